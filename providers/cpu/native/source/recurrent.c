/* LSTM, GRU and RNN: the loop over the steps of a sequence, float32.
 *
 * The products of all inputs with W come from a GEMM before; here each step multiplies the state with R, whose columns
 * stand in panels of PANEL, and applies the gates. A task takes some sequences of one direction from the first step to
 * the last. Sums run over the state in order, whatever the number of rows and tasks.
 */
#include "vector.h"

enum { PANEL = 32, ROWS = 3 };
enum { LSTM, GRU, RNN };
enum { SIGMOID, TANH, RELU };

/* D directions, T steps, N sequences, H state, G gates (LSTM: input, output, forget, cell; GRU: update, reset,
 * hidden). */
struct or_recurrent {
    const float *products;        /* [D, T, N, G H], of the inputs */
    const float *weights;         /* [D, panels][H][PANEL]: all columns of R, of the GRU the first 2 H */
    const float *candidate;       /* GRU: [D, panels][H][PANEL], the last H columns */
    const float *bias;            /* [D, G H] or NULL */
    const float *candidate_bias;  /* GRU that resets after the product: [D, H], added before; or NULL */
    const float *peephole;        /* LSTM: [D, 3 H], input, output, forget; or NULL */
    const int32_t *lengths;       /* [N] or NULL */
    const float *hidden, *cell;   /* initial states [D, N, H] or NULL */
    float *y;                     /* [T, D, N, H] by strides, or NULL */
    float *last_hidden, *last_cell; /* [D, N, H] by strides, or NULL */
    int64_t y_t, y_d, y_n, last_d, last_n; /* strides in floats */
    float *scratch;               /* [threads, each] */
    int64_t each;
    int64_t kind, directions, steps, batch, width;
    int64_t backward;             /* bit d: direction d runs from the last step to the first */
    int64_t functions[2][3];      /* per direction: of the gates, of the candidate, of the output */
    int64_t reset_after;
    double clip;
    int64_t blocks, tasks;        /* sequences of a direction are cut into so many blocks */
};

/* The memory of one task: `padded` floats for each of n rows. */
struct state {
    int64_t n, width, padded, gates; /* sequences; H; floats from row to row of a state and of the gates */
    float *hidden, *cell, *reset, *g, *candidate;
};

INLINE v8 activated(int64_t function, v8 x)
{
    return function == SIGMOID ? sigmoid8(x) : function == TANH ? tanh8(x) : max8(all8(0.0f), x);
}

/* out[r][0 .. PANEL) = sum over k of h[r][k] panel[k], for r < rows <= ROWS. */
INLINE void panel_rows(const float *h, int64_t step, const float *panel, int64_t depth, float *out, int64_t out_step,
                       const int rows)
{
    v8 sums[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < 4; c++)
            sums[r][c] = all8(0.0f);
    for (int64_t k = 0; k < depth; k++, panel += PANEL)
        for (int r = 0; r < rows; r++) {
            v8 x = all8(h[r * step + k]);
            for (int c = 0; c < 4; c++)
                sums[r][c] += x * load8(panel + 8 * c);
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < 4; c++)
            store8(out + r * out_step + 8 * c, sums[r][c]);
}

/* out[n][columns] = h[n][H] times the panels of `columns` columns; out rows have room for whole panels. */
static void times_weights(const struct state *s, const float *h, const float *panels, int64_t columns, float *out)
{
    for (int64_t column = 0; column < columns; column += PANEL, panels += s->width * PANEL) {
        int64_t r = 0;
        for (; r + 3 <= s->n; r += 3)
            panel_rows(h + r * s->padded, s->padded, panels, s->width, out + r * s->gates + column, s->gates, 3);
        if (s->n - r == 2)
            panel_rows(h + r * s->padded, s->padded, panels, s->width, out + r * s->gates + column, s->gates, 2);
        if (s->n - r == 1)
            panel_rows(h + r * s->padded, s->padded, panels, s->width, out + r * s->gates + column, s->gates, 1);
    }
}

INLINE v8 some8(const float *p, int64_t n) { return n >= 8 ? load8(p) : load8n(p, n); }
INLINE void put8(float *p, v8 x, int64_t n) { if (n >= 8) store8(p, x); else store8n(p, x, n); }

