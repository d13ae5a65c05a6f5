/* Transposed convolution over channels-last memory, by gathering: each output position is a product of its own.
 *
 *     y[n, i, j, m] = epilogue(sum over r, s, c of x[n, (i + begin - r * dilation) / stride, ..., c] * w[c, m, r, s])
 *
 * over the taps (r, s) for which the divisions leave no rest. Which taps these are depends on (i + begin) % stride and
 * (j + begin) % stride alone, the phase: the positions of one phase in one row of y are rows of a product (tiles.h) whose
 * chunks are the pixels of x under their taps, or zeros outside. Weights are packed as panels, [phases][groups], at
 * `offsets`. Tasks share parts of the rows of y of all images and groups.
 */
#include "tiles.h"
#include "turn.h"

struct or_transposed {
    float *y, *scratch;
    const float *x, *w;
    const int64_t *offsets;
    int64_t scratch_each, images, groups, channels, features; /* the latter two of one group */
    int64_t parts, tasks, block; /* block: positions of one product */
    int64_t y_image, y_row, y_pixel, x_image, x_row, x_pixel; /* floats */
    int64_t x_rows, x_columns, y_rows, y_columns, w_rows, w_columns;
    int64_t row_stride, column_stride, row_dilation, column_dilation, row_begin, column_begin;
    struct epilogue e;
};

/* Part of a row of y: image n, row i, columns from .. to - 1, one group. */
struct strip {
    int64_t n, i, from, to, group;
};

/* The entries of one chunk for `count` positions: the first one is under column `left` of `row`, null for no row. */
static void set_chunk(const struct or_transposed *a, const float **entry, const float *row, const float *zeros,
                      int64_t left, int64_t count)
{
    for (int64_t k = 0; k < count; k++) {
        int64_t column = left + k;
        entry[k] = row && column >= 0 && column < a->x_columns ? row + column * a->x_pixel : zeros;
    }
    for (int64_t k = count; k < count + MOST_ROWS; k++)
        entry[k] = entry[count - 1];
}

/* The table for `count` positions of y from column j on; returns the chunks. */
static int64_t set_table(const struct or_transposed *a, const struct strip *p, const float **table, const float *zeros,
                         int64_t j, int64_t count)
{
    const int64_t pitch = a->block + MOST_ROWS;
    const float *image = a->x + p->n * a->x_image + p->group * a->channels;
    int64_t chunks = 0;
    for (int64_t r = 0; r < a->w_rows; r++) {
        int64_t down = p->i + a->row_begin - r * a->row_dilation;
        if (down % a->row_stride)
            continue;
        int64_t at = down / a->row_stride;
        const float *row = at >= 0 && at < a->x_rows ? image + at * a->x_row : NULL;
        for (int64_t s = 0; s < a->w_columns; s++) {
            int64_t right = j + a->column_begin - s * a->column_dilation;
            if (right % a->column_stride == 0)
                set_chunk(a, table + chunks++ * pitch, row, zeros, right / a->column_stride, count);
        }
    }
    return chunks;
}

/* All positions of one phase: every column_stride-th from column j on. */
static void multiply_phase(const struct or_transposed *a, const struct strip *p, int64_t j, float *scratch)
{
    const int64_t S = a->column_stride, all = a->groups * a->features, number = (p->n * a->y_rows + p->i) * a->y_columns;
    const int64_t phase = (p->i + a->row_begin) % a->row_stride * S + (j + a->column_begin) % S;
    const float *weights = a->w + a->offsets[phase];
    float *zeros = scratch;
    const float **table = (const float **)(scratch + (a->channels + 1) / 2 * 2);
    struct epilogue e = a->e;
    memset(zeros, 0, 4 * (size_t)a->channels);
    e.residual_row = S * all;
    for (; j < p->to; j += a->block * S) {
        int64_t left = (p->to - j + S - 1) / S;
        struct block b = {.table = table, .pitch = a->block + MOST_ROWS, .length = a->channels, .e = &e};
        b.rows = left < a->block ? left : a->block;
        b.chunks = set_table(a, p, table, zeros, j, b.rows);
        b.to = (struct place){a->y + p->n * a->y_image + p->i * a->y_row + j * a->y_pixel, S * a->y_pixel, 1};
        if (a->e.residual)
            e.residual = a->e.residual + (number + j) * all;
        const int64_t depth = b.chunks * b.length;
        const float *panel = weights + p->group * depth * ((a->features + 7) / 8 * 8);
        for (int64_t column = 0; column < a->features;) {
            int64_t rest = a->features - column, width = panel_width(rest);
            multiply_panel(&b, panel + column * depth, width, width, rest < width ? rest : width,
                           p->group * a->features + column);
            column += width;
        }
    }
}

