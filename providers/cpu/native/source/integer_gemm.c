/* Matrix products of 8-bit integers. See integer.h. */
#include "integer.h"

#ifdef __AVX2__
#include <immintrin.h>

/* sums + x * w, two products to a sum. In assembly so that no sum leaves its register: the compiler would load all
 * of x ahead and spill, at half the speed. */
INLINE __m256i add_pairs(__m256i sums, __m256i x, __m256i w)
{
    __m256i products;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(x), "xm"(w));
    return sums;
}

/* n rows, n constant: 2 n sums of eight columns stay in registers. */
INLINE void rows_sums(int n, const int16_t *a, int64_t pitch, const int16_t *panel, int64_t pairs, int32_t *sums)
{
    __m256i left[MR], right[MR];
#pragma GCC unroll 6
    for (int r = 0; r < n; r++)
        left[r] = right[r] = _mm256_setzero_si256();
    for (int64_t p = 0; p < pairs; p++) {
        __m256i b0 = _mm256_loadu_si256((const __m256i *)(panel + 32 * p));
        __m256i b1 = _mm256_loadu_si256((const __m256i *)(panel + 32 * p + 16));
#pragma GCC unroll 6
        for (int r = 0; r < n; r++) {
            int32_t two;
            memcpy(&two, a + r * pitch + 2 * p, 4);
            __m256i x = _mm256_set1_epi32(two);
            left[r] = add_pairs(left[r], x, b0);
            right[r] = add_pairs(right[r], x, b1);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < n; r++) {
        _mm256_storeu_si256((__m256i *)(sums + NR * r), left[r]);
        _mm256_storeu_si256((__m256i *)(sums + NR * r + 8), right[r]);
    }
}
#else
INLINE void rows_sums(int n, const int16_t *a, int64_t pitch, const int16_t *panel, int64_t pairs, int32_t *sums)
{
    for (int r = 0; r < n; r++) {
        uint32_t row[NR] = {0}; /* unsigned: wraps */
        for (int64_t p = 0; p < pairs; p++) {
            int32_t x0 = a[r * pitch + 2 * p], x1 = a[r * pitch + 2 * p + 1];
            for (int c = 0; c < NR; c++)
                row[c] += (uint32_t)(x0 * panel[32 * p + 2 * c]) + (uint32_t)(x1 * panel[32 * p + 2 * c + 1]);
        }
        memcpy(sums + NR * r, row, sizeof row);
    }
}
#endif

void panel_sums(const int16_t *a, int64_t pitch, int64_t rows, const int16_t *panel, int64_t pairs, int32_t *sums)
{
    switch (rows) {
    case 1: rows_sums(1, a, pitch, panel, pairs, sums); break;
    case 2: rows_sums(2, a, pitch, panel, pairs, sums); break;
    case 3: rows_sums(3, a, pitch, panel, pairs, sums); break;
    case 4: rows_sums(4, a, pitch, panel, pairs, sums); break;
    case 5: rows_sums(5, a, pitch, panel, pairs, sums); break;
    default: rows_sums(6, a, pitch, panel, pairs, sums); break;
    }
}

void ready_scales(const struct output *o, int64_t first, int64_t last, int64_t thread)
{
    if (o->result == SUMS)
        return;
    float *scales = o->ready + thread * (rounded_up(o->columns) + NR);
    for (int64_t column = first; column < last; column++) {
        float scale = *o->x_scale * o->w_scale[o->w_step ? column : 0];
        scales[column] = o->direct ? scale / *o->y_scale : scale;
    }
}

/* Eight floats, rounded, shifted and saturated, as integers. */
INLINE i8v bytes8(v8 x, v8 zero, v8 low, v8 high)
{
    return __builtin_convertvector(min8(high, max8(low, round8(x) + zero)), i8v);
}

/* A tile of floats, `NR` between rows, to 8-bit integers in y; `scale`: what divides them. */
static void quantize_tile(const struct output *o, const float *tile, float scale, int64_t rows, int64_t columns,
                          int64_t row, int64_t column)
{
    typedef uint8_t u8x8 __attribute__((vector_size(8)));
    int64_t is_signed = o->result == SIGNED_BYTES;
    v8 zero = all8((float)zero_of(o->y_zero, is_signed)), by = all8(scale);
    v8 low = all8(is_signed ? -128 : 0), high = all8(is_signed ? 127 : 255);
    for (int64_t r = 0; r < rows; r++) {
        uint8_t *y = (uint8_t *)o->y + (row + r) * o->row + column * o->column;
        for (int64_t c = 0; c < columns; c += 8) {
            v8 x = load8(tile + NR * r + c);
            u8x8 bytes = __builtin_convertvector(bytes8(o->direct ? x : x / by, zero, low, high), u8x8);
            int64_t n = columns - c < 8 ? columns - c : 8;
            if (o->column == 1)
                memcpy(y + c, &bytes, (size_t)n);
            else
                for (int64_t k = 0; k < n; k++)
                    y[(c + k) * o->column] = bytes[k];
        }
    }
}

static void store_sums(const struct output *o, const int32_t *sums, int64_t rows, int64_t columns, int64_t row,
                       int64_t column)
{
    for (int64_t r = 0; r < rows; r++) {
        int32_t *y = (int32_t *)o->y + (row + r) * o->row + column * o->column;
        for (int64_t c = 0; c < columns; c++)
            y[c * o->column] = sums[NR * r + c];
    }
}

void finish_sums(const struct output *o, int32_t *sums, int64_t rows, int64_t columns, int64_t row, int64_t column,
                 int64_t thread)
{
    if (o->result == SUMS) {
        store_sums(o, sums, rows, columns, row, column);
        return;
    }
    const float *scales = o->ready + thread * (rounded_up(o->columns) + NR) + column;
    if (o->bias)
        for (int64_t c = 0; c < columns; c++) {
            uint32_t bias = (uint32_t)o->bias[o->bias_step ? column + c : 0];
            for (int64_t r = 0; r < rows; r++)
                sums[NR * r + c] = (int32_t)((uint32_t)sums[NR * r + c] + bias);
        }
    float tile[MR * NR], finished[MR * NR];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < NR; c += 8) {
            i8v whole;
            memcpy(&whole, sums + NR * r + c, sizeof whole);
            store8(tile + NR * r + c, __builtin_convertvector(whole, v8) * load8(scales + c));
        }
    struct place to = {(float *)o->y + row * o->row + column * o->column, o->row, o->column};
    if (o->result == FLOATS) {
        finish_tile(&o->e, tile, NR, rows, columns, row, column, to);
        return;
    }
    if (!o->direct) {
        struct place aside = {finished, NR, 1};
        finish_tile(&o->e, tile, NR, rows, columns, row, column, aside);
    }
    quantize_tile(o, o->direct ? tile : finished, *o->y_scale, rows, columns, row, column);
}

