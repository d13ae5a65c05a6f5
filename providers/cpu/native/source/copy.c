/* Copies between arrays of one shape and any strides.
 *
 * The caller has sorted the axes by the destination's strides and joined those that lie alike in both arrays. `plan` is
 * as in walk.h, strides in bytes. The last of its axes goes over chunks of an axis of `n` elements, `chunk` at a time (the
 * last chunk may be short). An item is one chunk at one place; tasks share the items.
 */
#include "turn.h"
#include "walk.h"

#define SHORT 1024 /* bytes up to which the loop here is faster than a call of memcpy */
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
        int64_t bytes = length(&w, a->rank, a->n, a->chunk) * a->size;
        char *y = a->y + w.y;
        const char *x = a->x + w.x;
        if (bytes == 4)
            memcpy(y, x, 4);
        else if (bytes == 8)
            memcpy(y, x, 8);
        else if (bytes == 16)
            memcpy(y, x, 16);
        else if (bytes <= SHORT)
            copy_short(y, x, bytes);
        else
            memcpy(y, x, (size_t)bytes);
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
