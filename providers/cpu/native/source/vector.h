/* Mathematics on eight floats at once.
 *
 * No function calls libm and none branches, so they inline into any loop. Error bounds are relative, in units of the
 * last place of float32 (ulp, 2^-24 of the value's binade), over all floats, and hold with and without fused
 * multiply-add; results that are subnormal are within one of the smallest floats. NaN gives NaN; what is said of
 * infinities is exact. Polynomials are least-maximum fits of relative error.
 */
#ifndef OUTRIDER_VECTOR_H
#define OUTRIDER_VECTOR_H

#include "outrider.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

/* Bits of `a` where the mask is -1, of `b` where it is 0. Comparisons of v8 give such masks. */
INLINE v8 select8(i8v mask, v8 a, v8 b)
{
#ifdef __AVX2__
    return (v8)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
#else
    return (v8)((mask & (i8v)a) | (~mask & (i8v)b));
#endif
}

/* The larger and the smaller of a and b; b where one of them is NaN: max8(bound, x) keeps the NaN of x. */
INLINE v8 max8(v8 a, v8 b)
{
#ifdef __AVX2__
    return (v8)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select8(a > b, a, b);
#endif
}

INLINE v8 min8(v8 a, v8 b)
{
#ifdef __AVX2__
    return (v8)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select8(a < b, a, b);
#endif
}

/* x limited to low .. high; NaN stays. */
INLINE v8 clamp8(v8 x, float low, float high) { return min8(all8(high), max8(all8(low), x)); }

INLINE v8 abs8(v8 x) { return (v8)((i8v)x & 0x7fffffff); }

/* |magnitude| with the sign of x. */
INLINE v8 sign8(v8 magnitude, v8 x) { return (v8)(((i8v)magnitude & 0x7fffffff) | ((i8v)x & INT32_MIN)); }

