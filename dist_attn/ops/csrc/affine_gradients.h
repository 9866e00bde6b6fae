/* From the gradients of the decayed rows, columns and pairs of a chunk to those of its rows, columns and decays.

   What a gate is worth is a sum over what it lies between, without differences, so a closed gate is worth 0 exactly. */
#pragma once
#include "affine_forward.h"

typedef struct {
    float *of_out, *of_read, *of_value[2]; /* [CHUNK, V]; read: of what rows of b see */
    float *of_row[2], *of_col[2];          /* [CHUNK, K]: of decayed ones, then of these as they come */
    float *of_pairs[2][2];
    float *own[2];       /* [CHUNK]: of pairs of a query with its own token */
    float *turned_value; /* [values, PAIR_ROW] */
    float *turned_state; /* [values, K] */
    float *of_log;       /* [CHUNK, K], or [CHUNK] */
    float *of_beta;      /* [CHUNK] */
    float *of_bonus, *of_gain; /* [K] */
    float *carry;        /* [K]: what later stripes of rows say of a gate */
    float *stage[2];     /* columns decayed to the start of each stripe: of 16, 32, 48 and 64 tokens */
    float *of_near[2];   /* [STRIPE, K] */
} slopes;

static slopes take_slopes(room *r, const call *c, const desk *d) {
    slopes g;
    int64_t keys = CHUNK * d->K, values = CHUNK * d->V, vector = c->decays > 1;
    g.of_out = take(r, values), g.of_read = take(r, values);
    for (int i = 0; i < 2; i++) {
        g.of_value[i] = take(r, values), g.of_row[i] = take(r, keys), g.of_col[i] = take(r, keys);
        for (int j = 0; j < 2; j++) g.of_pairs[i][j] = take(r, CHUNK * PAIR_ROW);
        g.own[i] = take(r, CHUNK);
        g.stage[i] = take(r, vector * STRIPE * STRIPES * (STRIPES + 1) / 2 * d->K);
        g.of_near[i] = take(r, vector * STRIPE * d->K);
    }
    g.turned_value = take(r, round_up(c->values, LANES) * PAIR_ROW);
    g.turned_state = take(r, round_up(c->values, LANES) * d->K);
    g.of_log = take(r, keys), g.of_beta = take(r, CHUNK), g.of_bonus = take(r, d->K), g.of_gain = take(r, d->K);
    g.carry = take(r, d->K);
    return g;
}

/* out += pairs^T y: what reaches columns from their later rows. */
static void add_later(float *out, const float *pairs, const float *y, int64_t lanes, int64_t row, int64_t columns) {
    for (int64_t j = 0; j < lanes; j += STRIPE)
        product(out + j * row, row, 1.0f, (factor){pairs + j * PAIR_ROW + j, 1, PAIR_ROW}, y + j * row, row, STRIPE,
                columns, lanes - j);
}

/* What the gates of a chunk lie between, of pairs of one kind, weighed and with their gradients not yet; to `worth`. */
static void between_pairs(const float *pairs, const float *of_pairs, int64_t lanes, int without, float *worth) {
    float of_column[CHUNK] __attribute__((aligned(64))) = {0};
    int32_t number[CHUNK] __attribute__((aligned(64)));
    for (int t = 0; t < CHUNK; t++) number[t] = t;
    for (int64_t t = lanes - 1; t >= 0; t--) {
        int64_t i = t + without; /* the first row behind the gate of t */
        for (int64_t j = 0; i < lanes && j < i; j += LANES)
            store(of_column + j,
                  load(of_column + j) + load(pairs + i * PAIR_ROW + j) * load(of_pairs + i * PAIR_ROW + j));
        vec sum = {0};
        for (int64_t j = 0; j < t; j += LANES)
            sum += choose(*(const ints *)(number + j) < (int32_t)t, load(of_column + j), all(0.0f));
        worth[t] += total(sum);
    }
}

