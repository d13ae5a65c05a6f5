/* Matrix products of 8-bit integers. See integer.h. */
#include "integer.h"

#include "bytes.h"

#ifdef __AVX2__

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

/* sums + x * w, four products to a sum, two of them at a time in int16. */
INLINE __m256i add_quads(__m256i sums, __m256i x, __m256i w, __m256i ones)
{
    __m256i products;
    __asm__("vpmaddubsw %2, %3, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
            : "+x"(sums), "=&x"(products) : "xm"(w), "x"(x), "x"(ones));
    return sums;
}

/* sums + x * w + y * v, eight products to a sum, four of them at a time in int16. */
INLINE __m256i add_octets(__m256i sums, __m256i x, __m256i y, const int8_t *w, const int8_t *v, __m256i ones)
{
    __m256i products, others;
    __asm__("vpmaddubsw %5, %3, %1\n\tvpmaddubsw %6, %4, %2\n\tvpaddw %2, %1, %1\n\t"
            "vpmaddwd %7, %1, %1\n\tvpaddd %1, %0, %0"
            : "+x"(sums), "=&x"(products), "=&x"(others)
            : "x"(x), "x"(y), "m"(*(const __m256i_u *)w), "m"(*(const __m256i_u *)v), "x"(ones));
    return sums;
}

INLINE __m256i four(const uint8_t *p)
{
    int32_t x;
    memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
}

/* Quads first .. last - 1 of a panel; quad q meets the numbers 4 at[q] of a row (at null: 4 q). */
INLINE void quad_sums(int n, const uint8_t *a, int64_t pitch, const int8_t *panel, int64_t first, int64_t last,
                      const int32_t *at, __m256i left[MR], __m256i right[MR])
{
    __m256i ones = _mm256_set1_epi16(1);
    for (int64_t q = first; q < last; q++) {
        __m256i w = _mm256_loadu_si256((const __m256i *)(panel + 64 * q));
        __m256i v = _mm256_loadu_si256((const __m256i *)(panel + 64 * q + 32));
        const uint8_t *from = a + 4 * (at ? at[q] : q);
#pragma GCC unroll 6
        for (int r = 0; r < n; r++) {
            __m256i x = four(from + r * pitch);
            left[r] = add_quads(left[r], x, w, ones);
            right[r] = add_quads(right[r], x, v, ones);
        }
    }
}

