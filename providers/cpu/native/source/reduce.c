/* Reductions of float32 along one axis: sums, means, norms, the largest, the smallest.
 *
 * The order of the operations depends on positions along the axis only, never on how memory lies: element k belongs to
 * partial result k % 8, every BLOCK elements the partial results are added to totals, and at the end the eight totals to
 * one, in the order of `sum8`. A sum is so within (BLOCK / 8 + n / BLOCK + 5) * 2^-24 of the sum of absolute values. NaN
 * stays NaN, also in the largest and the smallest.
 */
#include "reduce.h"
#include "walk.h"

#define BLOCK 1024
#define WIDE 4 /* vectors of neighbouring results that are made together: two cache lines */

/* The axis of `n` elements is contiguous in x. `plan` (walk.h, in floats) are the axes that stay. */
struct or_reduce_rows {
    float *y;
    const float *x;
    const int64_t *plan;
    int64_t rank, n, what, tasks;
    double divisor; /* of the result */
    int64_t root;   /* the result is a square root */
};

/* The last axis that stays, `inner` long, is contiguous in x; `plan` are the others and chunks of 8 * WIDE of it. */
struct or_reduce_columns {
    float *y;
    const float *x;
    const int64_t *plan;
    int64_t rank, n, what, tasks;
    double divisor;
    int64_t root;
    int64_t step, inner, y_step; /* floats between reduced elements in x; the last axis; its stride in y */
};

/* Two partial results. */
INLINE v8 join(const int what, v8 a, v8 b) { return combine(what == LARGEST || what == SMALLEST ? what : SUM, a, b); }

/* Eight partial results. */
INLINE v8 joined(const int what, const v8 *p)
{
    v8 even = join(what, join(what, p[0], p[4]), join(what, p[2], p[6]));
    v8 odd = join(what, join(what, p[1], p[5]), join(what, p[3], p[7]));
    return join(what, even, odd);
}

/* n contiguous elements to one. */
INLINE float row(const float *x, int64_t n, const int what)
{
    v8 total = all8(neutral(what));
    for (int64_t block = 0; block < n; block += BLOCK) {
        const int64_t end = n - block < BLOCK ? n : block + BLOCK;
        v8 part = all8(neutral(what));
        int64_t k = block;
        for (; k + 8 <= end; k += 8)
            part = combine(what, part, load8(x + k));
        if (k < end)
            part = combine(what, part, first8(load8n(x + k, end - k), end - k, all8(neutral(what))));
        total = join(what, total, part);
    }
    v8 one[8];
    for (int i = 0; i < 8; i++)
        one[i] = all8(total[i]);
    return joined(what, one)[0];
}

/* `combine` and `join` of single numbers. */
INLINE float combine1(const int what, float total, float x)
{
    switch (what) {
    case SQUARES: return total + x * x;
    case MAGNITUDES: return total + fabsf(x);
    case LARGEST: return total != total || total > x ? total : x;
    case SMALLEST: return total != total || total < x ? total : x;
    default: return total + x;
    }
}

INLINE float join1(const int what, float a, float b)
{
    return combine1(what == LARGEST || what == SMALLEST ? what : SUM, a, b);
}

/* `row` for up to eight elements. */
INLINE float short_row(const float *x, int64_t n, const int what)
{
    float p[8];
    for (int64_t i = 0; i < 8; i++)
        p[i] = i < n ? join1(what, neutral(what), combine1(what, neutral(what), x[i])) : neutral(what);
    float even = join1(what, join1(what, p[0], p[4]), join1(what, p[2], p[6]));
    float odd = join1(what, join1(what, p[1], p[5]), join1(what, p[3], p[7]));
    return join1(what, even, odd);
}

