// Fibers: the threads of one block, scheduled on one OS thread.
//
// A thread runs until it meets a barrier. A block barrier opens when every thread that has not left
// waits at it; a warp barrier opens when every lane of its mask waits with that same mask. When
// no thread can run, the kernel's barriers diverge and the launch fails. Threads run by index, or
// in an order that is drawn from a seed for each scheduling round, so that a kernel that lacks a
// barrier gives a wrong result instead of a lucky one. Rounds are not always fair then: in some, a
// warp runs as far as it can, as warps of a GPU do, before another has started.
//
// Strict builds (strict.cpp) refuse what a GPU leaves undefined: lanes that have exited count as
// missing wherever a warp acts together, and the lanes of one action must all have called the same.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#define KVCUPY_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVCUPY_ASAN 1
#endif
#endif
#ifdef KVCUPY_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace kvcupy_host {

// --- Switching stacks ----------------------------------------------------------------------------

#if defined(__x86_64__) || defined(__aarch64__)

// Save the callee-saved registers and the stack pointer, and switch to another stack.
// The assembler name is explicit, since Mach-O would prepend an underscore.
extern "C" __attribute__((visibility("hidden"))) void kvcupy_switch_stack(
    void** save, void* load) asm("kvcupy_switch_stack");

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
kvcupy_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr int kSavedWords = 6;  // then the return address
#else
asm(R"(
.text
.p2align 4
kvcupy_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#endif

struct Context {
  void* stack_pointer = nullptr;

  void prepare(char* stack, size_t bytes, void (*entry)()) {
    auto top = reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t{15};
#if defined(__x86_64__)
    // As after a call: the stack is 16-byte aligned plus one return address.
    auto* words = reinterpret_cast<void**>(top) - 2;
    words[0] = reinterpret_cast<void*>(entry);
    words[1] = nullptr;
    stack_pointer = words - kSavedWords;
    memset(stack_pointer, 0, kSavedWords * sizeof(void*));
#else
    stack_pointer = reinterpret_cast<void*>(top - 160);
    memset(stack_pointer, 0, 160);
    static_cast<void**>(stack_pointer)[11] = reinterpret_cast<void*>(entry);  // x30
#endif
  }
};

inline void switch_context(Context& from, Context& to) {
  kvcupy_switch_stack(&from.stack_pointer, to.stack_pointer);
}

#else

struct Context {
  ucontext_t context;

  void prepare(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.context, &to.context); }

#endif

// --- One block -----------------------------------------------------------------------------------

constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 64 * 1024;

enum class State : unsigned char { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Fiber {
  Context context;
  State state;
  WarpCall warp_call;
  unsigned warp_mask;
  Site site;  // of the block barrier that it waits at
  uint3 index;
};

#ifdef KVCUPY_STRICT
constexpr bool kStrict = true;
#else
constexpr bool kStrict = false;
#endif

// Added by a strict build (strict.cpp); others never call it.
void block_synchronised();
void warp_synchronised(int first, unsigned mask);
void refuse_warp_call(const Fiber* fibers, int count, int waiting);
bool barriers_differ(const Fiber* fibers, int count);

// Runs blocks of one launch on the calling OS thread; lives as long as that thread.
class BlockRunner {
 public:
  ~BlockRunner() {
    if (stacks_) munmap(stacks_, kMaxThreads * kStackBytes);
  }

  // Returns false if the barriers of the block diverge or a thread trapped.
  bool run(void (*entry)(), unsigned long long seed) {
    if (!stacks_) {
      void* memory = mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) return false;
      stacks_ = static_cast<char*>(memory);
    }
    count_ = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
    random_ = seed;
    trapped_ = false;
    for (int i = 0; i < count_; ++i) {
      Fiber& fiber = fibers_[i];
      fiber.state = State::kReady;
      const unsigned plane = blockDim.x * blockDim.y;
      fiber.index = {i % blockDim.x, i % plane / blockDim.x, i / plane};
#ifdef KVCUPY_ASAN
      // A fiber that left from here did not return, so ASan's redzones around its locals are still
      // set.
      __asan_unpoison_memory_region(stacks_ + i * kStackBytes, kStackBytes);
#endif
      fiber.context.prepare(stacks_ + i * kStackBytes, kStackBytes, entry);
      order_[i] = i;
    }
    left_ = count_;
    while (left_ > 0) {
      if (random_) shuffle_order();
      const bool by_warps = random_ >> 32 & 1;
      bool progress = false;
      for (int i = 0; i < count_; ++i) {
        progress |= by_warps ? run_warp(order_[i]) : run_thread(order_[i]);
        if (trapped_) return false;
      }
      if (!progress && !open_barriers()) return false;
    }
    return true;
  }

  void block_barrier(Site site) {
    fibers_[current_].state = State::kAtBlockBarrier;
    fibers_[current_].site = site;
    suspend();
  }

  void warp_barrier(unsigned mask, WarpCall call) {
    fibers_[current_].state = State::kAtWarpBarrier;
    fibers_[current_].warp_mask = mask;
    fibers_[current_].warp_call = call;
    if (!open_warp_barrier(current_)) suspend();
  }

  [[noreturn]] void leave() {
    fibers_[current_].state = State::kDone;
    suspend();
    abort();
  }

  [[noreturn]] void trap() {
    trapped_ = true;
    leave();
  }

  unsigned long long* warp_exchange() { return exchange_ + current_ / 32 * 32; }

  unsigned lanes_left(unsigned mask) const {
    const int first = current_ / 32 * 32;
    for (int i = 0; i < 32; ++i) {
      if (first + i >= count_ || fibers_[first + i].state == State::kDone) mask &= ~(1u << i);
    }
    return mask;
  }
  bool trapped() const { return trapped_; }
  int current() const { return current_; }
  const Fiber& fiber(int thread) const { return fibers_[thread]; }

 private:
  // Run a thread up to its next barrier; false if it waits at one, or has left.
  bool run_thread(int next) {
    if (fibers_[next].state != State::kReady) return false;
    resume(next);
    if (fibers_[next].state == State::kDone) --left_;
    return true;
  }

  // Run a thread's warp, beginning with that thread, until all of it waits.
  bool run_warp(int begin) {
    const int first = begin / 32 * 32;
    bool any = false;
    for (bool again = true; again;) {
      again = false;
      for (int i = 0; i < 32 && !trapped_; ++i) {
        const int next = first + (begin + i) % 32;
        if (next < count_) again |= run_thread(next);
      }
      any |= again;
    }
    return any;
  }

  void resume(int next) {
    current_ = next;
    threadIdx = fibers_[next].index;
#ifdef KVCUPY_ASAN
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stacks_ + next * kStackBytes, kStackBytes);
#endif
    switch_context(scheduler_, fibers_[next].context);
#ifdef KVCUPY_ASAN
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  }

  void suspend() {
    Fiber& fiber = fibers_[current_];
#ifdef KVCUPY_ASAN
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(fiber.state == State::kDone ? nullptr : &fake, scheduler_bottom_,
                                   scheduler_bytes_);
#endif
    switch_context(fiber.context, scheduler_);
#ifdef KVCUPY_ASAN
    __sanitizer_finish_switch_fiber(fake, &scheduler_bottom_, &scheduler_bytes_);
#endif
  }

  // Open the warp barrier that a thread waits at, if all lanes of its mask that have not left wait
  // there too.
  bool open_warp_barrier(int waiting) {
    const unsigned mask = fibers_[waiting].warp_mask;
    const int first = waiting / 32 * 32;
    const int end = first + 32 < count_ ? first + 32 : count_;
    if (!(mask >> (waiting - first) & 1u)) return false;
    for (int i = first; i < end; ++i) {
      const Fiber& fiber = fibers_[i];
      if (!(mask >> (i - first) & 1u) || (!kStrict && fiber.state == State::kDone)) continue;
      if (fiber.state != State::kAtWarpBarrier || fiber.warp_mask != mask) return false;
      if (kStrict && fiber.warp_call != fibers_[waiting].warp_call) return false;
    }
    if constexpr (kStrict) {
      if (fibers_[waiting].warp_call == WarpCall::kBarrier) warp_synchronised(first, mask);
    }
    for (int i = first; i < end; ++i) {
      Fiber& fiber = fibers_[i];
      if (mask >> (i - first) & 1u && fiber.state != State::kDone) fiber.state = State::kReady;
    }
    return true;
  }

  // No thread is ready: open barriers that only threads which have left since were missing at.
  bool open_barriers() {
    bool any = false;
    for (int i = 0; i < count_; ++i) {
      if (fibers_[i].state == State::kAtWarpBarrier) any |= open_warp_barrier(i);
    }
    if (any || open_block_barrier()) return true;
    if constexpr (kStrict) {  // the waiting lanes can never be released
      for (int i = 0; i < count_; ++i) {
        if (fibers_[i].state == State::kAtWarpBarrier) refuse_warp_call(fibers_, count_, i);
      }
    }
    return false;
  }

  bool open_block_barrier() {
    bool any = false;
    for (int i = 0; i < count_; ++i) {
      if (fibers_[i].state == State::kAtWarpBarrier) return false;
      any |= fibers_[i].state == State::kAtBlockBarrier;
    }
    if constexpr (kStrict) {
      if (any) {
        if (barriers_differ(fibers_, count_)) return false;
        block_synchronised();
      }
    }
    for (int i = 0; i < count_; ++i) {
      if (fibers_[i].state == State::kAtBlockBarrier) fibers_[i].state = State::kReady;
    }
    return any;
  }

  void shuffle_order() {
    for (int i = count_ - 1; i > 0; --i) {
      random_ ^= random_ << 13;  // xorshift64
      random_ ^= random_ >> 7;
      random_ ^= random_ << 17;
      const int other = static_cast<int>(random_ % static_cast<unsigned>(i + 1));
      const int kept = order_[i];
      order_[i] = order_[other];
      order_[other] = kept;
    }
  }

 public:
  // The scheduler's stack, for ASan.
  const void* scheduler_bottom_ = nullptr;
  size_t scheduler_bytes_ = 0;

 private:
  Fiber fibers_[kMaxThreads];
  int order_[kMaxThreads];
  unsigned long long exchange_[kMaxThreads];
  Context scheduler_;
  char* stacks_ = nullptr;
  unsigned long long random_ = 0;
  int count_ = 0;
  int left_ = 0;  // threads that have not left
  int current_ = 0;
  bool trapped_ = false;
};

}  // namespace kvcupy_host
