/* Tiles of rows x columns whose sums stay in registers. Every sum runs over k in order, one fused multiply-add each
 * (where the machine has it), whatever the tile: the bits of a result depend on nothing else. Error bound: k rounding
 * errors of the partial sums, as for any such sum, and those of the epilogue. */
#include "tiles.h"

#define UNROLL _Pragma("GCC unroll 8")
#define MOST_SUMS 12 /* vectors of a tile: all but four of the 16 registers of AVX2 */

INLINE v8 load_first8(const float *p, int64_t n)
{
#ifdef __AVX2__
    __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (v8)_mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lanes));
#else
    return load8n(p, n);
#endif
}

/* By halves: masked stores are slow on some machines. */
INLINE void store_first8(float *p, v8 x, int64_t n)
{
    float all[8];
    store8(all, x);
    if (n & 4) {
        memcpy(p, all, 16);
        p += 4;
    }
    const float *rest = all + (n & 4);
    if (n & 2)
        memcpy(p, rest, 8);
    if (n & 1)
        p[n & 2] = rest[n & 2];
}

/* sums[M][V] of the rows at table[..][0..M) and the panel. `ahead` is fetched meanwhile, `pace` bytes for each k. */
INLINE void add_products(const int M, const int V, const struct block *b, const float *const *table,
                         const float *panel, int64_t step, const char *ahead, int64_t pace, v8 *sums)
{
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < V; v++)
            sums[m * V + v] = all8(0);
    for (int64_t chunk = 0; chunk < b->chunks; chunk++, table += b->pitch) {
        const float *x[MOST_ROWS];
        UNROLL for (int m = 0; m < M; m++)
            x[m] = table[m] + b->offset;
        for (int64_t k = 0; k < b->length; k++, panel += step, ahead += pace) {
            v8 w[3];
            __builtin_prefetch(ahead, 0, 2);
            UNROLL for (int v = 0; v < V; v++)
                w[v] = load8(panel + 8 * v);
            UNROLL for (int m = 0; m < M; m++) {
                v8 one = all8(x[m][k]);
                UNROLL for (int v = 0; v < V; v++)
                    sums[m * V + v] += one * w[v];
            }
        }
    }
}

/* The epilogue, if it is no more than a bias, a residual before it and bounds, on contiguous columns: then it is done on
 * the registers. */
struct simple {
    int possible;
    float low, high;
    int64_t ahead, share, pace; /* see multiply_panel; bytes */
    int far; /* rows of y are so far apart that its cache lines are better fetched before the sums are there */
};

static struct simple simple_of(const struct block *b)
{
    const struct epilogue *e = b->e;
    const float none = __builtin_inff();
    struct simple s = {e->activation <= CLIP && !e->scale && !e->shift && e->factor == 1 && b->to.column == 1
                       && (!e->residual || ((!e->after || !e->activation) && e->residual_column == 1)), -none, none,
                       0, 0, 0, b->to.column == 1 && b->to.row > 64};
    if (e->activation == RELU)
        s.low = 0;
    if (e->activation == CLIP) {
        s.low = (float)e->alpha;
        s.high = (float)e->beta;
    }
    return s;
}

/* `whole`: all M rows and all 8 V columns exist. */
INLINE void store_simple(const int M, const int V, const int whole, const struct block *b, const struct simple *s,
                         const v8 *sums, int64_t row, int64_t rows, int64_t columns, int64_t column)
{
    const struct epilogue *e = b->e;
    v8 low = all8(s->low), high = all8(s->high);
    UNROLL for (int v = 0; v < V; v++) {
        int64_t n = columns - 8 * v;
        v8 bias = e->bias && (whole || n > 0) ? load8(e->bias + column + 8 * v) : all8(-0.0f);
        UNROLL for (int m = 0; m < M; m++) {
            if (!whole && (m >= rows || n <= 0))
                continue;
            float *y = b->to.y + (row + m) * b->to.row + column + 8 * v;
            const float *residual = e->residual + (b->row + row + m) * e->residual_row + column + 8 * v;
            v8 x = sums[m * V + v] + bias;
            if (e->residual)
                x = x + (whole ? load8(residual) : load_first8(residual, n));
            x = min8(high, max8(low, x));
            if (whole || n >= 8)
                store8(y, x);
            else
                store_first8(y, x, n);
        }
    }
}

