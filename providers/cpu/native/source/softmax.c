/* Softmax and its logarithm along one axis, float32.
 *
 * y = exp(t - max t) / sum exp(t - max t), or t - max t - ln sum exp(t - max t), with t = x * factor + mask. Relative
 * error of a softmax: 3 ulp, that of the sum (n / 8 + 3 ulp at most), and |t - max t| / 2 ulp from rounding the
 * difference. A sum is always taken as eight sums of every eighth term, so both kernels give the same bits.
 */
#include "vector.h"

enum { LOGARITHM = 1, NAN_TO_ZERO = 2 };

struct or_softmax {
    float *y;            /* [rows, n], may be x */
    const float *x;      /* [rows, n] */
    const float *mask;   /* added, or NULL */
    const int64_t *walk; /* [axes, (count, stride of the mask)]: the axes that rows are made of, outermost first */
    int64_t axes;
    int64_t step;        /* of the mask along a row: 1 or 0 */
    int64_t rows, n;
    double factor;
    int64_t flags, tasks;
};

/* t = x * factor + mask for one row, into y. */
static void scaled(const struct or_softmax *a, int64_t row, float *y)
{
    const float *x = a->x + row * a->n, *mask = a->mask;
    float factor = (float)a->factor;
    if (!mask) {
        for (int64_t i = 0; i < a->n; i++)
            y[i] = x[i] * factor;
        return;
    }
    for (int64_t axis = a->axes - 1, rest = row; axis >= 0; axis--) {
        mask += rest % a->walk[2 * axis] * a->walk[2 * axis + 1];
        rest /= a->walk[2 * axis];
    }
    if (a->step)
        for (int64_t i = 0; i < a->n; i++)
            y[i] = x[i] * factor + mask[i];
    else
        for (int64_t i = 0; i < a->n; i++)
            y[i] = x[i] * factor + *mask;
}

INLINE float top_of(const float *x, int64_t n)
{
    v8 top = all8(-__builtin_inff());
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        top = max8(load8(x + i), top);
    if (i < n)
        top = max8(first8(load8n(x + i, n - i), n - i, top), top);
    return top8(top);
}

/* y = exp(x - top) where `keep`; returns the sum. */
INLINE float exponentials(const float *x, float *y, int64_t n, float top, int keep)
{
    v8 sum = all8(0.0f);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        v8 e = quick_exp8(load8(x + i) - top);
        sum += e;
        if (keep)
            store8(y + i, e);
    }
    if (i < n) {
        v8 e = quick_exp8(load8n(x + i, n - i) - top);
        sum += first8(e, n - i, all8(0.0f));
        if (keep)
            store8n(y + i, e, n - i);
    }
    return sum8(sum);
}

/* Softmax along the last axis; a row of NaN becomes zeros where asked for. Tasks share the rows. */
KERNEL(or_softmax)
{
    ARGS(or_softmax);
    int64_t first, last, n = a->n;
    share(a->rows, task, a->tasks, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const float *x = a->x + row * n;
        float *y = a->y + row * n;
        if (a->mask || a->factor != 1.0) {
            scaled(a, row, y);
            x = y;
        }
        float top = top_of(x, n);
        if (a->flags & LOGARITHM) {
            float less = log8(all8(exponentials(x, y, n, top, 0)))[0];
            for (int64_t i = 0; i < n; i++)
                y[i] = x[i] - top - less;
            continue;
        }
        float sum = exponentials(x, y, n, top, 1), scale = 1.0f / sum;
        if (sum != sum && a->flags & NAN_TO_ZERO)
            memset(y, 0, 4 * (size_t)n);
        else
            for (int64_t i = 0; i < n; i++)
                y[i] *= scale;
    }
}

enum { COLUMNS = 64 };

struct or_softmax_columns {
    float *y;       /* [outer, n, inner], may be x */
    const float *x; /* [outer, n, inner] */
    int64_t outer, n, inner, flags, tasks;
};

/* Softmax of `count` <= COLUMNS neighbouring columns, whose elements are `inner` apart. */
static void columns(const float *x, float *y, int64_t n, int64_t inner, int64_t count, int64_t flags)
{
    float top[COLUMNS], sums[8][COLUMNS], lost[COLUMNS] = {0};
    memset(sums, 0, sizeof sums);
    for (int64_t c = 0; c < COLUMNS; c++)
        top[c] = -__builtin_inff();
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < count; c++)
            top[c] = x[i * inner + c] > top[c] ? x[i * inner + c] : top[c];
    for (int64_t i = 0; i < n; i++) {
        float *sum = sums[i % 8];
        for (int64_t c = 0; c < count; c += 8) {
            int64_t some = count - c < 8 ? count - c : 8;
            v8 t = (some < 8 ? load8n(x + i * inner + c, some) : load8(x + i * inner + c)) - load8(top + c);
            v8 e = quick_exp8(t);
            store8(sum + c, load8(sum + c) + e);
            if (flags & LOGARITHM)
                e = t;
            if (some < 8)
                store8n(y + i * inner + c, e, some);
            else
                store8(y + i * inner + c, e);
        }
    }
    for (int64_t c = 0; c < count; c++) {
        float sum = ((sums[0][c] + sums[4][c]) + (sums[2][c] + sums[6][c]))
                  + ((sums[1][c] + sums[5][c]) + (sums[3][c] + sums[7][c]));
        top[c] = flags & LOGARITHM ? log8(all8(sum))[0] : 1.0f / sum;
        lost[c] = sum != sum && flags & NAN_TO_ZERO;
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < count; c++) {
            float *p = y + i * inner + c;
            *p = flags & LOGARITHM ? *p - top[c] : lost[c] != 0.0f ? 0.0f : *p * top[c];
        }
}

/* Softmax along an axis that is not the last. Tasks share blocks of columns. */
KERNEL(or_softmax_columns)
{
    ARGS(or_softmax_columns);
    int64_t parts = (a->inner + COLUMNS - 1) / COLUMNS, first, last;
    share(a->outer * parts, task, a->tasks, &first, &last);
    for (int64_t k = first; k < last; k++) {
        int64_t begin = k % parts * COLUMNS, offset = k / parts * a->n * a->inner + begin;
        int64_t count = a->inner - begin < COLUMNS ? a->inner - begin : COLUMNS;
        columns(a->x + offset, a->y + offset, a->n, a->inner, count, a->flags);
    }
}
