/* The entries: a call's heads shared out over threads, each with memory of its own to work in. */
#include "forward.h"
#include "read.h"
#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Numbers below 1e-38, which decaying states are full of, count as 0 while a thread works here: they are slow. */
static uint64_t flush_denormals(void) {
#if defined(__x86_64__)
    uint32_t before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | (1 << 24)));
    return before;
#else
    return 0;
#endif
}

static void restore_denormals(uint64_t before) {
#if defined(__x86_64__)
    _mm_setcsr((uint32_t)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}

static void share_out(const call *c, void work(const call *, int64_t, float *)) {
#pragma omp parallel num_threads(c->threads)
    {
        uint64_t before = flush_denormals();
#pragma omp for schedule(dynamic, 1)
        for (int64_t group = 0; group < c->batch * c->heads; group++)
            work(c, group, c->memory + omp_get_thread_num() * c->memory_floats);
        restore_denormals(before);
    }
}

/* Compared with the size of its mirror in Python before anything is called. */
int64_t dist_attn_call_bytes(void) { return sizeof(call); }
/* Whether products of bfloat16 tensors are of bfloat16 instructions. */
int64_t dist_attn_half_products(void) { return HALF_PRODUCTS; }
int64_t dist_attn_state_floats(const call *c) { return state_floats(c); }
/* What a thread needs to work in; the same for any length that fits into memory, but for one number a chunk of reads. */
int64_t dist_attn_forward_floats(const call *c) { return round_up(forward_floats(c), 16); }
int64_t dist_attn_backward_floats(const call *c) { return round_up(backward_floats(c), 16); }
void dist_attn_attend(const call *c) { share_out(c, forward_group); }
void dist_attn_attend_backward(const call *c) { share_out(c, backward_group); }
void dist_attn_read(const call *c) { share_out(c, read_group); }
void dist_attn_read_backward(const call *c) { share_out(c, read_backward_group); }
void dist_attn_adjoint_read(const call *c) { share_out(c, adjoint_group); }
