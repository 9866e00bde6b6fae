/* Products of the rows of a chunk with its earlier columns, decayed in between, and rows and columns decayed to the
   chunk's edges. No sum of log decays reaches behind a pair, so none is positive where decays are below 1, none is a
   difference, and a closed gate leaves 0. */
#pragma once
#include "affine_chunk.h"

/* Zeros where a column is not before its row, to the end of the stripe. */
INLINE void keep_earlier(float *pairs, int64_t lanes) {
    for (int64_t i = 0; i < lanes; i++)
        for (int64_t j = i; j < round_up(i + 1, STRIPE); j++) pairs[i * PAIR_ROW + j] = 0.0f;
}

/* Times what a scalar decay leaves between the tokens of a pair. */
static void weigh_between(const desk *d, float *pairs, int64_t lanes, int without) {
    for (int64_t i = without; i < lanes; i++)
        for (int64_t j = 0; j < i; j += LANES) {
            float *to = pairs + i * PAIR_ROW + j;
            store(to, load(to) * load(d->weights + (i - without) * PAIR_ROW + j));
        }
    keep_earlier(pairs, lanes);
}

static void scalar_pairs(const call *c, desk *d, const chunk *at, const int there[2]) {
    int64_t K = d->K, lanes = at->lanes;
    for (int x = 0; x < 1 + (c->a.at != NULL); x++) {
        transposed(d->turned[x], PAIR_ROW, d->col[x], K, lanes, round_up(c->size, LANES));
        for (int r = 0; r < 2; r++)
            if (there[r]) {
                pair_products(&d->m, lanes, d->pairs[r][x], PAIR_ROW, (factor){d->row[r], K, 1}, d->turned[x], PAIR_ROW,
                              c->size);
                weigh_between(d, d->pairs[r][x], lanes, exclusive(c, r));
            }
        for (int64_t k = 0; k < c->size; k++)
            for (int64_t t = 0; t < lanes; t += LANES) {
                float *to = d->turned[x] + k * PAIR_ROW + t;
                store(to, load(to) * load(at->to + t));
            }
    }
    for (int r = 0; r < 2; r++)
        for (int64_t t = 0; there[r] && t < lanes; t++) {
            float left = (exclusive(c, r) ? at->before : at->from)[t];
            for (int64_t k = 0; k < c->size; k += LANES)
                store(d->full[r] + t * K + k, load(d->row[r] + t * K + k) * left);
        }
}

/* One token's step of the columns before it, four at a time: products with `rows` of these, which go to `out`. */
INLINE void walk_step(const int rows, const float *const *row, float *const *out, float *x, const float *gate,
                      int64_t K, int64_t size, int64_t columns) {
    for (int64_t j = 0; j < columns; j += 4) {
        vec sums[2][4] = {{{0}}};
        for (int64_t k = 0; k < size; k += LANES)
            for (int i = 0; i < 4; i++) {
                float *to = x + (j + i) * K + k;
                vec one = load(to);
                for (int r = 0; r < rows; r++) sums[r][i] += one * load(row[r] + k);
                if (gate) store(to, one * load(gate + k));
            }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 4; i++) out[r][j + i] = total(sums[r][i]);
    }
}

/* The pairs within a stripe: columns are multiplied on from token to token. */
static void walk_stripe(const call *c, desk *d, int64_t first, int x, const int there[2]) {
    int64_t K = d->K;
    memset(d->walk, 0, 4 * STRIPE * K);
    for (int64_t i = 0; i < STRIPE; i++) {
        const float *row[2];
        float *out[2];
        int rows = 0;
        memcpy(d->walk + i * K, d->col[x] + (first + i) * K, 4 * round_up(c->size, LANES));
        for (int r = 0; r < 2; r++) {
            int64_t t = i + exclusive(c, r);
            if (!there[r] || t == STRIPE) continue;
            row[rows] = d->row[r] + (first + t) * K, out[rows++] = d->pairs[r][x] + (first + t) * PAIR_ROW + first;
        }
        const float *gate = i + 1 < STRIPE ? d->gate + (first + i + 1) * K : NULL;
        if (rows == 2) walk_step(2, row, out, d->walk, gate, K, c->size, i + 1);
        else if (rows == 1) walk_step(1, row, out, d->walk, gate, K, c->size, i + 1);
        else walk_step(0, row, out, d->walk, gate, K, c->size, i + 1);
    }
}

