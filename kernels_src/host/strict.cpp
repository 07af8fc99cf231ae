// The runner of strict builds: this processor refuses what a GPU would punish.
//
// A strict build compiles a kernel with the instrumentation of the thread sanitizer and the
// alignment checks of the sanitizer for undefined behaviour, but links neither of their libraries.
// What the compiler calls at each access is defined here: accesses to shared memory are checked
// against the history of each byte (watch.h), and a misaligned one ends the launch. This file is
// compiled once, without instrumentation, and linked to every kernel.
//
// What is refused, where the sources leave a choice:
// - Shuffles, votes, products and ldmatrix need every lane that their mask names. The PTX ISA lets
//   shfl.sync and vote.sync pass by lanes that have exited, but not mma.sync and ldmatrix, and what
//   such a lane would have given is undefined: here none may be missing, nor outside the block.
// - bar.warp.sync (__syncwarp) waits for all threads named, so an exited lane is missing too.
// - __syncthreads waits for all threads that have not exited (CUDA guide, compute capability 7.0
//   and newer), and all of them must wait at the same one.
// - Only barriers order memory: __syncwarp the lanes that take part, __syncthreads the block.
#ifndef KVCUPY_STRICT
#error "strict.cpp is for strict builds"
#endif

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#if defined(__linux__)
#include <link.h>
#endif

#include "runner.h"

extern "C" {
// What KVCUPY_HOST_KERNEL (strict_kernel.h) defines.
void kvcupy_kernel(const void* params);
extern const int kvcupy_kernel_has_barriers;
#if defined(__ELF__)
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
#endif
}

namespace kvcupy_host {

// --- Where shared memory is ----------------------------------------------------------------------
// Each worker has a slot of one region, so that one comparison excludes all other memory.

constexpr size_t kSlotBytes = 256 * 1024;
constexpr size_t kSlots = 64;         // OS threads that run one kernel; more find no memory
constexpr size_t kDynamicStart = 16;  // in its slot: aligned as a GPU promises, and no better

static char* region;
static Worker* owners[kSlots];
static size_t num_slots;

// Variables declared __shared__ are thread-local: those of the library, but for `worker`.
static size_t fixed_bytes;
static bool fixed_known;

#if defined(__linux__)
static int find_thread_locals(dl_phdr_info* object, size_t, void* found) {
  size_t bytes = 0;
  bool ours = false;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const auto& part = object->dlpi_phdr[i];
    const uintptr_t start = object->dlpi_addr + part.p_vaddr;
    const auto here = reinterpret_cast<uintptr_t>(&kvcupy_kernel);
    if (part.p_type == PT_LOAD && here - start < part.p_memsz) ours = true;
    if (part.p_type == PT_TLS) bytes = part.p_memsz;
  }
  if (!ours) return 0;
  fixed_bytes = bytes > sizeof(worker) ? bytes : 0;
  *static_cast<void**>(found) = object->dlpi_tls_data;
  return 1;
}
#endif

// Find the thread-local variables of this OS thread.
static char* find_fixed() {
  void* found = nullptr;
#if defined(__linux__)
  dl_iterate_phdr(find_thread_locals, &found);
#endif
  return static_cast<char*>(found);
}

static bool open_worker(Worker& fresh) {
  pthread_mutex_lock(&idle_lock);
  if (!region) region = reserve<char>(kSlots * kSlotBytes);
  const size_t slot = region && num_slots < kSlots ? num_slots++ : kSlots;
  pthread_mutex_unlock(&idle_lock);
  if (slot == kSlots) return false;
  fresh.watch.dynamic = reserve<ByteState>(kSlotBytes);
  if (!fresh.watch.dynamic) return false;
  fresh.shared = region + slot * kSlotBytes + kDynamicStart;
  __atomic_store_n(&owners[slot], &fresh, __ATOMIC_RELEASE);
  return true;
}

// Reset shared memory for a block: nothing is written yet.
bool prepare_watch(size_t bytes) {
  Watch& watch = worker->watch;
  if (!worker->shared && !open_worker(*worker)) return false;
  if (!fixed_known || (fixed_bytes && !watch.fixed_start)) {
    watch.fixed_start = find_fixed();
    __atomic_store_n(&fixed_known, true, __ATOMIC_RELEASE);
  }
  if (fixed_bytes && !watch.fixed && !(watch.fixed = reserve<ByteState>(fixed_bytes))) return false;
  watch.shared_start = worker->shared;
  watch.shared_bytes = bytes;
  watch.begin_block(kSlotBytes, fixed_bytes);
  memset(worker->shared, 0xff, bytes);
  return true;
}

