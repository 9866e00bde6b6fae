/* A decode step of a whole model: one token of each row through all operations, without a return in between.

   A step is a list of operations over a working memory of float32, [rows, width], which names of columns share. Threads
   take shares of an operation as they come to them and wait for each other behind it: for a short time awake, then by
   leaving the processor to others. Nothing waits between steps. */
#include <omp.h>
#include <sched.h>
#include "recurrences.h"
#include "stored_weights.h"

#define KEYS 64      /* that are scored together */
#define TOGETHER 4   /* heads that may attend together */
#define MOST_OUTPUTS (8 * SHARE) /* of a share of a product */
#define SPINS 2000   /* looks at the other threads before the processor is left to others */

typedef struct {
    const operation *operations;
    int64_t count, rows, width, threads, widest, half; /* `half`: caches are bfloat16 */
    float *memory, *inputs; /* [rows, width]; [threads, rows + 1, widest] */
    const cache *caches; /* [operations with states, rows] */
    const float *cosine, *sine; /* [rows, rotated] */
} step;

typedef struct {
    int64_t next; /* share */
    int arrived, phase;
} crew;

static void wait_for_all(crew *c, int threads) {
    int phase = __atomic_load_n(&c->phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&c->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
        c->arrived = 0, c->next = 0;
        __atomic_store_n(&c->phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int looks = 0; __atomic_load_n(&c->phase, __ATOMIC_ACQUIRE) == phase; looks++)
        if (looks > SPINS) sched_yield();
#if defined(__x86_64__)
        else _mm_pause();
#endif
}

static int64_t next_share(crew *c) { return __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED); }

/* Outputs of a share where there are so many in all: some shares for each thread, none too small. */
static int64_t outputs_of_share(const step *s, int64_t total) {
    int64_t outputs = total / (8 * s->threads) / SHARE * SHARE;
    return outputs < SHARE ? SHARE : outputs > MOST_OUTPUTS ? MOST_OUTPUTS : outputs;
}

INLINE vec gate(vec x, int64_t kind) {
    vec steep = x;
    if (kind == GELU_TANH) steep = (x + x * x * x * 0.044715f) * 1.5957691216f; /* 2 sqrt(2 / pi) */
    return x / (exponential(-steep) + 1.0f);
}

#include "experts.h"

static void product_share(const step *s, const operation *o, const float *x, int64_t share, int64_t outputs) {
    int pair = o->then > ADD && o->matrices > 1;
    for (int64_t k = 0; k < (pair ? 1 : o->matrices); k++) {
        const matrix *m = &o->of[k];
        int64_t shares = (m->outputs + outputs - 1) / outputs;
        if (share >= shares) {
            share -= shares;
            continue;
        }
        int64_t first = share * outputs, last = first + outputs < m->outputs ? first + outputs : m->outputs;
        PRODUCTS[m->format](m, first, last, o->inputs, x, s->rows, s->memory + m->out, s->width, o->then == ADD);
        if (o->then <= ADD) return;
        const matrix *up = &o->of[1];
        if (pair) PRODUCTS[up->format](up, first, last, o->inputs, x, s->rows, s->memory + up->out, s->width, 0);
        for (int64_t row = 0; row < s->rows; row++) {
            float *a = s->memory + row * s->width + m->out, *b = s->memory + row * s->width + up->out;
            for (int64_t i = first; i < last; i += LANES) {
                vec activated = gate(load_loose(a + i), o->then);
                if (pair) activated *= load_loose(b + i);
                store_loose(a + i, activated);
            }
        }
        return;
    }
}

static void product(const step *s, const operation *o, crew *c, float *x) {
    int64_t format = o->of[0].format, total = 0, shares = 0;
    for (int64_t k = 0; k < o->matrices; k++) total += o->of[k].outputs;
    int64_t outputs = outputs_of_share(s, total);
    for (int64_t k = 0; k < (o->then > ADD ? 1 : o->matrices); k++) shares += (o->of[k].outputs + outputs - 1) / outputs;
    float *line = x + s->rows * s->widest;
    for (int64_t row = 0; row < s->rows; row++) {
        const float *in = s->memory + row * s->width + o->in;
        if (o->norm) {
            for (int64_t i = 0; i < o->inputs; i += o->normed_together)
                normed_inputs(line + i, in + i, o, i, o->normed_together);
            in = line;
        }
        if (o->gate) {
            float by = 1.0f / (1.0f + expf(-s->memory[row * s->width + o->gate]));
            for (int64_t i = 0; i < o->inputs; i++) line[i] = in[i] * by;
            in = line;
        }
        in_order(x + row * o->inputs, in, o->inputs, format);
    }
    for (int64_t share; (share = next_share(c)) < shares;) product_share(s, o, x, share, outputs);
}

/* The heads of one row that attend together, as they read the same keys. */
typedef struct {
    const operation *o;
    const cache *of;
    const uint8_t *keys, *values, *own_key, *own_value; /* of their group; those of the new token */
    float queries[TOGETHER][MOST_SIZE], sums[TOGETHER][MOST_SIZE]; /* in the order in which numbers are widened */
    float scores[TOGETHER][KEYS] __attribute__((aligned(64)));
    float largest[TOGETHER], total[TOGETHER];
} heads_of_row;