/* Correctly rounded square root; NaN below 0. */
INLINE v8 sqrt8(v8 x)
{
#ifdef __AVX2__
    return (v8)_mm256_sqrt_ps((__m256)x);
#else
    for (int i = 0; i < 8; i++)
        x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

/* The nearest integers, halves to even. */
INLINE v8 round8(v8 x)
{
#ifdef __AVX2__
    return (v8)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    v8 big = sign8(all8(8388608.0f), x); /* above 2^23 all floats are integers */
    return sign8(select8(abs8(x) < 8388608.0f, x + big - big, x), x);
#endif
}

INLINE v8 floor8(v8 x)
{
#ifdef __AVX2__
    return (v8)_mm256_floor_ps((__m256)x);
#else
    v8 near = round8(x);
    return select8(near > x, near - 1.0f, near);
#endif
}

INLINE v8 ceil8(v8 x)
{
#ifdef __AVX2__
    return (v8)_mm256_ceil_ps((__m256)x);
#else
    return -floor8(-x);
#endif
}

/* Sum and maximum of the eight; always in the same order. A NaN may be lost in the maximum. */
INLINE float sum8(v8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

INLINE float top8(v8 x)
{
    float top = x[0];
    for (int i = 1; i < 8; i++)
        top = x[i] > top ? x[i] : top;
    return top;
}

/* The first n < 8 of x, `rest` in the others. */
INLINE v8 first8(v8 x, int64_t n, v8 rest)
{
    const i8v lane = {0, 1, 2, 3, 4, 5, 6, 7};
    return select8(lane < (int32_t)n, x, rest);
}

/* exp(x) = 2^n (1 + rest), |x - n ln 2| <= ln 2 / 2, for |x| < 2^15: n as floats and `rest` with a small relative
 * error, so that exp(x) - 1 can be had near 0. */
INLINE v8 exp_parts8(v8 x, v8 *n)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    v8 whole = (x * 1.44269504f + shift) - shift;
    v8 r = x - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    v8 p = all8(0.0013901290949434042f);
    p = p * r + 0.00836316217f;
    p = p * r + 0.04166685417f;
    p = p * r + 0.16666577756f;
    p = p * r + 0.5f;
    *n = whole;
    return p * (r * r) + r;
}

/* 2^n for integers -126 <= n <= 127; 0 for -127 and inf for 128. */
INLINE v8 power_of_two8(v8 n)
{
    i8v biased = (i8v)(n + 12583039.0f); /* 1.5 * 2^23 + 127: the integer stands in the low bits */
    return (v8)(biased << 23);
}

/* exp(x) within 2 ulp; 0 below -104, inf above 88.73. */
INLINE v8 exp8(v8 x)
{
    v8 n, rest = exp_parts8(clamp8(x, -104.0f, 89.0f), &n);
    v8 half = floor8(n * 0.5f); /* in two factors: 2^n may be no float, or no normal one */
    return (rest + 1.0f) * power_of_two8(half) * power_of_two8(n - half);
}

/* exp(x) within 2 ulp where -87.6 < x < 88.3; 0 below and inf above: faster than exp8, which has all floats. */
INLINE v8 quick_exp8(v8 x)
{
    v8 n, rest = exp_parts8(clamp8(x, -88.0f, 88.7f), &n); /* n from -127, as power of two 0, to 128, which is inf */
    return (rest + 1.0f) * power_of_two8(n);
}

/* exp(x) - 1 within 3 ulp, also near 0; -1 below -18, inf above 88.73. */
INLINE v8 expm1_8(v8 x)
{
    v8 n, rest = exp_parts8(clamp8(x, -18.0f, 89.0f), &n);
    v8 half = floor8(n * 0.5f), low = power_of_two8(half), high = power_of_two8(n - half);
    v8 y = (rest * low + (low - power_of_two8(half - n))) * high; /* 2^n rest + (2^n - 1) */
    return select8(x == 0.0f, x, y);
}

/* The mantissa in [sqrt(1/2), sqrt(2)) of a positive x, subnormal too, and the exponent that belongs to it. */
INLINE v8 mantissa8(v8 x, v8 *exponent)
{
    i8v small = x < 1.17549435e-38f;
    v8 normal = select8(small, x * 8388608.0f, x);
    u8v bits = (u8v)normal - 0x3f3504f3u; /* sqrt(1/2); wraps for what has no logarithm */
    i8v e = (i8v)bits >> 23;
    *exponent = __builtin_convertvector(e, v8) - select8(small, all8(23.0f), all8(0.0f));
    return (v8)((u8v)normal - ((u8v)e << 23));
}

/* ln(1 + r) for sqrt(1/2) <= 1 + r < sqrt(2), and e ln 2 added. */
INLINE v8 log_near_one8(v8 r, v8 e)
{
    v8 p = all8(-0.07974208891f);
    p = p * r + 0.12655694783f;
    p = p * r - 0.12989278138f;
    p = p * r + 0.14209945500f;
    p = p * r - 0.16641581058f;
    p = p * r + 0.20001201332f;
    p = p * r - 0.25000303984f;
    p = p * r + 0.33333331347f;
    v8 square = r * r;
    v8 y = square * r * p;
    y = y + e * -2.12194440e-4f;
    y = y - square * 0.5f;
    return (r + y) + e * 0.693359375f;
}

/* ln(x) within 2 ulp; -inf at 0, NaN below, inf at inf. */
INLINE v8 log8(v8 x)
{
    v8 e, m = mantissa8(x, &e);
    v8 y = log_near_one8(m - 1.0f, e);
    y = select8(x == __builtin_inff(), x, y);
    y = select8(x == 0.0f, all8(-__builtin_inff()), y);
    return select8(x >= 0.0f, y, all8(__builtin_nanf("")));
}

/* ln(1 + x) for 0 <= x <= 1 within 3 ulp, also near 0. */
INLINE v8 log1p_8(v8 x)
{
    v8 above = x + 1.0f, e, m = mantissa8(above, &e);
    v8 lost = x - (above - 1.0f); /* what rounding took from 1 + x */
    v8 y = log_near_one8(m - 1.0f, e) + lost / above;
    return select8(x == x, y, x);
}

/* -1 or 1 with the sign of x; NaN stays. */
INLINE v8 saturated8(v8 x) { return select8(x == x, sign8(all8(1.0f), x), x); }

/* tanh(x) within 6 ulp; -1 and 1 beyond 9.1. A rational function of x^2 times x. */
INLINE v8 tanh8(v8 x)
{
    v8 s = x * x, s2 = s * s;
    v8 p = (1.3319102266e-08f * s + 2.0583505830e-05f) * s2 + (3.4940361511e-03f * s + 1.3379719853e-01f);
    v8 q = (7.7620325102e-07f * s + 3.2830954297e-04f) * s2 + (2.5871079415e-02f * s + 4.6713033319e-01f);
    p = p * s + 1.0f;
    q = q * s + 1.0f;
    return select8(abs8(x) < 9.1f, clamp8(x * p / q, -1.0f, 1.0f), saturated8(x));
}

/* The Gauss error function within 6 ulp; -1 and 1 beyond 3.93. A rational function of x^2 times x. */
INLINE v8 erf8(v8 x)
{
    v8 s = x * x, s2 = s * s;
    v8 p = (2.0419618068e-06f * s + 2.8480828041e-04f) * s2 + (3.7796190009e-03f * s + 5.2790317684e-02f);
    v8 q = (3.8003963709e-05f * s + 1.1652139947e-03f) * s2 + (1.4997459017e-02f * s + 1.1425764114e-01f);
    p = p * s2 + (1.9078412653e-01f * s + 1.1283791065f);
    q = q * s2 + (5.0241076946e-01f * s + 1.0f);
    return select8(abs8(x) < 3.93f, clamp8(x * p / q, -1.0f, 1.0f), saturated8(x));
}

/* 1 / (1 + exp(-x)) within 4 ulp where that is a normal float, above -87.3; 0 below -88.4. */
INLINE v8 sigmoid8(v8 x) { return 1.0f / (1.0f + quick_exp8(-x)); }

/* ln(1 + exp(x)) = max(x, 0) + ln(1 + exp(-|x|)) within 4 ulp; overflows nowhere. */
INLINE v8 softplus8(v8 x) { return max8(all8(0.0f), x) + log1p_8(exp8(-abs8(x))); }

#endif
