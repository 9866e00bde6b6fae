/* The entries: a call's heads shared out over threads, each with room of its own. 0, or 1 for too little memory. */
#include "forward.h"
#include "read.h"
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
#endif
}

static void restore_denormals(uint64_t before) {
#if defined(__x86_64__)
    _mm_setcsr((uint32_t)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#endif
}

static int share_out(const call *c, void work(const call *, int64_t, float *), int64_t floats) {
    int failed = 0;
#pragma omp parallel num_threads(c->threads) reduction(| : failed)
    {
        float *memory = NULL;
        uint64_t before = flush_denormals();
        failed |= posix_memalign((void **)&memory, 64, 4 * floats) != 0;
#pragma omp for schedule(dynamic, 1)
        for (int64_t group = 0; group < c->batch * c->heads; group++)
            if (memory) work(c, group, memory);
        free(memory);
        restore_denormals(before);
    }
    return failed;
}

int64_t dist_attn_lanes(void) { return LANES; }
int64_t dist_attn_state_floats(const call *c) { return state_floats(c); }
int dist_attn_attend(const call *c) { return share_out(c, forward_group, forward_floats(c)); }
int dist_attn_attend_backward(const call *c) { return share_out(c, backward_group, backward_floats(c)); }
int dist_attn_read(const call *c) { return share_out(c, read_group, forward_floats(c)); }
int dist_attn_read_backward(const call *c) { return share_out(c, read_backward_group, backward_floats(c)); }
int dist_attn_adjoint_read(const call *c) { return share_out(c, adjoint_group, backward_floats(c)); }
