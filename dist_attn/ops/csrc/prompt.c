/* A layer of a model that writes, over many tokens of one text: the five operations of `fused_step.py`, with products of
   bfloat16 numbers and sums, softmax, norms and all that goes from layer to layer in float32.

   Blocks of tokens go through the layer one by one, each by the thread that comes to it, and wait for the keys of those
   before. A token's finite numbers depend on the tokens before it, and not on how many are read at once: keys are scored in
   parts that begin at multiples of KEYS of the text. */
#include "operations.h"
#include "squares.h"
#include <omp.h>
#include <sched.h>

#define KEYS 256    /* that are scored together: scores of a square of queries stay in the nearest cache */
#define BLOCK 512   /* tokens of a block, and of a part of the keys of before, at most */
#define SPINS 2000  /* looks at the other threads before the processor is left to others */

enum { QKV, ATTENTION, OUT, GATES, DOWN }; /* the operations of a layer */

/* What Python hands over. Mirrors `_Reading` of `decode_step.py`, field by field. */
typedef struct {
    const operation *operations;
    int64_t rows, size, threads;
    float *x;                    /* [rows, size], in place */
    cache of;                    /* of all tokens; the keys and values of the last `rows` are yet to be written */
    const float *cosine, *sine;  /* [rows, rotated] */
    uint8_t *work;               /* bytes that `dist_attn_prompt_bytes` asks for, beginning at a multiple of 64 */
} reading;

typedef struct {
    int64_t block, before, tasks;         /* tokens of a block; parts of the keys of before; those and blocks */
    int64_t filled, width, widest;        /* tokens in whole squares; columns of queries, keys, values; of tiles */
    int64_t key_words, value_words, each; /* of a group; bytes of a thread */
} plan;

/* Memory of a thread for a block. Words are two bfloat16 numbers. */
typedef struct {
    uint32_t *in, *out, *panels; /* [block, widest / 2] in tiles, twice; [2 SIDE, widest / 2] */
    float *memory;               /* [block, width] */
    int tiles;
} desk;

static int64_t in_lines(int64_t bytes) { return round_up(bytes, 64); }

static plan planned(const reading *r) {
    const operation *o = r->operations, *a = o + ATTENTION;
    int64_t past = r->of.tokens - r->rows;
    plan p = {.block = round_up((r->rows + r->threads - 1) / r->threads, SIDE), .filled = round_up(r->of.tokens, SIDE)};
    if (p.block > BLOCK) p.block = BLOCK;
    p.before = (past / SIDE * SIDE + BLOCK - 1) / BLOCK;
    p.tasks = p.before + (r->of.tokens + p.block - 1) / p.block - past / p.block;
    p.width = a->heads * a->size + a->groups * (a->size + a->values);
    p.widest = r->size;
    if (o[OUT].inputs > p.widest) p.widest = o[OUT].inputs;
    if (o[DOWN].inputs > p.widest) p.widest = o[DOWN].inputs;
    p.key_words = p.filled * a->size / 2, p.value_words = p.filled * a->values / 2;
    p.each = 2 * in_lines(2 * p.block * p.widest) + in_lines(4 * SIDE * p.widest) + in_lines(4 * p.block * p.width);
    return p;
}

int64_t dist_attn_prompt_bytes(const reading *r) {
    plan p = planned(r);
    return in_lines(4 * p.tasks) + r->operations[ATTENTION].groups * 4 * (p.key_words + p.value_words) + r->threads * p.each;
}

static void wait_for(const int *ready, int64_t tasks) {
    for (int64_t task = 0; task < tasks; task++)
        for (int looks = 0; !__atomic_load_n(ready + task, __ATOMIC_ACQUIRE); looks++)
            if (looks > SPINS) sched_yield();
            else _mm_pause();
}

/* Rows of x, normed, into tiles. */
static void norm_rows(uint32_t *to, const float *x, const operation *o, int64_t rows, float *line) {
    for (int64_t i = 0; i < rows; i++, x += o->inputs) {
        normed(line, x, o->norm, o->eps, o->inputs);
        for (int64_t j = 0; j < o->inputs; j += SIDE)
            store_words(tile_of(to, i, j, o->inputs), load_loose(line + j), load_loose(line + j + LANES));
    }
}

/* Scores [there] of a query of which it sees the first `seen`, into weights, `to` in tiles, that are not divided by their
   sum: adds that to `sum`. What was summed before is to be multiplied by what this returns. */
