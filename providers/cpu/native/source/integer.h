/* Exact products of small integers: what the kernels of integer_gemm.c and integer_conv.c share.
 *
 * Operands are 8-bit integers less their zero points, held as int16; two products at a time are added into int32, which
 * is exact up to a depth of 33025 and wraps as int32 sums do beyond. Weights are packed in panels of NR columns:
 * [panels][pairs][NR][2] int16, pairs = (depth + 1) / 2, the missing ones 0.
 */
#ifndef OUTRIDER_INTEGER_H
#define OUTRIDER_INTEGER_H

#include "epilogue.h"
#include "outrider.h"

#define NR 16 /* columns of a panel */
#define MR 6  /* rows of a tile */

enum result { SUMS, FLOATS, BYTES, SIGNED_BYTES };

/* What becomes of the sums of a row and column. 28 words.
 *
 * SUMS: int32. FLOATS: sum * (x_scale * w_scale), then the epilogue. BYTES, SIGNED_BYTES: uint8 and int8,
 * saturate(round(value / y_scale) + y_zero) of that value; `direct`: of (sum + bias) instead, at the scale
 * x_scale * w_scale / y_scale in one multiplication, without the epilogue. Scales and zero points are read in the run.
 */
struct output {
    void *y;
    int64_t row, column; /* elements of y between rows and between columns */
    int64_t result, direct;
    const float *x_scale, *w_scale; /* w_scale: per column if w_step is 1 */
    int64_t w_step;
    const int32_t *bias; /* per column if bias_step is 1 */
    int64_t bias_step;
    const float *y_scale;
    const void *y_zero; /* has the type of y */
    float *ready;       /* [threads, columns rounded up to NR, + NR]: scales by column */
    int64_t columns;
    struct epilogue e;
};

/* The sums of `rows` <= MR rows of a (int16, `pitch` apart) with one panel, into sums [rows, NR]. */
void panel_sums(const int16_t *a, int64_t pitch, int64_t rows, const int16_t *panel, int64_t pairs, int32_t *sums);

/* Make the scales of columns first .. last ready for `finish_sums` on this thread. */
void ready_scales(const struct output *o, int64_t first, int64_t last, int64_t thread);

/* Sums [rows <= MR, columns <= NR], rows `NR` apart, to y at `row`, `column`. */
void finish_sums(const struct output *o, int32_t *sums, int64_t rows, int64_t columns, int64_t row, int64_t column,
                 int64_t thread);

/* The zero point at p, null being 0. */
INLINE int64_t zero_of(const uint8_t *p, int64_t is_signed)
{
    return !p ? 0 : is_signed ? (int64_t)(int8_t)*p : (int64_t)*p;
}

/* n bytes at x, less zero, as int16. */
INLINE void widen(const uint8_t *x, int64_t is_signed, int64_t zero, int16_t *y, int64_t n)
{
    int16_t by = (int16_t)zero;
    if (is_signed)
        for (int64_t i = 0; i < n; i++)
            y[i] = (int16_t)((int8_t)x[i] - by);
    else
        for (int64_t i = 0; i < n; i++)
            y[i] = (int16_t)(x[i] - by);
}

INLINE int64_t rounded_up(int64_t n) { return (n + NR - 1) / NR * NR; }

#endif
