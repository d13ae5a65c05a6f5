/* Depthwise convolution over channels-last memory: each channel has its own kernel.
 *
 *     y[n, i, j, c] = epilogue(sum over r, s of x[n, i * stride + r * dilation - begin, ..., c] * w[r, s, c])
 *
 * An item of work is a block of LANES channels of a segment of columns of a band of rows of one image; tasks share the
 * items. The rows of x that the kernel reaches are copied, with zeros left and right, into a ring of rows that the L1
 * cache holds: whatever the strides of x, neighbours lie side by side there, and no two of them fall on one another in
 * the cache. Kernel rows outside the image are left out. A tile, a few neighbours of a row of y, is summed in registers,
 * eight channels at a time: an input that is loaded serves all outputs of the tile that it belongs to.
 *
 * Channels are contiguous in x and y, all other strides are free. w is [blocks, kernel rows, kernel columns, LANES], with
 * zeros after the last channel; the residual is dense, [N, rows, columns, C].
 *
 * Each output is one sum in the order of the taps: its error is below taps * 2^-24 of the sum of absolute products.
 */
#include "epilogue.h"

#define LANES 16 /* floats: a cache line */
#define TILE 8
#define MOST_ROWS 64 /* of a kernel */

struct or_depthwise {
    float *y;
    const float *x, *w;
    float *scratch;                                    /* threads x `memory` floats */
    int64_t memory, channels, images, tasks;
    int64_t bands, segments, ring, width;              /* ring: rows, of `width` positions each */
    int64_t y_image, y_row, y_pixel, x_image, x_row, x_pixel; /* floats */
    int64_t x_rows, x_columns, y_rows, y_columns, w_rows, w_columns;
    int64_t row_stride, column_stride, row_dilation, column_dilation, row_begin, column_begin;
    struct epilogue e;
};

/* A tile of one kernel: where its first input lies in each of the `rows` kernel rows from `first` on. */
struct tile {
    float *y;
    const float *x[MOST_ROWS], *w;
    int64_t rows, outputs, c, lanes, number; /* channels c .. c + lanes - 1; number: of the first pixel in y */
    int64_t swift; /* what follows is only a bias and a clamp to low .. high, or hard-swish */
    float low, high;
};

INLINE void keep(float *y, v8 v, int64_t lanes)
{
    if (lanes >= 8)
        store8(y, v);
    else
        store8n(y, v, lanes);
}

/* The epilogue of the tile's sums of the channels from t->c + h on, into y. */
static void finish(const struct or_depthwise *a, const struct tile *t, const v8 *sum, int64_t h)
{
    const float *residual = a->e.residual;
    const int64_t lanes = t->lanes - h;
    for (int64_t k = 0; k < t->outputs; k++) {
        v8 other = all8(0);
        if (residual)
            other = load8n(residual + (t->number + k) * a->channels + t->c + h, lanes < 8 ? lanes : 8);
        keep(t->y + k * a->y_pixel + h, finish8(&a->e, a->e.activation, sum[k], t->c + h, other), lanes);
    }
}

/* The same, in registers where it is short. T: outputs of a whole tile. */
INLINE void finish_swift(const struct or_depthwise *a, const struct tile *t, const v8 *sum, int64_t h, const int T)
{
    if (!t->swift) {
        v8 copy[TILE]; /* so that the sums themselves need no memory */
        for (int k = 0; k < T; k++)
            copy[k] = sum[k];
        finish(a, t, copy, h);
        return;
    }
    const v8 bias = a->e.bias ? load8(a->e.bias + t->c + h) : all8(0);
    const int hard = a->e.activation == HARD_SWISH;
    const int full = t->outputs == T && t->lanes - h >= 8;
    for (int k = 0; k < T; k++) {
        v8 y = sum[k] + bias;
        y = hard ? activate8(HARD_SWISH, y, 0, 0) : clamp8(y, t->low, t->high);
        if (full)
            store8(t->y + k * a->y_pixel + h, y);
        else if (k < t->outputs)
            keep(t->y + k * a->y_pixel + h, y, t->lanes - h);
    }
}