struct or_integer_pack {
    const uint8_t *w, *zero; /* zero: one, or one per column if zero_step is 1; null: 0 */
    int16_t *y;
    int64_t is_signed, zero_step, zero_batch; /* zero_batch: zero points between batches */
    int64_t batches, depth, columns;
    int64_t batch_step, depth_step, column_step; /* bytes in w */
    int64_t tasks;
};

/* Pack weights [batches, depth, columns], less their zero points, into panels. Tasks share the panels. */
KERNEL(or_integer_pack)
{
    ARGS(or_integer_pack);
    int64_t panels = (a->columns + NR - 1) / NR, pairs = (a->depth + 1) / 2, first, last;
    share(a->batches * panels, task, a->tasks, &first, &last);
    for (int64_t item = first; item < last; item++) {
        int64_t left = item % panels * NR, n = a->columns - left < NR ? a->columns - left : NR;
        const uint8_t *w = a->w + item / panels * a->batch_step + left * a->column_step;
        const uint8_t *zeros = a->zero ? a->zero + item / panels * a->zero_batch : NULL;
        int16_t *y = a->y + item * pairs * 2 * NR;
        memset(y, 0, (size_t)(pairs * 2 * NR) * sizeof *y);
        for (int64_t c = 0; c < n; c++) {
            int64_t zero = zero_of(zeros ? zeros + (left + c) * a->zero_step : NULL, a->is_signed);
            for (int64_t k = 0; k < a->depth; k++) {
                uint8_t byte = w[k * a->depth_step + c * a->column_step];
                y[(k / 2 * NR + c) * 2 + k % 2] = (int16_t)((a->is_signed ? (int8_t)byte : byte) - zero);
            }
        }
    }
}

struct or_integer_gemm {
    const uint8_t *x, *x_zero; /* x_zero: one, or one per row if x_zero_step is 1; null: 0 */
    int64_t x_signed, x_zero_step, x_row; /* x_row: bytes between rows, whose elements are neighbours */
    const int16_t *w;                     /* packed; `w_batch` int16 between batches */
    int64_t w_batch, batches, rows, depth; /* rows of each batch; those of x and y go on through all batches */
    int64_t row_parts, panel_parts;        /* tasks */
    int64_t block_rows;                    /* rows that are widened at once: a multiple of MR */
    int16_t *block;                        /* [threads, block_rows, 2 pairs] */
    struct output o;
};

/* x [batches * rows, depth] times w, batch by batch. Tasks: parts of the rows of all batches times parts of the panels;
 * where row_parts is 1 < batches, a part of the rows may hold several batches. */
KERNEL(or_integer_gemm)
{
    ARGS(or_integer_gemm);
    int64_t pitch = (a->depth + 1) / 2 * 2, panels = (a->o.columns + NR - 1) / NR, first, last, low, high;
    share(a->batches * a->rows, task / a->panel_parts, a->row_parts, &first, &last);
    share(panels, task % a->panel_parts, a->panel_parts, &low, &high);
    ready_scales(&a->o, low * NR, high * NR < a->o.columns ? high * NR : a->o.columns, thread);
    int16_t *block = a->block + thread * a->block_rows * pitch;
    while (first < last) {
        int64_t batch = first / a->rows, end = (batch + 1) * a->rows;
        int64_t n = (end < last ? end : last) - first;
        n = n < a->block_rows ? n : a->block_rows;
        for (int64_t r = 0; r < n; r++) {
            const uint8_t *point = a->x_zero ? a->x_zero + (first + r) % a->rows * a->x_zero_step : NULL;
            widen(a->x + (first + r) * a->x_row, a->x_signed, zero_of(point, a->x_signed), block + r * pitch, a->depth);
            if (a->depth < pitch)
                block[r * pitch + a->depth] = 0;
        }
        for (int64_t panel = low; panel < high; panel++) {
            const int16_t *w = a->w + batch * a->w_batch + panel * pitch * NR;
            int64_t columns = a->o.columns - panel * NR < NR ? a->o.columns - panel * NR : NR;
            for (int64_t r = 0; r < n; r += MR) {
                int32_t sums[MR * NR];
                int64_t rows = n - r < MR ? n - r : MR;
                panel_sums(block + r * pitch, pitch, rows, w, pitch / 2, sums);
                finish_sums(&a->o, sums, rows, columns, first + r, panel * NR, thread);
            }
        }
        first += n;
    }
}
