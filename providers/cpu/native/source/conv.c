/* Convolutions over memory with the channels last, with one to three spatial axes, groups and an epilogue, without
 * columns and without a padded copy: a row of the product is the window of one output position, given by pointers into
 * the image. Where a window leaves the image, pointers lead to a vector of padding, or to a copy of a kernel row. */
#include "tiles.h"

enum { DEPTH, HEIGHT, WIDTH };

/* x [images][depth][height][width][groups * channels], with strides in floats and contiguous channels; w packed for
 * each group, [groups][panels of kernel * channels rows]; y [images][positions][groups * features]. */
struct or_conv {
    const float *x, *w, *pad; /* pad: value of each channel beyond the edges; null for 0 */
    float *y, *scratch;
    int64_t scratch_each; /* floats of scratch for each thread */
    int64_t images, groups, channels, features; /* the latter two of one group */
    int64_t in[3], out[3], kernel[3], stride[3], dilation[3], begin[3];
    int64_t x_image, x_step[3];
    int64_t y_image, y_position, y_feature;
    int64_t joined; /* a kernel row, all its channels, is contiguous in x: one chunk; else each tap is one */
    int64_t row_parts, panel_parts, tasks;
    int64_t block; /* positions that are multiplied with all panels before the next ones */
    struct epilogue e;
};

/* What fills the table of pointers for a block of positions. */
struct windows {
    const struct or_conv *a;
    const float **table; /* [chunks][pitch] */
    int64_t pitch, chunks, length;
    const float *padding; /* all channels of one tap, or of a kernel row */
    float *sums;          /* of a block, where there is one feature */
    float *edges, *edge;  /* copies of kernel rows that lie partly outside; the next one */
};

struct position {
    int64_t image, at[3];
};

static struct position locate(const struct or_conv *a, int64_t row)
{
    struct position p;
    p.at[WIDTH] = row % a->out[WIDTH];
    row /= a->out[WIDTH];
    p.at[HEIGHT] = row % a->out[HEIGHT];
    row /= a->out[HEIGHT];
    p.at[DEPTH] = row % a->out[DEPTH];
    p.image = row / a->out[DEPTH];
    return p;
}

/* A copy of the kernel row that begins at `column` of the image row, padding outside. */
static const float *edge_of(struct windows *w, const float *row, int64_t column)
{
    const struct or_conv *a = w->a;
    int64_t taps = a->kernel[WIDTH], channels = a->channels;
    float *copy = w->edge;
    w->edge += w->length;
    int64_t before = column < 0 ? -column : 0, end = a->in[WIDTH] - column;
    before = before < taps ? before : taps;
    end = end < before ? before : end < taps ? end : taps;
    memcpy(copy, w->padding, (size_t)(before * channels) * 4);
    if (end > before)
        memcpy(copy + before * channels, row + (column + before) * a->x_step[WIDTH],
               (size_t)((end - before) * channels) * 4);
    memcpy(copy + end * channels, w->padding, (size_t)((taps - end) * channels) * 4);
    return copy;
}

/* The output columns, from *low up to and without *high, whose `reach` columns of x from column * stride + shift on lie
 * inside. */
static void set_inside(const struct or_conv *a, int64_t shift, int64_t reach, int64_t *low, int64_t *high)
{
    int64_t stride = a->stride[WIDTH], room = a->in[WIDTH] - reach - shift;
    *low = shift >= 0 ? 0 : (stride - 1 - shift) / stride;
    *high = room < 0 ? 0 : room / stride + 1;
    *high = *high < *low ? *low : *high;
}

/* Entries for `run` output columns from `column` on: pieces of `row` at equal distances inside, padding or copies of
 * kernel rows outside. `row` is null outside of the image. `shift`: of the piece of output column 0. */
static void set_run(struct windows *w, const float **entry, const float *row, int64_t shift, int64_t column,
                    int64_t run)
{
    const struct or_conv *a = w->a;
    int64_t low, high, step = a->stride[WIDTH] * a->x_step[WIDTH];
    set_inside(a, shift, a->joined ? a->kernel[WIDTH] : 1, &low, &high);
    low = !row ? run : low < column ? 0 : low - column < run ? low - column : run;
    high = !row ? run : high < column ? 0 : high - column < run ? high - column : run;
    int copied = a->joined && row;
    for (int64_t i = 0; i < low; i++)
        entry[i] = copied ? edge_of(w, row, (column + i) * a->stride[WIDTH] + shift) : w->padding;
    for (int64_t i = low; i < high; i++)
        entry[i] = row + shift * a->x_step[WIDTH] + (column + i) * step;
    for (int64_t i = high; i < run; i++)
        entry[i] = copied ? edge_of(w, row, (column + i) * a->stride[WIDTH] + shift) : w->padding;
}

