/* A walk over the axes of two arrays at once.
 *
 * `plan` holds three numbers for each of `rank` axes (at most MOST_AXES), outermost first: count, stride of y, stride of
 * x. An item is one position on all of them.
 */
#ifndef OUTRIDER_WALK_H
#define OUTRIDER_WALK_H

#include "outrider.h"

#define MOST_AXES 8

/* Where a walk over the axes of a plan is: the position on each axis, and the offsets in y and x. */
struct walk {
    int64_t at[MOST_AXES];
    int64_t y, x;
};

INLINE void start(struct walk *w, const int64_t *plan, int64_t rank, int64_t item)
{
    w->y = w->x = 0;
    for (int64_t k = rank - 1; k >= 0; k--) {
        const int64_t *axis = plan + 3 * k;
        w->at[k] = item % axis[0];
        item /= axis[0];
        w->y += w->at[k] * axis[1];
        w->x += w->at[k] * axis[2];
    }
}

INLINE void next(struct walk *w, const int64_t *plan, int64_t rank)
{
    for (int64_t k = rank - 1; k >= 0; k--) {
        const int64_t *axis = plan + 3 * k;
        w->y += axis[1];
        w->x += axis[2];
        if (++w->at[k] < axis[0])
            return;
        w->y -= axis[0] * axis[1];
        w->x -= axis[0] * axis[2];
        w->at[k] = 0;
    }
}

/* `bytes` from x to y, which do not overlap: for rows so short that a call would take longer. */
INLINE void copy_short(char *y, const char *x, int64_t bytes)
{
    if (bytes < 32) {
        memcpy(y, x, (size_t)bytes);
        return;
    }
    for (int64_t i = 0; i + 32 <= bytes; i += 32)
        memcpy(y + i, x + i, 32);
    if (bytes % 32)
        memcpy(y + bytes - 32, x + bytes - 32, 32);
}

INLINE int64_t items(const int64_t *plan, int64_t rank)
{
    int64_t n = 1;
    for (int64_t k = 0; k < rank; k++)
        n *= plan[3 * k];
    return n;
}

#endif