/* What goes into gate k at j: the product of the state, that of the input and the bias. */
INLINE v8 gate(const float *g, const float *product, const float *bias, int64_t at, int64_t n)
{
    v8 x = some8(g + at, n) + some8(product + at, n);
    return bias ? x + some8(bias + at, n) : x;
}

struct row {
    const float *product, *bias, *peephole;
    const int64_t *functions;
    float clip;
};

static void lstm_row(const struct row *w, int64_t width, const float *g, float *hidden, float *cell)
{
    for (int64_t j = 0; j < width; j += 8) {
        int64_t n = width - j;
        v8 into = gate(g, w->product, w->bias, j, n), out = gate(g, w->product, w->bias, width + j, n);
        v8 forget = gate(g, w->product, w->bias, 2 * width + j, n);
        v8 fresh = gate(g, w->product, w->bias, 3 * width + j, n), old = some8(cell + j, n);
        if (w->peephole) {
            into += some8(w->peephole + j, n) * old;
            forget += some8(w->peephole + 2 * width + j, n) * old;
        }
        into = activated(w->functions[0], clamp8(into, -w->clip, w->clip));
        forget = activated(w->functions[0], clamp8(forget, -w->clip, w->clip));
        fresh = activated(w->functions[1], clamp8(fresh, -w->clip, w->clip));
        v8 now = forget * old + into * fresh;
        if (w->peephole)
            out += some8(w->peephole + width + j, n) * now;
        out = activated(w->functions[0], clamp8(out, -w->clip, w->clip));
        put8(cell + j, now, n);
        put8(hidden + j, out * activated(w->functions[2], now), n);
    }
}

/* Update and reset gates, in place in g; `reset` = reset gate times the state. */
static void gru_gates(const struct row *w, int64_t width, float *g, const float *hidden, float *reset)
{
    for (int64_t j = 0; j < width; j += 8) {
        int64_t n = width - j;
        v8 update = gate(g, w->product, w->bias, j, n), again = gate(g, w->product, w->bias, width + j, n);
        update = activated(w->functions[0], clamp8(update, -w->clip, w->clip));
        again = activated(w->functions[0], clamp8(again, -w->clip, w->clip));
        put8(reset + j, again * (hidden ? some8(hidden + j, n) : all8(1.0f)), n);
        put8(g + j, update, n);
    }
}

/* The new state: (1 - update) candidate + update state. `after`: the reset gate, or NULL if it was applied before. */
static void gru_row(const struct row *w, int64_t width, const float *g, const float *candidate, const float *late_bias,
                    const float *after, float *hidden)
{
    for (int64_t j = 0; j < width; j += 8) {
        int64_t n = width - j;
        v8 fresh = some8(candidate + j, n), update = some8(g + j, n), old = some8(hidden + j, n);
        if (after) {
            if (late_bias)
                fresh += some8(late_bias + j, n);
            fresh *= some8(after + j, n);
        }
        fresh += some8(w->product + 2 * width + j, n);
        if (w->bias)
            fresh += some8(w->bias + 2 * width + j, n);
        fresh = activated(w->functions[1], clamp8(fresh, -w->clip, w->clip));
        put8(hidden + j, (old - fresh) * update + fresh, n);
    }
}

static void rnn_row(const struct row *w, int64_t width, const float *g, float *hidden)
{
    for (int64_t j = 0; j < width; j += 8) {
        v8 x = gate(g, w->product, w->bias, j, width - j);
        put8(hidden + j, activated(w->functions[0], clamp8(x, -w->clip, w->clip)), width - j);
    }
}

