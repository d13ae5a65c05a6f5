/* The steps of an LSTM whose recurrent weights are 8-bit integers: com.microsoft DynamicQuantizeLSTM-1.
 *
 * In each step the hidden state becomes uint8 by its own range, as DynamicQuantizeLinear does; its product with the
 * weights is exact; gates are float32, in the order input, output, forget, cell.
 */
#include "integer.h"
#include "vector.h"

/* One direction. 18 words. */
struct direction {
    const float *products; /* [steps, batch, 4 width]: the inputs' part of the gates */
    const float *bias;     /* [8 width]: that of the input, then that of the state; null for none */
    struct weights w;      /* [width, 4 width] */
    const float *scale;    /* of the weights; per column if scale_step is 1 */
    int64_t scale_step;
    float *hidden, *cell;  /* [batch, width]: the initial states, the final ones afterwards */
    float *y;              /* the states of step t at y + t * y_step; null if not wanted */
    int64_t y_step, backward;
    void *row; /* [batch, ready length] of uint8, or int16 if the weights are wide */
};

struct or_integer_lstm {
    struct direction d[2];
    int64_t steps, batch, width;
    float *gates; /* [directions, batch, 4 width rounded up to NR] */
};

/* The hidden state as integers, ready for panel_sums. Returns its scale; the zero point goes to *zero. */
static float quantize_state(const struct direction *d, int64_t batch, int64_t width, int32_t *zero)
{
    v8 least = all8(0), most = all8(0);
    int64_t n = batch * width, length = ready_length(&d->w, width);
    for (int64_t i = 0; i < n; i += 8) {
        v8 x = n - i < 8 ? load8n(d->hidden + i, n - i) : load8(d->hidden + i);
        least = min8(x, least);
        most = max8(x, most);
    }
    float low = 0, high = 0;
    for (int k = 0; k < 8; k++) {
        low = least[k] < low ? least[k] : low;
        high = most[k] > high ? most[k] : high;
    }
    float scale = (high - low) / 255.0f;
    if (scale == 0)
        scale = 1;
    float point = clamp8(round8(all8(-low / scale)), 0, 255)[0];
    *zero = (int32_t)point;
    for (int64_t r = 0; r < batch; r++)
        for (int64_t i = 0; i < length; i += 8) {
            int64_t left = width - i < 8 ? width - i : 8, all = length - i < 8 ? length - i : 8;
            v8 x = left < 1 ? all8(0) : left < 8 ? load8n(d->hidden + r * width + i, left) : load8(d->hidden + r * width + i);
            i8v whole = __builtin_convertvector(clamp8(round8(x / scale) + point, 0, 255), i8v);
            for (int64_t k = 0; k < all; k++)
                if (d->w.narrow)
                    ((uint8_t *)d->row)[r * length + i + k] = k < left ? (uint8_t)whole[k] : 0;
                else
                    ((int16_t *)d->row)[r * length + i + k] = k < left ? (int16_t)(whole[k] - *zero) : 0;
        }
    return scale;
}

/* gates [batch, pitch] = product of the state with the weights + inputs' part + bias. */
static void gates_of(const struct direction *d, const float *products, int64_t batch, int64_t width, float *gates)
{
    int64_t columns = 4 * width, pitch = rounded_up(columns), length = ready_length(&d->w, width);
    int32_t zero;
    float scale = quantize_state(d, batch, width, &zero);
    for (int64_t first = 0; first < batch; first += MR) {
        int64_t n = batch - first < MR ? batch - first : MR;
        int32_t zeros[MR], totals[MR], sums[MR * NR];
        int64_t size = d->w.narrow ? 1 : 2;
        struct rows rows = {(const char *)d->row + first * length * size, length, width, zeros, totals};
        for (int64_t r = 0; r < n; r++) {
            zeros[r] = zero;
            totals[r] = d->w.zeros ? sum_of((const uint8_t *)rows.first + r * length, width) : 0;
        }
        for (int64_t panel = 0; panel * NR < columns; panel++) {
            panel_sums(&d->w, panel, &rows, 0, n, sums);
            int64_t last = columns - panel * NR < NR ? columns - panel * NR : NR;
            for (int64_t c = 0; c < last; c++) {
                int64_t column = panel * NR + c;
                float by = scale * d->scale[d->scale_step ? column : 0];
                float bias = d->bias ? d->bias[column] + d->bias[columns + column] : 0;
                for (int64_t r = 0; r < n; r++)
                    gates[(first + r) * pitch + column] =
                        (float)sums[NR * r + c] * by + (products[(first + r) * columns + column] + bias);
            }
        }
    }
}

/* New states of one sequence from its gates; they go to y as well, if that is wanted. */
static void step_states(const float *gates, int64_t width, float *hidden, float *cell, float *y)
{
    for (int64_t i = 0; i < width; i += 8) {
        int64_t n = width - i < 8 ? width - i : 8;
        v8 in = load8n(gates + i, n), out = load8n(gates + width + i, n), forget = load8n(gates + 2 * width + i, n);
        v8 fresh = load8n(gates + 3 * width + i, n), old = load8n(cell + i, n);
        v8 state = sigmoid8(forget) * old + sigmoid8(in) * tanh8(fresh), result = sigmoid8(out) * tanh8(state);
        store8n(cell + i, state, n);
        store8n(hidden + i, result, n);
        if (y)
            store8n(y + i, result, n);
    }
}

/* All steps of one direction, which is the task. */
KERNEL(or_integer_lstm)
{
    ARGS(or_integer_lstm);
    const struct direction *d = a->d + task;
    int64_t width = a->width, pitch = rounded_up(4 * width);
    float *gates = a->gates + task * a->batch * pitch;
    for (int64_t k = 0; k < a->steps; k++) {
        int64_t t = d->backward ? a->steps - 1 - k : k;
        gates_of(d, d->products + t * a->batch * 4 * width, a->batch, width, gates);
        for (int64_t r = 0; r < a->batch; r++) {
            float *y = d->y ? d->y + t * d->y_step + r * width : NULL;
            step_states(gates + r * pitch, width, d->hidden + r * width, d->cell + r * width, y);
        }
    }
}