INLINE float weigh_more(const float *scores, uint32_t *to, float scale, int64_t seen, int64_t there, float *top, float *sum) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    int64_t j = 0;
    for (; j + LANES <= seen; j += LANES) most = _mm512_max_ps(most, _mm512_load_ps(scores + j));
    if (j < seen) most = _mm512_mask_max_ps(most, (__mmask16)((1u << (seen - j)) - 1), most, _mm512_load_ps(scores + j));
    float before = *top, now = _mm512_reduce_max_ps(most) * scale;
    now = now > before ? now : before;
    vec sums = {0}, highest = all(now);
    for (j = 0; j < there; j += SIDE, to += 256) {
        vec part[2] = {{0}};
        for (int half = 0; half < 2; half++) {
            int64_t at = j + half * LANES, left = seen - at;
            if (left <= 0) continue;
            __m512 power = (__m512)power_of_two(load(scores + at) * scale - highest);
            if (left < LANES) power = _mm512_maskz_mov_ps((__mmask16)((1u << left) - 1), power);
            part[half] = (vec)power;
            sums += part[half];
        }
        store_words(to, part[0], part[1]);
    }
    float by = now == before ? 1.0f : exp2f(before - now);
    *top = now, *sum = *sum * by + total(sums);
    return by;
}

/* Queries [SIDE, K / 2] of tokens from position `first` on, `queries` of them, of one head over keys and values as right
   factors: into tiles from column `column` on, from row `row` on. */
static void attend(const operation *o, const plan *p, desk *d, const uint32_t *q, const uint32_t *keys,
                   const uint32_t *values, int64_t first, int64_t queries, int64_t row, int64_t column) {
    const int64_t K = o->size, V = o->values, last = first + queries;
    const float scale = (float)o->scale * 1.44269504f;
    float scores[SIDE * KEYS] __attribute__((aligned(64))), part[SIDE * SIDE] __attribute__((aligned(64)));
    float sums[SIDE * MOST_SIZE] __attribute__((aligned(64)));
    uint32_t weights[SIDE * KEYS / 2] __attribute__((aligned(64)));
    float top[SIDE], sum[SIDE] = {0};
    memset(sums, 0, 4 * SIDE * V);
    for (int r = 0; r < SIDE; r++) top[r] = -INFINITY;
    for (int64_t at = 0; at < last; at += KEYS) {
        int64_t there = last - at < KEYS ? round_up(last - at, SIDE) : KEYS;
        for (int64_t j = 0; j < there; j += SIDE)
            square(2, scores + j, KEYS, (left){q, K / 2, LANES, LANES * K / 2}, keys + (at + j) * K / 2, LANES * K / 2, K / 2,
                   d->tiles, NOTHING, NULL);
        for (int64_t r = 0; r < queries; r++) {
            int64_t seen = first + r + 1 - at;
            float by = weigh_more(scores + r * KEYS, tile_of(weights, r, 0, KEYS), scale, seen < there ? seen : there, there,
                                  top + r, sum + r);
            if (by != 1.0f)
                for (int64_t v = 0; v < V; v += LANES) store(sums + r * V + v, load(sums + r * V + v) * by);
        }
        for (int64_t v = 0; v < V; v += SIDE) {
            square(2, part, SIDE, in_tiles(weights, 0, KEYS), values + (v * p->filled + at * LANES) / 2,
                   p->filled / 2 * LANES, there / 2, d->tiles, NOTHING, NULL);
            for (int64_t r = 0; r < queries; r++)
                for (int64_t half = 0; half < SIDE; half += LANES) {
                    float *to = sums + r * V + v + half;
                    store(to, load(to) + load(part + r * SIDE + half));
                }
        }
    }
    for (int64_t r = 0; r < queries; r++) {
        float less = 1.0f / sum[r];
        for (int64_t v = 0; v < V; v += SIDE)
            store_words(tile_of(d->out, row + r, column + v, o->heads * V), load(sums + r * V + v) * less,
                        load(sums + r * V + v + LANES) * less);
    }
}

/* Keys and values of tokens from `first` to before `last` of a text of `there` so far as right factors. */
static void lay(const reading *r, const plan *p, uint32_t *keys, uint32_t *values, int64_t first, int64_t last, int64_t there) {
    const operation *o = r->operations + ATTENTION;
    for (int64_t g = 0; g < o->groups; g++) {
        lay_keys(keys + g * p->key_words, (const uint32_t *)(r->of.keys + 2 * g * r->of.key_group), o->size / 2, o->size,
                 first, last, there);
        lay_values(values + g * p->value_words, (const uint32_t *)(r->of.values + 2 * g * r->of.value_group), o->values / 2,
                   o->values, first, last, there, p->filled);
    }
}

/* Tokens from position `first` on, before `last`, up to the keys that are written. */
static void write_keys(const reading *r, const plan *p, desk *d, float *x, int64_t first, int64_t last) {
    const operation *o = r->operations, *a = o + ATTENTION;
    const int64_t rows = last - first, past = r->of.tokens - r->rows;
    norm_rows(d->in, x, o + QKV, rows, (float *)d->panels);
    for (int64_t k = 0; k < o[QKV].matrices; k++) {
        const matrix *m = o[QKV].of + k;
        linear of = {(const uint32_t *)m->at, m->bias};
        product(STORED, d->panels, d->in, &of, rows, o[QKV].inputs, m->outputs,
                (finish){.columns = p->width, .h = d->memory + m->out - r->size}, d->tiles);
    }
    float plain[MOST_SIZE];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t g = 0; g < a->groups; g++) {
            const float *of = d->memory + i * p->width - r->size, *turns[] = {r->cosine, r->sine};
            int64_t token = first + i, turn = (token - past) * a->rotated;
            placed(plain, of + a->key + g * a->size, a->key_norm, a, turns[0] + turn, turns[1] + turn);
            keep(r->of.keys + 2 * (g * r->of.key_group + token * a->size), plain, a->size, 1);
            keep(r->of.values + 2 * (g * r->of.value_group + token * a->values), of + a->value + g * a->values, a->values, 1);
        }
}

