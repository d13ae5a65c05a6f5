/* Resizing of images with the channels last: nearest neighbours, and sums of weighted neighbours (linear, cubic).
 *
 * Channels are contiguous in x and y, all other strides are free. Tasks share the rows of y of all images.
 */
#include "walk.h"

/* y[n, i, j] = x[n, rows[i], columns[j]], elements of any size: strides in bytes. */
struct or_resize_nearest {
    char *y;
    const char *x;
    const int64_t *rows, *columns;
    int64_t channels, images, tasks; /* channels: bytes of one pixel */
    int64_t y_image, y_row, y_pixel, x_image, x_row, x_pixel;
    int64_t y_rows, y_columns;
};

/* y[n, i, j] = sum over s of column_weights[j, s] * (sum over r of row_weights[i, r] * x[n, rows[i, r], columns[j, s]]),
 * float32, each sum in the order of its taps: within (row_taps + column_taps) * 2^-24 of the sum of absolute products. */
struct or_resize_weighted {
    float *y, *scratch; /* scratch: threads x x_columns x channels */
    const float *x;
    const int64_t *rows, *columns; /* [y_rows, row_taps], [y_columns, column_taps] */
    const float *row_weights, *column_weights;
    int64_t row_taps, column_taps, channels, images, tasks;
    int64_t y_image, y_row, y_pixel, x_image, x_row, x_pixel; /* floats */
    int64_t y_rows, y_columns, x_columns;
};

KERNEL(or_resize_nearest)
{
    ARGS(or_resize_nearest);
    const int64_t dense = a->y_pixel == a->channels;
    int64_t first, last;
    share(a->images * a->y_rows, task, a->tasks, &first, &last);
    for (int64_t k = first; k < last; k++) {
        const int64_t n = k / a->y_rows, i = k % a->y_rows;
        char *y = a->y + n * a->y_image + i * a->y_row;
        const char *x = a->x + n * a->x_image + a->rows[i] * a->x_row;
        if (dense && k > first && i && a->rows[i] == a->rows[i - 1]) {
            memcpy(y, y - a->y_row, (size_t)(a->y_columns * a->channels));
            continue;
        }
        for (int64_t j = 0; j < a->y_columns; j++)
            copy_short(y + j * a->y_pixel, x + a->columns[j] * a->x_pixel, a->channels);
    }
}

/* y[0 .. n - 1] = sum over the taps of weight[t] * x[at[t] * step ..]. */
INLINE void weigh(float *y, const float *x, const int64_t *at, const float *weight, int64_t taps, int64_t step,
                  int64_t n)
{
    int64_t c = 0;
    for (; c + 8 <= n; c += 8) {
        v8 sum = all8(0);
        for (int64_t t = 0; t < taps; t++)
            sum += load8(x + at[t] * step + c) * all8(weight[t]);
        store8(y + c, sum);
    }
    if (c < n) {
        v8 sum = all8(0);
        for (int64_t t = 0; t < taps; t++)
            sum += load8n(x + at[t] * step + c, n - c) * all8(weight[t]);
        store8n(y + c, sum, n - c);
    }
}

KERNEL(or_resize_weighted)
{
    ARGS(or_resize_weighted);
    float *row = a->scratch + thread * a->x_columns * a->channels;
    int64_t first, last;
    share(a->images * a->y_rows, task, a->tasks, &first, &last);
    for (int64_t k = first; k < last; k++) {
        const int64_t n = k / a->y_rows, i = k % a->y_rows, *rows = a->rows + i * a->row_taps;
        const float *x = a->x + n * a->x_image, *weights = a->row_weights + i * a->row_taps;
        float *y = a->y + n * a->y_image + i * a->y_row;
        if (a->x_pixel == a->channels)
            weigh(row, x, rows, weights, a->row_taps, a->x_row, a->x_columns * a->channels);
        else
            for (int64_t j = 0; j < a->x_columns; j++)
                weigh(row + j * a->channels, x + j * a->x_pixel, rows, weights, a->row_taps, a->x_row, a->channels);
        for (int64_t j = 0; j < a->y_columns; j++)
            weigh(y + j * a->y_pixel, row, a->columns + j * a->column_taps, a->column_weights + j * a->column_taps,
                  a->column_taps, a->channels, a->channels);
    }
}
