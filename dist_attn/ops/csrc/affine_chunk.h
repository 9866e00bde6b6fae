/* One chunk of an affine recurrence: its rows and columns, and what decays leave of them.

   Of a delta rule a row is b = -k, and a column is k, written with beta W, W = v + b^T S. */
#pragma once
#include "affine_call.h"

typedef struct {
    int64_t begin, length, lanes; /* lanes: whole stripes */
    int fresh;
    float beta[CHUNK] __attribute__((aligned(64)));
    /* Of a scalar decay: what is left from the chunk's start to each token, with its own decay and without; of each
       token at the chunk's end; and from start to end. */
    float from[CHUNK] __attribute__((aligned(64))), before[CHUNK] __attribute__((aligned(64)));
    float to[CHUNK] __attribute__((aligned(64)));
    float gain;
} chunk;

typedef struct {
    int64_t K, V;                  /* floats of a row of keys and of values */
    float *row[2], *col[2];        /* [CHUNK, K] as they come, */
    float *full[2];                /* rows decayed from the chunk's start, */
    float *turned[2];              /* [size, PAIR_ROW]: columns decayed to its end */
    float *v, *value[2], *num;     /* [CHUNK, V]; value: what columns are written with */
    float *pairs[2][2];            /* [CHUNK, PAIR_ROW]: of rows with earlier columns */
    float *solved, *system, *inverse, *some;
    float *weights;                /* of a scalar decay: what is left from one token to another */
    float *log, *gate, *from, *to; /* of a vector decay, [CHUNK, K]: its own, and from and to the edges of a stripe */
    float *gain;                   /* [STRIPES, K] */
    float *start, *total;          /* [K]: from the chunk's start to the stripe's; to the chunk's end */
    float *near[2];                /* [STRIPE, K]: rows decayed from the start of their stripe */
    float *walk;                   /* [STRIPE, K] */
    matrices m;
} desk;

#define STRIPES (CHUNK / STRIPE)

static desk take_desk(room *r, const call *c) {
    desk d;
    d.K = row_floats(c->size), d.V = row_floats(c->values);
    int64_t keys = CHUNK * d.K, values = CHUNK * d.V, vector = c->decays > 1;
    for (int i = 0; i < 2; i++) {
        int row = i == OF_Q ? c->q.at != NULL : erases(c), col = i == OF_K || c->a.at;
        d.row[i] = take(r, row * keys), d.full[i] = take(r, row * keys), d.near[i] = take(r, vector * STRIPE * d.K);
        d.col[i] = take(r, col * keys), d.turned[i] = take(r, col * round_up(c->size, LANES) * PAIR_ROW);
        d.value[i] = take(r, col * values);
        for (int j = 0; j < 2; j++) d.pairs[i][j] = take(r, CHUNK * PAIR_ROW);
    }
    d.v = take(r, values), d.num = take(r, values), d.solved = take(r, values);
    d.system = take(r, CHUNK * PAIR_ROW), d.inverse = take(r, STRIPE * STRIPE), d.some = take(r, STRIPE * d.V);
    d.weights = take(r, CHUNK * PAIR_ROW);
    d.log = take(r, vector * keys), d.gate = take(r, vector * keys);
    d.from = take(r, vector * keys), d.to = take(r, vector * keys);
    d.gain = take(r, vector * STRIPES * d.K), d.start = take(r, d.K), d.total = take(r, d.K);
    d.walk = take(r, STRIPE * d.K);
    /* What a state does to later ones is wanted in float32: bfloat16 products are for outputs. */
    int half = HALF_PRODUCTS && c->q.at && c->q.type == BFLOAT16 && c->k.type == BFLOAT16 && c->v.type == BFLOAT16;
    d.m = take_matrices(r, half, largest_factor(c->size > c->values ? c->size : c->values,
                                                c->size > c->values ? c->size : c->values));
    return d;
}

