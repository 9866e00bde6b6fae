/* Features of a chunk's tokens, and from their gradients those of the rows and of w; tokens in lanes, [M, CHUNK]. */
#pragma once
#include "attention_call.h"

/* One of queries or keys: the transposed rows, normalised where the map does so, 1 / length, and the features. */
typedef struct {
    float *x;       /* [K, CHUNK] */
    float *inverse; /* [CHUNK] */
    float *phi;     /* [M, CHUNK] */
} side;

INLINE float feature_scale(const call *c) {
    return c->kind == GAUSSIAN || c->kind == ARC_COSINE ? 1.0f / sqrtf((float)c->projections) : 1.0f;
}

/* `rows` is room for [CHUNK, K rounded up]. Tokens behind the last have the features of a row of zeros, which need not
   be 0: the caller weighs them. */
static void make_features(const call *c, int64_t group, view x, int64_t begin, int64_t length, side to, float *rows) {
    int64_t lanes = round_up(length, LANES), size = c->size, columns = round_up(size, LANES);
    int64_t D = c->projections;
    pack(rows, columns, x, c->heads, group, begin, length, lanes, size);
    transposed(to.x, CHUNK, rows, columns, lanes, columns);
    if (c->unit_norm) {
        for (int64_t t = 0; t < lanes; t += LANES) {
            vec squares = {0};
            for (int64_t k = 0; k < size; k++) {
                vec one = load(to.x + k * CHUNK + t);
                squares += one * one;
            }
            vec inverse;
            for (int i = 0; i < LANES; i++) inverse[i] = squares[i] == 0.0f ? 1.0f : 1.0f / sqrtf(squares[i]);
            store(to.inverse + t, inverse);
            for (int64_t k = 0; k < size; k++)
                store(to.x + k * CHUNK + t, load(to.x + k * CHUNK + t) * inverse);
        }
    }
    float scale = feature_scale(c);
    if (c->kind == GAUSSIAN || c->kind == ARC_COSINE) {
        const float *w = c->w + group % c->heads * D * size;
        product(to.phi, CHUNK, 0.0f, (factor){w, size, 1}, to.x, CHUNK, D, lanes, size);
    }
    if (c->kind == GAUSSIAN) {
        for (int64_t i = 0; i < D; i++)
            for (int64_t t = 0; t < lanes; t += LANES) {
                vec sine, cosine;
                sine_cosine(load(to.phi + i * CHUNK + t), &sine, &cosine);
                store(to.phi + i * CHUNK + t, sine * scale);
                store(to.phi + (D + i) * CHUNK + t, cosine * scale);
            }
        return;
    }
    for (int64_t i = 0; i < c->features; i++)
        for (int64_t t = 0; t < lanes; t += LANES) {
            float *at = to.phi + i * CHUNK + t;
            vec one = load(c->kind == ARC_COSINE ? at : to.x + i * CHUNK + t);
            if (c->kind == ARC_COSINE)
                one = choose(one < 0.0f, all(0.0f), one) * scale;
            else if (c->kind == ELU)
                one = choose(one > 0.0f, one + 1.0f, exponential(one));
            store(at, one);
        }
}

INLINE void weigh(float *phi, int64_t features, int64_t lanes, const float *weight) {
    for (int64_t i = 0; i < features; i++)
        for (int64_t t = 0; t < lanes; t += LANES) {
            float *at = phi + i * CHUNK + t;
            store(at, load(at) * load(weight + t));
        }
}

/* From the gradient of weighed features, in `grad` [M, CHUNK], to that of rows, written to `to`, and of w, added to
   `grad_w` [D, columns]. `from.phi` holds features times `weight` [CHUNK]; `grad` is used up. */
static void features_gradient(const call *c, int64_t group, side from, const float *weight, float *grad, view to,
                              int64_t begin, int64_t length, float *grad_x, float *rows, float *grad_w) {
    int64_t lanes = round_up(length, LANES), size = c->size, columns = round_up(size, LANES), D = c->projections;
    float scale = feature_scale(c);
    if (c->kind == GAUSSIAN) {
        for (int64_t i = 0; i < D; i++)
            for (int64_t t = 0; t < lanes; t += LANES) {
                float *of_sine = grad + i * CHUNK + t, *of_cosine = of_sine + D * CHUNK;
                const float *sine = from.phi + i * CHUNK + t, *cosine = sine + D * CHUNK;
                store(of_sine, load(of_sine) * load(cosine) - load(of_cosine) * load(sine));
            }
    } else {
        for (int64_t i = 0; i < c->features; i++)
            for (int64_t t = 0; t < lanes; t += LANES) {
                float *at = grad + i * CHUNK + t;
                vec phi = load(from.phi + i * CHUNK + t), w = load(weight + t), slope = w;
                if (c->kind == ARC_COSINE) slope = choose(phi == 0.0f, all(0.0f), w * scale);
                if (c->kind == ELU) slope = choose(magnitude(phi) > magnitude(w), w, phi);
                store(at, load(at) * slope);
            }
    }
    const float *of_x = grad;
    if (c->kind == GAUSSIAN || c->kind == ARC_COSINE) {
        const float *w = c->w + group % c->heads * D * size;
        if (grad_w) {
            for (int64_t j = 0; j < columns; j += LANES)
                for (int64_t t = 0; t < lanes; t += LANES) {
                    vec block[LANES];
                    for (int k = 0; k < LANES; k++) block[k] = j + k < size ? load(from.x + (j + k) * CHUNK + t) : (vec){0};
                    transpose(block);
                    for (int k = 0; k < LANES; k++) store(rows + (t + k) * columns + j, block[k]);
                }
            product(grad_w, columns, 1.0f, (factor){grad, CHUNK, 1}, rows, columns, D, columns, length);
        }
        if (!to.at) return;
        product(grad_x, CHUNK, 0.0f, (factor){w, 1, size}, grad, CHUNK, size, lanes, D);
        of_x = grad_x;
    }
    if (!to.at) return;
    if (c->unit_norm) {
        for (int64_t t = 0; t < lanes; t += LANES) {
            vec along = {0}, inverse = load(from.inverse + t);
            for (int64_t k = 0; k < size; k++) along += load(from.x + k * CHUNK + t) * load(of_x + k * CHUNK + t);
            for (int64_t k = 0; k < size; k++)
                store(grad_x + k * CHUNK + t,
                      (load(of_x + k * CHUNK + t) - load(from.x + k * CHUNK + t) * along) * inverse);
        }
        of_x = grad_x;
    }
    unpack_transposed(to, c->heads, group, begin, length, of_x, size);
}
