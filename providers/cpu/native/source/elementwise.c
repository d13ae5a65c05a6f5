/* Programs of element-wise instructions on float32, block by block; truth values are 1 and 0 there.
 *
 * Everything element-wise is one kernel: a short program whose instructions each read up to three blocks of BLOCK
 * floats and write one, so that intermediate results stay in the first cache. Operands are numbered: below INPUTS
 * the inputs, from there on blocks of scratch memory. The result of the last instruction goes to y.
 *
 * Element-wise error: that of the functions in vector.h; sums, products, quotients, roots are correctly rounded,
 * composed functions (gelu, silu, ...) have a few ulp more, fused multiply-adds may be used inside them. */
#include "vector.h"

enum { INPUTS = 16, AXES = 8, BLOCK = 1024 };

/* Numbers of instructions: `INSTRUCTIONS` in kernels/blockwise.py has the same list. */
enum {
    ADD, SUB, MUL, DIV, POW, MIN, MAX, NEG, ABS, SQRT, RSQRT, EXP, LOG, TANH, ERF, SIGMOID, RELU, LEAKY_RELU,
    HARD_SIGMOID, HARD_SWISH, RECIPROCAL, FLOOR, CEIL, ROUND, CLIP, SOFTPLUS, SILU, GELU, GELU_TANH, ELU, SOFTSIGN,
    MISH, THRESHOLDED_RELU, SIGN, LESS, LESS_OR_EQUAL, GREATER, GREATER_OR_EQUAL, EQUAL, WHERE, SWISH, SELU, CELU, COPY,
    MUL_ADD, NOT_EQUAL,
};

/* One input, broadcast to y's shape: strides in elements per axis. `kind`: dense like y; the same in every block (no
 * axis has a stride, or only the last one and blocks are whole rows); the same all along a row, of which blocks
 * are parts; or to be gathered for each block. */
enum { DENSE, PATTERN, EVEN, GATHERED };

/* What is not float32 is always brought to float32 in scratch memory. */
enum { FLOAT, BYTE, INT32, INT64 };

struct operand {
    int64_t type, kind, block, strides[AXES]; /* `block` of scratch memory it is brought to, unless it is dense */
};

struct instruction {
    int64_t name, a, b, c, result; /* result: the number of a block, or -1: y */
};

struct plan {
    int64_t axes, shape[AXES];                      /* of y, joined where all inputs allow; the last axis is a row */
    int64_t rows, width;                            /* a block is so many whole rows, or if 0 `width` floats of one */
    int64_t most;                                   /* floats of the largest block that there is */
    int64_t inputs, blocks, instructions;           /* `blocks`: of scratch memory */
    int64_t truths;                                 /* the block that is written to y as bytes 1 and 0, or -1 */
    struct operand operands[INPUTS];
    struct instruction program[];
};

struct or_elementwise {
    void *y;
    float *scratch;             /* [threads, blocks, BLOCK] */
    const struct plan *plan;
    int64_t tasks;
    const void *inputs[INPUTS];
};

/* y[i] = f(a[i], ...) for n floats; y may be a, b or c. */
INLINE void map1(v8 (*f)(v8), const float *a, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        store8(y + i, f(load8(a + i)));
    if (i < n)
        store8n(y + i, f(load8n(a + i, n - i)), n - i);
}

INLINE void map2(v8 (*f)(v8, v8), const float *a, const float *b, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        store8(y + i, f(load8(a + i), load8(b + i)));
    if (i < n)
        store8n(y + i, f(load8n(a + i, n - i), load8n(b + i, n - i)), n - i);
}

INLINE void map3(v8 (*f)(v8, v8, v8), const float *a, const float *b, const float *c, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        store8(y + i, f(load8(a + i), load8(b + i), load8(c + i)));
    if (i < n)
        store8n(y + i, f(load8n(a + i, n - i), load8n(b + i, n - i), load8n(c + i, n - i)), n - i);
}