/* n rows of bytes with narrow weights, n constant. */
INLINE void byte_sums(int n, const uint8_t *a, int64_t pitch, int64_t quads, const struct weights *w, int64_t panel,
                      int32_t *sums)
{
    const int8_t *b = (const int8_t *)w->panels + panel * quads * 64;
    __m256i left[MR], right[MR], ones = _mm256_set1_epi16(1);
#pragma GCC unroll 6
    for (int r = 0; r < n; r++)
        left[r] = right[r] = _mm256_setzero_si256();
    for (int64_t o = 0; o < w->octets; o++) {
        const int8_t *at = b + 128 * o;
#pragma GCC unroll 6
        for (int r = 0; r < n; r++) {
            __m256i x = four(a + r * pitch + 8 * o), y = four(a + r * pitch + 8 * o + 4);
            left[r] = add_octets(left[r], x, y, at, at + 64, ones);
            right[r] = add_octets(right[r], x, y, at + 32, at + 96, ones);
        }
    }
    quad_sums(n, a, pitch, b, 2 * w->octets, quads, NULL, left, right);
    quad_sums(n, a, pitch, w->extra, w->first[panel], w->first[panel + 1], w->at, left, right);
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

/* Products of one row and one quad. */
INLINE void quad_sums(const uint8_t *a, const int8_t *quad, uint32_t *row)
{
    for (int c = 0; c < NR; c++)
        for (int k = 0; k < 4; k++)
            row[c] += (uint32_t)(a[k] * quad[4 * c + k]);
}

INLINE void byte_sums(int n, const uint8_t *a, int64_t pitch, int64_t quads, const struct weights *w, int64_t panel,
                      int32_t *sums)
{
    const int8_t *b = (const int8_t *)w->panels + panel * quads * 64;
    for (int r = 0; r < n; r++) {
        uint32_t row[NR] = {0}; /* unsigned: wraps */
        for (int64_t q = 0; q < quads; q++)
            quad_sums(a + r * pitch + 4 * q, b + 64 * q, row);
        for (int64_t q = w->first[panel]; q < w->first[panel + 1]; q++)
            quad_sums(a + r * pitch + 4 * w->at[q], w->extra + 64 * q, row);
        memcpy(sums + NR * r, row, sizeof row);
    }
}
#endif

/* Zero points come off sums of rows and weights as they are. */
static void adjust_sums(const struct weights *w, int64_t panel, const struct rows *rows, int64_t row, int64_t n,
                        int32_t *sums)
{
    const int32_t *adjust = w->adjust + NR * panel, *zeros = w->zeros ? w->zeros + NR * panel : NULL;
    for (int64_t r = 0; r < n; r++) {
        uint32_t zero = (uint32_t)rows->zeros[row + r], sum = zeros ? (uint32_t)rows->sums[row + r] : 0;
        for (int c = 0; c < NR; c++) {
            uint32_t off = zero * (uint32_t)adjust[c] + (zeros ? sum * (uint32_t)zeros[c] : 0);
            sums[NR * r + c] = (int32_t)((uint32_t)sums[NR * r + c] - off);
        }
    }
}

INLINE void some_sums(int n, const struct weights *w, int64_t panel, const struct rows *rows, int64_t row, int32_t *sums)
{
    int64_t length = ready_length(w, rows->depth);
    if (w->narrow)
        byte_sums(n, (const uint8_t *)rows->first + row * rows->pitch, rows->pitch, length / 4, w, panel, sums);
    else
        rows_sums(n, (const int16_t *)rows->first + row * rows->pitch, rows->pitch,
                  (const int16_t *)w->panels + panel * length * NR, length / 2, sums);
}

void panel_sums(const struct weights *w, int64_t panel, const struct rows *rows, int64_t row, int64_t n, int32_t *sums)
{
    switch (n) {
    case 1: some_sums(1, w, panel, rows, row, sums); break;
    case 2: some_sums(2, w, panel, rows, row, sums); break;
    case 3: some_sums(3, w, panel, rows, row, sums); break;
    case 4: some_sums(4, w, panel, rows, row, sums); break;
    case 5: some_sums(5, w, panel, rows, row, sums); break;
    default: some_sums(6, w, panel, rows, row, sums); break;
    }
    if (w->narrow)
        adjust_sums(w, panel, rows, row, n, sums);
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

/* Eight floats, rounded, shifted and saturated: bytes. */
INLINE u8x8 bytes8(v8 x, v8 zero, v8 low, v8 high)
{
    return low_bytes8(__builtin_convertvector(min8(high, max8(low, round8(x) + zero)), i8v));
}

/* A tile of floats becomes what 8-bit integers hold of it. */
static void round_tile(const struct output *o, float *tile, int64_t rows)
{
    v8 zero = all8((float)zero_of(o->p_zero, o->p_signed)), scale = all8(*o->p_scale);
    v8 low = all8(o->p_signed ? -128 : 0), high = all8(o->p_signed ? 127 : 255);
    for (int64_t i = 0; i < rows * NR; i += 8) {
        v8 whole = min8(high, max8(low, round8(load8(tile + i) / scale) + zero));
        store8(tile + i, (whole - zero) * scale);
    }
}

/* A row of NR bytes to y at `row`, `column`, of which `columns` are there. */
INLINE void store_bytes(const struct output *o, const uint8_t *bytes, int64_t columns, int64_t row, int64_t column)
{
    uint8_t *y = (uint8_t *)o->y + row * o->row + column * o->column;
    if (o->column == 1 && columns == NR)
        memcpy(y, bytes, NR);
    else
        for (int64_t c = 0; c < columns; c++)
            y[c * o->column] = bytes[c];
}

/* A tile of floats, NR between rows, to 8-bit integers in y. `scale` divides them, null: nothing does. */
static void quantize_tile(const struct output *o, const float *tile, const float *scale, int64_t rows, int64_t columns,
                          int64_t row, int64_t column)
{
    int64_t is_signed = o->result == SIGNED_BYTES;
    v8 zero = all8((float)zero_of(o->y_zero, is_signed)), by = all8(scale ? *scale : 1);
    v8 low = all8(is_signed ? -128 : 0), high = all8(is_signed ? 127 : 255);
    for (int64_t r = 0; r < rows; r++) {
        uint8_t bytes[NR];
        for (int64_t c = 0; c < NR; c += 8) {
            v8 x = load8(tile + NR * r + c);
            u8x8 some = bytes8(scale ? x / by : x, zero, low, high);
            memcpy(bytes + c, &some, sizeof some);
        }
        store_bytes(o, bytes, columns, row + r, column);
    }
}

static void store_sums(const struct output *o, const int32_t *sums, int64_t rows, int64_t columns, int64_t row,
                       int64_t column)
{
    for (int64_t r = 0; r < rows; r++) {
        int32_t *y = (int32_t *)o->y + (row + r) * o->row + column * o->column;
        if (o->column == 1 && columns == NR)
            memcpy(y, sums + NR * r, NR * sizeof *y);
        else
            for (int64_t c = 0; c < columns; c++)
                y[c * o->column] = sums[NR * r + c];
    }
}

void finish_sums(const struct output *o, const int32_t *sums, int64_t rows, int64_t columns, int64_t row, int64_t column,
                 int64_t thread)
{
    if (o->result == SUMS) {
        store_sums(o, sums, rows, columns, row, column);
        return;
    }
    const float *scales = o->ready + thread * (rounded_up(o->columns) + NR) + column;
    float tile[MR * NR], finished[MR * NR];
    for (int64_t c = 0; c < NR; c += 8) {
        i8v bias = {0};
        if (o->bias)
            for (int64_t k = 0; k < 8 && c + k < columns; k++)
                bias[k] = o->bias[o->bias_step ? column + c + k : 0];
        for (int64_t r = 0; r < rows; r++) {
            i8v whole;
            memcpy(&whole, sums + NR * r + c, sizeof whole);
            store8(tile + NR * r + c, __builtin_convertvector(whole + bias, v8) * load8(scales + c));
        }
    }
    if (o->p_scale)
        round_tile(o, tile, rows);
    struct place to = {(float *)o->y + row * o->row + column * o->column, o->row, o->column};
    if (o->result == FLOATS) {
        finish_tile(&o->e, tile, NR, rows, columns, row, column, to);
        return;
    }
    if (!o->direct) {
        struct place aside = {finished, NR, 1};
        finish_tile(&o->e, tile, NR, rows, columns, row, column, aside);
    }
    quantize_tile(o, o->direct ? tile : finished, o->direct ? NULL : o->y_scale, rows, columns, row, column);
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
    struct weights w;
    int64_t batch_panels, batches, rows, depth; /* rows of each batch; those of x and y go on through all batches */
    int64_t row_parts, panel_parts;             /* tasks */
    int64_t block_rows;                         /* rows that are made ready at once: a multiple of MR, <= MOST_ROWS */
    void *block;                                /* [threads, block_rows, ready length]; null: x is ready as it is */
    struct output o;
};

/* Make row r of x ready, at `to`. */
INLINE void ready_row(const struct or_integer_gemm *a, int64_t row, int64_t zero, int64_t length, char *to)
{
    const uint8_t *x = a->x + row * a->x_row;
    if (a->w.narrow) {
        unsign(x, a->x_signed, (uint8_t *)to, a->depth);
        memset(to + a->depth, 0, (size_t)(length - a->depth));
    } else {
        widen(x, a->x_signed, zero, (int16_t *)to, a->depth);
        if (a->depth < length)
            ((int16_t *)to)[a->depth] = 0;
    }
}

/* x [batches * rows, depth] times w, batch by batch: batch i has the panels from i * batch_panels on. Tasks: parts of
 * the rows of all batches times parts of the panels. */
KERNEL(or_integer_gemm)
{
    ARGS(or_integer_gemm);
    int64_t length = ready_length(&a->w, a->depth), panels = (a->o.columns + NR - 1) / NR, first, last, low, high;
    int64_t size = a->w.narrow ? 1 : 2;
    int32_t zeros[MOST_ROWS], totals[MOST_ROWS];
    share(a->batches * a->rows, task / a->panel_parts, a->row_parts, &first, &last);
    share(panels, task % a->panel_parts, a->panel_parts, &low, &high);
    ready_scales(&a->o, low * NR, high * NR < a->o.columns ? high * NR : a->o.columns, thread);
    char *block = a->block ? (char *)a->block + thread * a->block_rows * length * size : NULL;
    while (first < last) {
        int64_t batch = first / a->rows, end = (batch + 1) * a->rows;
        int64_t n = (end < last ? end : last) - first;
        n = n < a->block_rows ? n : a->block_rows;
        struct rows rows = {block, length, a->depth, zeros, totals};
        if (!block) {
            rows.first = a->x + first * a->x_row;
            rows.pitch = a->x_row;
        }
        for (int64_t r = 0; r < n; r++) {
            const uint8_t *point = a->x_zero ? a->x_zero + (first + r) % a->rows * a->x_zero_step : NULL;
            int64_t zero = zero_of(point, a->x_signed);
            zeros[r] = (int32_t)(zero + (a->x_signed ? 128 : 0));
            if (block)
                ready_row(a, first + r, zero, length, block + r * length * size);
            if (a->w.zeros)
                totals[r] = sum_of((const uint8_t *)rows.first + r * rows.pitch, a->depth);
        }
        for (int64_t panel = low; panel < high; panel++) {
            int64_t columns = a->o.columns - panel * NR < NR ? a->o.columns - panel * NR : NR;
            for (int64_t r = 0; r < n; r += MR) {
                int32_t sums[MR * NR];
                int64_t some = n - r < MR ? n - r : MR;
                panel_sums(&a->w, batch * a->batch_panels + panel, &rows, r, some, sums);
                finish_sums(&a->o, sums, some, columns, first + r, panel * NR, thread);
            }
        }
        first += n;
    }
}
