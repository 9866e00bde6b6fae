/* Products of bfloat16 numbers in squares of 32 x 32 with sums of float32: by AMX's tiles, or by AVX-512 without them.

   What a product leaves is biased, activated and rounded while it lies in the nearest cache, meanwhile the next square
   is computed. A row of a product depends on no other row. */
#pragma once
#include "vector.h"

#if !defined(__AVX512BF16__)
#error "products of bfloat16 numbers need AVX-512 with its instructions for them"
#endif
#include <immintrin.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#define HAVE_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAVE_TILES 0
#endif

#define SIDE 32 /* rows and columns of a square, in which all products are computed */

#if HAVE_TILES
static __attribute__((constructor)) void ask_for_tiles(void) { syscall(SYS_arch_prctl, 0x1023, 18); }

static int have_tiles(void) {
    uint64_t granted = 0;
    return !syscall(SYS_arch_prctl, 0x1022, &granted) && granted >> 18 & 1;
}

typedef struct {
    uint8_t palette, row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes __attribute__((aligned(64)));

static void set_up_tiles(tile_shapes *before) {
    tile_shapes squares = {.palette = 1};
    for (int i = 0; i < 8; i++) squares.bytes[i] = 64, squares.rows[i] = 16;
    _tile_storeconfig(before);
    _tile_loadconfig(&squares);
}
#else
static int have_tiles(void) { return 0; }
#endif

/* Whether products of bfloat16 numbers are faster than those of float32. Without tiles Intel's processors have the
   instruction at less than half the speed: 85 against 131 GFLOP/s of a core. */
int64_t dist_attn_squares_are_fast(void) { return have_tiles() || !__builtin_cpu_is("intel"); }

INLINE void store_words(uint32_t *to, vec first, vec second) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}

/* NaN stays NaN. */
INLINE vec between(vec x, float least, float most) {
    return (vec)_mm512_min_ps(_mm512_set1_ps(most), _mm512_max_ps(_mm512_set1_ps(least), (__m512)x));
}

/* x Phi(x), to 2e-5 and 2e-5 of it: where |x| <= 4.2 Phi(x) - 1/2 is x times a polynomial of x^2, fitted here; further out it stays. */
INLINE vec gelu(vec x) {
    vec t = between(x, -4.2f, 4.2f), u = t * t;
    vec p = u * 4.92382767e-11f + -4.79566875e-09f;
    p = p * u + 2.07247851e-07f;
    p = p * u + -5.28956798e-06f;
    p = p * u + 8.98359795e-05f;
    p = p * u + -0.00108645926f;
    p = p * u + 0.00974094123f;
    p = p * u + -0.0662220791f;
    p = p * u + 0.398834586f;
    return x * (t * p + 0.5f);
}

/* 2^x of x <= 0, to 8e-5 of it. */
INLINE vec power_of_two(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    x = (vec)_mm512_max_ps(_mm512_set1_ps(-126.0f), (__m512)x); /* NaN stays NaN */
    vec shifted = x + magic, r = x - (shifted - magic);
    vec p = ((r * 0.0551704243f + 0.242609382f) * r + 0.693261027f) * r + 0.999928176f;
    return (vec)((ints)p + ((ints)shifted << 23));
}

/* x / (1 + e^-x), or of GELU by its tanh, to 2e-4 of it. */
INLINE vec gate(vec x, int64_t gelu) {
    vec steep = x;
    if (gelu) steep = (x + x * x * x * 0.044715f) * 1.5957691216f; /* 2 sqrt(2 / pi) */
    vec power = power_of_two(between(steep * -1.44269504f, -126.0f, 126.0f));
    return x * (vec)_mm512_rcp14_ps((__m512)(power + 1.0f));
}

/* Words of a left factor: how far apart are rows, sixteen words and what follows them, and sixteen rows. */
typedef struct {
    const uint32_t *at;
    int64_t row, step, half;
} left;

/* Rows as tiles take them: [rows / 16, columns / 32, 16, 16] words; where those of columns from j on are. */
INLINE uint32_t *tile_of(uint32_t *words, int64_t row, int64_t j, int64_t columns) {
    return words + ((row / 16 * columns + j) / 32 * 16 + row % 16) * 16;
}
INLINE left in_tiles(uint32_t *words, int64_t row, int64_t columns) {
    return (left){tile_of(words, row, 0, columns), 16, 256, 8 * columns};
}

/* What becomes of the numbers of a square of a linear layer: they are biased, and stored in float32 or added to it, or
   rounded, or activated and rounded; gates are those of another layer's numbers, and both are rounded as one. */
