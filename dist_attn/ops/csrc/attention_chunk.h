/* What forward and backward share of one chunk: gates, weights of pairs, the divisor, the state's step. */
#pragma once
#include "features.h"
#include "matrices.h"

typedef struct {
    int64_t begin, length, lanes;
    int fresh;
    float weight[CHUNK] __attribute__((aligned(64)));  /* of each key; 0 behind the last token */
    float present[CHUNK] __attribute__((aligned(64))); /* 1, and 0 behind the last token */
    float decay[CHUNK] __attribute__((aligned(64)));   /* cumulative log gate */
    float into[CHUNK] __attribute__((aligned(64)));    /* what is left of the state before, at each query */
    float left[CHUNK] __attribute__((aligned(64)));    /* what is left of each key behind the chunk */
    float gate[CHUNK] __attribute__((aligned(64)));    /* log gate */
    float gain; /* what is left of the state before, behind the chunk */
} chunk;

#define CLOSED -104.0f /* exp gives 0 from here on */

static void look_at(const call *c, int64_t group, int64_t number, chunk *at) {
    at->begin = c->chunks ? c->chunks[number] : number * CHUNK;
    int64_t end = c->chunks ? c->chunks[number + 1] : at->begin + CHUNK;
    at->length = (end < c->tokens ? end : c->tokens) - at->begin;
    at->lanes = round_up(at->length, LANES), at->fresh = c->fresh ? c->fresh[number] : 0;
    at->gain = 1.0f;
    float sum = 0.0f;
    for (int64_t t = 0; t < CHUNK; t++) {
        int there = t < at->length;
        at->present[t] = there;
        at->weight[t] = there && c->key_scale.at ? number_at(c->key_scale, group, c->heads, at->begin + t) : there;
        if (c->log_gate.at) {
            float gate = there ? number_at(c->log_gate, group, c->heads, at->begin + t) : 0.0f;
            sum += gate < CLOSED ? CLOSED : gate;
            at->gate[t] = gate < CLOSED ? CLOSED : gate;
            at->decay[t] = sum;
        }
    }
    if (!c->log_gate.at) return;
    for (int64_t t = 0; t < at->lanes; t += LANES) {
        store(at->into + t, exponential(load(at->decay + t)));
        store(at->left + t, exponential(sum - load(at->decay + t)));
    }
    at->gain = exponential(all(sum))[0];
}

/* The masses at the tokens of a chunk, m_t = g_t m_{t-1} + key_scale_t; the last one is that of the state after it. */
static float add_masses(const call *c, const chunk *at, float before, float *masses) {
    float m = at->fresh ? 0.0f : before;
    float gates[CHUNK] __attribute__((aligned(64)));
    if (c->log_gate.at)
        for (int64_t t = 0; t < at->lanes; t += LANES) store(gates + t, exponential(load(at->gate + t)));
    for (int64_t t = 0; t < at->length; t++) {
        m = (c->log_gate.at ? gates[t] * m : m) + at->weight[t];
        masses[t] = m;
    }
    return m;
}

/* Masks pairs [lanes, CHUNK] of keys after the query and weighs the others with what is left of them. */
static void weigh_pairs(const chunk *at, float *pairs, const float *weights) {
    for (int64_t i = 0; i < at->lanes; i++) {
        int64_t end = smaller(at->lanes, round_up(i + 1, STRIPE));
        float *row = pairs + i * CHUNK;
        if (weights)
            for (int64_t j = 0; j < end; j += LANES) store(row + j, load(row + j) * load(weights + i * CHUNK + j));
        else
            for (int64_t j = i + 1; j < end; j++) row[j] = 0.0f;
    }
}

/* exp(c_i - c_j) where key j is not after query i, 0 elsewhere. */
static void pair_weights(const chunk *at, float *weights) {
    for (int64_t i = 0; i < at->lanes; i++) {
        int64_t end = smaller(at->lanes, round_up(i + 1, STRIPE));
        for (int64_t j = 0; j < end; j += LANES) {
            store(weights + i * CHUNK + j, exponential(at->decay[i] - load(at->decay + j)));
        }
        for (int64_t j = i + 1; j < end; j++) weights[i * CHUNK + j] = 0.0f;
    }
}

