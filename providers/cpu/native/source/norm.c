/* Normalisations of rows, float32: (x - mean) / sqrt(variance + epsilon) * scale + bias.
 *
 * The mean first, then the sum of squared differences from it. Sums are taken as 32 sums of every 32nd term, whatever
 * the strides and threads; their relative error is n / 32 ulp at most, of the sum of magnitudes.
 */
#include "vector.h"

/* The sum of (x - centre)^2, or of x itself. */
INLINE float total(const float *x, int64_t n, float centre, int squares)
{
    v8 sums[4] = {all8(0.0f), all8(0.0f), all8(0.0f), all8(0.0f)};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int k = 0; k < 4; k++) {
            v8 t = load8(x + i + 8 * k) - centre;
            sums[k] += squares ? t * t : t;
        }
    for (int k = 0; i < n; i += 8, k++) {
        int64_t some = n - i < 8 ? n - i : 8;
        v8 t = (some < 8 ? load8n(x + i, some) : load8(x + i)) - centre;
        if (some < 8)
            t = first8(t, some, all8(0.0f));
        sums[k] += squares ? t * t : t;
    }
    return sum8((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

INLINE float sum_of(const float *x, int64_t n) { return total(x, n, 0.0f, 0); }
INLINE float squares_of(const float *x, int64_t n, float centre) { return total(x, n, centre, 1); }

struct or_layer_norm {
    float *y;               /* [rows, n], may be x */
    const float *x;         /* [rows, n] */
    const float *skip;      /* [skip_rows, n], added to the rows in turn, or NULL */
    const float *skip_bias; /* [n], added to each row, or NULL */
    float *sum;             /* [rows, n], what is normalised; NULL where nobody asks */
    const float *scale;     /* [n], or NULL */
    const float *bias;      /* [n], or NULL */
    float *mean;            /* [rows], or NULL */
    float *inverse;         /* [rows], 1 / sqrt(variance + epsilon), or NULL */
    int64_t rows, n, skip_rows;
    double epsilon;
    int64_t simple;         /* no mean is subtracted: root mean square */
    int64_t tasks;
};

/* sum = x + skip + bias of one row. */
static void added(const struct or_layer_norm *a, int64_t row, float *sum)
{
    const float *x = a->x + row * a->n, *skip = a->skip ? a->skip + row % a->skip_rows * a->n : 0;
    const float *bias = a->skip_bias;
    for (int64_t i = 0; i < a->n; i++)
        sum[i] = skip ? x[i] + skip[i] : x[i];
    if (bias)
        for (int64_t i = 0; i < a->n; i++)
            sum[i] += bias[i];
}

/* y = (x - mean) * inverse * scale + bias. */
INLINE void standardised(const float *x, float *y, int64_t n, float mean, float inverse, const float *scale,
                         const float *bias)
{
    if (scale && bias)
        for (int64_t i = 0; i < n; i++)
            y[i] = (x[i] - mean) * inverse * scale[i] + bias[i];
    else if (scale)
        for (int64_t i = 0; i < n; i++)
            y[i] = (x[i] - mean) * inverse * scale[i];
    else
        for (int64_t i = 0; i < n; i++)
            y[i] = (x[i] - mean) * inverse;
}

/* Layer normalisation and its kin. Tasks share the rows. */
KERNEL(or_layer_norm)
{
    ARGS(or_layer_norm);
    int64_t first, last, n = a->n;
    share(a->rows, task, a->tasks, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const float *x = a->x + row * n;
        float *y = a->y + row * n;
        if (a->skip || a->skip_bias) {
            float *sum = a->sum ? a->sum + row * n : y;
            added(a, row, sum);
            x = sum;
        }
        float mean = a->simple ? 0.0f : sum_of(x, n) / (float)n;
        float inverse = 1.0f / sqrtf(squares_of(x, n, mean) / (float)n + (float)a->epsilon);
        standardised(x, y, n, mean, inverse, a->scale, a->bias);
        if (a->mean)
            a->mean[row] = mean;
        if (a->inverse)
            a->inverse[row] = inverse;
    }
}

struct or_group_norm {
    float *y;                   /* [rows, channels, span], may be x */
    const float *x;
    const float *scale, *bias;  /* row r, channel c uses number (r % groups) * channels + c, or of a group r % groups */
    int64_t rows, channels, span, groups;
    int64_t per_group;
    double epsilon;
    int64_t tasks;
};

/* Normalisation of groups of channels, each of `span` numbers in a row; with one channel per group that of instances.
 * Tasks share the rows: one row is a group of one sample. */
KERNEL(or_group_norm)
{
    ARGS(or_group_norm);
    int64_t first, last, n = a->channels * a->span;
    share(a->rows, task, a->tasks, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const float *x = a->x + row * n;
        float *y = a->y + row * n;
        float mean = sum_of(x, n) / (float)n;
        float inverse = 1.0f / sqrtf(squares_of(x, n, mean) / (float)n + (float)a->epsilon);
        for (int64_t c = 0; c < a->channels; c++) {
            int64_t number = a->per_group ? row % a->groups : row % a->groups * a->channels + c;
            float scale = a->scale[number] * inverse, bias = a->bias[number];
            for (int64_t i = c * a->span; i < (c + 1) * a->span; i++)
                y[i] = (x[i] - mean) * scale + bias;
        }
    }
}