static void scalar_decays(const call *c, int64_t group, desk *d, chunk *at) {
    float log[CHUNK] __attribute__((aligned(64))), between[CHUNK] __attribute__((aligned(64))) = {0}, sum = 0.0f;
    for (int64_t t = 0; t < at->lanes; t++) {
        log[t] = t < at->length ? number_at(c->log_decay, group, c->heads, at->begin + t) : 0.0f;
        at->before[t] = sum, sum += log[t], at->from[t] = sum;
    }
    at->gain = exponential(all(sum))[0];
    sum = 0.0f;
    for (int64_t t = at->lanes - 1; t >= 0; t--) at->to[t] = sum, sum += log[t];
    for (int64_t t = 0; t < at->lanes; t += LANES) {
        store(at->from + t, exponential(load(at->from + t)));
        store(at->before + t, exponential(load(at->before + t)));
        store(at->to + t, exponential(load(at->to + t)));
    }
    /* Sums of the decays between two tokens, each by itself: differences of sums would lose what is small. */
    for (int64_t i = 0; i < at->lanes; i++) {
        for (int64_t j = 0; j <= i; j += LANES) {
            vec one = load(between + j) + log[i];
            store(between + j, one);
        }
        between[i] = 0.0f;
        for (int64_t j = 0; j <= i; j += LANES) store(d->weights + i * PAIR_ROW + j, exponential(load(between + j)));
    }
}

static void vector_decays(const call *c, int64_t group, desk *d, const chunk *at) {
    int64_t K = d->K;
    pack(d->log, K, c->log_decay, c->heads, group, at->begin, at->length, at->lanes, c->size);
    for (int64_t k = 0; k < c->size; k += LANES) {
        vec total = all(1.0f);
        for (int64_t i = 0; i < at->lanes; i += STRIPE) {
            vec sum = {0};
            for (int64_t t = i; t < i + STRIPE; t++) {
                vec one = load(d->log + t * K + k);
                sum += one;
                store(d->gate + t * K + k, exponential(one));
                store(d->from + t * K + k, exponential(sum));
            }
            vec gain = load(d->from + (i + STRIPE - 1) * K + k);
            store(d->gain + i / STRIPE * K + k, gain);
            total *= gain;
            sum = (vec){0};
            for (int64_t t = i + STRIPE - 1; t >= i; t--) {
                store(d->to + t * K + k, exponential(sum));
                sum += load(d->log + t * K + k);
            }
        }
        store(d->total + k, total);
    }
}

/* What is left of the start of a stripe at token t, for one vector of key channels. */
INLINE vec from_stripe(const desk *d, int64_t t, int64_t k, int without) {
    if (without && t % STRIPE == 0) return all(1.0f);
    return load(d->from + (t - without) * d->K + k);
}

static void look_at(const call *c, int64_t number, chunk *at) {
    at->begin = c->chunks ? c->chunks[number] : number * CHUNK;
    int64_t end = c->chunks ? c->chunks[number + 1] : at->begin + CHUNK;
    at->length = (end < c->tokens ? end : c->tokens) - at->begin;
    at->lanes = round_up(at->length, STRIPE), at->fresh = c->fresh ? c->fresh[number] : 0;
}

static void read_chunk(const call *c, int64_t group, int64_t number, desk *d, chunk *at) {
    look_at(c, number, at);
    int64_t K = d->K, lanes = at->lanes;
    pack(d->col[OF_K], K, c->k, c->heads, group, at->begin, at->length, lanes, c->size);
    pack(d->v, d->V, c->v, c->heads, group, at->begin, at->length, lanes, c->values);
    if (c->a.at) {
        pack(d->col[OF_A], K, c->a, c->heads, group, at->begin, at->length, lanes, c->size);
        pack(d->row[OF_B], K, c->b, c->heads, group, at->begin, at->length, lanes, c->size);
    }
    if (c->beta.at)
        for (int64_t t = 0; t < lanes; t++) {
            at->beta[t] = t < at->length ? number_at(c->beta, group, c->heads, at->begin + t) : 0.0f;
            for (int64_t k = 0; k < c->size; k += LANES)
                store(d->row[OF_B] + t * K + k, -load(d->col[OF_K] + t * K + k));
        }
    if (c->decays > 1) vector_decays(c, group, d, at);
    else scalar_decays(c, group, d, at);
}

static void read_queries(const call *c, int64_t group, desk *d, const chunk *at) {
    pack(d->row[OF_Q], d->K, c->q, c->heads, group, at->begin, at->length, at->lanes, c->size);
}