static void scalar_gradients(const call *c, desk *d, const chunk *at, slopes *g, const int there[2], float crossing) {
    int64_t K = d->K, lanes = at->lanes, columns = round_up(c->size, LANES);
    float sum = crossing;
    for (int64_t t = 0; t < lanes; t++) g->of_log[t] = 0.0f;
    for (int x = 0; x < 1 + (c->a.at != NULL); x++) {
        float later = 0.0f;
        for (int64_t t = 0; t < lanes; t++) {
            float *of = g->of_col[x] + t * K;
            g->of_log[t] += later + (x == 0 ? crossing : 0.0f);
            for (int64_t k = 0; k < columns; k += LANES) store(of + k, load(of + k) * at->to[t]);
            later += dot(of, d->col[x] + t * K, columns);
        }
    }
    for (int r = 0; r < 2; r++) {
        if (!there[r]) continue;
        int without = exclusive(c, r);
        sum = 0.0f;
        for (int64_t t = lanes - 1; t >= 0; t--) {
            float *of = g->of_row[r] + t * K, left = (without ? at->before : at->from)[t];
            if (without) g->of_log[t] += sum;
            for (int64_t k = 0; k < columns; k += LANES) store(of + k, load(of + k) * left);
            sum += dot(of, d->row[r] + t * K, columns);
            if (!without) g->of_log[t] += sum;
        }
        for (int x = 0; x < 1 + (c->a.at != NULL); x++) {
            float *of = g->of_pairs[r][x];
            keep_earlier(of, lanes);
            between_pairs(d->pairs[r][x], of, lanes, without, g->of_log);
            weigh_between(d, of, lanes, without);
            add_values(&d->m, lanes, lanes, g->of_row[r], of, PAIR_ROW, d->col[x], K, columns);
            add_later(g->of_col[x], of, d->row[r], lanes, K, columns);
        }
    }
}

/* Columns decayed to the start of stripe i: those of the i stripes before it. */
INLINE float *stage_of(const desk *d, const slopes *g, int x, int64_t i) {
    return g->stage[x] + STRIPE * i * (i - 1) / 2 * d->K;
}

static void make_stages(const call *c, const desk *d, const chunk *at, slopes *g, int x) {
    int64_t K = d->K;
    for (int64_t i = 0; i < at->lanes / STRIPE; i++) {
        const float *now = stage_of(d, g, x, i);
        float *next = stage_of(d, g, x, i + 1);
        for (int64_t t = 0; t < (i + 1) * STRIPE; t++)
            for (int64_t k = 0; k < c->size; k += LANES)
                store(next + t * K + k, t < i * STRIPE ? load(now + t * K + k) * load(d->gain + i * K + k)
                                                       : load(d->col[x] + t * K + k) * load(d->to + t * K + k));
    }
}

/* Columns' gradients from those at the end of stripe i to those at its start, or of columns as they come. */
static void columns_back(const call *c, const desk *d, slopes *g, int x, int64_t i) {
    int64_t K = d->K, first = i * STRIPE;
    const float *after = stage_of(d, g, x, i + 1);
    for (int64_t k = 0; k < c->size; k += LANES) {
        vec gain = load(d->gain + i * K + k), worth = load(g->of_gain + k);
        for (int64_t t = 0; t < first; t++) {
            float *of = g->of_col[x] + t * K + k;
            worth += load(after + t * K + k) * load(of);
            store(of, load(of) * gain);
        }
        store(g->of_gain + k, worth);
        vec sum = {0};
        for (int64_t t = first; t < first + STRIPE; t++) {
            float *of = g->of_col[x] + t * K + k, *of_log = g->of_log + t * K + k;
            store(of_log, load(of_log) + sum);
            sum += load(after + t * K + k) * load(of);
            store(of, load(of) * load(d->to + t * K + k));
        }
    }
}

/* Rows of a stripe: from the gradients of those decayed from the stripe's and the chunk's start. */
static void rows_back(const call *c, const desk *d, slopes *g, int r, int64_t first) {
    int64_t K = d->K, without = exclusive(c, r);
    for (int64_t k = 0; k < c->size; k += LANES) {
        vec start = load(d->start + k), sum = {0}, carry = load(g->carry + k);
        for (int64_t t = first + STRIPE - 1; t >= first; t--) {
            float *of = g->of_row[r] + t * K + k, *of_log = g->of_log + t * K + k;
            vec near = load(d->near[r] + (t - first) * K + k), full = load(of) * start;
            vec both = full + load(g->of_near[r] + (t - first) * K + k);
            if (without) store(of_log, load(of_log) + sum);
            sum += near * both, carry += near * full;
            if (!without) store(of_log, load(of_log) + sum);
            store(of, both * from_stripe(d, t, k, without));
        }
        store(g->carry + k, carry);
    }
}

