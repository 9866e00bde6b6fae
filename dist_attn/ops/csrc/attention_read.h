/* Queries that all read one state, decayed where gates lie between, with sums of their own where there are some. */
#pragma once
#include "attention_backward.h"

#define VANISHED -87.3 /* a state whose log decay is below is 0 in normal numbers */

/* What is left of the state at a chunk's queries, given the log decay before the chunk; 0: nothing. */
INLINE int decay_of(const call *c, chunk *at, double before) {
    if (!c->log_gate.at) {
        for (int64_t t = 0; t < CHUNK; t++) at->into[t] = 1.0f;
        return 1;
    }
    for (int64_t t = 0; t < at->lanes; t += LANES) {
        vec exponent;
        for (int i = 0; i < LANES; i++) exponent[i] = (float)(before + at->decay[t + i]);
        store(at->into + t, exponential(exponent));
    }
    return !(before < VANISHED); /* NaN has not vanished */
}

/* Denominators and masses of a chunk's queries. */
static void read_sums(const call *c, int64_t group, const chunk *at, const float *queries, state from, int there,
                      float *den, float *masses) {
    if (there) product(den, CHUNK, 0.0f, (factor){from.z, 0, 1}, queries, CHUNK, 1, at->lanes, c->features);
    for (int64_t t = 0; t < at->length; t++) {
        den[t] = there ? den[t] * at->into[t] : 0.0f;
        masses[t] = there ? *from.mass * at->into[t] : 0.0f;
        if (!c->sums.at) continue;
        const float *row = (const float *)row_of(c->sums, group, c->heads, at->begin + t);
        den[t] += row[c->values], masses[t] += row[c->values + 1];
    }
}

static void read_group(const call *c, int64_t group, float *memory) {
    room r = {memory, 0};
    int64_t values = round_up(c->values, LANES);
    side queries = take_side(&r, c);
    float *rows = take(&r, CHUNK * round_up(c->size, LANES)), *num = take(&r, CHUNK * values);
    matrices m = matrices_of(&r, c);
    state from = state_at(c, take(&r, state_floats(c)));
    float den[CHUNK] __attribute__((aligned(64))), masses[CHUNK];
    double decay = 0.0;
    load_state(c, group, c->s, c->zm, from);
    for (int64_t n = 0; n < c->num_chunks; n++) {
        chunk at;
        look_at(c, group, n, &at);
        int there = decay_of(c, &at, decay);
        if (there) {
            make_features(c, group, c->q, at.begin, at.length, queries, rows);
            multiply(&m, num, values, 0.0f, (factor){queries.phi, 1, CHUNK}, from.s, values, at.length, values,
                     c->features);
            weigh_rows(num, values, at.length, at.into);
        } else {
            memset(num, 0, 4 * CHUNK * values);
        }
        read_sums(c, group, &at, queries.phi, from, there, den, masses);
        for (int64_t t = 0; t < at.length; t++) {
            if (c->sums.at)
                for (int64_t j = 0; j < values; j += LANES) {
                    float *to = num + t * values + j;
                    const char *row = row_of(c->sums, group, c->heads, at.begin + t);
                    store(to, load(to) + read_row(row, c->sums.type, j, c->values));
                }
            write_output(c, group, at.begin + t, num + t * values, den[t], masses[t]);
        }
        if (c->log_gate.at) decay += at.decay[at.length - 1];
    }
}

