/* Depthwise convolution over channels-last memory: each channel has its own kernel.
 *
 *     y[n, i, j, c] = epilogue(sum over r, s of x[n, i * stride + r * dilation - begin, ..., c] * w[r, s, c])
 *
 * An item of work is a range of channels of a segment of columns of a band of rows of one image; tasks share the items.
 * A tile, a few neighbours of a row of y, is summed in registers, eight channels at a time: an input that is loaded
 * serves all outputs of the tile that it belongs to. Kernel rows outside the image are left out, if zeros stand there.
 *
 * Either the rows of x that the kernel reaches are copied, LANES channels at a time, with what stands left and right, into a
 * ring of rows that the L1 cache holds: whatever the strides of x, neighbours lie side by side there, and no two of them
 * fall on one another in the cache. Or, where a kernel of three columns meets strides that the cache can take, tiles
 * read x where it lies, and only those at an edge have their inputs copied: a third less time.
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
    const float *x, *w, *pad;                          /* pad: what stands outside, one per channel; null: zeros */
    float *scratch;                                    /* threads x `memory` floats */
    int64_t memory, channels, images, tasks;
    int64_t bands, segments, range;                    /* range: channels of an item, a multiple of LANES */
    int64_t direct, ring, width;                       /* ring: rows, of `width` positions each */
    int64_t y_image, y_row, y_pixel, x_image, x_row, x_pixel; /* floats */
    int64_t x_rows, x_columns, y_rows, y_columns, w_rows, w_columns;
    int64_t row_stride, column_stride, row_dilation, column_dilation, row_begin, column_begin;
    struct epilogue e;
};

/* A tile: where its first input lies in each of the `rows` kernel rows that count. */
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
    const v8 bias = a->e.bias ? load8(a->e.bias + t->c + h) : all8(0), low = all8(t->low), high = all8(t->high);
    const int64_t step = a->y_pixel, lanes = t->lanes - h, outputs = t->outputs;
    float *to = t->y + h;
    v8 y[TILE];
    if (a->e.activation == HARD_SWISH)
        for (int k = 0; k < T; k++)
            y[k] = activate8(HARD_SWISH, sum[k] + bias, 0, 0);
    else
        for (int k = 0; k < T; k++)
            y[k] = min8(high, max8(low, sum[k] + bias));
    if (outputs == T && lanes >= 8)
        for (int k = 0; k < T; k++, to += step)
            store8(to, y[k]);
    else
        for (int k = 0; k < T && k < outputs; k++, to += step)
            keep(to, y[k], lanes);
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

/* A tile of T outputs; K columns in the kernel, S: stride along a row, dilation 1; `step`: floats between inputs. */
INLINE void sums(const struct or_depthwise *a, const struct tile *t, const int K, const int S, const int T, int64_t step)
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
                const v8 in = load8(x + j * step);
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

static void tile31(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 3, 1, TILE, LANES); }
static void half31(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 3, 1, TILE / 2, LANES); }
static void tile32(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 3, 2, TILE, LANES); }
static void half32(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 3, 2, TILE / 2, LANES); }
static void tile51(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 5, 1, TILE, LANES); }
static void half51(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 5, 1, TILE / 2, LANES); }
static void tile52(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 5, 2, TILE, LANES); }
static void half52(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 5, 2, TILE / 2, LANES); }
static void tile71(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 7, 1, TILE, LANES); }
static void half71(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 7, 1, TILE / 2, LANES); }
static void direct31(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 3, 1, TILE, a->x_pixel); }
static void straight31(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 3, 1, TILE / 2, a->x_pixel); }
static void direct32(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 3, 2, TILE, a->x_pixel); }
static void straight32(const struct or_depthwise *a, const struct tile *t) { sums(a, t, 3, 2, TILE / 2, a->x_pixel); }

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

