/* An encoder of texts: the sum of a token's and a position's vector, its norm, and then layers of norm(x + attention(x))
   and norm(x + MLP(x)), with products of bfloat16 numbers.

   Only what enters a product is rounded: what goes from layer to layer, sums, softmax and norms are float32. What a
   product leaves is biased, activated and rounded while it lies in the nearest cache.

   A row of a product depends on no other row, and a text on no other text, so that a text has the same bits whatever is
   read beside it and by however many threads. */
#include "squares.h"
#include <omp.h>
#include <stdlib.h>

#define ENOUGH 512 /* rows that go through a layer together, so that all that they need stays in a core's cache */

typedef struct {
    const float *weight, *bias;
    double eps;
} norm;

typedef struct {
    linear qkv, out, up, down;
    norm after_mixing, after_mlp;
} layer;

/* What Python hands over. Mirrors `_Call` of `fused_encoder.py`, field by field. */
typedef struct {
    int64_t size, inner, heads, num_layers, texts, threads;
    const int64_t *starts, *tokens;         /* [texts + 1]: the row at which each text begins, and the end; [rows] */
    const float *of_tokens, *of_positions;  /* [.., size] */
    norm first;
    const layer *layers;
    float *y; /* [rows, size] */
} call;

int64_t dist_attn_call_bytes(void) { return sizeof(call); }

/* Memory of a thread, for some rows filled up to whole squares. Words are two bfloat16 numbers. */
typedef struct {
    uint32_t *x, *qkv, *mixed, *inner; /* [rows, size / 2], [rows, 3 size / 2], [rows, size / 2], [rows, inner / 2] */
    float *h;                          /* [rows, size] */
    uint32_t *keys, *values, *weights; /* of a head: [keys / 16, K / 2, 16], [K / 16, keys / 2, 16], [SIDE, keys / 2] */
    float *scores;                     /* [SIDE, keys] */
    int tiles;
} desk;

/* Scores [filled] of a query into weights, `to` in tiles, which are not divided by their sum yet: returns that. */
INLINE float weigh(const float *scores, uint32_t *to, float scale, int64_t keys, int64_t filled) {
    int64_t whole = keys / SIDE * SIDE;
    __mmask32 rest = (__mmask32)((1ull << (keys - whole)) - 1);
    __m512 most = _mm512_set1_ps(-INFINITY), other = most;
    for (int64_t j = 0; j < whole; j += SIDE) {
        most = _mm512_max_ps(most, _mm512_load_ps(scores + j));
        other = _mm512_max_ps(other, _mm512_load_ps(scores + j + LANES));
    }
    if (rest) {
        most = _mm512_mask_max_ps(most, (__mmask16)rest, most, _mm512_load_ps(scores + whole));
        other = _mm512_mask_max_ps(other, (__mmask16)(rest >> 16), other, _mm512_load_ps(scores + whole + LANES));
    }
    vec top = all(_mm512_reduce_max_ps(_mm512_max_ps(most, other)) * scale), sum[2] = {{0}};
    for (int64_t j = 0; j < whole; j += SIDE, to += 256) {
        vec first = power_of_two(load(scores + j) * scale - top);
        vec second = power_of_two(load(scores + j + LANES) * scale - top);
        sum[0] += first, sum[1] += second;
        store_words(to, first, second);
    }
    if (rest) {
        __m512 first = (__m512)power_of_two(load(scores + whole) * scale - top);
        __m512 second = (__m512)power_of_two(load(scores + whole + LANES) * scale - top);
        first = _mm512_maskz_mov_ps((__mmask16)rest, first), second = _mm512_maskz_mov_ps((__mmask16)(rest >> 16), second);
        sum[0] += (vec)first, sum[1] += (vec)second;
        store_words(to, (vec)first, (vec)second);
    }
    return total(sum[0] + sum[1]);
}

/* Softmax attention of the text in these rows of qkv. */
static void attend(const call *c, const desk *d, int64_t first, int64_t keys) {
    int64_t size = c->size, K = size / c->heads, row = 3 * size / 2, filled = round_up(keys, SIDE);
    const uint32_t *qkv = d->qkv + first * row;
    float scale = 1.44269504f / sqrtf((float)K), part[SIDE * SIDE] __attribute__((aligned(64)));
    for (int64_t head = 0; head < c->heads; head++) {
        lay_keys(d->keys, qkv + (size + head * K) / 2, row, K, 0, filled, keys);
        lay_values(d->values, qkv + (2 * size + head * K) / 2, row, K, 0, filled, keys, filled);
        for (int64_t i = 0; i < keys; i += SIDE) {
            int64_t queries = keys - i < SIDE ? keys - i : SIDE;
            left q = {qkv + i * row + head * K / 2, row, 16, 16 * row};
            for (int64_t j = 0; j < filled; j += SIDE)
                square(2, d->scores + j, filled, q, d->keys + j * K / 2, LANES * K / 2, K / 2, d->tiles, NOTHING, NULL);
            float less[SIDE];
            for (int64_t r = 0; r < queries; r++)
                less[r] = 1.0f / weigh(d->scores + r * filled, tile_of(d->weights, r, 0, filled), scale, keys, filled);
            for (int64_t v = 0; v < K; v += SIDE) {
                square(2, part, SIDE, in_tiles(d->weights, 0, filled), d->values + v * filled / 2, filled / 2 * LANES,
                       filled / 2, d->tiles, NOTHING, NULL);
                for (int64_t r = 0; r < queries; r++)
                    store_words(tile_of(d->mixed, first + i + r, head * K + v, size), load(part + r * SIDE) * less[r],
                                load(part + r * SIDE + LANES) * less[r]);
            }
        }
    }
}