enum { NOTHING, ROUNDED, ACTIVATED, ADDED, STORED, GATED };
typedef struct {
    const float *part, *gated; /* [SIDE, SIDE] */
    vec bias[2], gated_bias[2];
    int64_t row, column, rows, done;
    int64_t share;   /* rows that are finished in a step of the next square */
    int64_t columns, gelu_gate;
    uint32_t *words; /* rounded: [rows, columns / 2]; activated and gated: in tiles */
    float *h;        /* [rows, columns] */
    const char *ahead; /* weights that are needed next, */
    int64_t lines;     /* of which so many cache lines are fetched in a step */
} finish;

INLINE void finish_rows(const int what, finish *f, int64_t rows) {
    for (int64_t end = f->done + rows < f->rows ? f->done + rows : f->rows; f->done < end; f->done++) {
        int64_t row = f->row + f->done;
        const float *part = f->part + f->done * SIDE;
        vec first = load(part) + f->bias[0], second = load(part + LANES) + f->bias[1];
        if (what == ROUNDED) {
            store_words(f->words + (row * f->columns + f->column) / 2, first, second);
        } else if (what == ACTIVATED) {
            store_words(tile_of(f->words, row, f->column, f->columns), gelu(first), gelu(second));
        } else if (what == GATED) {
            const float *gated = f->gated + f->done * SIDE;
            first = gate(first, f->gelu_gate) * (load(gated) + f->gated_bias[0]);
            second = gate(second, f->gelu_gate) * (load(gated + LANES) + f->gated_bias[1]);
            store_words(tile_of(f->words, row, f->column, f->columns), first, second);
        } else {
            float *to = f->h + row * f->columns + f->column;
            if (what == ADDED) first += load(to), second += load(to + LANES);
            store(to, first), store(to + LANES, second);
        }
    }
}

/* out [SIDE, SIDE] = a b, or its first half: b is two panels [pairs, 16] of words, `panel` words apart; `pairs` is a
   multiple of 16. Meanwhile the square before is finished, as tiles leave the other units free. */
INLINE void square(const int halves, float *out, int64_t out_row, left a, const uint32_t *b, int64_t panel, int64_t pairs,
                   int tiles, const int what, finish *before) {
#if HAVE_TILES
    if (tiles) {
        __asm__ volatile("" ::: "memory"); /* what the tiles read has been written */
        _tile_zero(0);
        _tile_zero(1);
        if (halves > 1) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < pairs; k += 16, a.at += a.step) {
            _tile_loadd(4, a.at, 4 * a.row);
            _tile_loadd(6, b + 16 * k, 64);
            _tile_loadd(7, b + panel + 16 * k, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (halves > 1) {
                _tile_loadd(5, a.at + a.half, 4 * a.row);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            if (what) {
                finish_rows(what, before, before->share);
                for (int64_t i = 0; i < before->lines; i++, before->ahead += 64) _mm_prefetch(before->ahead, _MM_HINT_T1);
            }
        }
        _tile_stored(0, out, 4 * out_row);
        _tile_stored(1, out + 16, 4 * out_row);
        if (halves > 1) {
            _tile_stored(2, out + 16 * out_row, 4 * out_row);
            _tile_stored(3, out + 16 * out_row + 16, 4 * out_row);
        }
        return;
    }
#endif
    for (int64_t i = 0; i < 16 * halves; i += 8, out += 8 * out_row) {
        __m512 sums[8][2];
        for (int r = 0; r < 8; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
        const uint32_t *at = a.at + i / 16 * a.half + i % 16 * a.row;
        for (int64_t k = 0; k < pairs; k++) {
            __m512bh first = (__m512bh)_mm512_loadu_si512(b + 16 * k);
            __m512bh second = (__m512bh)_mm512_loadu_si512(b + panel + 16 * k);
            for (int r = 0; r < 8; r++) {
                __m512bh one = (__m512bh)_mm512_set1_epi32((int)at[k / 16 * a.step + k % 16 + r * a.row]);
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], one, first);
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], one, second);
            }
        }
        for (int r = 0; r < 8; r++) {
            store_loose(out + r * out_row, (vec)sums[r][0]);
            store_loose(out + r * out_row + 16, (vec)sums[r][1]);
        }
    }
    if (what) finish_rows(what, before, SIDE);
}

/* A linear layer: words of two neighbouring inputs' weights each, [outputs, inputs / 2], or packed: [outputs / 16,
   inputs / 2, 16]; and its biases, or NULL. */
typedef struct {
    const uint32_t *weights;
    const float *bias;
} linear;