/* What the policy divides by, and how much of its gradient goes to the denominator and to the mass. */
INLINE float divisor(const call *c, float den, float mass, float *of_den, float *of_mass) {
    float eps = (float)c->eps, floor_ = eps * mass;
    *of_den = *of_mass = 0.0f;
    switch (c->policy) {
    case EXACT: *of_den = 1.0f; return den;
    case CLAMP: *of_den = den < eps ? 0.0f : 1.0f; return den < eps ? eps : den;
    case SIGN_CLAMP:
        *of_den = fabsf(den) < eps ? 0.0f : 1.0f;
        return fabsf(den) < eps ? (den < 0.0f ? -eps : eps) : den;
    case ABS_CLAMP:
        *of_den = fabsf(den) < eps ? 0.0f : (den < 0.0f ? -1.0f : 1.0f);
        return fabsf(den) < eps ? eps : fabsf(den);
    case ONE: return 1.0f;
    case MASS:
        if (mass == 0.0f) return 1.0f;
        *of_mass = 1.0f;
        return mass;
    }
    float found = den > floor_ || den != den ? den : floor_;
    if (found == 0.0f) return 1.0f;
    float half = den == floor_ ? 0.5f : den > floor_;
    *of_den = half, *of_mass = (1.0f - half) * eps;
    return found;
}

/* One token's output from its numerator, [V rounded up], denominator and mass. */
static void write_output(const call *c, int64_t group, int64_t token, const float *num, float den, float mass) {
    char *to = row_of(c->out, group, c->heads, token);
    float unused, also_unused, inverse = 1.0f;
    if (!c->undivided) inverse = 1.0f / divisor(c, den, mass, &unused, &also_unused);
    for (int64_t j = 0; j < round_up(c->values, LANES); j += LANES)
        write_row(to, c->out.type, j, c->values, load(num + j) * inverse);
    if (c->undivided) ((float *)to)[c->values] = den, ((float *)to)[c->values + 1] = mass;
    if (c->den) c->den[group * c->tokens + token] = den, c->mass[group * c->tokens + token] = mass;
}

static void load_state(const call *c, int64_t group, const float *s, const float *zm, state to) {
    memset(to.s, 0, 4 * state_floats(c));
    if (!s) return;
    for (int64_t m = 0; m < c->features; m++)
        memcpy(to.s + m * to.values, s + (group * c->features + m) * c->values, 4 * c->values);
    memcpy(to.z, zm + group * (c->features + 1), 4 * c->features);
    *to.mass = zm[group * (c->features + 1) + c->features];
}

static void store_state(const call *c, int64_t group, state from, float *s, float *zm) {
    for (int64_t m = 0; m < c->features; m++)
        memcpy(s + (group * c->features + m) * c->values, from.s + m * from.values, 4 * c->values);
    memcpy(zm + group * (c->features + 1), from.z, 4 * c->features);
    zm[group * (c->features + 1) + c->features] = *from.mass;
}

/* Denominators of a chunk's queries: what they read from z, decayed, and the sums of their pairs' weights. */
static void denominators(const call *c, const chunk *at, const float *queries, const float *z, const float *pairs,
                         float *den) {
    product(den, CHUNK, 0.0f, (factor){z, 0, 1}, queries, CHUNK, 1, at->lanes, c->features);
    if (c->log_gate.at)
        for (int64_t t = 0; t < at->lanes; t += LANES) store(den + t, load(den + t) * load(at->into + t));
    for (int64_t t = 0; t < at->length; t++) {
        vec sum = {0};
        for (int64_t j = 0; j < smaller(at->lanes, round_up(t + 1, STRIPE)); j += LANES)
            sum += load(pairs + t * CHUNK + j);
        den[t] += total(sum);
    }
}

INLINE side take_side(room *r, const call *c) {
    side s;
    s.x = take(r, round_up(c->size, LANES) * CHUNK);
    s.inverse = take(r, CHUNK);
    s.phi = take(r, round_up(c->features, LANES) * CHUNK);
    return s;
}
#define SIDE_FLOATS(c) ((round_up((c)->size, LANES) + round_up((c)->features, LANES) + 1) * CHUNK)

INLINE int in_halves(const call *c) {
    view keys = c->k.at ? c->k : c->q, values = c->k.at ? c->v : c->q; /* of a read: its queries */
    return HALF_PRODUCTS && keys.type == BFLOAT16 && values.type == BFLOAT16;
}
INLINE int64_t factor_floats(const call *c) { return largest_factor(c->features, c->values); }
INLINE int64_t matrices_floats(const call *c) { return in_halves(c) ? 2 * factor_floats(c) + 2 * 16 : 0; }
INLINE matrices matrices_of(room *r, const call *c) { return take_matrices(r, in_halves(c), factor_floats(c)); }
