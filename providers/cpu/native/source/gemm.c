/* Matrix products y = x w with an epilogue, batch by batch, where x and y lie. */
#include "tiles.h"
#include "turn.h"

/* x [batch][rows][depth], floats of a row contiguous; y [batch][rows][columns] likewise. w [depth][columns] is packed
 * (see tiles.h; its offset then counts whole matrices of panels), or has the strides w_depth and w_column, one of which
 * is 1. Work is cut into parts: batch x row_parts x panel_parts; tasks share the parts. */
struct or_gemm {
    const float *x, *w;
    float *y, *scratch;
    int64_t scratch_each;   /* floats of scratch for each thread */
    const int64_t *offsets; /* [batch][3]: of x, w, y, in floats */
    int64_t batch, rows, depth, columns;
    int64_t x_row, y_row;
    int64_t packed, w_depth, w_column;
    int64_t row_parts, panel_parts, tasks;
    int64_t block; /* rows that are multiplied with all panels before the next ones */
    struct epilogue e;
};

struct part {
    const float *x, *w;
    int64_t first_row, last_row, first_column, last_column;
    const float **table; /* room for a block of rows and MOST_ROWS more */
    float *panel;        /* room for a panel of 24 columns, or one of 1 and the sums of a block */
    struct block b;
};

/* The table of the block of rows from `row` on. */
static void set_rows(const struct or_gemm *a, struct part *p, int64_t row)
{
    int64_t rows = p->last_row - row < a->block ? p->last_row - row : a->block;
    const float *x = p->x + row * a->x_row;
    for (int64_t r = 0; r < rows; r++)
        p->table[r] = x + r * a->x_row;
    for (int64_t r = rows; r < rows + MOST_ROWS; r++)
        p->table[r] = p->table[rows - 1];
    p->b.rows = rows;
}

/* Pack `columns` columns of w from `column` on into a panel of `width`, padded with zeros. */
static void pack(const struct or_gemm *a, const float *w, int64_t column, int64_t columns, int64_t width, float *panel)
{
    w += column * a->w_column;
    if (columns < width)
        memset(panel, 0, (size_t)(a->depth * width) * 4);
    if (a->w_column == 1)
        for (int64_t k = 0; k < a->depth; k++)
            memcpy(panel + k * width, w + k * a->w_depth, (size_t)columns * 4);
    else
        turn_words((char *)panel, 4 * width, (const char *)w, 4 * a->w_column, a->depth, columns);
}

/* Blocks of rows outside, packed panels inside. */
static void multiply_packed(const struct or_gemm *a, struct part *p, float *y, int64_t row_offset)
{
    for (int64_t row = p->first_row; row < p->last_row; row += a->block) {
        set_rows(a, p, row);
        p->b.row = row_offset + row;
        p->b.to.y = y + row * a->y_row;
        for (int64_t column = p->first_column; column < p->last_column;) {
            int64_t left = a->columns - column, width = panel_width(left);
            multiply_panel(&p->b, p->w + column * a->depth, width, width, left < width ? left : width, column);
            column += width;
        }
    }
}

/* Panels outside: each is packed once, or read where it lies if that is cheaper. */
static void multiply_unpacked(const struct or_gemm *a, struct part *p, float *y, int64_t row_offset)
{
    for (int64_t column = p->first_column; column < p->last_column;) {
        int64_t left = a->columns - column, width = panel_width(left), columns = left < width ? left : width;
        const float *panel = p->w + column;
        int64_t step = a->w_depth;
        if (a->w_column != 1 || columns < width || a->rows > 16) {
            pack(a, p->w, column, columns, width, p->panel);
            panel = p->panel;
            step = width;
        }
        for (int64_t row = p->first_row; row < p->last_row; row += a->block) {
            set_rows(a, p, row);
            p->b.row = row_offset + row;
            p->b.to.y = y + row * a->y_row;
            multiply_panel(&p->b, panel, step, width, columns, column);
        }
        column += width;
    }
}

/* The only column; its numbers packed or gathered. */
static void multiply_vector(const struct or_gemm *a, struct part *p, float *y, int64_t row_offset)
{
    const float *w = p->w;
    int64_t padded = (a->depth + 7) / 8 * 8;
    if (!a->packed) {
        for (int64_t k = 0; k < padded; k++)
            p->panel[k] = k < a->depth ? w[k * a->w_depth] : 0;
        w = p->panel;
    }
    for (int64_t row = p->first_row; row < p->last_row; row += a->block) {
        set_rows(a, p, row);
        p->b.row = row_offset + row;
        p->b.to.y = y + row * a->y_row;
        multiply_column(&p->b, w, p->panel + padded);
    }
}

KERNEL(or_gemm)
{
    ARGS(or_gemm);
    int64_t first, last, panels = panel_count(a->columns);
    share(a->batch * a->row_parts * a->panel_parts, task, a->tasks, &first, &last);
    for (int64_t part = first; part < last; part++) {
        int64_t across = part % a->panel_parts, down = part / a->panel_parts % a->row_parts;
        int64_t batch = part / a->panel_parts / a->row_parts, low, high;
        const int64_t *offsets = a->offsets + 3 * batch;
        struct part p = {.x = a->x + offsets[0], .w = a->w + offsets[1]};
        share((a->rows + 23) / 24, down, a->row_parts, &low, &high);
        p.first_row = 24 * low;
        p.last_row = 24 * high < a->rows ? 24 * high : a->rows;
        share(panels, across, a->panel_parts, &low, &high);
        p.first_column = panel_start(a->columns, low);
        p.last_column = panel_start(a->columns, high);
        float *scratch = a->scratch + thread * a->scratch_each;
        p.table = (const float **)scratch;
        p.panel = scratch + 2 * (a->block + MOST_ROWS);
        p.b = (struct block){.table = p.table, .chunks = 1, .length = a->depth, .e = &a->e,
                             .to = {a->y, a->y_row, 1}};
        float *y = a->y + offsets[2];
        if (a->columns == 1)
            multiply_vector(a, &p, y, batch * a->rows);
        else if (a->packed)
            multiply_packed(a, &p, y, batch * a->rows);
        else
            multiply_unpacked(a, &p, y, batch * a->rows);
    }
}