static void read_backward_group(const call *c, int64_t group, float *memory) {
    room r = {memory, 0};
    desk d = take_desk(&r, c);
    int64_t values = round_up(c->values, LANES), columns = round_up(c->size, LANES), M = c->features;
    state from = state_at(c, take(&r, state_floats(c))), grad = state_at(c, d.before);
    double *decays = (double *)d.inner, later = 0.0; /* before each chunk */
    load_state(c, group, c->s, c->zm, from);
    load_state(c, group, NULL, NULL, grad);
    if (c->grad_w) memset(d.grad_w, 0, 4 * c->projections * columns);
    double decay = 0.0;
    for (int64_t n = 0; n < c->num_chunks; n++) {
        chunk at;
        look_at(c, group, n, &at);
        decays[n] = decay;
        if (c->log_gate.at) decay += at.decay[at.length - 1];
    }
    for (int64_t n = c->num_chunks - 1; n >= 0; n--) {
        chunk at;
        float den[CHUNK] __attribute__((aligned(64))), masses[CHUNK];
        float of_den[CHUNK] __attribute__((aligned(64))), of_mass[CHUNK];
        float at_query[CHUNK] __attribute__((aligned(64))) = {0};
        look_at(c, group, n, &at);
        int there = decay_of(c, &at, decays[n]);
        if (there) {
            make_features(c, group, c->q, at.begin, at.length, d.queries, d.rows);
            if (at.length < at.lanes) weigh(d.queries.phi, M, at.lanes, at.present);
        }
        read_sums(c, group, &at, d.queries.phi, from, there, den, masses);
        through_divisor(c, group, &at, &d, den, masses, of_den, of_mass);
        for (int64_t t = 0; c->grad_sums.at && t < at.length; t++) {
            char *row = row_of(c->grad_sums, group, c->heads, at.begin + t);
            for (int64_t j = 0; j < values; j += LANES)
                write_row(row, c->grad_sums.type, j, c->values, load(d.of_num + t * values + j));
            ((float *)row)[c->values] = of_den[t], ((float *)row)[c->values + 1] = of_mass[t];
        }
        for (int64_t t = 0; t < at.length; t++) *grad.mass += there ? at.into[t] * of_mass[t] : 0.0f;
        if (there) {
            multiply(&d.m, d.of_queries, CHUNK, 0.0f, (factor){from.s, values, 1}, d.of_num_turned, CHUNK, M, at.lanes,
                     c->values);
            for (int64_t m = 0; m < M; m++)
                for (int64_t t = 0; t < at.lanes; t += LANES) {
                    float *to = d.of_queries + m * CHUNK + t;
                    store(to, (load(to) + from.z[m] * load(of_den + t)) * load(at.into + t));
                }
            if (c->log_gate.at) column_dots(d.queries.phi, d.of_queries, M, at.lanes, at_query);
            if (c->grad_q.at || c->grad_w)
                features_gradient(c, group, d.queries, at.present, d.of_queries, c->grad_q, at.begin, at.length, d.grad_x,
                                  d.rows, c->grad_w ? d.grad_w : NULL);
            weigh(d.queries.phi, M, at.lanes, at.into);
            multiply(&d.m, grad.s, values, 1.0f, (factor){d.queries.phi, CHUNK, 1}, d.of_num, values, M, values,
                     at.length);
            for (int64_t m = 0; m < M; m++) grad.z[m] += dot(d.queries.phi + m * CHUNK, of_den, at.lanes);
        } else if (c->grad_q.at) {
            for (int64_t t = 0; t < at.length; t++)
                memset(row_of(c->grad_q, group, c->heads, at.begin + t), 0, (c->grad_q.type == BFLOAT16 ? 2 : 4) * c->size);
        }
        if (!c->grad_log_gate) continue;
        for (int64_t t = at.length - 1; t >= 0; t--) {
            if (there) later += at_query[t] + of_mass[t] * at.into[t] * *from.mass;
            float given = number_at(c->log_gate, group, c->heads, at.begin + t);
            c->grad_log_gate[group * c->tokens + at.begin + t] = given < CLOSED ? 0.0f : (float)later;
        }
    }
    store_state(c, group, grad, c->grad_s, c->grad_zm);
    for (int64_t i = 0; c->grad_w && i < c->projections; i++)
        memcpy(c->grad_w + (group * c->projections + i) * c->size, d.grad_w + i * columns, 4 * c->size);
}

/* The gradient of the state before an attention without gates, from that of its outputs and its denominators. */
static void adjoint_group(const call *c, int64_t group, float *memory) {
    room r = {memory, 0};
    desk d = take_desk(&r, c);
    int64_t values = round_up(c->values, LANES), M = c->features;
    state grad = state_at(c, d.before);
    load_state(c, group, NULL, NULL, grad);
    for (int64_t n = 0; n < c->num_chunks; n++) {
        chunk at;
        float of_den[CHUNK] __attribute__((aligned(64))), of_mass[CHUNK];
        look_at(c, group, n, &at);
        make_features(c, group, c->q, at.begin, at.length, d.queries, d.rows);
        if (at.length < at.lanes) weigh(d.queries.phi, M, at.lanes, at.present);
        int64_t token = group * c->tokens + at.begin;
        divide_gradient(c, group, &at, &d, c->den + token, c->mass + token, of_den, of_mass);
        multiply(&d.m, grad.s, values, 1.0f, (factor){d.queries.phi, CHUNK, 1}, d.of_num, values, M, values, at.length);
        for (int64_t m = 0; m < M; m++) grad.z[m] += dot(d.queries.phi + m * CHUNK, of_den, at.lanes);
        for (int64_t t = 0; t < at.length; t++) *grad.mass += of_mass[t];
    }
    store_state(c, group, grad, c->grad_s, c->grad_zm);
}
