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

INLINE void finish_with(const struct epilogue *e, int64_t activation, const float *tile, int64_t pitch, int64_t rows,
                        int64_t columns, int64_t row, int64_t column, struct place to)
{
    for (int64_t r = 0; r < rows; r++) {
        const float *residual = e->residual;
        if (residual)
            residual += (row + r) * e->residual_row + column * e->residual_column;
        for (int64_t c = 0; c < columns; c += 8) {
            int64_t n = columns - c < 8 ? columns - c : 8;
            v8 added = all8(0);
            if (residual && e->residual_column == 1 && n == 8)
                added = load8(residual + c);
            else if (residual)
                added = gather8(residual + c * e->residual_column, e->residual_column, n);
            v8 x = finish8(e, activation, load8(tile + r * pitch + c), column + c, added);
            float *y = to.y + r * to.row + c * to.column;
            if (to.column == 1 && n == 8)
                store8(y, x);
            else
                for (int64_t i = 0; i < n; i++)
                    y[i * to.column] = x[i];
        }
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
