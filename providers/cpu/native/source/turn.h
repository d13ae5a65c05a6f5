/* Transpositions of matrices in blocks. */
#ifndef OUTRIDER_TURN_H
#define OUTRIDER_TURN_H

#include "outrider.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX2__
/* An 8 x 8 block of 4-byte elements: column j of x, 32 bytes at x + j * x_step, becomes element j of each row of y. */
INLINE void turn8(char *y, int64_t y_step, const char *x, int64_t x_step)
{
    __m256 r[8], t[8];
    for (int j = 0; j < 4; j++) { /* r[j]: the lower halves of columns j and j + 4, r[j + 4]: the upper ones */
        const char *low = x + j * x_step, *high = low + 4 * x_step;
        r[j] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float *)low)),
                                    _mm_loadu_ps((const float *)high), 1);
        r[j + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float *)(low + 16))),
                                        _mm_loadu_ps((const float *)(high + 16)), 1);
    }
    for (int h = 0; h < 8; h += 4) {
        t[h] = _mm256_unpacklo_ps(r[h], r[h + 1]);
        t[h + 1] = _mm256_unpackhi_ps(r[h], r[h + 1]);
        t[h + 2] = _mm256_unpacklo_ps(r[h + 2], r[h + 3]);
        t[h + 3] = _mm256_unpackhi_ps(r[h + 2], r[h + 3]);
        r[h] = _mm256_shuffle_ps(t[h], t[h + 2], 0x44);
        r[h + 1] = _mm256_shuffle_ps(t[h], t[h + 2], 0xee);
        r[h + 2] = _mm256_shuffle_ps(t[h + 1], t[h + 3], 0x44);
        r[h + 3] = _mm256_shuffle_ps(t[h + 1], t[h + 3], 0xee);
    }
    for (int i = 0; i < 8; i++)
        _mm256_storeu_ps((float *)(y + i * y_step), r[i]);
}
#else
INLINE void turn8(char *y, int64_t y_step, const char *x, int64_t x_step)
{
    for (int64_t i = 0; i < 8; i++)
        for (int64_t j = 0; j < 8; j++)
            memcpy(y + i * y_step + 4 * j, x + j * x_step + 4 * i, 4);
}
#endif

/* rows x columns elements, contiguous along rows in x and along columns in y. */
INLINE void turn(char *y, int64_t y_step, const char *x, int64_t x_step, int64_t rows, int64_t columns, int64_t size)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            memcpy(y + i * y_step + j * size, x + j * x_step + i * size, (size_t)size);
}

/* The same for 4-byte elements: full blocks of 8 x 8, the rest one by one. */
INLINE void turn_words(char *y, int64_t y_step, const char *x, int64_t x_step, int64_t rows, int64_t columns)
{
    int64_t i = 0, whole = columns - columns % 8;
    for (; i + 8 <= rows; i += 8)
        for (int64_t j = 0; j < whole; j += 8)
            turn8(y + i * y_step + 4 * j, y_step, x + j * x_step + 4 * i, x_step);
    if (columns > whole)
        turn(y + 4 * whole, y_step, x + whole * x_step, x_step, i, columns - whole, 4);
    turn(y + i * y_step, y_step, x + 4 * i, x_step, rows - i, columns, 4);
}

#endif
