/* Depthwise convolution over channels-last memory: each channel has its own kernel.
 *
 *     y[n, i, j, c] = epilogue(sum over r, s of x[n, i * stride + r * dilation - begin, ..., c] * w[r, s, c])
 *
 * Channels (8 or more) are contiguous in x and y; all other strides are free. w is [kernel rows, kernel columns, C]; the
 * residual is dense, [N, rows, columns, C]. A tile is a few neighbours of a row of y; eight channels of it are summed in
 * registers at a time, and an input that is loaded serves all outputs of the tile that it belongs to. What lies outside
 * the image is read from `outside`, C zeros; kernel rows outside are left out. Blocks of channels keep what a tile reads
 * in the L1 cache. Tasks share the rows of all images.
 *
 * Each output is one sum in the order of the taps: its error is below taps * 2^-24 of the sum of absolute products.
 */
#include "epilogue.h"

#define MOST_POINTERS 1024 /* of inputs of a tile */
#define EDGE 4             /* outputs of a tile that may lie at the edge */
#define TILE 8             /* of any other */
#define CACHE 5120         /* floats of x and w that a tile reads of a block of channels */

struct or_depthwise {
    float *y;
    const float *x, *w, *outside;
    int64_t channels, images, parts, tasks; /* parts: of each row of y, so that there is enough to share */
    int64_t y_image, y_row, y_pixel, x_image, x_row, x_pixel; /* floats */
    int64_t x_rows, x_columns, y_rows, y_columns, w_rows, w_columns;
    int64_t row_stride, column_stride, row_dilation, column_dilation, row_begin, column_begin;
    struct epilogue e;
};

/* A tile. Of the kernel, `rows` rows from `first` on lie inside the image. Its inputs lie x_pixel apart from `x` on in
 * the first of those rows, or, at an edge, where `at` says: row by row, inputs of the tile from left to right. */
struct tile {
    float *y;
    const float *x, *const *at;
    int64_t first, rows, outputs, number; /* number: of its first output among all pixels of y */
};

INLINE void finish(const struct or_depthwise *a, int64_t activation, const struct tile *t, const v8 *sum, int64_t c)
{
    const float *residual = a->e.residual;
    for (int64_t k = 0; k < t->outputs; k++) {
        v8 other = residual ? load8(residual + (t->number + k) * a->channels + c) : all8(0);
        store8(t->y + k * a->y_pixel + c, finish8(&a->e, activation, sum[k], c, other));
    }
}

/* The epilogue of the tile's sums of eight channels from c on, into y. */
static void finish_sums(const struct or_depthwise *a, const struct tile *t, const v8 *sum, int64_t c)
{
    switch (a->e.activation) {
    case PLAIN: finish(a, PLAIN, t, sum, c); break;
    case RELU: finish(a, RELU, t, sum, c); break;
    case CLIP: finish(a, CLIP, t, sum, c); break;
    case HARD_SWISH: finish(a, HARD_SWISH, t, sum, c); break;
    default: finish(a, a->e.activation, t, sum, c);
    }
}

/* Eight channels from c on of a tile of T outputs; K columns in the kernel, S: stride along a row, dilation 1. */
INLINE void sums(const struct or_depthwise *a, const struct tile *t, int64_t c, const int K, const int S, const int T)
{
    const int inputs = (T - 1) * S + K;
    const float *x = t->x + c, *w = a->w + t->first * K * a->channels + c;
    const int64_t x_row = a->row_dilation * a->x_row;
    v8 sum[TILE];
    for (int k = 0; k < T; k++)
        sum[k] = all8(0);
    for (int64_t r = 0; r < t->rows; r++) {
#pragma GCC unroll 32
        for (int j = 0; j < inputs; j++) {
            v8 in = load8(T == EDGE ? t->at[r * inputs + j] + c : x + j * a->x_pixel);
#pragma GCC unroll 8
            for (int s = 0; s < K; s++)
                if (j >= s && (j - s) % S == 0 && (j - s) / S < T)
                    sum[(j - s) / S] += in * load8(w + s * a->channels);
        }
        x += x_row;
        w += K * a->channels;
    }
    finish_sums(a, t, sum, c);
}