/* One step of sequences first .. first + s->n of direction d. */
static void step(const struct or_recurrent *a, struct state *s, int64_t d, int64_t t, int64_t first)
{
    static const int64_t gate_counts[] = {4, 3, 1};
    int64_t h = s->width, gates = gate_counts[a->kind], direct = a->kind == GRU ? 2 * h : gates * h;
    int64_t direct_panels = (direct + PANEL - 1) / PANEL, panels = (h + PANEL - 1) / PANEL;
    struct row w = {
        .bias = a->bias ? a->bias + d * gates * h : 0, .peephole = a->peephole ? a->peephole + d * 3 * h : 0,
        .functions = a->functions[d], .clip = (float)a->clip,
    };
    const float *late = a->candidate_bias ? a->candidate_bias + d * h : 0;
    const float *product = a->products + ((d * a->steps + t) * a->batch + first) * gates * h;
    times_weights(s, s->hidden, a->weights + d * direct_panels * h * PANEL, direct, s->g);
    if (a->kind == GRU) {
        for (int64_t r = 0; r < s->n; r++) {
            w.product = product + r * gates * h;
            gru_gates(&w, h, s->g + r * s->gates, a->reset_after ? 0 : s->hidden + r * s->padded,
                      s->reset + r * s->padded);
        }
        times_weights(s, a->reset_after ? s->hidden : s->reset, a->candidate + d * panels * h * PANEL, h, s->candidate);
    }
    for (int64_t r = 0; r < s->n; r++) {
        float *hidden = s->hidden + r * s->padded;
        float *y = a->y ? a->y + t * a->y_t + d * a->y_d + (first + r) * a->y_n : 0;
        if (a->lengths && t >= a->lengths[first + r]) { /* past its end a sequence holds its state */
            if (y)
                memset(y, 0, 4 * (size_t)h);
            continue;
        }
        w.product = product + r * gates * h;
        if (a->kind == LSTM)
            lstm_row(&w, h, s->g + r * s->gates, hidden, s->cell + r * s->padded);
        else if (a->kind == GRU)
            gru_row(&w, h, s->g + r * s->gates, s->candidate + r * s->gates, late,
                    a->reset_after ? s->reset + r * s->padded : 0, hidden);
        else
            rnn_row(&w, h, s->g + r * s->gates, hidden);
        if (y)
            memcpy(y, hidden, 4 * (size_t)h);
    }
}

/* state = from [n, H], or zeros. */
static void start(const struct state *s, float *state, const float *from)
{
    for (int64_t r = 0; r < s->n; r++)
        if (from)
            memcpy(state + r * s->padded, from + r * s->width, 4 * (size_t)s->width);
        else
            memset(state + r * s->padded, 0, 4 * (size_t)s->width);
}

static void finish(const struct or_recurrent *a, const struct state *s, const float *state, int64_t d, int64_t first,
                   float *to)
{
    for (int64_t r = 0; to && r < s->n; r++)
        memcpy(to + d * a->last_d + (first + r) * a->last_n, state + r * s->padded, 4 * (size_t)s->width);
}

/* All steps of a block of sequences of one direction. Tasks share directions and blocks. */
KERNEL(or_recurrent)
{
    ARGS(or_recurrent);
    int64_t begin, end, columns = (a->kind == LSTM ? 4 : a->kind == GRU ? 2 : 1) * a->width;
    share(a->directions * a->blocks, task, a->tasks, &begin, &end);
    for (int64_t k = begin; k < end; k++) {
        int64_t d = k / a->blocks, first, last;
        share(a->batch, k % a->blocks, a->blocks, &first, &last);
        struct state s = {.n = last - first, .width = a->width, .padded = (a->width + PANEL - 1) / PANEL * PANEL,
                          .gates = (columns + PANEL - 1) / PANEL * PANEL};
        s.hidden = a->scratch + thread * a->each;
        s.cell = s.hidden + s.n * s.padded;
        s.reset = s.cell + s.n * s.padded;
        s.g = s.reset + s.n * s.padded;
        s.candidate = s.g + s.n * s.gates;
        start(&s, s.hidden, a->hidden ? a->hidden + (d * a->batch + first) * a->width : 0);
        start(&s, s.cell, a->cell ? a->cell + (d * a->batch + first) * a->width : 0);
        for (int64_t i = 0; i < a->steps; i++)
            step(a, &s, d, a->backward >> d & 1 ? a->steps - 1 - i : i, first);
        finish(a, &s, s.hidden, d, first, a->last_hidden);
        finish(a, &s, s.cell, d, first, a->last_cell);
    }
}