INLINE void rows(const struct or_reduce_rows *a, int64_t task, const int what)
{
    int64_t first, last;
    struct walk w;
    share(items(a->plan, a->rank), task, a->tasks, &first, &last);
    start(&w, a->plan, a->rank, first);
    for (int64_t i = first; i < last; i++) {
        float result;
        if (a->n == 2)
            result = short_row(a->x + w.x, 2, what);
        else
            result = a->n <= 8 ? short_row(a->x + w.x, a->n, what) : row(a->x + w.x, a->n, what);
        if (a->divisor != 1 || a->root)
            result = finished(all8(result), a->divisor, a->root)[0];
        a->y[w.y] = result;
        next(&w, a->plan, a->rank);
    }
}

KERNEL(or_reduce_rows)
{
    ARGS(or_reduce_rows);
    switch (a->what) {
    case SQUARES: rows(a, task, SQUARES); break;
    case MAGNITUDES: rows(a, task, MAGNITUDES); break;
    case LARGEST: rows(a, task, LARGEST); break;
    case SMALLEST: rows(a, task, SMALLEST); break;
    default: rows(a, task, SUM);
    }
}

/* `vectors` times eight neighbouring results, from n elements each that lie `step` apart. `lanes`: how many of eight there
 * are; only for one vector. */
INLINE void column(v8 *y, const float *x, int64_t n, int64_t step, const int vectors, int64_t lanes, const int what)
{
    v8 total[WIDE][8], part[WIDE][8];
    for (int v = 0; v < vectors; v++)
        for (int i = 0; i < 8; i++)
            total[v][i] = all8(neutral(what));
    for (int64_t block = 0; block < n; block += BLOCK) {
        const int64_t end = n - block < BLOCK ? n : block + BLOCK;
        for (int v = 0; v < vectors; v++)
            for (int i = 0; i < 8; i++)
                part[v][i] = all8(neutral(what));
        for (int64_t k = block; k < end; k++)
            for (int v = 0; v < vectors; v++) {
                v8 in = lanes < 8 ? load8n(x + k * step, lanes) : load8(x + k * step + 8 * v);
                part[v][k % 8] = combine(what, part[v][k % 8], in);
            }
        for (int v = 0; v < vectors; v++)
            for (int i = 0; i < 8; i++)
                total[v][i] = join(what, total[v][i], part[v][i]);
    }
    for (int v = 0; v < vectors; v++)
        y[v] = joined(what, total[v]);
}

INLINE void columns(const struct or_reduce_columns *a, int64_t task, const int what)
{
    int64_t first, last;
    struct walk w;
    share(items(a->plan, a->rank), task, a->tasks, &first, &last);
    start(&w, a->plan, a->rank, first);
    for (int64_t i = first; i < last; i++) {
        const int64_t rest = a->inner - w.at[a->rank - 1] * 8 * WIDE, lanes = rest < 8 * WIDE ? rest : 8 * WIDE;
        const float *x = a->x + w.x;
        v8 result[WIDE];
        if (lanes == 8 * WIDE)
            column(result, x, a->n, a->step, WIDE, 8, what);
        else
            for (int64_t c = 0; c < lanes; c += 8)
                if (c + 8 <= lanes)
                    column(result + c / 8, x + c, a->n, a->step, 1, 8, what);
                else
                    column(result + c / 8, x + c, a->n, a->step, 1, lanes - c, what);
        for (int64_t c = 0; c < lanes; c += 8) {
            v8 y = finished(result[c / 8], a->divisor, a->root);
            for (int64_t k = 0; k < 8 && c + k < lanes; k++)
                a->y[w.y + (c + k) * a->y_step] = y[k];
        }
        next(&w, a->plan, a->rank);
    }
}

KERNEL(or_reduce_columns)
{
    ARGS(or_reduce_columns);
    switch (a->what) {
    case SQUARES: columns(a, task, SQUARES); break;
    case MAGNITUDES: columns(a, task, MAGNITUDES); break;
    case LARGEST: columns(a, task, LARGEST); break;
    case SMALLEST: columns(a, task, SMALLEST); break;
    default: columns(a, task, SUM);
    }
}
