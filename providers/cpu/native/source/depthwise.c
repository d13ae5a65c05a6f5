/* Depthwise convolution over channels-last memory: each channel has its own kernel.
 *
 *     y[n, i, j, c] = epilogue(sum over r, s of x[n, i * stride + r * dilation - begin, ..., c] * w[r, s, c])
 *
 * Channels are contiguous in x, y and the residual; all other strides are free (in elements). w is [kernel[0],
 * kernel[1], C]. Each call to a tile makes `T` neighbours of a row for all channels, eight channels at a time; an input is
 * loaded once per kernel row and serves all outputs that it belongs to. Positions outside the image are read from
 * `outside`, C floats. Tasks share the rows of all images. Each output is one sum in the order of the taps, rounded once
 * per tap: error below taps * 2^-24 of the sum of absolute products.
 */
#include "outrider.h"

#define MOST_TAPS 128 /* of a kernel row, with the neighbours that share a tile */
#define EDGE 4        /* outputs of a tile at the edge */

struct or_depthwise {
    float *y;
    const float *x, *w, *outside;
    int64_t channels, images, tasks;
    int64_t y_image, y_row, y_pixel, x_image, x_row, x_pixel; /* strides */
    int64_t rows, columns, out_rows, out_columns;             /* of x and of y */
    int64_t kernel_rows, kernel_columns;
    int64_t stride_rows, stride_columns, dilation_rows, dilation_columns, begin_rows, begin_columns;
    const float *bias;
};

/* Where a tile reads and writes: `rows` kernel rows from `first` on lie inside the image. */
struct place {
    float *y;
    const float *x; /* the first input of the first kernel row that counts */
    int64_t first, rows, x_row;
};

/* T outputs of eight channels from c on. K and S: kernel columns and stride, dilation is 1. */
INLINE void inner8(const struct or_depthwise *a, const struct place *p, int64_t c, const int K, const int S, const int T)
{
    v8 sum[8];
    for (int t = 0; t < T; t++)
        sum[t] = all8(0);
    const float *x = p->x + c, *w = a->w + p->first * K * a->channels + c;
    for (int64_t r = 0; r < p->rows; r++) {
#pragma GCC unroll 32
        for (int j = 0; j < (T - 1) * S + K; j++) {
            v8 in = load8(x + j * a->x_pixel);
#pragma GCC unroll 8
            for (int s = 0; s < K; s++)
                if (j >= s && (j - s) % S == 0 && (j - s) / S < T)
                    sum[(j - s) / S] += in * load8(w + s * a->channels);
        }
        x += p->x_row;
        w += K * a->channels;
    }
    v8 bias = a->bias ? load8(a->bias + c) : all8(0);
    for (int t = 0; t < T; t++)
        store8(p->y + t * a->y_pixel + c, sum[t] + bias);
}

INLINE void inner(const struct or_depthwise *a, const struct place *p, const int K, const int S, const int T)
{
    int64_t c = 0;
    for (; c + 8 <= a->channels; c += 8)
        inner8(a, p, c, K, S, T);
    if (c < a->channels)
        inner8(a, p, a->channels - 8, K, S, T);
}
static void inner318(const struct or_depthwise *a, const struct place *p) { inner(a, p, 3, 1, 8); }
static void inner314(const struct or_depthwise *a, const struct place *p) { inner(a, p, 3, 1, 4); }
static void inner518(const struct or_depthwise *a, const struct place *p) { inner(a, p, 5, 1, 8); }
static void inner514(const struct or_depthwise *a, const struct place *p) { inner(a, p, 5, 1, 4); }
static void inner326(const struct or_depthwise *a, const struct place *p) { inner(a, p, 3, 2, 8); }
EXPORT void or_dwtest(const struct or_depthwise *a, int which)
{
    for (int64_t i = 1; i < a->out_rows - 1; i++) {
      for (int64_t j = 8; j + 8 < a->out_columns; j += 8) {
        struct place p = {a->y + i * a->y_row + j * a->y_pixel,
            a->x + (i*a->stride_rows - a->begin_rows) * a->x_row + (j*a->stride_columns - a->begin_columns) * a->x_pixel, 0, a->kernel_rows, a->x_row};
        if (which == 0) inner318(a, &p);
        if (which == 1) { inner314(a, &p); p.x += 4 * a->x_pixel; p.y += 4 * a->y_pixel; inner314(a, &p); }
        if (which == 2) inner518(a, &p);
        if (which == 3) { inner514(a, &p); p.x += 4 * a->x_pixel; p.y += 4 * a->y_pixel; inner514(a, &p); }
        if (which == 4) inner326(a, &p);
      }
    }
}