Indices* indices() { return &worker->indices; }

// --- Refusing ------------------------------------------------------------------------------------

static int this_thread() {
  return worker->fibers ? worker->fibers->current() : worker->watch.plain_thread;
}

struct Name {
  char text[48];
};

static Name thread_name(int thread) {
  const unsigned row = blockDim.x;
  const unsigned plane = row * blockDim.y;
  Name name;
  snprintf(name.text, sizeof name.text, "thread (%u, %u, %u)", thread % row, thread % plane / row,
           thread / plane);
  return name;
}

static const char* file_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

// Record why the launch fails, unless another block has done so: "block ..., thread ...: <format>".
__attribute__((format(printf, 3, 4))) static void refuse(int thread, const void* code,
                                                         const char* format, ...) {
  Grid& grid = *worker->watch.grid;
  int expected = kOk;
  if (!__atomic_compare_exchange_n(&grid.status, &expected, kRefused, false, __ATOMIC_SEQ_CST,
                                   __ATOMIC_SEQ_CST)) {
    return;
  }
  Report& report = *grid.report;
  const int used = snprintf(report.text, sizeof report.text, "block (%u, %u, %u), %s: ", blockIdx.x,
                            blockIdx.y, blockIdx.z, thread_name(thread).text);
  va_list values;
  va_start(values, format);
  vsnprintf(report.text + used, sizeof report.text - used, format, values);
  va_end(values);
#if defined(__ELF__)
  if (code) report.code = static_cast<const char*>(code) - __ehdr_start;
#endif
}

// End the block of the running thread.
[[noreturn]] static void leave_refused() {
  if (!worker->fibers) leave_plain(kRefused);
  worker->fibers->trap();
}

// --- Warps and barriers --------------------------------------------------------------------------

static const char* name_of(WarpCall call) {
  switch (call) {
    case WarpCall::kBarrier:
      return "__syncwarp";
    case WarpCall::kShuffle:
      return "a shuffle";
    case WarpCall::kVote:
      return "a vote";
    case WarpCall::kProduct:
      return "mma.sync";
    case WarpCall::kLoadMatrices:
      return "ldmatrix";
  }
  return "";
}

void require_mask(unsigned mask, WarpCall call) {
  const int self = this_thread();
  const int first = self / warpSize * warpSize;
  const int threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  if (!(mask >> self % warpSize & 1u)) {
    refuse(self, nullptr, "%s with the mask 0x%08x, which does not name its own lane %d",
           name_of(call), mask, self % warpSize);
    leave_refused();
  }
  for (int lane = 0; lane < warpSize; ++lane) {
    if (mask >> lane & 1u && first + lane >= threads) {
      refuse(self, nullptr,
             "%s with the mask 0x%08x, which names lane %d: the block has no such thread",
             name_of(call), mask, lane);
      leave_refused();
    }
  }
}

void require_lane(unsigned mask, unsigned source) {
  if (source < 32 && mask >> source & 1u) return;
  refuse(this_thread(), nullptr,
         "a shuffle with the mask 0x%08x reads lane %u, which the mask does not name", mask,
         source);
  leave_refused();
}

void block_synchronised() { worker->watch.block_synchronised(); }
void warp_synchronised(int first, unsigned mask) { worker->watch.warp_synchronised(first, mask); }

// Deadlock: report what thread `waiting` waits for.
void refuse_warp_call(const Fiber* fibers, int, int waiting) {
  const Fiber& self = fibers[waiting];
  const int first = waiting / warpSize * warpSize;
  for (int lane = 0; lane < warpSize; ++lane) {
    const Fiber& other = fibers[first + lane];
    if (!(self.warp_mask >> lane & 1u)) continue;
    if (other.state == State::kAtWarpBarrier && other.warp_mask == self.warp_mask &&
        other.warp_call == self.warp_call) {
      continue;
    }
    char where[120];
    if (other.state == State::kDone) {
      snprintf(where, sizeof where, "has exited");
    } else if (other.state == State::kAtBlockBarrier) {
      snprintf(where, sizeof where, "waits at the __syncthreads of %s:%d",
               file_name(other.site.file), other.site.line);
    } else {
      snprintf(where, sizeof where, "waits in %s with the mask 0x%08x", name_of(other.warp_call),
               other.warp_mask);
    }
    refuse(waiting, nullptr, "%s with the mask 0x%08x waits for lane %d, but %s %s",
           name_of(self.warp_call), self.warp_mask, lane, thread_name(first + lane).text, where);
    return;
  }
}