INLINE const uint8_t *token_row(const uint8_t *rows, const uint8_t *own, int64_t token, int64_t last, int64_t nbytes) {
    return token < last ? rows + token * nbytes : own;
}

INLINE void score(const int format, const int count, heads_of_row *a, int64_t first, int64_t there) {
    wide products[TOGETHER][16];
    const int64_t last = a->of->tokens - 1, nbytes = a->o->size / GROUP * BLOCK_BYTES[format];
    for (int64_t t = 0; t < there; t += 16) {
        for (int part = 0; part < 16; part += 4) {
            wide sums[4 * TOGETHER];
            const uint8_t *key[4];
            for (int i = 0; i < 4; i++) key[i] = token_row(a->keys, a->own_key, first + t + part + i, last, nbytes);
            for (int k = 0; k < 4 * count; k++) sums[k] = (wide){0};
            for (int64_t g = 0; g < a->o->size / GROUP; g++)
                for (int i = 0; i < 4; i++) {
                    wide some[2];
                    widen(format, key[i], g, some);
                    for (int h = 0; h < count; h++) {
                        const float *q = a->queries[h] + g * GROUP;
                        sums[i * count + h] = fused(some[0], load_wide(q), sums[i * count + h]);
                        sums[i * count + h] = fused(some[1], load_wide(q + 16), sums[i * count + h]);
                    }
                }
            for (int i = 0; i < 4; i++)
                for (int h = 0; h < count; h++) products[h][part + i] = sums[i * count + h];
        }
        for (int h = 0; h < count; h++) totals(16, products[h], a->scores[h] + t);
    }
}

/* `groups` groups of values from number `g` on, by their weights. */
INLINE void weigh(const int format, const int count, const int groups, heads_of_row *a, int64_t first, int64_t there,
                  int64_t g, const float *by) {
    wide sums[TOGETHER * 4];
    const int64_t last = a->of->tokens - 1, nbytes = a->o->values / GROUP * BLOCK_BYTES[format];
    for (int h = 0; h < count; h++)
        for (int k = 0; k < 2 * groups; k++) sums[h * 2 * groups + k] = load_wide(a->sums[h] + g * GROUP + 16 * k) * by[h];
    for (int64_t t = 0; t < there; t++) {
        const uint8_t *value = token_row(a->values, a->own_value, first + t, last, nbytes);
        for (int k = 0; k < groups; k++) {
            wide some[2];
            widen(format, value, g + k, some);
            for (int h = 0; h < count; h++)
                for (int i = 0; i < 2; i++) {
                    wide *sum = sums + (h * groups + k) * 2 + i;
                    *sum = fused(some[i], all_wide(a->scores[h][t]), *sum);
                }
        }
    }
    for (int h = 0; h < count; h++)
        for (int k = 0; k < 2 * groups; k++)
            memcpy(a->sums[h] + g * GROUP + 16 * k, &sums[h * 2 * groups + k], 64);
}

/* Heads over their keys, with sums that are scaled again whenever a larger score is found. */
INLINE void attend(const int format, const int count, heads_of_row *a) {
    memset(a->sums, 0, sizeof a->sums[0] * count);
    for (int h = 0; h < count; h++) a->largest[h] = -INFINITY, a->total[h] = 0.0f;
    for (int64_t first = 0; first < a->of->tokens; first += KEYS) {
        int64_t there = a->of->tokens - first < KEYS ? a->of->tokens - first : KEYS, g = 0;
        float by[TOGETHER];
        score(format, count, a, first, there);
        for (int h = 0; h < count; h++) {
            float *scores = a->scores[h], before = a->largest[h], most;
            for (int64_t t = there; t < KEYS; t++) scores[t] = -INFINITY;
            vec peak = load(scores), sum = {0};
            for (int t = LANES; t < KEYS; t += LANES) peak = larger(load(scores + t), peak);
            most = peak[0];
            for (int i = 1; i < LANES; i++) most = peak[i] > most ? peak[i] : most;
            a->largest[h] = most = most > before ? most : before;
            for (int t = 0; t < KEYS; t += LANES) {
                vec weight = exponential(load(scores + t) - most);
                store(scores + t, weight), sum += weight;
            }
            by[h] = exponential(all(before - most))[0];
            a->total[h] = a->total[h] * by[h] + total(sum);
        }
        for (; g + 2 <= a->o->values / GROUP; g += 2) weigh(format, count, 2, a, first, there, g, by);
        if (g < a->o->values / GROUP) weigh(format, count, 1, a, first, there, g, by);
    }
}

#define ATTEND(format, count) \
    case 2 * (count) + (format): attend(format, count, a); break