/* The rest of the layer of these tokens. */
static void read_block(const reading *r, const plan *p, desk *d, float *x, const uint32_t *keys, const uint32_t *values,
                       int64_t first, int64_t last) {
    const operation *o = r->operations, *a = o + ATTENTION;
    const int64_t rows = last - first, past = r->of.tokens - r->rows, each = a->heads / a->groups;
    uint32_t q[SIDE * MOST_SIZE / 2] __attribute__((aligned(64))) = {0};
    float plain[MOST_SIZE];
    for (int64_t h = 0; h < a->heads; h++)
        for (int64_t i = 0; i < rows; i += SIDE) {
            int64_t queries = rows - i < SIDE ? rows - i : SIDE;
            for (int64_t k = 0; k < queries; k++) {
                int64_t turn = (first + i + k - past) * a->rotated;
                placed(plain, d->memory + (i + k) * p->width + a->query - r->size + h * a->size, a->norm, a, r->cosine + turn,
                       r->sine + turn);
                for (int64_t j = 0; j < a->size; j += SIDE)
                    store_words(q + (k * a->size + j) / 2, load_loose(plain + j), load_loose(plain + j + LANES));
            }
            attend(a, p, d, q, keys + h / each * p->key_words, values + h / each * p->value_words, first + i, queries, i,
                   h * a->values);
        }
    linear out = {(const uint32_t *)o[OUT].of->at, o[OUT].of->bias}, down = {(const uint32_t *)o[DOWN].of->at, o[DOWN].of->bias};
    linear gates[] = {{(const uint32_t *)o[GATES].of[0].at, o[GATES].of[0].bias},
                      {(const uint32_t *)o[GATES].of[1].at, o[GATES].of[1].bias}};
    product(ADDED, d->panels, d->out, &out, rows, o[OUT].inputs, r->size, (finish){.h = x}, d->tiles);
    norm_rows(d->in, x, o + GATES, rows, (float *)d->panels);
    product(GATED, d->panels, d->in, gates, rows, o[GATES].inputs, o[DOWN].inputs,
            (finish){.words = d->out, .gelu_gate = o[GATES].then == GELU_TANH}, d->tiles);
    product(ADDED, d->panels, d->out, &down, rows, o[DOWN].inputs, r->size, (finish){.h = x}, d->tiles);
}

void dist_attn_read(const reading *r) {
    const plan p = planned(r);
    const int64_t past = r->of.tokens - r->rows, old = past / SIDE * SIDE, groups = r->operations[ATTENTION].groups;
    int *ready = (int *)r->work;
    uint32_t *keys = (uint32_t *)(r->work + in_lines(4 * p.tasks)), *values = keys + groups * p.key_words;
    uint8_t *desks = (uint8_t *)(values + groups * p.value_words);
    int64_t next = 0;
    memset(ready, 0, 4 * p.tasks);
#pragma omp parallel num_threads(r->threads) if (r->threads > 1 && p.tasks > 1)
    {
        uint8_t *at = desks + omp_get_thread_num() * p.each;
        const int64_t tiles_bytes = in_lines(2 * p.block * p.widest), panels_bytes = in_lines(4 * SIDE * p.widest);
        desk d = {(uint32_t *)at, (uint32_t *)(at + tiles_bytes), (uint32_t *)(at + 2 * tiles_bytes),
                  (float *)(at + 2 * tiles_bytes + panels_bytes), 0};
#if HAVE_TILES
        tile_shapes before;
        if ((d.tiles = have_tiles())) set_up_tiles(&before);
#endif
        for (int64_t task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < p.tasks;) {
            if (task < p.before) { /* keys of before */
                int64_t end = (task + 1) * BLOCK < old ? (task + 1) * BLOCK : old;
                lay(r, &p, keys, values, task * BLOCK, end, past);
                __atomic_store_n(ready + task, 1, __ATOMIC_RELEASE);
                continue;
            }
            int64_t number = task - p.before + past / p.block, first = number * p.block, last = first + p.block;
            first = first < past ? past : first, last = last < r->of.tokens ? last : r->of.tokens;
            float *x = r->x + (first - past) * r->size;
            write_keys(r, &p, &d, x, first, last);
            lay(r, &p, keys, values, first / SIDE * SIDE, round_up(last, SIDE), last);
            __atomic_store_n(ready + task, 1, __ATOMIC_RELEASE);
            wait_for(ready, task);
            read_block(r, &p, &d, x, keys, values, first, last);
        }
#if HAVE_TILES
        if (d.tiles) _tile_loadconfig(&before); /* another library's */
#endif
    }
}