KERNEL(or_transposed)
{
    ARGS(or_transposed);
    int64_t first, last;
    share(a->images * a->y_rows * a->parts * a->groups, task, a->tasks, &first, &last);
    for (int64_t k = first; k < last; k++) {
        struct strip p = {.group = k % a->groups};
        int64_t rest = k / a->groups;
        share(a->y_columns, rest % a->parts, a->parts, &p.from, &p.to);
        rest /= a->parts;
        p.i = rest % a->y_rows;
        p.n = rest / a->y_rows;
        for (int64_t j = p.from; j < p.to && j < p.from + a->column_stride; j++)
            multiply_phase(a, &p, j, a->scratch + thread * a->scratch_each);
    }
}

/* Few outputs of each pixel that no other pixel contributes to: kernel and stride are the same, a pixel of x becomes
 * `outputs` (at most MOST_OUTPUTS) numbers of y, which lie `offsets` apart from its first one. Eight pixels of a row are
 * turned so that they lie side by side for each channel, and are summed together. */
#define MOST_OUTPUTS 8

struct or_transposed_few {
    float *y;
    const float *x, *w; /* w [channels][2, 4 or 8 outputs], zeros behind the last output */
    const int64_t *offsets;
    int64_t outputs, images, rows, columns, channels, tasks; /* of x */
    int64_t y_image, y_row, y_pixel, x_image, x_row, x_pixel; /* floats; y_row, y_pixel: between first outputs */
    struct epilogue e; /* bias, scale, shift: eight times for each output; no residual */
};

/* N outputs of `count` (at most eight) pixels. */
INLINE void few(const struct or_transposed_few *a, const float *x, float *y, int64_t count, const int N)
{
    v8 sum[MOST_OUTPUTS];
    const float *w = a->w;
    const int64_t step = a->x_pixel, whole = count == 8 ? a->channels / 8 * 8 : 0;
    for (int k = 0; k < N; k++)
        sum[k] = all8(0);
    for (int64_t c = 0; c < whole; c += 8) {
        float turned[64];
        turn8((char *)turned, 32, (const char *)(x + c), 4 * step);
        for (int i = 0; i < 8; i++, w += N) {
            v8 in = load8(turned + 8 * i);
            for (int k = 0; k < N; k++)
                sum[k] += in * all8(w[k]);
        }
    }
    for (int64_t c = whole; c < a->channels; c++, w += N) {
        v8 in = all8(0);
        for (int64_t p = 0; p < count; p++)
            in[p] = x[p * step + c];
        for (int k = 0; k < N; k++)
            sum[k] += in * all8(w[k]);
    }
    for (int k = 0; k < N && k < a->outputs; k++) {
        v8 result = finish8(&a->e, a->e.activation, sum[k], 8 * k, all8(0));
        for (int64_t p = 0; p < count; p++)
            y[p * a->y_pixel + a->offsets[k]] = result[p];
    }
}

KERNEL(or_transposed_few)
{
    ARGS(or_transposed_few);
    int64_t first, last;
    share(a->images * a->rows, task, a->tasks, &first, &last);
    for (int64_t k = first; k < last; k++) {
        const float *x = a->x + k / a->rows * a->x_image + k % a->rows * a->x_row;
        float *y = a->y + k / a->rows * a->y_image + k % a->rows * a->y_row;
        for (int64_t j = 0; j < a->columns; j += 8, x += 8 * a->x_pixel, y += 8 * a->y_pixel) {
            int64_t count = a->columns - j < 8 ? a->columns - j : 8;
            if (a->outputs <= 2)
                few(a, x, y, count, 2);
            else if (a->outputs <= 4)
                few(a, x, y, count, 4);
            else
                few(a, x, y, count, 8);
        }
    }
}