// Whether the threads of the block wait at different barriers, which is then refused.
bool barriers_differ(const Fiber* fibers, int count) {
  int waiting = -1;
  for (int i = 0; i < count; ++i) {
    if (fibers[i].state != State::kAtBlockBarrier) continue;
    if (waiting < 0) waiting = i;
    const Site here = fibers[waiting].site;
    const Site there = fibers[i].site;
    if (here.line == there.line && strcmp(here.file, there.file) == 0) continue;
    refuse(waiting, nullptr, "it waits at the __syncthreads of %s:%d, but %s at that of %s:%d",
           file_name(here.file), here.line, thread_name(i).text, file_name(there.file), there.line);
    return true;
  }
  return false;
}

// --- Shared memory -------------------------------------------------------------------------------

static const char* name_of(unsigned access) {
  return access & kAtomic ? "atomic access to" : access & kWrite ? "write of" : "read of";
}

[[noreturn]] static void refuse_access(const void* address, size_t bytes, unsigned access,
                                       const char* memory, size_t place, const char* why, int other,
                                       const void* code) {
  refuse(this_thread(), code, "%s %zu bytes at byte %zu of %s (address %p), but %s%s%s",
         name_of(access), bytes, place, memory, address, why, other < 0 ? "" : " ",
         other < 0 ? "" : thread_name(other).text);
  leave_refused();
}

static void watch_bytes(ByteState* states, const void* address, size_t bytes, unsigned access,
                        const char* memory, size_t place, const void* code) {
  Watch& watch = worker->watch;
  const int self = this_thread();
  for (size_t i = 0; i < bytes; ++i) {
    int other;
    if (const char* why = watch.touch(states[i], self, access, other)) {
      refuse_access(address, bytes, access, memory, place, why, other, code);
    }
  }
}

constexpr const char* kDynamic = "dynamic shared memory";

static __attribute__((noinline)) void watch_dynamic(const void* address, size_t bytes,
                                                    unsigned access, const void* code) {
  const size_t at = static_cast<const char*>(address) - region;
  Worker* owner = owners[at / kSlotBytes];
  const size_t place = at % kSlotBytes - kDynamicStart;  // huge where that is below the start
  if (owner != worker) {
    refuse_access(address, bytes, access, kDynamic, place, "it is another block's", -1, code);
  }
  const size_t there = worker->watch.shared_bytes;
  if (place >= there || bytes > there - place) {
    char why[60];
    snprintf(why, sizeof why, "the block has %zu bytes of it", there);
    refuse_access(address, bytes, access, kDynamic, place, why, -1, code);
  }
  watch_bytes(worker->watch.dynamic + place, address, bytes, access, kDynamic, place, code);
}

static __attribute__((noinline)) void watch_fixed(const void* address, size_t bytes,
                                                  unsigned access, const void* code) {
  const Watch& watch = worker->watch;
  const size_t place = static_cast<const char*>(address) - watch.fixed_start;
  if (place >= fixed_bytes) return;
  watch_bytes(watch.fixed + place, address, bytes, access, "static shared memory", place, code);
}

static inline bool is_dynamic(const void* address) {
  return static_cast<size_t>(static_cast<const char*>(address) - region) < kSlots * kSlotBytes;
}

// The history of the bytes of shared memory from an address on; null if it is not shared memory.
static ByteState* states_of(const char* address) {
  const Watch& watch = worker->watch;
  if (is_dynamic(address)) return watch.dynamic + (address - worker->shared);
  const size_t place = address - watch.fixed_start;
  return fixed_bytes && place < fixed_bytes ? watch.fixed + place : nullptr;
}

static inline void watch_access(const void* address, size_t bytes, unsigned access,
                                const void* code) {
  if (__builtin_expect(is_dynamic(address), 0)) {
    watch_dynamic(address, bytes, access, code);
  } else if (__builtin_expect(fixed_bytes != 0, 0)) {
    watch_fixed(address, bytes, access, code);
  }
}

// --- Matrices and copies (mma.h) -----------------------------------------------------------------

void* fragment_memory(size_t bytes) {
  void*& memory = worker->watch.fragments;
  if (!memory && !(memory = malloc(bytes))) {
    refuse(this_thread(), nullptr, "no memory for what mma.sync multiplies");
    leave_refused();
  }
  return memory;
}

