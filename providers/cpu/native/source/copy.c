/* Copies between arrays of one shape and any strides.
 *
 * The caller has sorted the axes by the destination's strides and joined those that lie alike in both arrays. `plan`
 * holds three numbers for each axis that is walked: count, stride of y, stride of x (bytes), outermost first. The last of
 * them goes over chunks of an axis of `n` elements, `chunk` at a time (the last chunk may be short). An item is one chunk
 * at one place; tasks share the items.
 */
#include "outrider.h"
#include "turn.h"

#define MOST_AXES 8
#define TILE 16 /* elements: one cache line of floats */

struct or_copy_rows {
    char *y;
    const char *x;
    const int64_t *plan;
    int64_t rank, n, chunk, size, tasks; /* size: bytes of an element */
};
struct or_copy_strided {
    char *y;
    const char *x;
    const int64_t *plan;
    int64_t rank, n, chunk, size, tasks;
    int64_t y_step, x_step; /* bytes between neighbours of the chunked axis */
};
struct or_copy_turned {
    char *y;
    const char *x;
    const int64_t *plan;
    int64_t rank, n, chunk, size, tasks;
    int64_t y_step; /* bytes in y between neighbours of the chunked axis, which is contiguous in x */
    int64_t columns, x_step; /* the axis that is contiguous in y: its length, bytes between neighbours in x */
};

/* Where a walk over the axes of a plan is: the position on each axis, and the byte offsets in y and x. */
struct walk {
    int64_t at[MOST_AXES];
    int64_t y, x;
};

static void start(struct walk *w, const int64_t *plan, int64_t rank, int64_t item)
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

static int64_t items(const int64_t *plan, int64_t rank)
{
    int64_t n = 1;
    for (int64_t k = 0; k < rank; k++)
        n *= plan[3 * k];
    return n;
}

/* Elements of the chunk that the walk is at. */
INLINE int64_t length(const struct walk *w, int64_t rank, int64_t n, int64_t chunk)
{
    int64_t rest = n - w->at[rank - 1] * chunk;
    return rest < chunk ? rest : chunk;
}

/* The chunked axis is contiguous in both. */
KERNEL(or_copy_rows)
{
    ARGS(or_copy_rows);
    int64_t first, last;
    struct walk w;
    share(items(a->plan, a->rank), task, a->tasks, &first, &last);
    start(&w, a->plan, a->rank, first);
    for (int64_t i = first; i < last; i++) {
        size_t bytes = (size_t)(length(&w, a->rank, a->n, a->chunk) * a->size);
        char *y = a->y + w.y;
        const char *x = a->x + w.x;
        if (bytes == 4)
            memcpy(y, x, 4);
        else if (bytes == 8)
            memcpy(y, x, 8);
        else if (bytes == 16)
            memcpy(y, x, 16);
        else
            memcpy(y, x, bytes);
        next(&w, a->plan, a->rank);
    }
}

INLINE void strided(char *y, const char *x, int64_t n, int64_t y_step, int64_t x_step, size_t size)
{
    for (int64_t i = 0; i < n; i++)
        memcpy(y + i * y_step, x + i * x_step, size);
}

/* Element by element: steps of 0 and below are fine in x. */
KERNEL(or_copy_strided)
{
    ARGS(or_copy_strided);
    int64_t first, last;
    struct walk w;
    share(items(a->plan, a->rank), task, a->tasks, &first, &last);
    start(&w, a->plan, a->rank, first);
    for (int64_t i = first; i < last; i++) {
        int64_t n = length(&w, a->rank, a->n, a->chunk);
        char *y = a->y + w.y;
        const char *x = a->x + w.x;
        if (a->size == 4 && a->y_step == 4)
            strided(y, x, n, 4, a->x_step, 4);
        else if (a->size == 4)
            strided(y, x, n, a->y_step, a->x_step, 4);
        else if (a->size == 1)
            strided(y, x, n, a->y_step, a->x_step, 1);
        else if (a->size == 2)
            strided(y, x, n, a->y_step, a->x_step, 2);
        else
            strided(y, x, n, a->y_step, a->x_step, 8);
        next(&w, a->plan, a->rank);
    }
}

/* A transposition: the chunked axis (chunks of TILE) is contiguous in x, the axis of `columns` in y. Tile by tile, so
 * that every cache line that is touched is used whole. */
KERNEL(or_copy_turned)
{
    ARGS(or_copy_turned);
    int64_t first, last;
    struct walk w;
    share(items(a->plan, a->rank), task, a->tasks, &first, &last);
    start(&w, a->plan, a->rank, first);
    for (int64_t i = first; i < last; i++) {
        int64_t rows = length(&w, a->rank, a->n, a->chunk);
        for (int64_t j = 0; j < a->columns; j += TILE) {
            int64_t columns = a->columns - j < TILE ? a->columns - j : TILE;
            char *y = a->y + w.y + j * a->size;
            const char *x = a->x + w.x + j * a->x_step;
            if (a->size == 4)
                turn_words(y, a->y_step, x, a->x_step, rows, columns);
            else if (a->size == 1)
                turn(y, a->y_step, x, a->x_step, rows, columns, 1);
            else if (a->size == 2)
                turn(y, a->y_step, x, a->x_step, rows, columns, 2);
            else
                turn(y, a->y_step, x, a->x_step, rows, columns, 8);
        }
        next(&w, a->plan, a->rank);
    }
}