/* The pairs within a stripe, one vector of key channels at a time. */
static void walk_back(const call *c, const desk *d, slopes *g, int x, int64_t first, const int there[2]) {
    int64_t K = d->K;
    for (int64_t k = 0; k < c->size; k += LANES) {
        vec decayed[STRIPE][STRIPE], of[STRIPE];
        for (int64_t i = 0; i < STRIPE; i++) {
            vec gate = load(d->gate + (first + i) * K + k);
            for (int64_t j = 0; j < i; j++) decayed[i][j] = decayed[i - 1][j] * gate;
            decayed[i][i] = load(d->col[x] + (first + i) * K + k);
            of[i] = (vec){0};
        }
        for (int64_t i = STRIPE - 1; i >= 0; i--) {
            for (int r = 0; r < 2; r++) {
                int without = exclusive(c, r);
                int64_t t = first + i + without;
                if (!there[r] || i + without == STRIPE) continue;
                vec row = load(d->row[r] + t * K + k), sum = load(g->of_row[r] + t * K + k);
                const float *weight = g->of_pairs[r][x] + t * PAIR_ROW + first;
                for (int64_t j = 0; j < i + without; j++) {
                    of[j] += weight[j] * row;
                    sum += weight[j] * decayed[i][j];
                }
                store(g->of_row[r] + t * K + k, sum);
            }
            vec gate = load(d->gate + (first + i) * K + k), worth = load(g->of_log + (first + i) * K + k);
            for (int64_t j = 0; j < i; j++) worth += decayed[i][j] * of[j], of[j] *= gate;
            store(g->of_log + (first + i) * K + k, worth);
            float *to = g->of_col[x] + (first + i) * K + k;
            store(to, load(to) + of[i]);
        }
    }
}

/* What the stripes before i leave of the chunk's start. */
static void start_of(const call *c, desk *d, int64_t i) {
    for (int64_t k = 0; k < c->size; k += LANES) {
        vec left = all(1.0f);
        for (int64_t n = 0; n < i; n++) left *= load(d->gain + n * d->K + k);
        store(d->start + k, left);
    }
}

/* `crossing` [K]: what the state before and after the chunk says of each of its gates. */
static void vector_gradients(const call *c, desk *d, const chunk *at, slopes *g, const int there[2],
                             const float *crossing) {
    int64_t K = d->K, columns = round_up(c->size, LANES);
    memset(g->of_log, 0, 4 * at->lanes * K), memset(g->carry, 0, 4 * K);
    for (int x = 0; x < 1 + (c->a.at != NULL); x++) make_stages(c, d, at, g, x);
    for (int64_t i = at->lanes / STRIPE - 1; i >= 0; i--) {
        int64_t first = i * STRIPE;
        memcpy(g->of_gain, g->carry, 4 * columns); /* of rows behind the stripe, before its own join them */
        start_of(c, d, i);
        for (int r = 0; r < 2; r++) {
            if (!there[r]) continue;
            near_rows(c, d, first, r);
            memset(g->of_near[r], 0, 4 * STRIPE * K);
        }
        for (int x = 0; x < 1 + (c->a.at != NULL); x++) {
            columns_back(c, d, g, x, i);
            for (int r = 0; i && r < 2; r++) {
                if (!there[r]) continue;
                const float *of = g->of_pairs[r][x] + first * PAIR_ROW;
                multiply(&d->m, g->of_near[r], K, 1.0f, (factor){of, PAIR_ROW, 1}, stage_of(d, g, x, i), K, STRIPE,
                         columns, first);
                multiply(&d->m, g->of_col[x], K, 1.0f, (factor){of, 1, PAIR_ROW}, d->near[r], K, first, columns, STRIPE);
            }
        }
        for (int r = 0; r < 2; r++)
            if (there[r]) rows_back(c, d, g, r, first);
        for (int x = 0; x < 1 + (c->a.at != NULL); x++) walk_back(c, d, g, x, first, there);
        for (int64_t t = first; t < first + STRIPE; t++)
            for (int64_t k = 0; k < columns; k += LANES) {
                float *to = g->of_log + t * K + k;
                store(to, load(to) + load(g->of_gain + k) + load(crossing + k));
            }
    }
}

/* Pairs of queries with their own tokens, which nothing decays. */
static void own_gradients(const call *c, int64_t group, const desk *d, const chunk *at, slopes *g, int x) {
    if (!sees_itself(c, x)) return;
    const float *bonus = c->reads_before ? c->bonus + group % c->heads * c->size : NULL;
    for (int64_t t = 0; t < at->length; t++) {
        const float *q = d->row[OF_Q] + t * d->K, *column = d->col[x] + t * d->K;
        float *of_q = g->of_row[OF_Q] + t * d->K, *of_column = g->of_col[x] + t * d->K, own = g->own[x][t];
        for (int64_t k = 0; k < c->size; k++) {
            float weight = bonus ? bonus[k] * own : own;
            of_q[k] += weight * column[k], of_column[k] += weight * q[k];
            if (bonus) g->of_bonus[k] += own * q[k] * column[k];
        }
    }
}