/* Weights of SIDE outputs as they are stored, packed: two panels [pairs, 16]. */
static void pack(uint32_t *to, const uint32_t *from, int64_t pairs) {
    for (int64_t i = 0; i < SIDE; i += LANES)
        for (int64_t k = 0; k < pairs; k += LANES) {
            vec rows[LANES];
            for (int r = 0; r < LANES; r++) rows[r] = load_loose((const float *)(from + (i + r) * pairs + k));
            transpose(rows);
            for (int r = 0; r < LANES; r++) store((float *)(to + i * pairs + (k + r) * LANES), rows[r]);
        }
}

/* x [rows, inputs] in tiles times a layer's weights, or those of two of which the first one's are gates. They are packed
   already, or into `panels`, SIDE x inputs of each. `of` says what words and numbers are finished. */
INLINE void product(const int what, uint32_t *panels, uint32_t *x, const linear *l, int64_t rows, int64_t inputs,
                    int64_t outputs, finish of, int tiles) {
    const int count = what == GATED ? 2 : 1;
    float parts[2][2][SIDE * SIDE] __attribute__((aligned(64)));
    int64_t pairs = inputs / 2, number = 0, squares = (rows + SIDE - 1) / SIDE;
    of.share = (SIDE * 16 + count * pairs - 1) / (count * pairs), of.lines = (32 + squares - 1) / squares;
    if (!of.columns) of.columns = outputs;
    for (int64_t j = 0; j < outputs; j += SIDE) {
        const char *ahead[2];
        const uint32_t *b[2];
        for (int m = 0; m < count; m++) {
            b[m] = panels ? panels + m * SIDE * pairs : l[m].weights + j * pairs;
            if (panels) pack(panels + m * SIDE * pairs, l[m].weights + j * pairs, pairs);
            ahead[m] = (const char *)(l[m].weights + (j + SIDE) * pairs);
        }
        for (int64_t i = 0; i < rows; i += SIDE, number++) {
            left a = in_tiles(x, i, inputs);
            for (int m = 0; m < count; m++) {
                float *part = parts[number % 2][m];
                of.ahead = ahead[m];
                if (rows - i > SIDE / 2) square(2, part, SIDE, a, b[m], 16 * pairs, pairs, tiles, what, &of);
                else square(1, part, SIDE, a, b[m], 16 * pairs, pairs, tiles, what, &of);
                ahead[m] = of.ahead;
            }
            of.part = parts[number % 2][0], of.gated = parts[number % 2][count - 1];
            of.row = i, of.column = j, of.done = 0, of.rows = rows - i < SIDE ? rows - i : SIDE;
            for (int half = 0; half < 2; half++) {
                int64_t at = j + half * LANES;
                of.bias[half] = l->bias ? load_loose(l->bias + at) : all(0.0f);
                of.gated_bias[half] = l[count - 1].bias ? load_loose(l[count - 1].bias + at) : all(0.0f);
            }
        }
    }
    finish_rows(what, &of, SIDE);
}

/* Keys from number `first` to before `last` as right factors [keys / 16, K / 2, 16], out of rows [K / 2] of words: pairs of
   what is summed over lie side by side. Behind key number `keys` are zeros. */
static void lay_keys(uint32_t *to, const uint32_t *from, int64_t row, int64_t K, int64_t first, int64_t last, int64_t keys) {
    for (int64_t j = first; j < last; j += LANES)
        for (int64_t k = 0; k < K / 2; k += LANES) {
            vec rows[LANES];
            for (int64_t i = 0; i < LANES; i++)
                rows[i] = j + i < keys ? load_loose((const float *)(from + (j + i) * row + k)) : (vec){0};
            transpose(rows);
            for (int64_t i = 0; i < LANES; i++) store((float *)(to + (j * K / 2 + (k + i) * LANES)), rows[i]);
        }
}

/* Values likewise: [V / 16, filled / 2, 16]. */
static void lay_values(uint32_t *to, const uint32_t *from, int64_t row, int64_t V, int64_t first, int64_t last, int64_t keys,
                       int64_t filled) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t v = 0; v < V; v += SIDE)
        for (int64_t j = first; j < last; j += 2) {
            const uint32_t *at = from + j * row + v / 2;
            __m512i even = j < keys ? _mm512_loadu_si512(at) : _mm512_setzero_si512();
            __m512i odd = j + 1 < keys ? _mm512_loadu_si512(at + row) : _mm512_setzero_si512();
            uint32_t *pair = to + v * filled / 2 + j / 2 * LANES;
            _mm512_store_si512(pair, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_store_si512(pair + filled / 2 * LANES, _mm512_permutex2var_epi16(even, high, odd));
        }
}
