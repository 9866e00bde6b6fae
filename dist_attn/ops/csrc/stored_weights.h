/* Weights as they are stored, and their products with few rows of float32 inputs: 32 weights of a row at a time are
   widened to float32, exactly, and take all rows of inputs that there are. Inputs are never rounded.

   An output is one sum of sixteen lanes in one order: it depends neither on what other rows of inputs there are, nor on
   how outputs are shared out, nor on where numbers begin in memory. */
#pragma once
#include "operations.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static const int64_t BLOCK_BYTES[] = {128, 64, 32, 34, 18, 20, 22, 24, 144, 176, 210};
static const int64_t BLOCK_GROUPS[] = {1, 1, 1, 1, 1, 1, 1, 1, 8, 8, 8};

typedef float wide __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t wide_words __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t wide_ints __attribute__((vector_size(64)));
typedef int8_t narrow __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t bytes __attribute__((vector_size(16), aligned(1), may_alias));

INLINE wide load_wide(const float *p) { return *(const wide *)p; }
INLINE wide all_wide(float x) { return x - (wide){0}; }

INLINE wide fused(wide a, wide b, wide sum) {
#if defined(__AVX512F__)
    return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
    return a * b + sum;
#endif
}

/* Sixteen integers: said in so many words, as compilers take them apart one by one. */
#if defined(__AVX512F__)
#define SIXTEEN(name, result, part, of512, of256) \
    INLINE result name(const void *p) { return (result)of512(_mm_loadu_si128(p)); }
#elif defined(__AVX2__)
#define SIXTEEN(name, result, part, of512, of256)                                                   \
    INLINE result name(const void *p) {                                                             \
        __m256i both[2] = {of256(_mm_loadl_epi64(p)), of256(_mm_loadl_epi64((const __m128i *)((const char *)p + 8)))}; \
        result x;                                                                                   \
        memcpy(&x, both, 64);                                                                       \
        return x;                                                                                   \
    }
#else
#define SIXTEEN(name, result, part, of512, of256) \
    INLINE result name(const void *p) { return __builtin_convertvector(*(const part *)p, result); }
#endif
SIXTEEN(of_signed, wide_ints, narrow, _mm512_cvtepi8_epi32, _mm256_cvtepi8_epi32)
SIXTEEN(of_bytes, wide_words, bytes, _mm512_cvtepu8_epi32, _mm256_cvtepu8_epi32)

INLINE float from_float16(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, word;
    if (rest < 0x400) return sign ? -(float)rest * 0x1p-24f : (float)rest * 0x1p-24f;
    word = sign | ((rest << 13) + (rest < 0x7c00 ? 0x38000000u : 0x70000000u));
    float x;
    memcpy(&x, &word, 4);
    return x;
#endif
}

/* Sixteen levels, times a scale and with an offset, by numbers from 0 to 15 in the low bits of `places`. */
INLINE wide look_up(wide_words places, float scale, float offset, float least) {
#if defined(__AVX512F__)
    const wide levels = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    __m512 table = (__m512)fused(levels + least, all_wide(scale), all_wide(offset));
    return (wide)_mm512_permutexvar_ps((__m512i)places, table);
#else
    return fused(__builtin_convertvector(places & 15, wide) + least, all_wide(scale), all_wide(offset));
#endif
}

/* Sixteen whole numbers, times a scale and with an offset. */
INLINE wide level(wide_words whole, float scale, float offset, float least) {
    return fused(__builtin_convertvector((wide_ints)whole, wide) + least, all_wide(scale), all_wide(offset));
}

/* The six bits of scale `g` of eight, and of its offset, in the twelve bytes of a block of Q4_K or Q5_K. */
INLINE int six_bits(const uint8_t *p, int64_t g, int offset) {
    p += offset ? 4 : 0;
    if (g < 4) return p[g] & 63;
    return (offset ? p[g] >> 4 : p[g + 4] & 15) | (p[g - 4] >> 6) << 4;
}

/* Group number `g` of a row. Those of BFLOAT16 come as even and odd ones, and so must inputs (`in_order`). Scales times
   numbers are exact in float32 but in Q6_K, where they are rounded in the order in which GGUF's own library does. */