/* Rows of a stripe, decayed from its start and from the chunk's. */
static void near_rows(const call *c, desk *d, int64_t first, int r) {
    int64_t K = d->K;
    for (int64_t k = 0; k < c->size; k += LANES)
        for (int64_t t = first; t < first + STRIPE; t++) {
            vec one = load(d->row[r] + t * K + k) * from_stripe(d, t, k, exclusive(c, r));
            store(d->near[r] + (t - first) * K + k, one);
            store(d->full[r] + t * K + k, one * load(d->start + k));
        }
}

static void next_start(const call *c, desk *d, int64_t first) {
    for (int64_t k = 0; k < c->size; k += LANES)
        store(d->start + k, load(d->start + k) * load(d->gain + first / STRIPE * d->K + k));
}

/* Columns before a stripe are decayed to its start; here they go on to its end, and its own join them. */
static void columns_onward(const call *c, desk *d, int64_t first, int x) {
    int64_t K = d->K;
    for (int64_t k = 0; k < c->size; k++)
        for (int64_t t = 0; t < first; t += LANES) {
            float *to = d->turned[x] + k * PAIR_ROW + t;
            store(to, load(to) * d->gain[first / STRIPE * K + k]);
        }
    for (int64_t t = 0; t < STRIPE; t++)
        for (int64_t k = 0; k < c->size; k += LANES)
            store(d->walk + t * K + k, load(d->col[x] + (first + t) * K + k) * load(d->to + (first + t) * K + k));
    transposed(d->turned[x] + first, PAIR_ROW, d->walk, K, STRIPE, round_up(c->size, LANES));
}

static void vector_pairs(const call *c, desk *d, const chunk *at, const int there[2]) {
    for (int64_t k = 0; k < c->size; k += LANES) store(d->start + k, all(1.0f));
    for (int64_t i = 0; i < at->lanes; i += STRIPE) {
        for (int r = 0; r < 2; r++)
            if (there[r]) near_rows(c, d, i, r);
        for (int x = 0; x < 1 + (c->a.at != NULL); x++) {
            for (int r = 0; i && r < 2; r++)
                if (there[r])
                    multiply(&d->m, d->pairs[r][x] + i * PAIR_ROW, PAIR_ROW, 0.0f, (factor){d->near[r], d->K, 1},
                             d->turned[x], PAIR_ROW, STRIPE, i, c->size);
            if (there[OF_B] || there[OF_Q]) walk_stripe(c, d, i, x, there);
            columns_onward(c, d, i, x);
        }
        next_start(c, d, i);
    }
    for (int x = 0; x < 1 + (c->a.at != NULL); x++)
        for (int r = 0; r < 2; r++)
            if (there[r]) keep_earlier(d->pairs[r][x], at->lanes);
}

INLINE float dot(const float *a, const float *b, int64_t floats) {
    vec sum = {0};
    for (int64_t i = 0; i < floats; i += LANES) sum += load(a + i) * load(b + i);
    return total(sum);
}

/* Whether queries see their own token in the columns x; when they read before it, only through a bonus. */
INLINE int sees_itself(const call *c, int x) { return !c->reads_before || (c->bonus && x == OF_K); }

/* Decayed rows and columns of a chunk, and all pairs of those rows that are there. */
static void make_pairs(const call *c, int64_t group, desk *d, const chunk *at, int queries) {
    int there[2] = {erases(c), queries};
    if (c->decays > 1) vector_pairs(c, d, at, there);
    else scalar_pairs(c, d, at, there);
    for (int x = 0; queries && x < 1 + (c->a.at != NULL); x++) {
        if (!sees_itself(c, x)) continue;
        for (int64_t t = 0; t < at->lanes; t++) {
            const float *q = d->row[OF_Q] + t * d->K, *column = d->col[x] + t * d->K;
            float sum = 0.0f;
            if (!c->reads_before) sum = dot(q, column, c->size);
            else
                for (int64_t k = 0; k < c->size; k++) sum += q[k] * c->bonus[group % c->heads * c->size + k] * column[k];
            d->pairs[OF_Q][x][t * PAIR_ROW + t] = sum;
        }
    }
}