/* `count` positions that lie outside. */
static float *copy_outside(float *to, const float *pad, int64_t count)
{
    const v8 low = pad ? load8(pad) : all8(0), high = pad ? load8(pad + 8) : all8(0);
    for (int64_t j = 0; j < count; j++, to += LANES) {
        store8(to, low);
        store8(to + 8, high);
    }
    return to;
}

/* `lanes` channels from c on of `count` positions of a row, from column `left` on; zeros after the lanes. x: image. */
static void copy_row(const struct or_depthwise *a, float *to, const float *x, int64_t row, int64_t left, int64_t count,
                     int64_t c, int64_t lanes)
{
    const float *pad = a->pad ? a->pad + c : NULL;
    const int64_t step = a->x_pixel, ahead = a->x_row;
    int64_t before = left < 0 ? -left : 0, inside = a->x_columns - left;
    before = before < count && row >= 0 && row < a->x_rows ? before : count;
    inside = inside < before ? before : inside < count ? inside : count;
    to = copy_outside(to, pad, before);
    x += row * a->x_row + (left + before) * step + c;
    for (int64_t j = before; j < inside; j++, to += LANES, x += step)
        if (lanes == LANES) {
            __builtin_prefetch(x + ahead);
            store8(to, load8(x));
            store8(to + 8, load8(x + 8));
        } else {
            memset(to, 0, 4 * LANES);
            memcpy(to, x, 4 * (size_t)lanes);
        }
    copy_outside(to, pad, count - inside);
}

INLINE int64_t ceiling(int64_t n, int64_t d) { return (n + d - 1) / d; }

/* The kernel rows that count where the first one lies on row `top` of x: from the one returned on, t->rows of them. */
static int64_t counting(const struct or_depthwise *a, struct tile *t, int64_t top)
{
    const int64_t D = a->row_dilation;
    t->rows = a->w_rows;
    if (a->pad)
        return 0;
    int64_t first = top < 0 ? ceiling(-top, D) : 0, stop = a->x_rows > top ? ceiling(a->x_rows - top, D) : 0;
    stop = stop < a->w_rows ? stop : a->w_rows;
    t->rows = stop > first ? stop - first : 0;
    return first;
}

/* A part of y: columns j0 .. j1 - 1 of rows i0 .. i1 - 1 of image n, channels c0 .. c1 - 1. */
struct part {
    int64_t n, i0, i1, j0, j1, c0, c1;
};

/* Position (i, j) of y and channel c are where the tile is. */
INLINE void aim(const struct or_depthwise *a, const struct part *p, struct tile *t, int64_t i, int64_t j, int64_t c)
{
    t->c = c;
    t->lanes = a->channels - c < LANES ? a->channels - c : LANES;
    t->y = a->y + p->n * a->y_image + i * a->y_row + j * a->y_pixel + c;
    t->number = (p->n * a->y_rows + i) * a->y_columns + j;
    t->outputs = p->j1 - j < TILE ? p->j1 - j : TILE;
}

/* Weights of the kernel rows from `first` on, for the LANES channels from c on. */
INLINE const float *weights(const struct or_depthwise *a, int64_t c, int64_t first)
{
    return a->w + c * a->w_rows * a->w_columns + first * a->w_columns * LANES;
}

/* Where row `row` of x lies in the ring. */
INLINE int64_t slot(const struct or_depthwise *a, int64_t row)
{
    int64_t place = row % a->ring;
    return (place < 0 ? place + a->ring : place) * a->width * LANES;
}