/* Channels first .. last - 1, eight or more. */
INLINE void channels(const struct or_depthwise *a, const struct tile *t, int64_t first, int64_t last, const int K,
                     const int S, const int T)
{
    int64_t c = first;
    for (; c + 8 <= last; c += 8)
        sums(a, t, c, K, S, T);
    if (c < last)
        sums(a, t, last - 8, K, S, T);
}

typedef void (*channels_of)(const struct or_depthwise *, const struct tile *, int64_t, int64_t);

static void whole31(const struct or_depthwise *a, const struct tile *t, int64_t first, int64_t last)
{
    channels(a, t, first, last, 3, 1, TILE);
}
static void edge31(const struct or_depthwise *a, const struct tile *t, int64_t first, int64_t last)
{
    channels(a, t, first, last, 3, 1, EDGE);
}
static void whole32(const struct or_depthwise *a, const struct tile *t, int64_t first, int64_t last)
{
    channels(a, t, first, last, 3, 2, TILE);
}
static void edge32(const struct or_depthwise *a, const struct tile *t, int64_t first, int64_t last)
{
    channels(a, t, first, last, 3, 2, EDGE);
}
static void whole51(const struct or_depthwise *a, const struct tile *t, int64_t first, int64_t last)
{
    channels(a, t, first, last, 5, 1, TILE);
}
static void edge51(const struct or_depthwise *a, const struct tile *t, int64_t first, int64_t last)
{
    channels(a, t, first, last, 5, 1, EDGE);
}
static void whole52(const struct or_depthwise *a, const struct tile *t, int64_t first, int64_t last)
{
    channels(a, t, first, last, 5, 2, TILE);
}
static void edge52(const struct or_depthwise *a, const struct tile *t, int64_t first, int64_t last)
{
    channels(a, t, first, last, 5, 2, EDGE);
}
static void whole71(const struct or_depthwise *a, const struct tile *t, int64_t first, int64_t last)
{
    channels(a, t, first, last, 7, 1, TILE);
}
static void edge71(const struct or_depthwise *a, const struct tile *t, int64_t first, int64_t last)
{
    channels(a, t, first, last, 7, 1, EDGE);
}

/* Any kernel, stride and dilation, always through pointers: for each tap the inputs of the EDGE outputs. */
static void edge_any(const struct or_depthwise *a, const struct tile *t, int64_t first, int64_t last)
{
    const int64_t taps = t->rows * a->w_columns;
    for (int64_t next = first; next < last; next += 8) {
        const int64_t c = next + 8 <= last ? next : last - 8;
        const float *w = a->w + t->first * a->w_columns * a->channels + c;
        v8 sum[EDGE] = {all8(0), all8(0), all8(0), all8(0)};
        for (int64_t k = 0; k < taps; k++) {
            v8 weight = load8(w + k * a->channels);
            for (int j = 0; j < EDGE; j++)
                sum[j] += load8(t->at[k * EDGE + j] + c) * weight;
        }
        finish_sums(a, t, sum, c);
    }
}

/* The functions for this kernel's columns; *whole is null where every tile goes through pointers. */
static void choose(const struct or_depthwise *a, channels_of *whole, channels_of *edge)
{
    static const channels_of wholes[3][2] = {{whole31, whole32}, {whole51, whole52}, {whole71, NULL}};
    static const channels_of edges[3][2] = {{edge31, edge32}, {edge51, edge52}, {edge71, edge_any}};
    int64_t k = (a->w_columns - 3) / 2, s = a->column_stride - 1;
    *whole = NULL;
    *edge = edge_any;
    if (a->column_dilation == 1 && a->w_columns % 2 == 1 && k >= 0 && k < 3 && s < 2) {
        *whole = wholes[k][s];
        *edge = edges[k][s];
    }
}

