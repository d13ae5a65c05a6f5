/* Exact products of 8-bit integers: what the kernels of integer_gemm.c and integer_conv.c share.
 *
 * Weights are packed in panels of NR columns, in one of two forms.
 *
 * Wide: weights less their zero points as int16, [panels][pairs][NR][2], times rows less theirs as int16. Two products at
 * a time are added into int32: exact.
 *
 * Narrow: weights as int8, [panels][quads][NR][4], times rows as uint8; both as they are, so that zero points come off
 * the sums at the end. Two products at a time are added into int16, of an octet (two quads) two times two, before they
 * go into int32. So that an int16 never overflows, the sum of the weights of one sign that meet in it is at most 128;
 * what is above is left out and comes in `extra` quads of its panel. Exact as well, and less work where they are few.
 *
 * Sums wrap as int32 sums do. What is missing of a pair, quad or panel is 0.
 */
#ifndef OUTRIDER_INTEGER_H
#define OUTRIDER_INTEGER_H

#include "epilogue.h"
#include "outrider.h"

#define NR 16 /* columns of a panel */
#define MR 6  /* rows of a tile */
#define MOST_ROWS 192 /* that a task makes ready at once */

enum result { SUMS, FLOATS, BYTES, SIGNED_BYTES };

/* What becomes of the sums of a row and column. 28 words.
 *
 * SUMS: int32. FLOATS: sum * (x_scale * w_scale), rounded to what a byte holds at p_scale if that is given, then the
 * epilogue. BYTES, SIGNED_BYTES: uint8 and int8,
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
    const float *p_scale;
    const uint8_t *p_zero;
    int64_t p_signed;
    float *ready;       /* [threads, columns rounded up to NR, + NR]: scales by column */
    int64_t columns;
    struct epilogue e;
};

/* Packed weights. 8 words. */
struct weights {
    const void *panels;
    int64_t narrow, octets; /* octets: how many leading pairs of quads are added in int16 */
    const int32_t *first;   /* narrow: panel p has the extra quads first[p] .. first[p + 1] - 1, */
    const int32_t *at;      /* which meet the numbers of the row that quad at[i] meets, */
    const int8_t *extra;    /* [extra quads][NR][4] */
    const int32_t *adjust;  /* narrow, [panels][NR]: sum of the weights of a column, less depth times its zero point */
    const int32_t *zeros;   /* narrow, [panels][NR]: zero points, null if all are 0 */
};

/* Rows of the left operand as a task has made them ready: int16, or uint8 if the weights are narrow. */
struct rows {
    const void *first;
    int64_t pitch, depth;
    const int32_t *zeros, *sums; /* narrow: zero point and sum of each row */
};

/* The sums of n <= MR rows from `row` on with panel `panel`, into sums [n, NR]. */
void panel_sums(const struct weights *w, int64_t panel, const struct rows *rows, int64_t row, int64_t n, int32_t *sums);

/* The length of a ready row: depth rounded up to whole pairs or quads. */
INLINE int64_t ready_length(const struct weights *w, int64_t depth)
{
    return w->narrow ? (depth + 3) / 4 * 4 : (depth + 1) / 2 * 2;
}

/* Make the scales of columns first .. last ready for `finish_sums` on this thread. */
void ready_scales(const struct output *o, int64_t first, int64_t last, int64_t thread);

/* Sums [rows <= MR, columns <= NR], rows `NR` apart, to y at `row`, `column`. */
void finish_sums(const struct output *o, const int32_t *sums, int64_t rows, int64_t columns, int64_t row, int64_t column,
                 int64_t thread);

/* n bytes at x as uint8, 128 more if they are signed. */
INLINE void unsign(const uint8_t *x, int64_t is_signed, uint8_t *y, int64_t n)
{
    if (is_signed)
        for (int64_t i = 0; i < n; i++)
            y[i] = x[i] ^ 0x80;
    else
        memcpy(y, x, (size_t)n);
}

INLINE int32_t sum_of(const uint8_t *x, int64_t n)
{
    int32_t sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i];
    return sum;
}

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