/* Each row of h less its mean, over its deviation: in place, and into words in tiles. */
static void normalise(norm n, float *h, int64_t rows, int64_t size, uint32_t *words) {
    for (int64_t i = 0; i < rows; i++, h += size) {
        vec sum = {0}, squares = {0};
        for (int64_t j = 0; j < size; j += LANES) sum += load(h + j);
        vec mean = all(total(sum) / (float)size);
        for (int64_t j = 0; j < size; j += LANES) squares += (load(h + j) - mean) * (load(h + j) - mean);
        float less = 1.0f / sqrtf(total(squares) / (float)size + (float)n.eps);
        for (int64_t j = 0; j < size; j += 2 * LANES) {
            vec normed[2];
            for (int half = 0; half < 2; half++) {
                int64_t at = j + half * LANES;
                normed[half] = (load(h + at) - mean) * less * load_loose(n.weight + at) + load_loose(n.bias + at);
                store(h + at, normed[half]);
            }
            store_words(tile_of(words, i, j, size), normed[0], normed[1]);
        }
    }
}

/* Texts from `first` on, before `last`. */
static void encode(const call *c, const desk *d, int64_t first, int64_t last) {
    int64_t size = c->size, begin = c->starts[first], rows = c->starts[last] - begin;
    if (!rows) return; /* texts without tokens */
    for (int64_t text = first, i = 0; text < last; text++)
        for (int64_t at = 0; at < c->starts[text + 1] - c->starts[text]; at++, i++)
            for (int64_t j = 0; j < size; j += LANES)
                store(d->h + i * size + j, load_loose(c->of_tokens + c->tokens[begin + i] * size + j) +
                                               load_loose(c->of_positions + at * size + j));
    normalise(c->first, d->h, rows, size, d->x);
    for (const layer *l = c->layers; l < c->layers + c->num_layers; l++) {
        product(ROUNDED, NULL, d->x, &l->qkv, rows, size, 3 * size, (finish){.words = d->qkv}, d->tiles);
        for (int64_t text = first; text < last; text++)
            attend(c, d, c->starts[text] - begin, c->starts[text + 1] - c->starts[text]);
        product(ADDED, NULL, d->mixed, &l->out, rows, size, size, (finish){.h = d->h}, d->tiles);
        normalise(l->after_mixing, d->h, rows, size, d->x);
        product(ACTIVATED, NULL, d->x, &l->up, rows, size, c->inner, (finish){.words = d->inner}, d->tiles);
        product(ADDED, NULL, d->inner, &l->down, rows, c->inner, size, (finish){.h = d->h}, d->tiles);
        normalise(l->after_mlp, d->h, rows, size, d->x);
    }
    memcpy(c->y + begin * size, d->h, 4 * rows * size);
}

/* Whole texts of `enough` rows or just over, from `first` on: where they end. */
static int64_t end_of_some(const call *c, int64_t first, int64_t enough) {
    int64_t last = first;
    while (last < c->texts && (last == first || c->starts[last + 1] - c->starts[first] <= enough)) last++;
    return last;
}

/* Returns 0 where there was no memory. */
int64_t dist_attn_encode(const call *c) {
    int64_t rows = 0, longest = 0, next = 0, enough = round_up((c->starts[c->texts] + c->threads - 1) / c->threads, SIDE);
    if (enough > ENOUGH + SIDE) enough = ENOUGH + SIDE;
    for (int64_t text = 0; text < c->texts; text++) {
        int64_t length = c->starts[text + 1] - c->starts[text];
        if (length > longest) longest = length;
    }
    rows = round_up(longest > enough ? longest : enough, SIDE) + SIDE; /* queries of a text's last square lie behind it */
    longest = round_up(longest, SIDE);
    int64_t size = c->size, K = size / c->heads;
    int64_t words[] = {rows * size / 2, rows * size / 2 * 3, rows * size / 2, rows * c->inner / 2, rows * size,
                       longest * K / 2, longest * K / 2, longest * SIDE / 2, longest * SIDE};
    int64_t sum = 0;
    for (int i = 0; i < 9; i++) sum += words[i] = round_up(words[i], 16);
#pragma omp parallel num_threads(c->threads) if (c->threads > 1 && c->texts > 1)
    {
        uint32_t *memory = aligned_alloc(64, 4 * sum), *parts[9];
        if (memory) {
            for (int i = 0; i < 9; i++) parts[i] = i ? parts[i - 1] + words[i - 1] : memory;
            desk d = {parts[0], parts[1], parts[2], parts[3], (float *)parts[4], parts[5], parts[6], parts[7],
                      (float *)parts[8], 0};
#if HAVE_TILES
            tile_shapes before;
            if ((d.tiles = have_tiles())) set_up_tiles(&before);
#endif
            for (;;) {
                int64_t first, last;
#pragma omp critical
                first = next, last = next = end_of_some(c, first, enough);
                if (first == last) break;
                encode(c, &d, first, last);
            }
#if HAVE_TILES
            if (d.tiles) _tile_loadconfig(&before); /* another library's */
#endif
            free(memory);
        } /* else: other threads take all */
    }
    return next == c->texts;
}