INLINE v8 zero(void) { return all8(0.0f); }
INLINE v8 truth(i8v mask) { return select8(mask, all8(1.0f), zero()); }
INLINE v8 add(v8 a, v8 b) { return a + b; }
INLINE v8 sub(v8 a, v8 b) { return a - b; }
INLINE v8 mul(v8 a, v8 b) { return a * b; }
INLINE v8 mul_add(v8 a, v8 b, v8 c) { return a * b + c; }
INLINE v8 divide(v8 a, v8 b) { return a / b; }
INLINE v8 smaller(v8 a, v8 b) { return select8(a != a, a, min8(a, b)); }
INLINE v8 larger(v8 a, v8 b) { return select8(a != a, a, max8(a, b)); }
INLINE v8 negate(v8 a) { return -a; }
INLINE v8 rsqrt(v8 a) { return 1.0f / sqrt8(a); }
INLINE v8 relu(v8 a) { return max8(zero(), a); }
INLINE v8 leaky_relu(v8 a, v8 slope) { return select8(a < 0.0f, a * slope, a); }
INLINE v8 hard_sigmoid(v8 a, v8 alpha, v8 beta) { return clamp8(a * alpha + beta, 0.0f, 1.0f); }
INLINE v8 hard_swish(v8 a) { return a * clamp8(a * (1.0f / 6.0f) + 0.5f, 0.0f, 1.0f); }
INLINE v8 reciprocal(v8 a) { return 1.0f / a; }
INLINE v8 clip(v8 a, v8 low, v8 high) { return min8(high, max8(low, a)); }
INLINE v8 silu(v8 a) { return a * sigmoid8(a); }
INLINE v8 swish(v8 a, v8 alpha) { return a * sigmoid8(a * alpha); }
INLINE v8 gelu(v8 a) { return a * (0.5f * erf8(a * 0.70710678f) + 0.5f); }
INLINE v8 gelu_tanh(v8 a) { return a * (0.5f * tanh8(a * (a * a * 0.035677408f + 0.79788456f)) + 0.5f); }
INLINE v8 elu(v8 a, v8 alpha) { return select8(a < 0.0f, alpha * expm1_8(a), a); }
INLINE v8 selu(v8 a, v8 alpha, v8 gamma) { return gamma * elu(a, alpha); }
INLINE v8 celu(v8 a, v8 alpha) { return max8(zero(), a) + min8(zero(), alpha * expm1_8(a / alpha)); }
INLINE v8 softsign(v8 a) { return a / (1.0f + abs8(a)); }
INLINE v8 mish(v8 a) { return a * tanh8(softplus8(a)); }
INLINE v8 thresholded_relu(v8 a, v8 alpha) { return select8(a > alpha, a, zero()); }
INLINE v8 sign(v8 a) { return select8(a > 0.0f, all8(1.0f), select8(a < 0.0f, all8(-1.0f), a)); }
INLINE v8 less(v8 a, v8 b) { return truth(a < b); }
INLINE v8 less_or_equal(v8 a, v8 b) { return truth(a <= b); }
INLINE v8 greater(v8 a, v8 b) { return truth(a > b); }
INLINE v8 greater_or_equal(v8 a, v8 b) { return truth(a >= b); }
INLINE v8 equal(v8 a, v8 b) { return truth(a == b); }
INLINE v8 not_equal(v8 a, v8 b) { return truth(a != b); }
INLINE v8 where(v8 condition, v8 a, v8 b) { return select8(condition != 0.0f, a, b); }

INLINE v8 square(v8 a) { return a * a; }
INLINE v8 cube(v8 a) { return a * a * a; }
INLINE v8 root(v8 a) { return select8(a == -__builtin_inff(), -a, sqrt8(a + 0.0f)); }

/* a to the power of b. A common exponent of 2 or 1/2 is exact, one of 3 within 1 ulp; the others are pow() itself. */
static void power(const float *a, const float *b, float *y, int64_t n)
{
    int common = 1;
    for (int64_t i = 1; i < n; i++)
        common &= b[i] == b[0];
    if (common && b[0] == 2.0f)
        map1(square, a, y, n);
    else if (common && b[0] == 3.0f)
        map1(cube, a, y, n);
    else if (common && b[0] == 0.5f)
        map1(root, a, y, n);
    else
        for (int64_t i = 0; i < n; i++)
            y[i] = powf(a[i], b[i]);
}

