/* The epilogue of a tile, out of line: one loop for each activation, shared by all kernels. */
#include "epilogue.h"

/* Eight numbers, or the first n of them, `step` floats apart. */
INLINE v8 gather8(const float *p, int64_t step, int64_t n)
{
    v8 x = all8(0);
    for (int64_t i = 0; i < n; i++)
        x[i] = p[i * step];
    return x;
}

/* What is the same for all rows of eight columns; where an operand is missing, the number that changes nothing. */
struct constants {
    v8 factor, bias, scale, shift;
};

INLINE v8 finish(int64_t activation, const struct epilogue *e, const struct constants *c, v8 x, v8 before, v8 after)
{
    x = activate8(activation, x * c->factor + c->bias + before, (float)e->alpha, (float)e->beta);
    return x * c->scale + c->shift + after;
}

/* Eight columns, or n of them, of all rows. */
INLINE void finish_columns(const struct epilogue *e, int64_t activation, const struct constants *c, const float *tile,
                           int64_t pitch, int64_t rows, int64_t n, const float *residual, struct place to)
{
    const v8 none = all8(-0.0f);
    if (!residual && to.column == 1 && n == 8) {
        for (int64_t r = 0; r < rows; r++)
            store8(to.y + r * to.row, finish(activation, e, c, load8(tile + r * pitch), none, none));
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        v8 added = none;
        if (residual && e->residual_column == 1 && n == 8)
            added = load8(residual + r * e->residual_row);
        else if (residual)
            added = gather8(residual + r * e->residual_row, e->residual_column, n);
        v8 x = finish(activation, e, c, load8(tile + r * pitch), e->after ? none : added, e->after ? added : none);
        float *y = to.y + r * to.row;
        if (to.column == 1 && n == 8)
            store8(y, x);
        else
            for (int64_t i = 0; i < n; i++)
                y[i * to.column] = x[i];
    }
}

INLINE void finish_with(const struct epilogue *e, int64_t activation, const float *tile, int64_t pitch, int64_t rows,
                        int64_t columns, int64_t row, int64_t column, struct place to)
{
    const float *residual = e->residual;
    if (residual)
        residual += row * e->residual_row + column * e->residual_column;
    for (int64_t i = 0; i < columns; i += 8) {
        struct constants c = {
            .factor = all8((float)e->factor),
            .bias = e->bias ? load8(e->bias + column + i) : all8(-0.0f),
            .scale = e->scale ? load8(e->scale + column + i) : all8(1),
            .shift = e->shift ? load8(e->shift + column + i) : all8(-0.0f),
        };
        struct place there = {to.y + i * to.column, to.row, to.column};
        finish_columns(e, activation, &c, tile + i, pitch, rows, columns - i < 8 ? columns - i : 8,
                       residual ? residual + i * e->residual_column : NULL, there);
    }
}

void finish_tile(const struct epilogue *e, const float *tile, int64_t pitch, int64_t rows, int64_t columns,
                 int64_t row, int64_t column, struct place to)
{
    switch (e->activation) {
    case RELU: finish_with(e, RELU, tile, pitch, rows, columns, row, column, to); break;
    case CLIP: finish_with(e, CLIP, tile, pitch, rows, columns, row, column, to); break;
    case LEAKY_RELU: finish_with(e, LEAKY_RELU, tile, pitch, rows, columns, row, column, to); break;
    case HARD_SIGMOID: finish_with(e, HARD_SIGMOID, tile, pitch, rows, columns, row, column, to); break;
    case HARD_SWISH: finish_with(e, HARD_SWISH, tile, pitch, rows, columns, row, column, to); break;
    case SIGMOID: finish_with(e, SIGMOID, tile, pitch, rows, columns, row, column, to); break;
    case TANH: finish_with(e, TANH, tile, pitch, rows, columns, row, column, to); break;
    case GELU: finish_with(e, GELU, tile, pitch, rows, columns, row, column, to); break;
    case GELU_TANH: finish_with(e, GELU_TANH, tile, pitch, rows, columns, row, column, to); break;
    case SILU: finish_with(e, SILU, tile, pitch, rows, columns, row, column, to); break;
    case ELU: finish_with(e, ELU, tile, pitch, rows, columns, row, column, to); break;
    default: finish_with(e, PLAIN, tile, pitch, rows, columns, row, column, to);
    }
}