/* Whether what follows is short, and then between what the result is clamped. */
static void look(const struct or_depthwise *a, struct tile *t)
{
    const struct epilogue *e = &a->e;
    t->swift = !e->scale && !e->shift && !e->residual && e->factor == 1 &&
               (e->activation <= CLIP || e->activation == HARD_SWISH);
    t->low = e->activation == CLIP ? (float)e->alpha : e->activation == RELU ? 0 : -INFINITY;
    t->high = e->activation == CLIP ? (float)e->beta : INFINITY;
}

/* A tile of T outputs; K columns in the kernel, S: stride along a row, dilation 1. */
INLINE void sums(const struct or_depthwise *a, const struct tile *t, const int K, const int S, const int T)
{
    for (int64_t h = 0; h < t->lanes; h += 8) {
        const float *w = t->w + h;
        v8 sum[TILE];
        for (int k = 0; k < T; k++)
            sum[k] = all8(0);
        for (int64_t r = 0; r < t->rows; r++, w += K * LANES) {
            const float *x = t->x[r] + h;
#pragma GCC unroll 32
            for (int j = 0; j < (T - 1) * S + K; j++) {
                v8 in = load8(x + j * LANES);
#pragma GCC unroll 8
                for (int s = 0; s < K; s++)
                    if (j >= s && (j - s) % S == 0 && (j - s) / S < T)
                        sum[(j - s) / S] += in * load8(w + s * LANES);
            }
        }
        finish_swift(a, t, sum, h, T);
    }
}

typedef void (*tiler)(const struct or_depthwise *, const struct tile *);

static void tile31(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 3, 1, TILE); }
static void half31(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 3, 1, TILE / 2); }
static void tile32(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 3, 2, TILE); }
static void half32(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 3, 2, TILE / 2); }
static void tile51(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 5, 1, TILE); }
static void half51(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 5, 1, TILE / 2); }
static void tile52(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 5, 2, TILE); }
static void half52(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 5, 2, TILE / 2); }
static void tile71(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 7, 1, TILE); }
static void half71(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 7, 1, TILE / 2); }

/* Any kernel, stride and dilation. */
INLINE void sums_any(const struct or_depthwise *a, const struct tile *t, const int T)
{
    const int64_t S = a->column_stride * LANES, D = a->column_dilation * LANES;
    for (int64_t h = 0; h < t->lanes; h += 8) {
        const float *w = t->w + h;
        v8 sum[TILE];
        for (int k = 0; k < T; k++)
            sum[k] = all8(0);
        for (int64_t r = 0; r < t->rows; r++)
            for (int64_t s = 0; s < a->w_columns; s++, w += LANES) {
                const float *x = t->x[r] + h + s * D;
                v8 weight = load8(w);
                for (int k = 0; k < T; k++)
                    sum[k] += load8(x + k * S) * weight;
            }
        finish_swift(a, t, sum, h, T);
    }
}
static void tile_any(const struct or_depthwise *a, const struct tile *t) { sums_any(a, t, TILE); }
static void half_any(const struct or_depthwise *a, const struct tile *t) { sums_any(a, t, TILE / 2); }

/* The functions for tiles and half tiles of this kernel. */
static void choose(const struct or_depthwise *a, tiler *whole, tiler *half)
{
    static const tiler wholes[3][2] = {{tile31, tile32}, {tile51, tile52}, {tile71, tile_any}};
    static const tiler halves[3][2] = {{half31, half32}, {half51, half52}, {half71, half_any}};
    int64_t k = (a->w_columns - 3) / 2, s = a->column_stride - 1;
    int known = a->column_dilation == 1 && a->w_columns % 2 == 1 && a->w_columns >= 3 && k < 3 && s < 2;
    *whole = known ? wholes[k][s] : tile_any;
    *half = known ? halves[k][s] : half_any;
}

