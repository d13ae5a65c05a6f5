/* Poolings over channels-last memory: the largest, sums, means and norms of windows.
 *
 * Channels are contiguous in x and y, all other strides are free. Taps outside the image are left out. `divisor` holds a
 * number for each position of y, null for none. Tasks share the rows of y of all images. A result combines its taps in
 * their order, so a sum is within taps * 2^-24 of the sum of absolute values; NaN stays NaN.
 */
#include "reduce.h"

#define WIDE 4 /* vectors of channels that are made together */

struct or_pool {
    float *y;
    const float *x, *divisor;
    int64_t what, root, channels, images, tasks;
    int64_t y_image, y_row, y_pixel, x_image, x_row, x_pixel; /* floats */
    int64_t x_rows, x_columns, y_rows, y_columns, w_rows, w_columns;
    int64_t row_stride, column_stride, row_dilation, column_dilation, row_begin, column_begin;
};

/* The taps of a window on one axis that lie inside: from `first` on, `count` of them, the first one at `at`. */
struct taps {
    int64_t count, at;
};

INLINE struct taps taps(int64_t at, int64_t taps, int64_t dilation, int64_t size)
{
    int64_t first = at < 0 ? (-at + dilation - 1) / dilation : 0;
    int64_t stop = size > at ? (size - at + dilation - 1) / dilation : 0;
    stop = stop < taps ? stop : taps;
    return (struct taps){stop > first ? stop - first : 0, at + first * dilation};
}

/* `vectors` times eight channels of one position, or `lanes` of eight. x: the first tap that counts. */
INLINE void window(const struct or_pool *a, float *y, const float *x, int64_t rows, int64_t columns, float divisor,
                   const int vectors, int64_t lanes, const int what)
{
    const int64_t down = a->row_dilation * a->x_row, right = a->column_dilation * a->x_pixel;
    v8 total[WIDE];
    for (int v = 0; v < vectors; v++)
        total[v] = all8(neutral(what));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t s = 0; s < columns; s++)
            for (int v = 0; v < vectors; v++) {
                const float *in = x + r * down + s * right + 8 * v;
                total[v] = combine(what, total[v], lanes < 8 ? load8n(in, lanes) : load8(in));
            }
    for (int v = 0; v < vectors; v++) {
        v8 result = finished(total[v], divisor, a->root);
        if (lanes < 8)
            store8n(y + 8 * v, result, lanes);
        else
            store8(y + 8 * v, result);
    }
}

INLINE void pool(const struct or_pool *a, int64_t task, const int what)
{
    int64_t first, last;
    share(a->images * a->y_rows, task, a->tasks, &first, &last);
    for (int64_t k = first; k < last; k++) {
        const int64_t n = k / a->y_rows, i = k % a->y_rows;
        const struct taps down = taps(i * a->row_stride - a->row_begin, a->w_rows, a->row_dilation, a->x_rows);
        for (int64_t j = 0; j < a->y_columns; j++) {
            const struct taps right =
                taps(j * a->column_stride - a->column_begin, a->w_columns, a->column_dilation, a->x_columns);
            const float divisor = a->divisor ? a->divisor[i * a->y_columns + j] : 1;
            const float *x = a->x + n * a->x_image + down.at * a->x_row + right.at * a->x_pixel;
            float *y = a->y + n * a->y_image + i * a->y_row + j * a->y_pixel;
            int64_t c = 0;
            for (; c + 8 * WIDE <= a->channels; c += 8 * WIDE)
                window(a, y + c, x + c, down.count, right.count, divisor, WIDE, 8, what);
            for (; c + 8 <= a->channels; c += 8)
                window(a, y + c, x + c, down.count, right.count, divisor, 1, 8, what);
            if (c < a->channels)
                window(a, y + c, x + c, down.count, right.count, divisor, 1, a->channels - c, what);
        }
    }
}

KERNEL(or_pool)
{
    ARGS(or_pool);
    switch (a->what) {
    case SQUARES: pool(a, task, SQUARES); break;
    case MAGNITUDES: pool(a, task, MAGNITUDES); break;
    case LARGEST: pool(a, task, LARGEST); break;
    default: pool(a, task, SUM);
    }
}
