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

// Returns once is_over(*word). Spins for about the length of an operation, then blocks: with more threads than free
// cores, the thread that is waited for needs the core of the one that waits.
template <class IsOver>
HFP_ALWAYS_INLINE inline void wait_until(int32_t* word, int32_t* blocked, IsOver&& is_over) {
  constexpr int kSpins = 4000;
  for (int spins = 0; spins < kSpins; spins++) {
    if (is_over(__atomic_load_n(word, __ATOMIC_ACQUIRE))) return;
    pause_briefly();
  }
  __atomic_add_fetch(blocked, 1, __ATOMIC_SEQ_CST);
  for (;;) {
    int32_t value = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    if (is_over(value)) break;
    block_while(word, value);
  }
  __atomic_sub_fetch(blocked, 1, __ATOMIC_SEQ_CST);
}

// Changes a word that others wait for.
HFP_ALWAYS_INLINE inline void announce(int32_t* word, int32_t value, int32_t* blocked) {
  __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(blocked, __ATOMIC_SEQ_CST)) wake_all(word);
}

HFP_ALWAYS_INLINE inline void wait_for_all(Barrier* barrier, Share share) {
  if (share.count == 1) return;
  int32_t generation = __atomic_load_n(&barrier->generation, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == share.count) {
    __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
    announce(&barrier->generation, generation + 1, &barrier->blocked);
    return;
  }
  wait_until(&barrier->generation, &barrier->blocked, [&](int32_t now) { return now != generation; });
}

// Waits until the parts whose keys and values the present one needs have done the operations before `op`.
HFP_ALWAYS_INLINE inline void wait_for_earlier_parts(const Run& run, int32_t op) {
  for (int32_t back = run.earlier_parts; back > 0; back--) {
    Progress* part = run.progress - back;
    wait_until(&part->ops, &part->blocked, [&](int32_t now) { return now >= op; });
  }
}

}  // namespace hfp
