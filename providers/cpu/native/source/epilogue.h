/* What follows a convolution or a matrix product while the sums are in registers or in the L1 cache:
 *
 *     y = act(factor * product + bias [+ residual before]) * scale + shift [+ residual after]
 *
 * (kernels/epilogue.py says the same in NumPy.) Columns are features. The functions of vector.h give the error bounds
 * of the activations; all else is one rounding per operation, or less where the compiler fuses.
 */
#ifndef OUTRIDER_EPILOGUE_H
#define OUTRIDER_EPILOGUE_H

#include "outrider.h"
#include "vector.h"

/* In the order of ACTIVATIONS of kernels/epilogue.py. */
enum activation {
    PLAIN, RELU, CLIP, LEAKY_RELU, HARD_SIGMOID, HARD_SWISH, SIGMOID, TANH, GELU, GELU_TANH, SILU, ELU
};

/* Words of the args of every kernel with an epilogue: `struct epilogue e` in its struct, `Library` words from
 * `epilogue_words` of kernels/panels.py. bias, scale, shift: one number per column, null for none, readable up to
 * 24 floats behind the last column. The residual has a row for each row of y, `residual_row` floats apart, and columns
 * `residual_column` floats apart. */
struct epilogue {
    const float *bias, *scale, *shift, *residual;
    int64_t residual_row, residual_column;
    int64_t after; /* the residual is added at the end, not before the activation */
    int64_t activation;
    double alpha, beta, factor;
};

INLINE v8 gelu8(v8 x) { return x * 0.5f * (erf8(x * 0.70710678118654752f) + 1.0f); }

INLINE v8 gelu_tanh8(v8 x)
{
    v8 inner = x * (x * x * 0.044715f + 1.0f) * 0.79788456080286536f;
    return x * 0.5f * (tanh8(inner) + 1.0f);
}

/* act(x), parameters as in kernels/epilogue.py; NaN stays NaN. */
INLINE v8 activate8(int64_t activation, v8 x, float alpha, float beta)
{
    switch (activation) {
    case RELU: return max8(all8(0), x);
    case CLIP: return clamp8(x, alpha, beta);
    case LEAKY_RELU: return select8(x < 0, x * alpha, x);
    case HARD_SIGMOID: return clamp8(x * alpha + beta, 0, 1);
    case HARD_SWISH: return x * clamp8(x * (1.0f / 6.0f) + 0.5f, 0, 1);
    case SIGMOID: return sigmoid8(x);
    case TANH: return tanh8(x);
    case GELU: return gelu8(x);
    case GELU_TANH: return gelu_tanh8(x);
    case SILU: return x * sigmoid8(x * alpha);
    case ELU: return select8(x < 0, expm1_8(x) * alpha, x);
    default: return x;
    }
}

/* The whole epilogue of eight columns from `column` on. `residual`: the eight numbers, read if e->residual. With a
 * constant `activation` the switch is gone. */
INLINE v8 finish8(const struct epilogue *e, int64_t activation, v8 x, int64_t column, v8 residual)
{
    x = x * (float)e->factor;
    if (e->bias)
        x = x + load8(e->bias + column);
    if (e->residual && !e->after)
        x = x + residual;
    x = activate8(activation, x, (float)e->alpha, (float)e->beta);
    if (e->scale)
        x = x * load8(e->scale + column);
    if (e->shift)
        x = x + load8(e->shift + column);
    if (e->residual && e->after)
        x = x + residual;
    return x;
}

/* Where a tile of y lies: its first element, floats between rows, floats between columns. */
struct place {
    float *y;
    int64_t row, column;
};

/* The epilogue of a tile of sums, rows `pitch` floats apart (readable up to a multiple of 8 columns), into y. `row`
 * and `column`: the position in y and in the residual of the tile's first element. */
void finish_tile(const struct epilogue *e, const float *tile, int64_t pitch, int64_t rows, int64_t columns,
                 int64_t row, int64_t column, struct place to);

#endif