static __attribute__((noinline)) void attend_together(heads_of_row *a, int64_t format, int64_t count) {
    switch (2 * count + format) {
        ATTEND(FLOAT32, 1);
        ATTEND(BFLOAT16, 1);
        ATTEND(FLOAT32, 2);
        ATTEND(BFLOAT16, 2);
        ATTEND(FLOAT32, 3);
        ATTEND(BFLOAT16, 3);
        ATTEND(FLOAT32, 4);
        ATTEND(BFLOAT16, 4);
    }
}

/* `count` heads of one group from number `head` on. */
static void attention_share(const step *s, const operation *o, int64_t row, int64_t head, int64_t count) {
    const cache *of = s->caches + o->state * s->rows + row;
    float *memory = s->memory + row * s->width, *out = memory + o->out + head * o->values;
    const int64_t group = head / (o->heads / o->groups), number = s->half ? 2 : 4, format = s->half ? BFLOAT16 : FLOAT32;
    const float *cosine = s->cosine + row * o->rotated, *sine = s->sine + row * o->rotated;
    float plain[MOST_SIZE];
    uint8_t own_key[4 * MOST_SIZE], own_value[4 * MOST_SIZE];
    heads_of_row a;
    if (!of->tokens) {
        memset(out, 0, 4 * count * o->values);
        return;
    }
    placed(plain, memory + o->key + group * o->size, o->key_norm, o, cosine, sine);
    keep(own_key, plain, o->size, s->half);
    keep(own_value, memory + o->value + group * o->values, o->values, s->half);
    uint8_t *keys = of->keys + group * of->key_group * number, *values = of->values + group * of->value_group * number;
    if (head % (o->heads / o->groups) == 0) { /* no other head reads these places: each has made its own */
        memcpy(keys + (of->tokens - 1) * o->size * number, own_key, o->size * number);
        memcpy(values + (of->tokens - 1) * o->values * number, own_value, o->values * number);
    }
    a.o = o, a.of = of, a.keys = keys, a.values = values, a.own_key = own_key, a.own_value = own_value;
    for (int64_t h = 0; h < count; h++) {
        placed(plain, memory + o->query + (head + h) * o->query_step, o->norm, o, cosine, sine);
        for (int64_t i = 0; i < o->size; i++) plain[i] *= (float)o->scale;
        in_order(a.queries[h], plain, o->size, format);
    }
    attend_together(&a, format, count);
    for (int64_t h = 0; h < count; h++, out += o->values) {
        for (int64_t at = 0; at < o->values; at += GROUP)
            for (int i = 0; i < GROUP; i++)
                out[at + i] = a.sums[h][at + (s->half ? i / 2 + i % 2 * 16 : i)] / a.total[h];
        const float *by = memory + o->query + (head + h) * o->query_step + o->gate;
        for (int64_t i = 0; o->gate && i < o->values; i += LANES)
            store_loose(out + i, load_loose(out + i) / (exponential(-load_loose(by + i)) + 1.0f));
    }
}

static void attention(const step *s, const operation *o, crew *c) {
    const int64_t readers = o->heads / o->groups, few = s->rows * o->groups < 2 * s->threads ? 2 : TOGETHER;
    const int64_t together = readers < few ? readers : few, shares = (readers + together - 1) / together;
    for (int64_t share; (share = next_share(c)) < s->rows * o->groups * shares;) {
        int64_t first = share % shares * together, count = readers - first < together ? readers - first : together;
        int64_t group = share / shares % o->groups;
        attention_share(s, o, share / shares / o->groups, group * readers + first, count);
    }
}

static void convolution(const step *s, const operation *o, crew *c, float *line) {
    const int64_t shares = (o->inputs + CHANNELS - 1) / CHANNELS;
    for (int64_t share; (share = next_share(c)) < s->rows * shares;) {
        int64_t row = share / shares, first = share % shares * CHANNELS, there = o->inputs - first;
        convolve_channels(o, s->memory + row * s->width, s->caches + o->state * s->rows + row, s->half, first,
                          there < CHANNELS ? there : CHANNELS, line);
    }
}

static void recurrence(const step *s, const operation *o, crew *c) {
    uint64_t before = flush_denormals();
    for (int64_t share; (share = next_share(c)) < s->rows * o->heads;) {
        int64_t row = share / o->heads;
        float *memory = s->memory + row * s->width;
        const cache *of = s->caches + o->state * s->rows + row;
        if (o->kind == RECURS) step_head(o, memory, of, share % o->heads);
        else attend_by_features(o, memory, of, s->rows, share % o->heads);
    }
    restore_denormals(before);
}

void dist_attn_decode_step(const step *s) {
    crew c = {0};
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        int threads = omp_get_num_threads();
        float *inputs = s->inputs + omp_get_thread_num() * (s->rows + 1) * s->widest;
        for (int64_t i = 0; i < s->count; i++) {
            const operation *o = s->operations + i;
            if (o->kind == MULTIPLIES) product(s, o, &c, inputs);
            else if (o->kind == ATTENDS) attention(s, o, &c);
            else if (o->kind == CONVOLVES) convolution(s, o, &c, inputs);
            else if (o->kind != CHOOSES) recurrence(s, o, &c);
            else experts(s, o, &c, threads, inputs);
            wait_for_all(&c, threads);
        }
    }
}