static void require_aligned(const void* address, const char* what, int bytes = 16) {
  if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
  refuse(this_thread(), nullptr, "misaligned address %p: %s needs a multiple of %d", address, what,
         bytes);
  leave_refused();
}

void require_matrix_row(const char* row) {
  require_aligned(row, "ldmatrix");
  if (!states_of(row)) {
    refuse(this_thread(), nullptr, "ldmatrix of address %p, which is not in shared memory", row);
    leave_refused();
  }
  watch_access(row, 16, kRead, __builtin_return_address(0));
}

static Copies& copies_of_thread() {
  Copies& copies = worker->watch.copies[this_thread()];
  if (copies.block != worker->watch.block()) {
    copies.block = worker->watch.block();
    copies.count = 0;
    copies.group = 0;
  }
  return copies;
}

void begin_copy(char* to, const char* from, bool exist, int bytes) {
  require_aligned(to, "the target of cp.async", bytes);
  require_aligned(from, "the source of cp.async", bytes);
  if (!states_of(to) || states_of(from)) {
    refuse(this_thread(), nullptr,
           "cp.async from %p to %p, which is not from global to shared memory",
           static_cast<const void*>(from), static_cast<const void*>(to));
    leave_refused();
  }
  watch_access(to, bytes, kWrite, __builtin_return_address(0));
  Copies& copies = copies_of_thread();
  if (!copies.add({to, exist ? from : nullptr, copies.group, bytes})) {
    refuse(this_thread(), nullptr, "no memory for what cp.async has begun");
    leave_refused();
  }
  ByteState* states = states_of(to);
  for (int i = 0; i < bytes; ++i) {
    states[i].in_flight = true;
    states[i].copier = static_cast<uint16_t>(this_thread());
  }
}

void commit_copies() { ++copies_of_thread().group; }

// Let all copies land but those of the `left` last committed groups.
void wait_for_groups(unsigned left) {
  Copies& copies = copies_of_thread();
  int kept = 0;
  for (int i = 0; i < copies.count; ++i) {
    const Copy copy = copies.begun[i];
    if (copy.group + left >= copies.group) {
      copies.begun[kept++] = copy;
      continue;
    }
    if (copy.from) {
      memcpy(copy.to, copy.from, copy.bytes);
    } else {
      memset(copy.to, 0, copy.bytes);
    }
    ByteState* states = states_of(copy.to);
    for (int k = 0; k < copy.bytes; ++k) states[k].in_flight = false;
    watch_access(copy.to, copy.bytes, kWrite, nullptr);
  }
  copies.count = kept;
}

void finish_copies() {
  commit_copies();
  wait_for_groups(0);
}

// --- Blocks --------------------------------------------------------------------------------------

static void fiber_entry() {
  kvcupy_kernel(worker->watch.grid->params);
  worker->fibers->leave();
}

static int run_fibers(const void*, unsigned long long seed) {
  worker->fibers = &worker->runner;
  if (worker->fibers->run(fiber_entry, seed)) return kOk;
  return worker->fibers->trapped() ? kTrapped : kBarriersDiverge;
}

// A permutation of `count` indices, drawn from a seed; 0: the identity.
class Order {
 public:
  Order(unsigned long long count, unsigned long long seed) : count_(count), start_(seed % count) {
    if (seed) factor_ = (seed >> 20) % count;
    while (count > 1 && common_divisor(count, factor_) != 1) factor_ = (factor_ + 1) % count;
  }

  unsigned long long operator[](unsigned long long number) const {
    const auto product = static_cast<unsigned __int128>(factor_) * number;
    return static_cast<unsigned long long>((product + start_) % count_);
  }

 private:
  static unsigned long long common_divisor(unsigned long long a, unsigned long long b) {
    while (b) {
      const unsigned long long rest = a % b;
      a = b;
      b = rest;
    }
    return a;
  }

  unsigned long long count_;
  unsigned long long factor_ = 1;
  unsigned long long start_;
};

static __attribute__((noinline)) void run_each(const void* params, unsigned long long seed) {
  const int threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  const unsigned row = blockDim.x;
  const unsigned plane = row * blockDim.y;
  const Order order(threads, seed);
  for (int i = 0; i < threads; ++i) {
    const auto thread = static_cast<unsigned>(order[i]);
    worker->watch.plain_thread = static_cast<int>(thread);
    threadIdx = {thread % row, thread % plane / row, thread / plane};
    kvcupy_kernel(params);
  }
}

