/* The QLinear operators on 8-bit integers: sums, products, softmax. In float32; where a result lies half way between two
 * integers it may be one off from NumPy's, which rounds after each operation. Scales and zero points (null: 0) are read
 * in the run. */
#include "bytes.h"
#include "integer.h"
#include "vector.h"

struct or_qlinear_binary {
    const uint8_t *x, *other;
    uint8_t *y;
    const float *x_scale, *other_scale, *y_scale;
    const uint8_t *x_zero, *other_zero, *y_zero;
    int64_t is_signed, multiply;
    int64_t rows, n, other_row, other_step; /* other: bytes between rows (0 or n), and between elements (0 or 1) */
    int64_t tasks;
};

/* Numbers of one call: y = x * left + other * right + offset, or (x - x_zero) * (other - other_zero) * left + offset. */
struct numbers {
    float left, right, offset, x_zero, other_zero, low, high;
};

static struct numbers numbers_of(const struct or_qlinear_binary *a)
{
    struct numbers f;
    float y_zero = (float)zero_of(a->y_zero, a->is_signed);
    f.x_zero = (float)zero_of(a->x_zero, a->is_signed);
    f.other_zero = (float)zero_of(a->other_zero, a->is_signed);
    f.low = a->is_signed ? -128 : 0;
    f.high = a->is_signed ? 127 : 255;
    if (a->multiply) {
        f.left = *a->x_scale * *a->other_scale / *a->y_scale;
        f.right = 0;
        f.offset = y_zero;
    } else {
        f.left = *a->x_scale / *a->y_scale;
        f.right = *a->other_scale / *a->y_scale;
        f.offset = y_zero - (f.left * f.x_zero + f.right * f.other_zero);
    }
    return f;
}

INLINE u8x8 combined8(const struct numbers *f, int64_t multiply, i8v x, i8v other)
{
    v8 a = __builtin_convertvector(x, v8), b = __builtin_convertvector(other, v8), y;
    if (multiply)
        y = (a - f->x_zero) * (b - f->other_zero) * f->left + f->offset;
    else
        y = a * f->left + (b * f->right + f->offset);
    return low_bytes8(__builtin_convertvector(clamp8(round8(y), f->low, f->high), i8v));
}

/* Elements first .. last of one row. */
INLINE void combine(const struct or_qlinear_binary *a, const struct numbers *f, int64_t row, int64_t first, int64_t last)
{
    const uint8_t *x = a->x + row * a->n, *other = a->other + row * a->other_row;
    uint8_t *y = a->y + row * a->n, left[8] = {0}, right[8];
    int64_t i = first;
    memset(right, *other, sizeof right);
    for (; i + 8 <= last; i += 8) {
        i8v two = wide_bytes8(a->other_step ? other + i : right, a->is_signed);
        u8x8 some = combined8(f, a->multiply, wide_bytes8(x + i, a->is_signed), two);
        memcpy(y + i, &some, sizeof some);
    }
    if (i < last) {
        size_t n = (size_t)(last - i);
        memcpy(left, x + i, n);
        if (a->other_step)
            memcpy(right, other + i, n);
        u8x8 some = combined8(f, a->multiply, wide_bytes8(left, a->is_signed), wide_bytes8(right, a->is_signed));
        memcpy(y + i, &some, n);
    }
}

/* com.microsoft QLinearAdd-1 and QLinearMul-1, x [rows, n] and y of one memory order. Tasks share the rows, or the
 * elements of a single one. */
KERNEL(or_qlinear_binary)
{
    ARGS(or_qlinear_binary);
    struct numbers f = numbers_of(a);
    int64_t first, last;
    if (a->rows == 1) {
        share((a->n + 63) / 64, task, a->tasks, &first, &last);
        combine(a, &f, 0, first * 64, last * 64 < a->n ? last * 64 : a->n);
        return;
    }
    share(a->rows, task, a->tasks, &first, &last);
    for (int64_t row = first; row < last; row++)
        combine(a, &f, row, 0, a->n);
}

struct or_qlinear_softmax {
    const uint8_t *x;
    uint8_t *y;
    const float *x_scale, *y_scale;
    const uint8_t *y_zero;
    int64_t x_signed, y_signed, rows, n, tasks;
};

/* com.microsoft QLinearSoftmax-1 along rows of n. Tasks share the rows. */
KERNEL(or_qlinear_softmax)
{
    ARGS(or_qlinear_softmax);
    float powers[256]; /* of what is so much below the largest */
    int64_t first, last;
    for (int k = 0; k < 256; k += 8) {
        v8 below = {0, 1, 2, 3, 4, 5, 6, 7};
        store8(powers + k, exp8((below + (float)k) * -*a->x_scale));
    }
    float zero = (float)zero_of(a->y_zero, a->y_signed), steps = floorf(1 / *a->y_scale); /* as qlinear.py says */
    float low = a->y_signed ? -128 : 0, high = a->y_signed ? 127 : 255;
    share(a->rows, task, a->tasks, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const uint8_t *x = a->x + row * a->n;
        uint8_t flip = a->x_signed ? 0x80 : 0, most = 0, table[256];
        for (int64_t i = 0; i < a->n; i++)
            most = (uint8_t)(x[i] ^ flip) > most ? (uint8_t)(x[i] ^ flip) : most;
        float sum = 0;
        for (int64_t i = 0; i < a->n; i++)
            sum += powers[most - (x[i] ^ flip)];
        for (int k = 0; k <= most; k += 8) { /* what each number becomes */
            v8 y = round8(load8(powers + k) / sum * steps) + zero;
            u8x8 some = low_bytes8(__builtin_convertvector(clamp8(y, low, high), i8v));
            memcpy(table + k, &some, sizeof some);
        }
        for (int64_t i = 0; i < a->n; i++)
            a->y[row * a->n + i] = table[most - (x[i] ^ flip)];
    }
}