/* Rows row .. row + rows of the block, at most M, times one panel of 8 V columns. */
INLINE void multiply_tile(const int M, const int V, const struct block *b, const struct simple *s, int64_t row,
                          int64_t rows, const float *panel, int64_t step, int64_t columns, int64_t column)
{
    const char *ahead = (const char *)panel + s->ahead + row * s->share;
    v8 sums[MOST_SUMS];
    if (s->far)
        UNROLL for (int m = 0; m < M; m++) {
            const float *y = b->to.y + (row + (m < rows ? m : 0)) * b->to.row + column;
            __builtin_prefetch(y, 1);
            __builtin_prefetch(y + 8 * V - 1, 1);
        }
    add_products(M, V, b, b->table + row, panel, step, ahead, s->pace, sums);
    if (s->possible && rows >= M && columns >= 8 * V) {
        store_simple(M, V, 1, b, s, sums, row, rows, columns, column);
        return;
    }
    if (s->possible) {
        store_simple(M, V, 0, b, s, sums, row, rows, columns, column);
        return;
    }
    float tile[MOST_SUMS * 8];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < V; v++)
            store8(tile + 8 * (m * V + v), sums[m * V + v]);
    struct place to = {b->to.y + row * b->to.row + column * b->to.column, b->to.row, b->to.column};
    finish_tile(b->e, tile, 8 * V, rows, columns, b->row + row, column, to);
}

#define TILE(M, V) \
    static __attribute__((noinline)) void tile_##M##x##V(const struct block *b, const struct simple *s, int64_t row, \
                                                         int64_t rows, const float *panel, int64_t step, \
                                                         int64_t columns, int64_t column) \
    { \
        multiply_tile(M, V, b, s, row, rows, panel, step, columns, column); \
    }

TILE(4, 3) TILE(2, 3) TILE(1, 3)
TILE(6, 2) TILE(3, 2) TILE(1, 2)
TILE(8, 1) TILE(4, 1) TILE(1, 1)

typedef void (*tile)(const struct block *, const struct simple *, int64_t, int64_t, const float *, int64_t, int64_t,
                     int64_t);

/* By vectors of a panel: the tiles from the highest on, and their rows. */
static const struct { tile run; int64_t rows; } tiles[3][3] = {
    {{tile_8x1, 8}, {tile_4x1, 4}, {tile_1x1, 1}},
    {{tile_6x2, 6}, {tile_3x2, 3}, {tile_1x2, 1}},
    {{tile_4x3, 4}, {tile_2x3, 2}, {tile_1x3, 1}},
};

void multiply_panel(const struct block *b, const float *panel, int64_t step, int64_t width, int64_t columns,
                    int64_t column)
{
    struct simple s = simple_of(b);
    int64_t depth = b->chunks * b->length; /* 0 where no tap of a transposed convolution meets the rows */
    if (step == width && depth && b->rows) {
        /* packed: each row of tiles fetches its share of the next panel, which lies behind this one */
        int64_t most = tiles[width / 8 - 1][0].rows;
        s.ahead = 4 * depth * width;
        s.share = s.ahead / b->rows;
        s.pace = depth ? s.share * (b->rows < most ? b->rows : most) / depth : 0; /* a transposed convolution's gaps */
    }
    for (int64_t row = 0; row < b->rows;) {
        int64_t left = b->rows - row, size = 0; /* the lowest tile that holds what is left */
        while (size < 2 && left <= tiles[width / 8 - 1][size + 1].rows)
            size++;
        int64_t rows = tiles[width / 8 - 1][size].rows;
        tiles[width / 8 - 1][size].run(b, &s, row, left < rows ? left : rows, panel, step, columns, column);
        row += rows;
    }
}

/* Eight rows times one column: eight sums of eight lanes, added at the end. */
static void add_column(const struct block *b, const float *const *table, const float *weights, float *sums)
{
    v8 sum[8];
    UNROLL for (int m = 0; m < 8; m++)
        sum[m] = all8(0);
    int64_t whole = b->length / 8 * 8, rest = b->length - whole;
    for (int64_t chunk = 0; chunk < b->chunks; chunk++, table += b->pitch) {
        for (int64_t k = 0; k < whole; k += 8, weights += 8) {
            v8 w = load8(weights);
            UNROLL for (int m = 0; m < 8; m++)
                sum[m] += load8(table[m] + k) * w;
        }
        if (!rest)
            continue;
        v8 w = load8(weights);
        weights += 8;
        UNROLL for (int m = 0; m < 8; m++)
            sum[m] += load_first8(table[m] + whole, rest) * w;
    }
    for (int m = 0; m < 8; m++)
        sums[m] = sum8(sum[m]);
}

void multiply_column(const struct block *b, const float *weights, float *sums)
{
    for (int64_t row = 0; row < b->rows; row += 8)
        add_column(b, b->table + row, weights, sums + row);
    struct epilogue e = *b->e; /* of eight rows of y as eight columns */
    int64_t whole = b->rows / 8, rest = b->rows - 8 * whole;
    if (e.residual)
        e.residual += b->row * e.residual_row;
    e.residual_column = e.residual_row;
    e.residual_row *= 8;
    struct place to = {b->to.y, 8 * b->to.row, b->to.row};
    finish_tile(&e, sums, 8, whole, 8, 0, 0, to);
    to.y += 8 * whole * b->to.row;
    if (rest)
        finish_tile(&e, sums + 8 * whole, 8, 1, rest, whole, 0, to);
}
