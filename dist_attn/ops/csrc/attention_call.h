/* What Python hands over: where tensors lie, and what is to be done with them. Mirrors `native_call.py`, field by field. */
#pragma once
#include "tensors.h"

enum { AS_GIVEN = 0, GAUSSIAN = 1, ARC_COSINE = 2, ELU = 3 };
enum { FLOOR = 0, EXACT = 1, CLAMP = 2, SIGN_CLAMP = 3, MASS = 4, ONE = 5, ABS_CLAMP = 6 };

typedef struct {
    int64_t batch, heads, tokens, size, values, projections, features;
    int64_t kind, unit_norm, policy, undivided, threads;
    int64_t num_chunks, save_every; /* in chunks: the state is kept before every so many */
    double eps;
    const int64_t *chunks;       /* [num_chunks + 1]: where each begins, and the end; NULL: side by side */
    const unsigned char *fresh;  /* [num_chunks]: a document starts here; NULL: nowhere */
    const float *w;              /* [H, D, K] */
    view q, k, v, out, log_gate, key_scale;
    const float *s, *zm;         /* the state before: [G, M, V], [G, M + 1] with the mass last */
    float *s_after, *zm_after;
    float *den, *mass;           /* [G, L], where they are asked for */
    float *kept;                 /* [G, saved, state_floats] */
    view grad_out, grad_q, grad_k, grad_v;
    float *grad_w;               /* [G, D, K] */
    float *grad_log_gate, *grad_key_scale; /* [G, L] */
    const float *grad_s_after, *grad_zm_after;
    float *grad_s, *grad_zm;
    view sums, grad_sums;        /* of a read: [B, H, L, V + 2] to be added */
    float *memory;               /* [threads, memory_floats]: to work in */
    int64_t memory_floats;
} call;

typedef struct {
    int64_t values, features; /* columns of S, rounded up; rows */
    float *s, *z, *mass;
} state;

/* Of S and z; a state has 16 more, the first of which is the mass. */
INLINE int64_t sum_floats(const call *c) {
    return c->features * round_up(c->values, LANES) + round_up(c->features, LANES);
}
INLINE int64_t state_floats(const call *c) { return round_up(sum_floats(c), 16) + 16; }
INLINE state state_at(const call *c, float *at) {
    int64_t values = round_up(c->values, LANES);
    return (state){values, c->features, at, at + c->features * values, at + state_floats(c) - 16};
}
