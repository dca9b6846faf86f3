// Waiting for the other threads of a step.
#pragma once
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "program.h"

namespace hfp {

HFP_ALWAYS_INLINE inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Blocks while *word is `value`, or returns for no reason.
HFP_ALWAYS_INLINE inline void block_while(int32_t* word, int32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  (void)word, (void)value;
  sched_yield();
#endif
}

HFP_ALWAYS_INLINE inline void wake_all(int32_t* word) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

// Spins for about the length of an operation, then blocks: with more threads than free cores, the thread that is
// waited for needs the core of the one that waits.
HFP_ALWAYS_INLINE inline void wait_for_all(Barrier* barrier) {
  constexpr int kSpins = 4000;
  if (barrier->threads == 1) return;
  int32_t generation = __atomic_load_n(&barrier->generation, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == barrier->threads) {
    __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&barrier->generation, generation + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&barrier->blocked, __ATOMIC_SEQ_CST)) wake_all(&barrier->generation);
    return;
  }
  for (int spins = 0; spins < kSpins; spins++) {
    if (__atomic_load_n(&barrier->generation, __ATOMIC_ACQUIRE) != generation) return;
    pause_briefly();
  }
  __atomic_add_fetch(&barrier->blocked, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&barrier->generation, __ATOMIC_SEQ_CST) == generation)
    block_while(&barrier->generation, generation);
  __atomic_sub_fetch(&barrier->blocked, 1, __ATOMIC_SEQ_CST);
}

}  // namespace hfp
