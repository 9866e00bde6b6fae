/* A call's heads shared out over threads, each with memory of its own to work in.

   Included where `call` is known, of one operation or another. */
#pragma once
#include <stdint.h>
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
