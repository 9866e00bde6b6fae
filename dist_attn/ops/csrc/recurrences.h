/* One token of a short convolution's channels, and of a head with a state that decays: both read and write once what
   their row had before. */
#pragma once
#include "operations.h"

#define CHANNELS 256  /* that are convolved together */
#define STATE_WIDTH 4 /* vectors of columns of a state: their sums stay in registers */

/* x / (1 + exp(-x)) */
INLINE vec silu(vec x) { return x / (exponential(-x) + 1.0f); }

INLINE vec some(const int whole, const float *p, int64_t there) {
    if (whole) return load_loose(p);
    vec x = {0};
    memcpy(&x, p, 4 * there);
    return x;
}

INLINE void put(const int whole, float *p, vec x, int64_t there) {
    if (whole) store_loose(p, x);
    else memcpy(p, &x, 4 * there);
}

/* `count` channels from `first` on. The token enters as later steps will find it: as it is kept. `line`: where the
   inputs of a row are normed. */
static void convolve_channels(const operation *o, float *memory, const cache *of, int64_t half, int64_t first,
                              int64_t count, float *line) {
    float sums[CHANNELS], past[CHANNELS];
    if (o->norm) normed_inputs(line, memory + o->columns[0], o, 0, o->inputs);
    const int64_t each = half ? 2 : 4;
    for (int64_t i = 0; i < count; i++) sums[i] = o->bias ? o->bias[first + i] : 0.0f;
    for (int64_t t = 0; t < o->size; t++) {
        const float *w = o->weights + (o->newest_first ? o->size - 1 - t : t) * o->inputs + first;
        const uint8_t *row = of->keys + (t * o->inputs + first) * each;
        if (t + 1 == o->size)
            for (int64_t i = 0; i < count; i++) {
                float x = o->norm ? line[first + i] : memory[o->columns[first + i]];
                past[i] = half ? from_bfloat16(to_bfloat16(x)) : x;
            }
        else if (half)
            for (int64_t i = 0; i < count; i++) past[i] = from_bfloat16(((const uint16_t *)row)[i]);
        else
            memcpy(past, row, 4 * count);
        for (int64_t i = 0; i < count; i++) sums[i] += w[i] * past[i];
        if (t) keep(of->values + ((t - 1) * o->inputs + first) * each, past, count, half);
    }
    float *out = memory + o->out + first;
    if (o->then == STORE) {
        memcpy(out, sums, 4 * count);
        return;
    }
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store_loose(out + i, silu(load_loose(sums + i)));
    if (i < count) put(0, out + i, silu(some(0, sums + i, count - i)), count - i);
}

/* What a head does with its state: keeps a part, and writes along the key. */
typedef struct {
    float query[MOST_SIZE], key[MOST_SIZE], stay, write, skip;
    int delta;           /* what the key finds is taken from what is written */
    const float *before; /* [size, values] */
    float *after;
} head_step;

/* `width` vectors of columns from `first` on. */
INLINE void step_columns(const int width, const int whole, const head_step *h, int64_t size, int64_t values,
                         const float *value, float *out, int64_t first) {
    const int64_t there = values - first;
    vec v[STATE_WIDTH], write[STATE_WIDTH], sums[STATE_WIDTH];
    for (int j = 0; j < width; j++) v[j] = write[j] = some(whole, value + first + j * LANES, there), sums[j] = (vec){0};
    if (h->delta) {
        for (int64_t k = 0; k < size; k++)
            for (int j = 0; j < width; j++)
                sums[j] += h->key[k] * some(whole, h->before + k * values + first + j * LANES, there);
        for (int j = 0; j < width; j++) write[j] -= h->stay * sums[j], sums[j] = (vec){0};
    }
    for (int j = 0; j < width; j++) write[j] *= h->write;
    for (int64_t k = 0; k < size; k++)
        for (int j = 0; j < width; j++) {
            int64_t at = k * values + first + j * LANES;
            vec s = h->stay * some(whole, h->before + at, there) + h->key[k] * write[j];
            sums[j] += h->query[k] * s;
            put(whole, h->after + at, s, there);
        }
    for (int j = 0; j < width; j++) put(whole, out + first + j * LANES, sums[j] + h->skip * v[j], there);
}

INLINE void step_all_columns(const head_step *h, int64_t size, int64_t values, const float *value, float *out) {
    int64_t i = 0;
    for (; i + STATE_WIDTH * LANES <= values; i += STATE_WIDTH * LANES)
        step_columns(STATE_WIDTH, 1, h, size, values, value, out, i);
    for (; i + LANES <= values; i += LANES) step_columns(1, 1, h, size, values, value, out, i);
    if (i < values) step_columns(1, 0, h, size, values, value, out, i);
}