INLINE void widen(const int format, const uint8_t *row, int64_t g, wide w[2]) {
    const wide_words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t each = BLOCK_GROUPS[format];
    const uint8_t *p = row + g / each * BLOCK_BYTES[format];
    g %= each;
    if (format == FLOAT32) {
        w[0] = load_wide((const float *)p), w[1] = load_wide((const float *)p + 16);
    } else if (format == BFLOAT16) {
        wide_words pairs = *(const wide_words *)p;
        w[0] = (wide)(pairs << 16), w[1] = (wide)(pairs & 0xffff0000u);
    } else if (format == INT8 || format == Q8_0) {
        const uint8_t *q = format == Q8_0 ? p + 2 : p;
        for (int i = 0; i < 2; i++) w[i] = __builtin_convertvector(of_signed(q + 16 * i), wide);
        if (format == Q8_0) {
            wide scale = all_wide(from_float16(p));
            w[0] *= scale, w[1] *= scale;
        }
    } else if (format == Q4_0 || format == Q4_1) {
        wide_words both = of_bytes(p + (format == Q4_0 ? 2 : 4));
        float scale = from_float16(p), offset = format == Q4_0 ? 0.0f : from_float16(p + 2), least = format == Q4_0 ? -8 : 0;
        w[0] = look_up(both, scale, offset, least), w[1] = look_up(both >> 4, scale, offset, least);
    } else if (format == Q5_0 || format == Q5_1) {
        const uint8_t *q = p + (format == Q5_0 ? 2 : 4);
        float scale = from_float16(p), offset = format == Q5_0 ? 0.0f : from_float16(p + 2), least = format == Q5_0 ? -16 : 0;
        wide_words both = of_bytes(q + 4);
        uint32_t high;
        memcpy(&high, q, 4);
        w[0] = level((both & 15) | (((lanes * 0 + high) >> lanes & 1) << 4), scale, offset, least);
        w[1] = level(both >> 4 | (((lanes * 0 + (high >> 16)) >> lanes & 1) << 4), scale, offset, least);
    } else if (format == Q4_K || format == Q5_K) {
        const uint8_t *q = p + (format == Q4_K ? 16 : 48) + g / 2 * 32;
        float scale = from_float16(p) * (float)six_bits(p + 4, g, 0);
        float offset = -from_float16(p + 2) * (float)six_bits(p + 4, g, 1);
        for (int i = 0; i < 2; i++) {
            wide_words places = of_bytes(q + 16 * i) >> (g % 2 * 4);
            if (format == Q4_K) w[i] = look_up(places, scale, offset, 0);
            else w[i] = level((places & 15) | (of_bytes(p + 16 + 16 * i) >> g & 1) << 4, scale, offset, 0);
        }
    } else {
        const uint8_t *low = p + g / 4 * 64 + g % 2 * 32, *high = p + 128 + g / 4 * 32;
        for (int i = 0; i < 2; i++) {
            float scale = from_float16(p + 208) * (float)(int8_t)p[192 + 2 * g + i];
            wide_words places = (of_bytes(low + 16 * i) >> (g % 4 / 2 * 4) & 15) | (of_bytes(high + 16 * i) >> (g % 4 * 2) & 3) << 4;
            w[i] = (__builtin_convertvector((wide_ints)places, wide) - 32.0f) * scale;
        }
    }
}

/* Inputs in the order in which weights are widened. */
static void in_order(float *out, const float *in, int64_t count, int64_t format) {
    if (format != BFLOAT16) {
        memcpy(out, in, 4 * count);
        return;
    }
    for (int64_t at = 0; at < count; at += GROUP)
        for (int i = 0; i < GROUP / 2; i++) out[at + i] = in[at + 2 * i], out[at + i + GROUP / 2] = in[at + 2 * i + 1];
}

