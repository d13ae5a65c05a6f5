/* Vectors of small integers: eight at a time, from and to int32. */
#ifndef OUTRIDER_BYTES_H
#define OUTRIDER_BYTES_H

#include "outrider.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef int8_t s8x8 __attribute__((vector_size(8)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef int16_t s16x8 __attribute__((vector_size(16)));

/* The low byte of each of eight integers. (Compilers take them out one by one where they convert.) */
INLINE u8x8 low_bytes8(i8v x)
{
#ifdef __AVX2__
    __m256i picked = _mm256_shuffle_epi8((__m256i)x, _mm256_setr_epi32(0x0c080400, -1, -1, -1, 0x0c080400, -1, -1, -1));
    __m128i joined = _mm_unpacklo_epi32(_mm256_castsi256_si128(picked), _mm256_extracti128_si256(picked, 1));
    u8x8 bytes;
    memcpy(&bytes, &joined, sizeof bytes);
    return bytes;
#else
    return __builtin_convertvector(x, u8x8);
#endif
}

/* The low 16 bits of each of eight integers. */
INLINE u16x8 low_words8(i8v x)
{
#ifdef __AVX2__
    __m256i order = _mm256_setr_epi32(0x05040100, 0x0d0c0908, -1, -1, 0x05040100, 0x0d0c0908, -1, -1);
    __m256i picked = _mm256_shuffle_epi8((__m256i)x, order);
    return (u16x8)_mm_unpacklo_epi64(_mm256_castsi256_si128(picked), _mm256_extracti128_si256(picked, 1));
#else
    return __builtin_convertvector(x, u16x8);
#endif
}

/* Eight bytes of memory as int32. */
INLINE i8v wide_bytes8(const void *p, int64_t is_signed)
{
#ifdef __AVX2__
    __m128i bytes = _mm_loadl_epi64(p);
    return (i8v)(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    if (is_signed) {
        s8x8 v;
        memcpy(&v, p, sizeof v);
        return __builtin_convertvector(v, i8v);
    }
    u8x8 v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, i8v);
#endif
}

/* Eight 16-bit integers of memory as int32. */
INLINE i8v wide_words8(const void *p, int64_t is_signed)
{
#ifdef __AVX2__
    __m128i words = _mm_loadu_si128(p);
    return (i8v)(is_signed ? _mm256_cvtepi16_epi32(words) : _mm256_cvtepu16_epi32(words));
#else
    if (is_signed) {
        s16x8 v;
        memcpy(&v, p, sizeof v);
        return __builtin_convertvector(v, i8v);
    }
    u16x8 v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, i8v);
#endif
}

#endif