/* By way of the ring, for one block of LANES channels. */
static void by_ring(const struct or_depthwise *a, const struct part *p, float *ring, tiler whole, tiler half)
{
    const int64_t left = p->j0 * a->column_stride - a->column_begin, D = a->row_dilation;
    const float *x = a->x + p->n * a->x_image;
    int64_t next = INT64_MIN; /* the first row of x that is not in the ring */
    struct tile t;
    look(a, &t);
    for (int64_t i = p->i0; i < p->i1; i++) {
        const int64_t top = i * a->row_stride - a->row_begin, first = counting(a, &t, top);
        t.w = weights(a, p->c0, first);
        aim(a, p, &t, i, p->j0, p->c0);
        const int64_t lowest = top < 0 && !a->pad ? 0 : top; /* that this or a later row of y may need */
        next = next > lowest ? next : lowest;
        for (; t.rows && next <= top + (first + t.rows - 1) * D; next++)
            copy_row(a, ring + slot(a, next), x, next, left, a->width, p->c0, t.lanes);
        for (int64_t j = p->j0; j < p->j1; j += t.outputs) {
            aim(a, p, &t, i, j, p->c0);
            for (int64_t r = 0; r < t.rows; r++)
                t.x[r] = ring + slot(a, top + (first + r) * D) + (j - p->j0) * a->column_stride * LANES;
            (t.outputs > TILE / 2 ? whole : half)(a, &t);
        }
    }
}

/* The inputs of a tile, `count` from column `left` on in each kernel row from row `top` of x on, copied to `buffer`. */
static void copy_inputs(const struct or_depthwise *a, struct tile *t, const float *x, int64_t top, int64_t left,
                        int64_t count, float *buffer)
{
    for (int64_t r = 0; r < t->rows; r++, buffer += count * LANES) {
        copy_row(a, buffer, x, top + r * a->row_dilation, left, count, t->c, t->lanes);
        t->x[r] = buffer;
    }
}

/* Where x lies, with 3 columns in the kernel and a stride of 1 or 2 along a row. */
static void directly(const struct or_depthwise *a, const struct part *p, float *buffer, tiler whole, tiler half)
{
    const int64_t S = a->column_stride;
    const float *x = a->x + p->n * a->x_image;
    const tiler direct = S == 1 ? direct31 : direct32, straight = S == 1 ? straight31 : straight32;
    struct tile t;
    look(a, &t);
    for (int64_t i = p->i0; i < p->i1; i++) {
        const int64_t top = i * a->row_stride - a->row_begin, first = counting(a, &t, top);
        const int64_t row = top + first * a->row_dilation, end = row + (t.rows - 1) * a->row_dilation;
        const int within = row >= 0 && end < a->x_rows;
        for (int64_t j = p->j0; j < p->j1; j += t.outputs) {
            const int64_t left = j * S - a->column_begin;
            for (int64_t c = p->c0; c < p->c1; c += LANES) {
                aim(a, p, &t, i, j, c);
                t.w = weights(a, c, first);
                const int full = t.outputs > TILE / 2;
                const int64_t count = ((full ? TILE : TILE / 2) - 1) * S + 3;
                if (left >= 0 && left + count <= a->x_columns && within && t.lanes % 8 == 0) {
                    for (int64_t r = 0; r < t.rows; r++)
                        t.x[r] = x + (row + r * a->row_dilation) * a->x_row + left * a->x_pixel + c;
                    (full ? direct : straight)(a, &t);
                } else {
                    copy_inputs(a, &t, x, row, left, count, buffer);
                    (full ? whole : half)(a, &t);
                }
            }
        }
    }
}

KERNEL(or_depthwise)
{
    ARGS(or_depthwise);
    const int64_t ranges = ceiling(a->channels, a->range);
    float *own = a->scratch + thread * a->memory;
    tiler whole, half;
    int64_t first, last;
    choose(a, &whole, &half);
    share(a->images * a->bands * a->segments * ranges, task, a->tasks, &first, &last);
    for (int64_t k = first; k < last; k++) {
        struct part p = {.c0 = k % ranges * a->range};
        int64_t rest = k / ranges;
        p.c1 = p.c0 + a->range < a->channels ? p.c0 + a->range : a->channels;
        share(a->y_columns, rest % a->segments, a->segments, &p.j0, &p.j1);
        rest /= a->segments;
        share(a->y_rows, rest % a->bands, a->bands, &p.i0, &p.i1);
        p.n = rest / a->bands;
        (a->direct ? directly : by_ring)(a, &p, own, whole, half);
    }
}
