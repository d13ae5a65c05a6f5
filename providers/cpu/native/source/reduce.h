/* What reductions and poolings combine. */
#ifndef OUTRIDER_REDUCE_H
#define OUTRIDER_REDUCE_H

#include "vector.h"

/* As kernels/reducing.py has them. */
enum { SUM, SQUARES, MAGNITUDES, LARGEST, SMALLEST };

/* One more element; NaN wins. */
INLINE v8 combine(const int what, v8 total, v8 x)
{
    switch (what) {
    case SQUARES: return total + x * x;
    case MAGNITUDES: return total + abs8(x);
    case LARGEST: return select8(total != total, total, max8(total, x));
    case SMALLEST: return select8(total != total, total, min8(total, x));
    default: return total + x;
    }
}

/* What combines with x to x, or to its square or magnitude. */
INLINE float neutral(const int what) { return what == LARGEST ? -INFINITY : what == SMALLEST ? INFINITY : 0; }

INLINE v8 finished(v8 y, double divisor, int64_t root)
{
    y = divisor == 1 ? y : y / (float)divisor;
    return root ? sqrt8(y) : y;
}

#endif
