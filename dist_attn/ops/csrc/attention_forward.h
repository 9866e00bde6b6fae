/* Causal attention from chunk to chunk, and the state that keys leave behind. */
#pragma once
#include "attention_chunk.h"

/* The state behind a chunk, S = gain S + sum phi_k v^T; `phi` holds weighed keys, times `left` where gates are. */
static void advance(const call *c, const matrices *m, const chunk *at, state to, const float *phi, const float *v) {
    int64_t values = to.values;
    float keep = at->fresh ? 0.0f : at->gain;
    multiply(m, to.s, values, keep, (factor){phi, CHUNK, 1}, v, values, c->features, values, at->length);
    for (int64_t i = 0; i < c->features; i++) {
        vec sum = {0};
        for (int64_t t = 0; t < at->lanes; t += LANES) sum += load(phi + i * CHUNK + t);
        to.z[i] = (keep == 0.0f ? 0.0f : keep * to.z[i]) + total(sum);
    }
}

static void forward_group(const call *c, int64_t group, float *memory) {
    room r = {memory, 0};
    int64_t values = round_up(c->values, LANES), saved = 0;
    side keys = take_side(&r, c), queries = take_side(&r, c);
    float *rows = take(&r, CHUNK * round_up(c->size, LANES)), *v = take(&r, CHUNK * values);
    float *num = take(&r, CHUNK * values), *pairs = take(&r, CHUNK * CHUNK), *weights = take(&r, CHUNK * CHUNK);
    float den[CHUNK] __attribute__((aligned(64))), masses[CHUNK];
    int gated = c->log_gate.at != NULL;
    matrices m = matrices_of(&r, c);
    state now = state_at(c, take(&r, state_floats(c)));
    load_state(c, group, c->s, c->zm, now);
    for (int64_t n = 0; n < c->num_chunks; n++) {
        if (c->kept && n && n % c->save_every == 0)
            memcpy(c->kept + (group * ((c->num_chunks - 1) / c->save_every) + saved++) * state_floats(c), now.s,
                   4 * state_floats(c));
        chunk at;
        look_at(c, group, n, &at);
        int64_t lanes = at.lanes;
        make_features(c, group, c->k, at.begin, at.length, keys, rows);
        if (c->key_scale.at || at.length < lanes) weigh(keys.phi, c->features, lanes, at.weight);
        pack(v, values, c->v, c->heads, group, at.begin, at.length, lanes, c->values);
        if (at.fresh) memset(now.s, 0, 4 * state_floats(c));
        *now.mass = add_masses(c, &at, *now.mass, masses);
        if (c->q.at) {
            make_features(c, group, c->q, at.begin, at.length, queries, rows);
            multiply(&m, num, values, 0.0f, (factor){queries.phi, 1, CHUNK}, now.s, values, at.length, values,
                     c->features);
            if (gated) {
                weigh_rows(num, values, at.length, at.into);
                pair_weights(&at, weights);
            }
            pair_products(&m, lanes, pairs, CHUNK, (factor){queries.phi, 1, CHUNK}, keys.phi, CHUNK, c->features);
            weigh_pairs(&at, pairs, gated ? weights : NULL);
            denominators(c, &at, queries.phi, now.z, pairs, den);
            add_values(&m, at.length, lanes, num, pairs, CHUNK, v, values, values);
            for (int64_t t = 0; t < at.length; t++)
                write_output(c, group, at.begin + t, num + t * values, den[t], masses[t]);
        }
        if (gated) weigh(keys.phi, c->features, lanes, at.left);
        advance(c, &m, &at, now, keys.phi, v);
    }
    store_state(c, group, now, c->s_after, c->zm_after);
}

INLINE int64_t forward_floats(const call *c) {
    return 2 * SIDE_FLOATS(c) + CHUNK * (round_up(c->size, LANES) + 2 * round_up(c->values, LANES) + 2 * CHUNK) +
           state_floats(c) + matrices_floats(c) + 256;
}