/* `lanes` channels of `count` positions of a row from column `left` on; zeros outside the row and after the lanes. */
static void copy_row(const struct or_depthwise *a, float *to, const float *row, int64_t left, int64_t count,
                     int64_t lanes)
{
    int64_t before = left < 0 ? -left : 0, inside = a->x_columns - left;
    before = before < count ? before : count;
    inside = inside < count ? inside : count;
    for (int64_t j = 0; j < before; j++, to += LANES)
        memset(to, 0, 4 * LANES);
    const float *x = row + (left + before) * a->x_pixel;
    for (int64_t j = before; j < inside; j++, to += LANES, x += a->x_pixel)
        if (lanes == LANES) {
            __builtin_prefetch(x + a->x_row);
            store8(to, load8(x));
            store8(to + 8, load8(x + 8));
        } else {
            memset(to, 0, 4 * LANES);
            memcpy(to, x, 4 * (size_t)lanes);
        }
    for (int64_t j = before > inside ? before : inside; j < count; j++, to += LANES)
        memset(to, 0, 4 * LANES);
}

INLINE int64_t ceiling(int64_t n, int64_t d) { return (n + d - 1) / d; }

/* A block of channels of the columns j0 .. j1 - 1 of the rows i0 .. i1 - 1 of image n. */
static void item(const struct or_depthwise *a, float *ring, int64_t n, int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                 int64_t block, tiler whole, tiler half)
{
    const int64_t c = block * LANES, left = j0 * a->column_stride - a->column_begin;
    struct tile t = {.c = c, .lanes = a->channels - c < LANES ? a->channels - c : LANES};
    const float *x = a->x + n * a->x_image + c, *w = a->w + block * a->w_rows * a->w_columns * LANES;
    int64_t next = 0; /* the first row of x that is not in the ring */
    look(a, &t);
    for (int64_t i = i0; i < i1; i++) {
        const int64_t top = i * a->row_stride - a->row_begin, D = a->row_dilation;
        int64_t first = top < 0 ? ceiling(-top, D) : 0, stop = a->x_rows > top ? ceiling(a->x_rows - top, D) : 0;
        stop = stop < a->w_rows ? stop : a->w_rows;
        t.rows = stop > first ? stop - first : 0;
        t.w = w + first * a->w_columns * LANES;
        next = next > top + first * D ? next : top + first * D;
        for (; t.rows && next <= top + (stop - 1) * D; next++)
            copy_row(a, ring + next % a->ring * a->width * LANES, x + next * a->x_row, left, a->width, t.lanes);
        for (int64_t j = j0; j < j1; j += t.outputs) {
            for (int64_t r = 0; r < t.rows; r++)
                t.x[r] = ring + ((top + (first + r) * D) % a->ring * a->width + (j - j0) * a->column_stride) * LANES;
            t.y = a->y + n * a->y_image + i * a->y_row + j * a->y_pixel + c;
            t.number = (n * a->y_rows + i) * a->y_columns + j;
            t.outputs = j1 - j < TILE ? j1 - j : TILE;
            (t.outputs > TILE / 2 ? whole : half)(a, &t);
        }
    }
}

KERNEL(or_depthwise)
{
    ARGS(or_depthwise);
    const int64_t blocks = ceiling(a->channels, LANES);
    tiler whole, half;
    int64_t first, last;
    choose(a, &whole, &half);
    share(a->images * a->bands * a->segments * blocks, task, a->tasks, &first, &last);
    for (int64_t k = first; k < last; k++) {
        int64_t rest = k / blocks, i0, i1, j0, j1;
        share(a->y_columns, rest % a->segments, a->segments, &j0, &j1);
        rest /= a->segments;
        share(a->y_rows, rest % a->bands, a->bands, &i0, &i1);
        item(a, a->scratch + thread * a->memory, rest / a->bands, i0, i1, j0, j1, k % blocks, whole, half);
    }
}