/* Head number `number` of a row, with the gate of its output. */
static void step_head(const operation *o, float *memory, const cache *of, int64_t number) {
    const head_columns at = o->places[number];
    const int64_t size = o->size, values = o->values;
    float *out = memory + o->out + number * values, step = memory[at.step] + o->step_bias[number];
    const float *value = memory + at.value, *gate = memory + at.gate;
    step = step > 20.0f ? step : log1pf(expf(step)); /* softplus, as torch has it */
    step = step < o->least ? (float)o->least : step > o->most ? (float)o->most : step;
    head_step h = {.stay = expf(-expf(o->log_rates[number]) * step), .write = step, .skip = o->skip ? o->skip[number] : 0.0f};
    if (at.write >= 0) h.delta = 1, h.write = 1.0f / (1.0f + expf(-memory[at.write]));
    h.before = (const float *)of->keys + number * size * values, h.after = (float *)of->values + number * size * values;
    if (o->norm) {
        normed(h.query, memory + at.query, o->norm, o->eps, size);
        normed(h.key, memory + at.key, o->key_norm, o->eps, size);
    } else {
        memcpy(h.query, memory + at.query, 4 * size), memcpy(h.key, memory + at.key, 4 * size);
    }
    step_all_columns(&h, size, values, value, out);
    if (o->out_norm) normed(out, out, o->out_norm, o->out_eps, values);
    int64_t i = 0;
    for (; i + LANES <= values; i += LANES)
        store_loose(out + i, load_loose(out + i) * silu(load_loose(gate + i)));
    if (i < values) put(0, out + i, some(0, out + i, values - i) * silu(some(0, gate + i, values - i)), values - i);
}

/* (sin, cos)(w sigma x / |x|) / sqrt(D) of a query and of a key, [2 D] each, with w [D, K] and sigma [K]. */
static void fourier_features(head_step *h, const float *query, const float *key, const float *w, const float *sigma,
                             int64_t K, int64_t D) {
    const float *from[2] = {query, key}, scale = 1.0f / sqrtf((float)D);
    float in[2][MOST_SIZE], *out[2] = {h->query, h->key};
    for (int of = 0; of < 2; of++) {
        float squares = 0.0f;
        for (int64_t k = 0; k < K; k++) squares += from[of][k] * from[of][k];
        const float inverse = squares == 0.0f ? 1.0f : 1.0f / sqrtf(squares);
        for (int64_t k = 0; k < K; k++) in[of][k] = from[of][k] * inverse * sigma[k];
    }
    for (int64_t i = 0; i < D; i += LANES) {
        vec angle[2] = {{0}, {0}};
        for (int64_t k = 0; k < K; k += LANES) {
            const int64_t there = K - k < LANES ? K - k : LANES;
            vec columns[LANES];
            for (int j = 0; j < LANES; j++) columns[j] = some(there == LANES, w + (i + j) * K + k, there);
            transpose(columns);
            for (int64_t j = 0; j < there; j++)
                for (int of = 0; of < 2; of++) angle[of] += in[of][k + j] * columns[j];
        }
        for (int of = 0; of < 2; of++) {
            vec sine, cosine;
            sine_cosine(angle[of], &sine, &cosine);
            store_loose(out[of] + i, sine * scale), store_loose(out[of] + D + i, cosine * scale);
        }
    }
}

/* Head number `number` of a row over the sums of its keys' features. States of one operation lie `rows` caches apart:
   S, z, the mass of keys and the log of all gates. */
static void attend_by_features(const operation *o, float *memory, const cache *of, int64_t rows, int64_t number) {
    const int64_t D = o->inputs, M = 2 * D, K = o->size, V = o->values;
    const cache *sums = of, *of_features = of + rows, *masses = of + 2 * rows, *decays = of + 3 * rows;
    const float *z = (const float *)of_features->keys + number * M;
    float *z_after = (float *)of_features->values + number * M, *out = memory + o->out + number * V;
    float den = 0.0f, key_scale = 1.0f, log_gate = 0.0f;
    head_step h = {.stay = 1.0f, .write = 1.0f};
    if (o->gate) {
        float x = memory[o->gate + number], small = expf(-fabsf(x)); /* neither g nor 1 - g loses digits near 0 or 1 */
        log_gate = (x < 0.0f ? x : 0.0f) - log1pf(small);
        h.stay = expf(log_gate), key_scale = (x < 0.0f ? 1.0f : small) / (1.0f + small);
    }
    fourier_features(&h, memory + o->query + number * K, memory + o->key + number * K, o->weights + number * D * K,
                     o->sigma + number * K, K, D);
    for (int64_t i = 0; i < M; i++) {
        h.key[i] *= key_scale;
        z_after[i] = h.stay * z[i] + h.key[i];
        den += h.query[i] * z_after[i];
    }
    h.before = (const float *)sums->keys + number * M * V, h.after = (float *)sums->values + number * M * V;
    step_all_columns(&h, M, V, memory + o->value + number * V, out);
    float mass = h.stay * ((const float *)masses->keys)[number] + key_scale, floor = (float)o->least * mass;
    ((float *)masses->values)[number] = mass;
    ((float *)decays->values)[number] = ((const float *)decays->keys)[number] + log_gate;
    float divisor = den < floor || floor != floor ? floor : den; /* NaN stays NaN */
    if (divisor == 0.0f) divisor = 1.0f;
    memory[o->guarded + number] = fabsf(divisor - den) > 0.0f ? 1.0f : 0.0f;
    for (int64_t i = 0; i < V; i++) out[i] /= divisor;
}