/* Arithmetic and comparisons. Returns 0 where `name` is none of these. */
static int arithmetic(int64_t name, const float *a, const float *b, const float *c, float *y, int64_t n)
{
    switch (name) {
    case ADD: map2(add, a, b, y, n); return 1;
    case SUB: map2(sub, a, b, y, n); return 1;
    case MUL: map2(mul, a, b, y, n); return 1;
    case DIV: map2(divide, a, b, y, n); return 1;
    case POW: power(a, b, y, n); return 1;
    case MIN: map2(smaller, a, b, y, n); return 1;
    case MAX: map2(larger, a, b, y, n); return 1;
    case NEG: map1(negate, a, y, n); return 1;
    case ABS: map1(abs8, a, y, n); return 1;
    case SQRT: map1(sqrt8, a, y, n); return 1;
    case RSQRT: map1(rsqrt, a, y, n); return 1;
    case RECIPROCAL: map1(reciprocal, a, y, n); return 1;
    case FLOOR: map1(floor8, a, y, n); return 1;
    case CEIL: map1(ceil8, a, y, n); return 1;
    case ROUND: map1(round8, a, y, n); return 1;
    case SIGN: map1(sign, a, y, n); return 1;
    case CLIP: map3(clip, a, b, c, y, n); return 1;
    case LESS: map2(less, a, b, y, n); return 1;
    case LESS_OR_EQUAL: map2(less_or_equal, a, b, y, n); return 1;
    case GREATER: map2(greater, a, b, y, n); return 1;
    case GREATER_OR_EQUAL: map2(greater_or_equal, a, b, y, n); return 1;
    case EQUAL: map2(equal, a, b, y, n); return 1;
    case NOT_EQUAL: map2(not_equal, a, b, y, n); return 1;
    case WHERE: map3(where, a, b, c, y, n); return 1;
    case MUL_ADD: map3(mul_add, a, b, c, y, n); return 1;
    case COPY: memmove(y, a, 4 * (size_t)n); return 1;
    default: return 0;
    }
}

/* Functions of one value and its parameters. */
static void function(int64_t name, const float *a, const float *b, const float *c, float *y, int64_t n)
{
    switch (name) {
    case EXP: map1(exp8, a, y, n); break;
    case LOG: map1(log8, a, y, n); break;
    case TANH: map1(tanh8, a, y, n); break;
    case ERF: map1(erf8, a, y, n); break;
    case SIGMOID: map1(sigmoid8, a, y, n); break;
    case RELU: map1(relu, a, y, n); break;
    case LEAKY_RELU: map2(leaky_relu, a, b, y, n); break;
    case HARD_SIGMOID: map3(hard_sigmoid, a, b, c, y, n); break;
    case HARD_SWISH: map1(hard_swish, a, y, n); break;
    case SOFTPLUS: map1(softplus8, a, y, n); break;
    case SILU: map1(silu, a, y, n); break;
    case SWISH: map2(swish, a, b, y, n); break;
    case GELU: map1(gelu, a, y, n); break;
    case GELU_TANH: map1(gelu_tanh, a, y, n); break;
    case ELU: map2(elu, a, b, y, n); break;
    case SELU: map3(selu, a, b, c, y, n); break;
    case CELU: map2(celu, a, b, y, n); break;
    case SOFTSIGN: map1(softsign, a, y, n); break;
    case MISH: map1(mish, a, y, n); break;
    case THRESHOLDED_RELU: map2(thresholded_relu, a, b, y, n); break;
    default: break;
    }
}

/* Where row `row` of an operand begins, in elements. */
static int64_t row_of(const struct plan *plan, const struct operand *x, int64_t row)
{
    int64_t offset = 0;
    for (int64_t axis = plan->axes - 2; axis >= 0; axis--) {
        offset += row % plan->shape[axis] * x->strides[axis];
        row /= plan->shape[axis];
    }
    return offset;
}

/* n elements, `step` apart, as floats. */
static void spread(int64_t type, const void *from, int64_t offset, int64_t step, int64_t n, float *block)
{
    const float *floats = (const float *)from + offset;
    const uint8_t *bytes = (const uint8_t *)from + offset;
    const int32_t *words = (const int32_t *)from + offset;
    const int64_t *longs = (const int64_t *)from + offset;
    if (type == BYTE)
        for (int64_t i = 0; i < n; i++)
            block[i] = bytes[i * step];
    else if (type == INT32)
        for (int64_t i = 0; i < n; i++)
            block[i] = (float)words[i * step];
    else if (type == INT64)
        for (int64_t i = 0; i < n; i++)
            block[i] = (float)longs[i * step];
    else if (step == 1)
        memcpy(block, floats, 4 * (size_t)n);
    else
        for (int64_t i = 0; i < n; i++)
            block[i] = floats[i * step];
}

