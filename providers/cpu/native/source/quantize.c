/* Linear quantization: floats to small integers, back, and both at once.
 *
 * An array is seen as [outer, channels, inner], contiguous; scale and zero point have one entry (step 0) or one per
 * channel (step 1). Integers are uint8, int8, uint16 or int16 (`kind` 0 to 3); the zero point has their type, null is 0.
 * Every result is the one of the same float32 operations in NumPy: no sums, no contraction. Tasks share the elements,
 * or the rows of `inner` elements where a channel has several, or the rows of `channels` where it has one.
 */
#include "bytes.h"
#include "vector.h"

enum kind { UINT8, INT8, UINT16, INT16 };

static const float LOW[] = {0, -128, 0, -32768}, HIGH[] = {255, 127, 65535, 32767};
static const int64_t SIZE[] = {1, 1, 2, 2};

INLINE i8v integers8(v8 x) { return __builtin_convertvector(x, i8v); }
INLINE v8 floats8(i8v x) { return __builtin_convertvector(x, v8); }

/* Eight integers of a kind from memory, as floats. */
INLINE v8 read8(const void *p, int64_t kind)
{
    if (SIZE[kind] == 1)
        return floats8(wide_bytes8(p, kind == INT8));
    return floats8(wide_words8(p, kind == INT16));
}

/* Eight floats that are integers of the kind, to memory. */
INLINE void write8(void *p, v8 x, int64_t kind)
{
    i8v i = integers8(x);
    if (SIZE[kind] == 1) {
        u8x8 v = low_bytes8(i);
        memcpy(p, &v, 8);
    } else {
        u16x8 v = low_words8(i);
        memcpy(p, &v, 16);
    }
}

static float zero_at(const void *zero, int64_t kind, int64_t i)
{
    if (!zero)
        return 0;
    switch (kind) {
    case UINT8: return ((const uint8_t *)zero)[i];
    case INT8: return ((const int8_t *)zero)[i];
    case UINT16: return ((const uint16_t *)zero)[i];
    default: return ((const int16_t *)zero)[i];
    }
}

/* saturate(round(x / scale) + zero), still as floats. */
INLINE v8 quantized8(v8 x, v8 scale, v8 zero, int64_t kind)
{
    return clamp8(round8(x / scale) + zero, LOW[kind], HIGH[kind]);
}

enum work { QUANTIZE, DEQUANTIZE, IMITATE };

struct or_quantize {
    const void *x;
    void *y;
    const float *scale;
    const void *zero;
    int64_t kind, work, step;
    int64_t outer, channels, inner, tasks;
};

/* Eight elements at x: to integers, from integers, or to integers and back in float32. */
INLINE void convert8(int64_t kind, int64_t work, const char *x, char *y, v8 scale, v8 zero)
{
    if (work == DEQUANTIZE) {
        store8((float *)y, (read8(x, kind) - zero) * scale);
    } else {
        v8 whole = quantized8(load8((const float *)x), scale, zero, kind);
        if (work == QUANTIZE)
            write8(y, whole, kind);
        else
            store8((float *)y, (whole - zero) * scale);
    }
}

/* A run of n elements from x to y. Scale and zero point: those of channel c (`each` 0), or from channel c on, one per
 * element (`each` 1), in which case they are `scales` and `zeros`. */
INLINE void run(int64_t kind, int64_t work, const char *x, char *y, int64_t n, int each,
                const float *scales, const float *zeros)
{
    int64_t from = work == DEQUANTIZE ? SIZE[kind] : 4, to = work == QUANTIZE ? SIZE[kind] : 4;
    v8 scale = all8(scales[0]), zero = all8(zeros[0]);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        if (each) {
            scale = load8(scales + i);
            zero = load8(zeros + i);
        }
        convert8(kind, work, x + i * from, y + i * to, scale, zero);
    }
    if (i < n) {
        char in[32] = {0}, out[32];
        if (each) {
            scale = load8n(scales + i, n - i);
            zero = load8n(zeros + i, n - i);
        }
        memcpy(in, x + i * from, (size_t)((n - i) * from));
        convert8(kind, work, in, out, scale, zero);
        memcpy(y + i * to, out, (size_t)((n - i) * to));
    }
}

#define SOME 256 /* channels whose numbers are made ready at once */

INLINE void share_of(const struct or_quantize *a, int64_t kind, int64_t work, int64_t task)
{
    int64_t from = work == DEQUANTIZE ? SIZE[kind] : 4, to = work == QUANTIZE ? SIZE[kind] : 4;
    const char *x = a->x;
    char *y = a->y;
    int64_t first, last;
    if (!a->step) {
        float zero = zero_at(a->zero, kind, 0);
        share(a->outer * a->channels * a->inner, task, a->tasks, &first, &last);
        run(kind, work, x + first * from, y + first * to, last - first, 0, a->scale, &zero);
    } else if (a->inner > 1) {
        share(a->outer * a->channels, task, a->tasks, &first, &last);
        for (int64_t row = first; row < last; row++) {
            int64_t channel = row % a->channels, at = row * a->inner;
            float zero = zero_at(a->zero, kind, channel);
            run(kind, work, x + at * from, y + at * to, a->inner, 0, a->scale + channel, &zero);
        }
    } else {
        share(a->outer, task, a->tasks, &first, &last);
        for (int64_t channel = 0; channel < a->channels; channel += SOME) {
            float zeros[SOME];
            int64_t n = a->channels - channel < SOME ? a->channels - channel : SOME;
            for (int64_t i = 0; i < n; i++)
                zeros[i] = zero_at(a->zero, kind, channel + i);
            for (int64_t row = first; row < last; row++) {
                int64_t at = row * a->channels + channel;
                run(kind, work, x + at * from, y + at * to, n, 1, a->scale + channel, zeros);
            }
        }
    }
}