static int run_plain(const void* params, unsigned long long seed) {
  worker->fibers = nullptr;
  if (const int status = setjmp(worker->plain_exit)) return status;
  run_each(params, seed);
  return kOk;
}

unsigned long long block_in_order(const Grid& grid, unsigned long long number) {
  return Order(grid.blocks, grid.config->seed)[number];
}

// --- What an instrumented kernel calls -----------------------------------------------------------

// Of the sanitizer for undefined behaviour.
struct SourceLocation {
  const char* file;
  uint32_t line;
  uint32_t column;
};
struct TypeDescriptor {
  uint16_t kind;
  uint16_t info;
  char name[1];
};
struct TypeMismatch {
  SourceLocation location;
  const TypeDescriptor* type;
  unsigned char log_alignment;
  unsigned char kind;
};

static void refuse_type(const TypeMismatch& mismatch, void* address) {
  static const char* const kKinds[] = {"a read of", "a write of", "an access to"};
  refuse(this_thread(), nullptr, "misaligned address %p: %s %s needs a multiple of %d (%s:%u)",
         address, kKinds[mismatch.kind < 2 ? mismatch.kind : 2], mismatch.type->name,
         1 << mismatch.log_alignment, file_name(mismatch.location.file), mismatch.location.line);
  leave_refused();
}

[[noreturn]] static void refuse_multiple(const void* address, size_t bytes, unsigned access,
                                         size_t multiple, const void* code) {
  refuse(this_thread(), code, "misaligned address %p: a %s %zu bytes needs a multiple of %zu",
         address, name_of(access), bytes, multiple);
  leave_refused();
}

}  // namespace kvcupy_host

#define KVCUPY_HOOK extern "C" __attribute__((visibility("hidden")))

KVCUPY_HOOK void __ubsan_handle_type_mismatch_v1(void* mismatch, void* address) {
  kvcupy_host::refuse_type(*static_cast<kvcupy_host::TypeMismatch*>(mismatch), address);
}

KVCUPY_HOOK void __tsan_init() {}
KVCUPY_HOOK void __tsan_func_entry(void*) {}
KVCUPY_HOOK void __tsan_func_exit() {}

// An access whose type is aligned as its size, at least up to 8 bytes.
template <size_t kBytes>
static inline void note_access(void* address, unsigned access, const void* code) {
  constexpr uintptr_t kMultiple = kBytes < 8 ? kBytes : 8;
  if (__builtin_expect(reinterpret_cast<uintptr_t>(address) % kMultiple != 0, 0)) {
    kvcupy_host::refuse_multiple(address, kBytes, access, kMultiple, code);
  }
  kvcupy_host::watch_access(address, kBytes, access, code);
}

#define KVCUPY_ACCESS(NAME, BYTES, ACCESS)                                          \
  KVCUPY_HOOK void __tsan_##NAME##BYTES(void* address) {                            \
    note_access<BYTES>(address, ACCESS, __builtin_return_address(0));               \
  }                                                                                 \
  KVCUPY_HOOK void __tsan_unaligned_##NAME##BYTES(void* address) {                  \
    kvcupy_host::watch_access(address, BYTES, ACCESS, __builtin_return_address(0)); \
  }
#define KVCUPY_ACCESSES(BYTES)                   \
  KVCUPY_ACCESS(read, BYTES, kvcupy_host::kRead) \
  KVCUPY_ACCESS(write, BYTES, kvcupy_host::kWrite)
KVCUPY_ACCESSES(1)
KVCUPY_ACCESSES(2)
KVCUPY_ACCESSES(4)
KVCUPY_ACCESSES(8)
KVCUPY_ACCESSES(16)

KVCUPY_HOOK void __tsan_read_range(void* address, unsigned long bytes) {
  kvcupy_host::watch_access(address, bytes, kvcupy_host::kRead, __builtin_return_address(0));
}
KVCUPY_HOOK void __tsan_write_range(void* address, unsigned long bytes) {
  kvcupy_host::watch_access(address, bytes, kvcupy_host::kWrite, __builtin_return_address(0));
}

