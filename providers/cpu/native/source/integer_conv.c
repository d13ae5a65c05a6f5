/* Convolutions of 8-bit integers over channels-last memory: windows become rows, which the panels of integer_gemm.c
 * multiply; depthwise ones go tap by tap. What lies in the padding is 0 after the zero point. */
#include "bytes.h"
#include "integer.h"

/* An image batch [images, height, width, channels], strides in bytes, channels being neighbours, and the window that
 * slides over it. 20 words. */
struct window {
    const uint8_t *x, *x_zero;
    int64_t x_signed, images, height, width, channels;
    int64_t image_step, row_step, column_step;
    int64_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, top, left;
    int64_t out_h, out_w;
};

/* n numbers at x, made ready: as int16 less zero, or as uint8. */
INLINE void ready(const struct window *g, int64_t narrow, const uint8_t *x, int64_t zero, void *y, int64_t n)
{
    if (narrow)
        unsign(x, g->x_signed, y, n);
    else
        widen(x, g->x_signed, zero, y, n);
}

/* n numbers that stand for zero. */
INLINE void ready_zeros(const struct window *g, int64_t narrow, int64_t zero, void *y, int64_t n)
{
    if (narrow)
        memset(y, (int)(g->x_signed ? zero + 128 : zero), (size_t)n);
    else
        memset(y, 0, (size_t)n * 2);
}

/* The window of one output pixel, channels first .. first + n of each tap, made ready at y. */
INLINE void gather(const struct window *g, int64_t narrow, int64_t pixel, int64_t first, int64_t n, int64_t zero, char *y)
{
    int64_t column = pixel % g->out_w * g->stride_w - g->left, rest = pixel / g->out_w, size = narrow ? 1 : 2;
    int64_t row = rest % g->out_h * g->stride_h - g->top;
    const uint8_t *image = g->x + rest / g->out_h * g->image_step + first;
    int64_t together = g->dilation_w == 1 && n == g->column_step; /* the taps of a row are neighbours */
    for (int64_t ky = 0; ky < g->kernel_h; ky++, y += g->kernel_w * n * size) {
        int64_t iy = row + ky * g->dilation_h;
        if (iy < 0 || iy >= g->height) {
            ready_zeros(g, narrow, zero, y, g->kernel_w * n);
        } else if (together && column >= 0 && column + g->kernel_w <= g->width) {
            ready(g, narrow, image + iy * g->row_step + column * n, zero, y, g->kernel_w * n);
        } else {
            for (int64_t kx = 0; kx < g->kernel_w; kx++) {
                int64_t ix = column + kx * g->dilation_w;
                if (ix < 0 || ix >= g->width)
                    ready_zeros(g, narrow, zero, y + kx * n * size, n);
                else
                    ready(g, narrow, image + iy * g->row_step + ix * g->column_step, zero, y + kx * n * size, n);
            }
        }
    }
}

struct or_integer_conv {
    struct window g;
    struct weights w; /* the panels of each group, depth in the order kernel_h, kernel_w, channel */
    int64_t groups, tasks;
    int64_t block_rows; /* pixels that are gathered at once: a multiple of MR, <= MOST_ROWS */
    void *block;        /* [threads, block_rows, ready length] */
    struct output o;    /* rows are pixels */
};

/* n pixels of one group: gather them, multiply, finish. */
INLINE void some_pixels(const struct or_integer_conv *a, int64_t narrow, int64_t first, int64_t n, int64_t group,
                        char *block, int64_t thread)
{
    int64_t channels = a->g.channels / a->groups, features = a->o.columns / a->groups;
    int64_t depth = a->g.kernel_h * a->g.kernel_w * channels, panels = (features + NR - 1) / NR;
    int64_t length = ready_length(&a->w, depth), size = narrow ? 1 : 2, zero = zero_of(a->g.x_zero, a->g.x_signed);
    int32_t zeros[MOST_ROWS], totals[MOST_ROWS];
    struct rows rows = {block, length, depth, zeros, totals};
    for (int64_t r = 0; r < n; r++) {
        char *to = block + r * length * size;
        gather(&a->g, narrow, first + r, group * channels, channels, zero, to);
        memset(to + depth * size, 0, (size_t)((length - depth) * size));
        zeros[r] = (int32_t)(zero + (a->g.x_signed ? 128 : 0));
        if (a->w.zeros)
            totals[r] = sum_of((const uint8_t *)to, depth);
    }
    for (int64_t panel = 0; panel < panels; panel++) {
        int64_t columns = features - panel * NR < NR ? features - panel * NR : NR;
        for (int64_t r = 0; r < n; r += MR) {
            int32_t sums[MR * NR];
            int64_t some = n - r < MR ? n - r : MR;
            panel_sums(&a->w, group * panels + panel, &rows, r, some, sums);
            finish_sums(&a->o, sums, some, columns, first + r, group * features + panel * NR, thread);
        }
    }
}