/* The input at a column of a row of x, or zeros. */
INLINE const float *input(const struct or_depthwise *a, const float *row, int64_t column)
{
    return column < 0 || column >= a->x_columns ? a->outside : row + column * a->x_pixel;
}

/* Where the inputs of a tile at column j lie, into `at`. `row`: the first row of x that counts. */
static void point(const struct or_depthwise *a, struct tile *t, const float *row, int64_t j, int by_tap, const float **at)
{
    const int64_t S = a->column_stride, D = a->column_dilation, inputs = (EDGE - 1) * S + a->w_columns;
    const int64_t left = j * S - a->column_begin, used = (t->outputs - 1) * S + a->w_columns;
    for (int64_t r = 0; r < t->rows; r++, row += a->row_dilation * a->x_row)
        if (by_tap)
            for (int64_t s = 0; s < a->w_columns; s++)
                for (int64_t k = 0; k < EDGE; k++)
                    *at++ = k < t->outputs ? input(a, row, left + k * S + s * D) : a->outside;
        else
            for (int64_t k = 0; k < inputs; k++)
                *at++ = k < used ? input(a, row, left + k) : a->outside;
}

/* Columns `from` .. `to` - 1 of row i of image n of y. */
static void row(const struct or_depthwise *a, int64_t n, int64_t i, int64_t from, int64_t to, channels_of whole,
                channels_of edge)
{
    const float *at[MOST_POINTERS];
    const int64_t S = a->column_stride, reach = (a->w_columns - 1) * a->column_dilation;
    const int64_t top = i * a->row_stride - a->row_begin, last = a->x_columns - 1 - reach + a->column_begin;
    const int64_t inside = (a->column_begin + S - 1) / S, end = last < 0 ? 0 : last / S + 1;
    int64_t first = top < 0 ? (-top + a->row_dilation - 1) / a->row_dilation : 0;
    int64_t stop = a->x_rows > top ? (a->x_rows - top + a->row_dilation - 1) / a->row_dilation : 0;
    if (stop > a->w_rows)
        stop = a->w_rows;
    if (first > stop)
        first = stop;
    const float *x = a->x + n * a->x_image + (top + first * a->row_dilation) * a->x_row;
    int64_t block = CACHE / (a->w_columns * a->w_rows + ((TILE - 1) * S + reach + 1) * a->w_rows) / 8 * 8;
    block = block < 32 ? 32 : block;
    for (int64_t c = 0; c < a->channels;) {
        int64_t until = a->channels - c < block + 8 ? a->channels : c + block;
        for (int64_t j = from; j < to;) {
            struct tile t = {a->y + n * a->y_image + i * a->y_row + j * a->y_pixel, NULL, at,
                             first, stop - first, TILE, (n * a->y_rows + i) * a->y_columns + j};
            if (whole && j >= inside && j + TILE <= end && j + TILE <= to) {
                t.x = x + (j * S - a->column_begin) * a->x_pixel;
                whole(a, &t, c, until);
            } else {
                t.outputs = to - j < EDGE ? to - j : EDGE;
                point(a, &t, x, j, edge == edge_any, at);
                edge(a, &t, c, until);
            }
            j += t.outputs;
        }
        c = until;
    }
}

KERNEL(or_depthwise)
{
    ARGS(or_depthwise);
    channels_of whole, edge;
    int64_t first, last;
    choose(a, &whole, &edge);
    share(a->images * a->y_rows * a->parts, task, a->tasks, &first, &last);
    for (int64_t k = first; k < last; k++) {
        int64_t number = k / a->parts, from, to;
        share(a->y_columns, k % a->parts, a->parts, &from, &to);
        row(a, number / a->y_rows, number % a->y_rows, from, to, whole, edge);
    }
}