// Clang calls these for what GCC leaves to the C library.
KVCUPY_HOOK void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  kvcupy_host::watch_access(from, bytes, kvcupy_host::kRead, __builtin_return_address(0));
  kvcupy_host::watch_access(to, bytes, kvcupy_host::kWrite, __builtin_return_address(0));
  return memcpy(to, from, bytes);
}
KVCUPY_HOOK void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  kvcupy_host::watch_access(from, bytes, kvcupy_host::kRead, __builtin_return_address(0));
  kvcupy_host::watch_access(to, bytes, kvcupy_host::kWrite, __builtin_return_address(0));
  return memmove(to, from, bytes);
}
KVCUPY_HOOK void* __tsan_memset(void* to, int value, size_t bytes) {
  kvcupy_host::watch_access(to, bytes, kvcupy_host::kWrite, __builtin_return_address(0));
  return memset(to, value, bytes);
}

// The instrumentation makes calls of atomics. All are sequentially consistent here.
KVCUPY_HOOK void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

#define KVCUPY_TOUCH(T, ACCESS)                                                                  \
  kvcupy_host::watch_access(const_cast<T*>(address), sizeof(T), kvcupy_host::kAtomic | (ACCESS), \
                            __builtin_return_address(0))
#define KVCUPY_UPDATE(BITS, T, NAME, BUILTIN)                                     \
  KVCUPY_HOOK T __tsan_atomic##BITS##_##NAME(volatile T* address, T value, int) { \
    KVCUPY_TOUCH(T, kvcupy_host::kRead | kvcupy_host::kWrite);                    \
    return BUILTIN(address, value, __ATOMIC_SEQ_CST);                             \
  }
#define KVCUPY_SWAP(BITS, T, NAME)                                                                 \
  KVCUPY_HOOK bool __tsan_atomic##BITS##_compare_exchange_##NAME(volatile T* address, T* expected, \
                                                                 T value, int, int) {              \
    KVCUPY_TOUCH(T, kvcupy_host::kRead | kvcupy_host::kWrite);                                     \
    return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_SEQ_CST,          \
                                       __ATOMIC_SEQ_CST);                                          \
  }
#define KVCUPY_ATOMICS(BITS, T)                                                             \
  KVCUPY_HOOK T __tsan_atomic##BITS##_load(const volatile T* address, int) {                \
    KVCUPY_TOUCH(T, kvcupy_host::kRead);                                                    \
    return __atomic_load_n(address, __ATOMIC_SEQ_CST);                                      \
  }                                                                                         \
  KVCUPY_HOOK void __tsan_atomic##BITS##_store(volatile T* address, T value, int) {         \
    KVCUPY_TOUCH(T, kvcupy_host::kWrite);                                                   \
    __atomic_store_n(address, value, __ATOMIC_SEQ_CST);                                     \
  }                                                                                         \
  KVCUPY_UPDATE(BITS, T, exchange, __atomic_exchange_n)                                     \
  KVCUPY_UPDATE(BITS, T, fetch_add, __atomic_fetch_add)                                     \
  KVCUPY_UPDATE(BITS, T, fetch_sub, __atomic_fetch_sub)                                     \
  KVCUPY_UPDATE(BITS, T, fetch_and, __atomic_fetch_and)                                     \
  KVCUPY_UPDATE(BITS, T, fetch_or, __atomic_fetch_or)                                       \
  KVCUPY_UPDATE(BITS, T, fetch_xor, __atomic_fetch_xor)                                     \
  KVCUPY_SWAP(BITS, T, strong)                                                              \
  KVCUPY_SWAP(BITS, T, weak)                                                                \
  KVCUPY_HOOK T __tsan_atomic##BITS##_compare_exchange_val(volatile T* address, T expected, \
                                                           T value, int, int) {             \
    KVCUPY_TOUCH(T, kvcupy_host::kRead | kvcupy_host::kWrite);                              \
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_SEQ_CST,         \
                                __ATOMIC_SEQ_CST);                                          \
    return expected;                                                                        \
  }
KVCUPY_ATOMICS(8, unsigned char)
KVCUPY_ATOMICS(16, unsigned short)
KVCUPY_ATOMICS(32, unsigned int)
KVCUPY_ATOMICS(64, unsigned long long)

// Run a grid. If it is refused, `report` says why.
extern "C" __attribute__((visibility("default"))) int kvcupy_launch_strict(
    const void* params, const kvcupy_host::Config* config, kvcupy_host::Report* report) {
  using namespace kvcupy_host;
  Grid grid{params, config, kvcupy_kernel_has_barriers ? run_fibers : run_plain,
            1ULL * config->grid[0] * config->grid[1] * config->grid[2]};
  grid.report = report;
  return run_grid(grid);
}