/* Dense or grouped convolution. Tasks share the pixels of all images. */
KERNEL(or_integer_conv)
{
    ARGS(or_integer_conv);
    int64_t depth = a->g.kernel_h * a->g.kernel_w * a->g.channels / a->groups, first, last;
    share(a->g.images * a->g.out_h * a->g.out_w, task, a->tasks, &first, &last);
    ready_scales(&a->o, 0, a->o.columns, thread);
    char *block = (char *)a->block + thread * a->block_rows * ready_length(&a->w, depth) * (a->w.narrow ? 1 : 2);
    for (; first < last; first += a->block_rows) {
        int64_t n = last - first < a->block_rows ? last - first : a->block_rows;
        for (int64_t group = 0; group < a->groups; group++)
            if (a->w.narrow)
                some_pixels(a, 1, first, n, group, block, thread);
            else
                some_pixels(a, 0, first, n, group, block, thread);
    }
}

struct or_integer_depthwise {
    struct window g;
    const int16_t *w; /* [taps, channels rounded up to NR] */
    int64_t tasks;
    struct output o; /* rows are pixels */
};

/* Eight bytes less zero times eight weights; the products fit int32. */
INLINE i8v products8(const uint8_t *x, int64_t is_signed, i8v zero, const int16_t *w)
{
    i8v wide = wide_bytes8(x, is_signed) - zero;
#ifdef __AVX2__
    /* Each half of a lane is an int16; the upper one meets 0. */
    i8v low = wide_words8(w, 0);
    return (i8v)_mm256_madd_epi16((__m256i)wide, (__m256i)low);
#else
    return wide * wide_words8(w, 1);
#endif
}

/* The sums of NR channels from `channel` on, of one pixel; `n` of the channels are there. */
static void tap_sums(const struct or_integer_depthwise *a, int64_t pixel, int64_t channel, int64_t n, int32_t *sums)
{
    const struct window *g = &a->g;
    int64_t column = pixel % g->out_w * g->stride_w - g->left, rest = pixel / g->out_w;
    int64_t row = rest % g->out_h * g->stride_h - g->top, width = rounded_up(g->channels);
    const uint8_t *image = g->x + rest / g->out_h * g->image_step + channel;
    int32_t point = (int32_t)zero_of(g->x_zero, g->x_signed);
    i8v zero = {point, point, point, point, point, point, point, point}, low = zero - zero, high = low;
    for (int64_t ky = 0; ky < g->kernel_h; ky++) {
        int64_t iy = row + ky * g->dilation_h;
        if (iy < 0 || iy >= g->height)
            continue;
        for (int64_t kx = 0; kx < g->kernel_w; kx++) {
            int64_t ix = column + kx * g->dilation_w;
            if (ix < 0 || ix >= g->width)
                continue;
            const uint8_t *x = image + iy * g->row_step + ix * g->column_step;
            const int16_t *w = a->w + (ky * g->kernel_w + kx) * width + channel;
            uint8_t some[NR] = {0};
            if (n < NR) { /* never read behind the image */
                memcpy(some, x, (size_t)n);
                x = some;
            }
            low += products8(x, g->x_signed, zero, w);
            high += products8(x + 8, g->x_signed, zero, w + 8);
        }
    }
    memcpy(sums, &low, sizeof low);
    memcpy(sums + 8, &high, sizeof high);
}

/* Convolution with one feature per channel, which sees that channel only. Tasks share the pixels of all images. */
KERNEL(or_integer_depthwise)
{
    ARGS(or_integer_depthwise);
    int64_t first, last, channels = a->g.channels;
    share(a->g.images * a->g.out_h * a->g.out_w, task, a->tasks, &first, &last);
    ready_scales(&a->o, 0, channels, thread);
    for (int64_t pixel = first; pixel < last; pixel += MR) {
        int64_t rows = last - pixel < MR ? last - pixel : MR;
        for (int64_t channel = 0; channel < channels; channel += NR) {
            int32_t sums[MR * NR];
            int64_t n = channels - channel < NR ? channels - channel : NR;
            for (int64_t r = 0; r < rows; r++)
                tap_sums(a, pixel + r, channel, n, sums + NR * r);
            finish_sums(&a->o, sums, rows, n, pixel, channel, thread);
        }
    }
}