/* n elements of an operand, from the place `first` of row `row` on, row after row; into `block`. */
static void gather(const struct plan *plan, const struct operand *x, const void *from, int64_t row, int64_t first,
                   int64_t n, float *block)
{
    int64_t width = plan->shape[plan->axes - 1], step = x->strides[plan->axes - 1];
    while (n > 0) {
        int64_t count = width - first < n ? width - first : n;
        spread(x->type, from, row_of(plan, x, row) + first * step, step, count, block);
        block += count, n -= count, first = 0, row++;
    }
}

/* Floats as bytes 1 and 0. */
static void truths(const float *restrict x, uint8_t *restrict y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = x[i] != 0.0f;
}

/* Runs the program on block `number` of y. `filled`: the row whose block was the last one, -1 if this is the first.
 * What is the same in every block, or everywhere in a row, is brought to its block of scratch memory once. */
static void run_block(const struct or_elementwise *a, float *scratch, int64_t number, int64_t *filled)
{
    const struct plan *plan = a->plan;
    const float *at[INPUTS];
    int64_t width = plan->shape[plan->axes - 1], row, first = 0, n;
    if (plan->rows) {
        int64_t all = 1;
        for (int64_t axis = 0; axis < plan->axes - 1; axis++)
            all *= plan->shape[axis];
        row = number * plan->rows;
        n = (all - row < plan->rows ? all - row : plan->rows) * width;
    } else {
        int64_t parts = (width + plan->width - 1) / plan->width;
        row = number / parts;
        first = number % parts * plan->width;
        n = width - first < plan->width ? width - first : plan->width;
    }
    int64_t start = row * width + first;
    for (int64_t i = 0; i < plan->inputs; i++) {
        const struct operand *x = &plan->operands[i];
        float *block = scratch + x->block * BLOCK;
        at[i] = x->kind == DENSE ? (const float *)a->inputs[i] + start : block;
        if (x->kind == PATTERN && *filled < 0)
            gather(plan, x, a->inputs[i], row, first, plan->most, block);
        if (x->kind == EVEN && *filled != row)
            spread(x->type, a->inputs[i], row_of(plan, x, row), 0, plan->width, block);
        if (x->kind == GATHERED)
            gather(plan, x, a->inputs[i], row, first, n, block);
    }
    *filled = row;
    for (int64_t i = 0; i < plan->instructions; i++) {
        const struct instruction *now = &plan->program[i];
        const float *x[3];
        const int64_t numbers[3] = {now->a, now->b, now->c};
        for (int64_t k = 0; k < 3; k++)
            x[k] = numbers[k] < INPUTS ? at[numbers[k]] : scratch + (numbers[k] - INPUTS) * BLOCK;
        float *y = now->result < 0 ? (float *)a->y + start : scratch + now->result * BLOCK;
        if (!arithmetic(now->name, x[0], x[1], x[2], y, n))
            function(now->name, x[0], x[1], x[2], y, n);
    }
    if (plan->truths >= 0)
        truths(scratch + plan->truths * BLOCK, (uint8_t *)a->y + start, n);
}

/* y = program(inputs), all broadcast to y's shape, which is dense in memory; an input that is dense may be y. Tasks
 * share the blocks. */
KERNEL(or_elementwise)
{
    ARGS(or_elementwise);
    const struct plan *plan = a->plan;
    float *scratch = a->scratch + thread * plan->blocks * BLOCK;
    int64_t rows = 1, width = plan->shape[plan->axes - 1], first, last;
    for (int64_t axis = 0; axis < plan->axes - 1; axis++)
        rows *= plan->shape[axis];
    int64_t blocks = plan->rows ? (rows + plan->rows - 1) / plan->rows
                                : rows * ((width + plan->width - 1) / plan->width);
    share(blocks, task, a->tasks, &first, &last);
    int64_t filled = -1;
    for (int64_t block = first; block < last; block++)
        run_block(a, scratch, block, &filled);
}