/* The pointers of `run` positions of one output row from p on, in the columns of the table from r on. */
static void set_windows_of_row(struct windows *w, const struct position *p, int64_t r, int64_t run)
{
    const struct or_conv *a = w->a;
    const float **entry = w->table + r, *image = a->x + p->image * a->x_image;
    int64_t pieces = a->joined ? 1 : a->kernel[WIDTH];
    for (int64_t i = 0; i < a->kernel[DEPTH]; i++)
        for (int64_t j = 0; j < a->kernel[HEIGHT]; j++) {
            int64_t z = p->at[DEPTH] * a->stride[DEPTH] - a->begin[DEPTH] + i * a->dilation[DEPTH];
            int64_t y = p->at[HEIGHT] * a->stride[HEIGHT] - a->begin[HEIGHT] + j * a->dilation[HEIGHT];
            int inside = z >= 0 && z < a->in[DEPTH] && y >= 0 && y < a->in[HEIGHT];
            const float *row = inside ? image + z * a->x_step[DEPTH] + y * a->x_step[HEIGHT] : NULL;
            for (int64_t k = 0; k < pieces; k++, entry += w->pitch)
                set_run(w, entry, row, k * a->dilation[WIDTH] - a->begin[WIDTH], p->at[WIDTH], run);
        }
}

static void set_windows(struct windows *w, int64_t first, int64_t rows)
{
    const struct or_conv *a = w->a;
    w->edge = w->edges;
    for (int64_t r = 0; r < rows;) {
        struct position p = locate(a, first + r);
        int64_t run = a->out[WIDTH] - p.at[WIDTH] < rows - r ? a->out[WIDTH] - p.at[WIDTH] : rows - r;
        set_windows_of_row(w, &p, r, run);
        r += run;
    }
    for (int64_t c = 0; c < w->chunks; c++) /* tiles read whole; what they make of these rows is not stored */
        for (int64_t r = rows; r < rows + MOST_ROWS; r++)
            w->table[c * w->pitch + r] = w->table[c * w->pitch + rows - 1];
}

/* Cuts a thread's scratch into table, padding, sums and edges. */
static struct windows begin_windows(const struct or_conv *a, float *scratch)
{
    struct windows w = {.a = a, .pitch = a->block + MOST_ROWS};
    int64_t taps = a->joined ? a->kernel[WIDTH] : 1, channels = a->groups * a->channels, wide = taps * channels;
    w.length = taps * a->channels;
    w.chunks = a->kernel[DEPTH] * a->kernel[HEIGHT] * (a->joined ? 1 : a->kernel[WIDTH]);
    w.table = (const float **)scratch;
    float *padding = scratch + 2 * w.chunks * w.pitch;
    for (int64_t i = 0; i < wide; i++)
        padding[i] = a->pad ? a->pad[i % channels] : 0;
    w.padding = padding;
    w.sums = padding + (wide + 7) / 8 * 8;
    w.edges = w.sums + w.pitch;
    return w;
}

/* The block of positions times panels `first` .. `last`, counted through all groups. */
static void multiply_groups(const struct or_conv *a, struct block *b, int64_t first, int64_t last)
{
    int64_t depth = b->chunks * b->length, panels = panel_count(a->features);
    int64_t group = first / panels, column = panel_start(a->features, first % panels);
    for (int64_t panel = first; panel < last; panel++) {
        const float *weights = a->w + group * depth * ((a->features + 7) / 8 * 8) + column * depth;
        int64_t left = a->features - column, width = panel_width(left);
        b->offset = group * a->channels;
        multiply_panel(b, weights, width, width, left < width ? left : width, group * a->features + column);
        column += width;
        if (column >= a->features) {
            column = 0;
            group++;
        }
    }
}

/* Positions first .. last, all in one image if y is not dense over images, times some panels. */
static void convolve(const struct or_conv *a, struct windows *w, int64_t first, int64_t last, int64_t first_panel,
                     int64_t last_panel)
{
    int64_t positions = a->out[DEPTH] * a->out[HEIGHT] * a->out[WIDTH], image = first / positions;
    struct epilogue e = a->e;
    if (e.residual)
        e.residual += image * (a->y_image - positions * a->y_position);
    struct block b = {.table = w->table, .pitch = w->pitch, .chunks = w->chunks, .length = w->length, .e = &e};
    for (int64_t row = first; row < last; row += a->block) {
        b.rows = last - row < a->block ? last - row : a->block;
        b.row = row;
        b.to = (struct place){a->y + image * a->y_image + (row - image * positions) * a->y_position, a->y_position,
                              a->y_feature};
        set_windows(w, row, b.rows);
        if (a->features * a->groups == 1)
            multiply_column(&b, a->w, w->sums);
        else
            multiply_groups(a, &b, first_panel, last_panel);
    }
}

KERNEL(or_conv)
{
    ARGS(or_conv);
    int64_t positions = a->out[DEPTH] * a->out[HEIGHT] * a->out[WIDTH], rows = a->images * positions;
    int dense = a->y_image == positions * a->y_position;
    int64_t begin, end, low, high, first_panel, last_panel;
    share(a->row_parts * a->panel_parts, task, a->tasks, &begin, &end);
    struct windows w = begin_windows(a, a->scratch + thread * a->scratch_each);
    for (int64_t part = begin; part < end; part++) {
        share(a->groups * panel_count(a->features), part % a->panel_parts, a->panel_parts, &first_panel, &last_panel);
        share((rows + 23) / 24, part / a->panel_parts, a->row_parts, &low, &high);
        int64_t last = 24 * high < rows ? 24 * high : rows;
        for (int64_t row = 24 * low, next; row < last; row = next) {
            next = dense ? last : (row / positions + 1) * positions;
            next = next < last ? next : last;
            convolve(a, &w, row, next, first_panel, last_panel);
        }
    }
}