/* Totals of `count` sums, 8 or 16, in the order 8, 4, 2, 1 of lanes that are added to each other. */
INLINE void totals(const int count, wide *sums, float *out) {
#if defined(__AVX512F__)
    for (int half = count / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            sums[i] = (wide)SHUFFLE((vec)sums[i], (vec)sums[i + half], FIRST_HALVES) +
                      (wide)SHUFFLE((vec)sums[i], (vec)sums[i + half], SECOND_HALVES);
    wide sum = sums[0];
    if (count == 8) sum += (wide)SHUFFLE((vec)sum, (vec)sum, SWAPPED);
    memcpy(out, &sum, 4 * count);
#else
    for (int i = 0; i < count; i++) {
        float lanes[16];
        memcpy(lanes, &sums[i], sizeof lanes);
        for (int half = 8; half; half /= 2)
            for (int k = 0; k < half; k++) lanes[k] += lanes[k + half];
        out[i] = lanes[0];
    }
#endif
}

typedef struct {
    int64_t first, last; /* groups of inputs */
    wide *sums;          /* so far, where they are not all */
} stretch;

/* `height` outputs from `first` on of `width` rows of inputs; the product of both is 8 or 16. Behind the last output
   that one is computed again. */
INLINE void tile(const int format, const int height, const int width, const matrix *m, int64_t first, int64_t inputs,
                 stretch of, const float *x, float *y, int64_t stride, int add) {
    const int64_t groups = inputs / GROUP, row = groups / BLOCK_GROUPS[format] * BLOCK_BYTES[format];
    /* Whole pages for float32, of which a group is two cache lines: 0.85 of the time where weights are not cached. */
    const int64_t ahead = format == FLOAT32 ? round_up(4096, height * row) : height * row;
    const uint8_t *w[8];
    wide sums[16];
    for (int i = 0; i < height; i++) w[i] = m->at + (first + i < m->outputs ? first + i : m->outputs - 1) * row;
    for (int k = 0; k < height * width; k++) sums[k] = of.first ? of.sums[k] : (wide){0};
    for (int64_t g = of.first; g < of.last; g++)
        for (int i = 0; i < height; i++) {
            wide some[2];
            const uint8_t *later = w[i] + ahead + g * BLOCK_BYTES[format] / BLOCK_GROUPS[format];
            __builtin_prefetch(later);
            if (format == FLOAT32) __builtin_prefetch(later + 64);
            widen(format, w[i], g, some);
            for (int j = 0; j < width; j++) {
                const float *in = x + j * inputs + g * GROUP;
                sums[i * width + j] = fused(some[0], load_wide(in), sums[i * width + j]);
                sums[i * width + j] = fused(some[1], load_wide(in + 16), sums[i * width + j]);
            }
        }
    if (of.last < groups) {
        memcpy(of.sums, sums, sizeof(wide) * height * width);
        return;
    }
    float found[16];
    totals(height * width, sums, found);
    for (int i = 0; i < height && first + i < m->outputs; i++)
        for (int j = 0; j < width; j++) {
            float one = found[i * width + j], *to = y + j * stride + first + i;
            float bias = m->bias ? m->bias[first + i] : 0.0f;
            /* Rounded once, said in so many words: compilers would fuse it for some sizes of tiles and not for others. */
            one = format == INT8 ? fmaf(one, from_bfloat16(m->scale[first + i]), bias) : one + bias;
            *to = add ? *to + one : one;
        }
}

#define SHARE 16 /* outputs that all rows of inputs take before the next ones: whole tiles of each kind */
#define NEAR 32  /* groups of many rows of inputs that stay in the nearest cache while a share's outputs take them */
#define TILES(height, width, most)                                                                             \
    for (; rows - j >= (width); j += (width))                                                                  \
        for (int64_t g = 0; g < groups; g += (most))                                                           \
            for (int64_t i = first; i < first + SHARE && i < last; i += (height)) {                            \
                stretch of = {g, g + (most) < groups ? g + (most) : groups, held[(i - first) / (height)]};     \
                tile(format, height, width, m, i, inputs, of, x + j * inputs, y + j * stride, stride, add);    \
            }

/* Outputs from `first`, a multiple of SHARE, to `last` of rows of inputs [rows, inputs] into y, rows of `stride`. */
#define PRODUCT(format_name, name)                                                                                  \
    static __attribute__((noinline)) void name(const matrix *m, int64_t first, int64_t last, int64_t inputs,        \
                                               const float *x, int64_t rows, float *y, int64_t stride, int add) {   \
        enum { format = format_name };                                                                              \
        const int64_t groups = inputs / GROUP;                                                                      \
        wide held[SHARE / 2][16] __attribute__((aligned(64)));                                                      \
        for (; first < last; first += SHARE) {                                                                      \
            int64_t j = 0;                                                                                          \
            TILES(2, 8, NEAR)                                                                                       \
            TILES(4, 4, groups)                                                                                     \
            TILES(4, 2, groups)                                                                                     \
            TILES(8, 1, groups)                                                                                     \
        }                                                                                                           \
    }
PRODUCT(FLOAT32, product_float32)
PRODUCT(BFLOAT16, product_bfloat16)
PRODUCT(INT8, product_int8)
PRODUCT(Q8_0, product_q8_0)
PRODUCT(Q4_0, product_q4_0)
PRODUCT(Q4_1, product_q4_1)
PRODUCT(Q5_0, product_q5_0)
PRODUCT(Q5_1, product_q5_1)
PRODUCT(Q4_K, product_q4_k)
PRODUCT(Q5_K, product_q5_k)
PRODUCT(Q6_K, product_q6_k)

typedef void product_of(const matrix *, int64_t, int64_t, int64_t, const float *, int64_t, float *, int64_t, int);
static product_of *const PRODUCTS[] = {product_float32, product_bfloat16, product_int8, product_q8_0,
                                       product_q4_0,    product_q4_1,     product_q5_0, product_q5_1,
                                       product_q4_k,    product_q5_k,     product_q6_k};