/* y = quantized x, dequantized x, or x quantized and dequantized, as `work` says. */
KERNEL(or_quantize)
{
    ARGS(or_quantize);
    int64_t work = a->work;
    switch (a->kind * 3 + work) {
    case UINT8 * 3 + QUANTIZE: share_of(a, UINT8, QUANTIZE, task); break;
    case UINT8 * 3 + DEQUANTIZE: share_of(a, UINT8, DEQUANTIZE, task); break;
    case UINT8 * 3 + IMITATE: share_of(a, UINT8, IMITATE, task); break;
    case INT8 * 3 + QUANTIZE: share_of(a, INT8, QUANTIZE, task); break;
    case INT8 * 3 + DEQUANTIZE: share_of(a, INT8, DEQUANTIZE, task); break;
    case INT8 * 3 + IMITATE: share_of(a, INT8, IMITATE, task); break;
    case UINT16 * 3 + QUANTIZE: share_of(a, UINT16, QUANTIZE, task); break;
    case UINT16 * 3 + DEQUANTIZE: share_of(a, UINT16, DEQUANTIZE, task); break;
    case UINT16 * 3 + IMITATE: share_of(a, UINT16, IMITATE, task); break;
    case INT16 * 3 + QUANTIZE: share_of(a, INT16, QUANTIZE, task); break;
    case INT16 * 3 + DEQUANTIZE: share_of(a, INT16, DEQUANTIZE, task); break;
    default: share_of(a, INT16, IMITATE, task); break;
    }
}

struct or_range {
    const float *x;
    float *parts; /* [tasks, 2] */
    int64_t n, tasks;
};

/* The least and the largest of each task's share of x, and of 0. */
KERNEL(or_range)
{
    ARGS(or_range);
    int64_t first, last;
    share(a->n, task, a->tasks, &first, &last);
    v8 low[4] = {{0}}, high[4] = {{0}};
    int64_t i = first;
    for (; i + 32 <= last; i += 32)
        for (int k = 0; k < 4; k++) {
            v8 x = load8(a->x + i + 8 * k);
            low[k] = min8(x, low[k]);
            high[k] = max8(x, high[k]);
        }
    for (; i < last; i += 8) {
        v8 x = last - i < 8 ? load8n(a->x + i, last - i) : load8(a->x + i);
        low[0] = min8(x, low[0]);
        high[0] = max8(x, high[0]);
    }
    for (int k = 1; k < 4; k++) {
        low[0] = min8(low[k], low[0]);
        high[0] = max8(high[k], high[0]);
    }
    float least = 0, most = 0;
    for (int k = 0; k < 8; k++) {
        least = low[0][k] < least ? low[0][k] : least;
        most = high[0][k] > most ? high[0][k] : most;
    }
    a->parts[2 * task] = least;
    a->parts[2 * task + 1] = most;
}

struct or_dynamic_quantize {
    const float *x;
    uint8_t *y;
    float *scale;
    uint8_t *zero;
    const float *parts; /* of or_range: [of, 2] */
    int64_t n, of, tasks;
};

/* ONNX DynamicQuantizeLinear-11: scale, zero point and y from the range that or_range found. */
KERNEL(or_dynamic_quantize)
{
    ARGS(or_dynamic_quantize);
    float low = 0, high = 0;
    for (int64_t i = 0; i < a->of; i++) {
        low = a->parts[2 * i] < low ? a->parts[2 * i] : low;
        high = a->parts[2 * i + 1] > high ? a->parts[2 * i + 1] : high;
    }
    float scale = (high - low) / 255.0f;
    if (scale == 0)
        scale = 1;
    float zero = clamp8(round8(all8(-low / scale)), 0, 255)[0];
    if (task == 0) {
        *a->scale = scale;
        *a->zero = (uint8_t)zero;
    }
    int64_t first, last;
    share(a->n, task, a->tasks, &first, &last);
    run(UINT8, QUANTIZE, (const char *)(a->x + first), (char *)(a->y + first), last - first, 0, &scale, &zero);
}

struct or_look_up {
    const uint8_t *x, *table;
    uint8_t *y;
    int64_t n, tasks;
};

/* y = table[x], 256 entries. */
KERNEL(or_look_up)
{
    ARGS(or_look_up);
    int64_t first, last;
    share(a->n, task, a->tasks, &first, &last);
    for (int64_t i = first; i < last; i++)
        a->y[i] = a->table[a->x[i]];
}
