// The race detector of strict builds: for each byte of a block's shared memory, the threads
// that last wrote and read it, and whether a barrier came since.
//
// Time is counted in epochs of the block, one per block barrier, and within an epoch in stamps of a
// warp, one per warp barrier. An access happens before another if it is of an earlier epoch, or of
// the same thread, or of a lane whose accesses up to that stamp the other's warp barriers have
// ordered. Shuffles, votes and products order no memory. Epochs and stamps keep counting from block
// to block, so that nothing has to be cleared between them.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

namespace kvcupy_host {

// Why a launch was refused; `Report` in kvcupy/devices/host.py mirrors it.
struct Report {
  unsigned long long code;  // where in the library the access is, or 0
  char text[1016];
};

enum Access : unsigned { kRead = 1, kWrite = 2, kAtomic = 4 };

// A byte of shared memory.
struct ByteState {
  uint32_t write_epoch;  // 0: never
  uint32_t write_stamp;
  uint32_t read_epoch;
  uint32_t read_stamp;  // of the earliest of `readers`
  uint32_t readers;     // lanes of the warp of first_reader
  uint16_t writer;      // a thread, as are those below
  uint16_t first_reader;
  uint16_t other_reader;  // of another warp, if `of_warps`
  uint16_t copier;
  bool of_warps;  // readers of this epoch are in several warps
  bool by_atomic;
  bool in_flight;  // a copy of `copier` lands here at an unknown time
};

struct Copy {
  char* to;
  const char* from;  // null: zeros
  unsigned group;
  int bytes;
};

// The copies that one thread has begun and not waited for.
struct Copies {
  Copy* begun = nullptr;
  int count = 0;
  int room = 0;
  unsigned group = 0;  // the one that the next copy belongs to
  uint32_t block = 0;  // the first epoch of the block that they are of

  bool add(const Copy& copy) {
    if (count == room) {
      const int more = room ? 2 * room : 32;
      void* memory = realloc(begun, more * sizeof(Copy));
      if (!memory) return false;
      begun = static_cast<Copy*>(memory);
      room = more;
    }
    begun[count++] = copy;
    return true;
  }
};

// Zero-filled memory that takes no space until it is touched.
template <typename T>
inline T* reserve(size_t count) {
  void* memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<T*>(memory);
}

struct Grid;

class Watch {
 public:
  static constexpr int kMostThreads = 1024;
  static constexpr int kWarpLanes = 32;
  static constexpr uint32_t kLastEpoch = 0xf0000000u;

  ByteState* dynamic = nullptr;  // of dynamic shared memory
  ByteState* fixed = nullptr;    // of __shared__ variables
  char* fixed_start = nullptr;
  char* shared_start = nullptr;
  size_t shared_bytes = 0;
  Grid* grid = nullptr;
  int plain_thread = 0;  // the running one, of a kernel without barriers
  Copies copies[kMostThreads];
  void* fragments = nullptr;  // of the matrices that threads multiply (mma.h)

  void begin_block(size_t dynamic_room, size_t fixed_room) {
    if (epoch_ >= kLastEpoch || latest_stamp_ >= kLastEpoch) {
      memset(dynamic, 0, dynamic_room * sizeof(ByteState));
      if (fixed) memset(fixed, 0, fixed_room * sizeof(ByteState));
      memset(stamps_, 0, sizeof stamps_);
      memset(all_known_, 0, sizeof all_known_);
      memset(known_, 0, sizeof known_);
      epoch_ = latest_stamp_ = 0;
    }
    first_epoch_ = ++epoch_;
  }

  uint32_t block() const { return first_epoch_; }

  void block_synchronised() { ++epoch_; }

  // The lanes of `mask` of the warp that begins at thread `first` have met.
  void warp_synchronised(int first, unsigned mask) {
    const int warp = first / kWarpLanes;
    const uint32_t stamp = ++stamps_[warp];
    if (stamp > latest_stamp_) latest_stamp_ = stamp;
    if (mask == 0xffffffffu) {
      all_known_[warp] = stamp;
      return;
    }
    uint32_t merged[kWarpLanes];
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      merged[lane] = 0;
      for (int other = 0; other < kWarpLanes; ++other) {
        const uint32_t known = known_[first + other][lane];
        if (mask >> other & 1u && known > merged[lane]) merged[lane] = known;
      }
      if (mask >> lane & 1u) merged[lane] = stamp;
    }
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      if (mask >> lane & 1u) memcpy(known_[first + lane], merged, sizeof merged);
    }
  }

  // Note an access of thread `self` to one byte; return why it is refused, or null. `other` is then
  // the thread that it meets, or -1.
  const char* touch(ByteState& byte, int self, unsigned access, int& other) {
    other = -1;
    if (byte.in_flight) {
      other = byte.copier;
      return "an asynchronous copy to it has not been waited for, which was begun by";
    }
    const bool current = byte.write_epoch == epoch_;
    if (access & kRead && byte.write_epoch < first_epoch_) return "nobody has written it";
    if (current && byte.writer != self && !(access & kAtomic && byte.by_atomic) &&
        !comes_before(byte.writer, byte.write_stamp, self)) {
      other = byte.writer;
      return "no barrier lies between it and the write of";
    }
    if (access & kWrite) {
      if (byte.read_epoch == epoch_ && (other = unordered_reader(byte, self)) >= 0) {
        return "no barrier lies between it and the read of";
      }
      byte.write_epoch = epoch_;
      byte.write_stamp = stamps_[self / kWarpLanes];
      byte.writer = static_cast<uint16_t>(self);
      byte.by_atomic = (access & kAtomic) != 0;
      byte.read_epoch = 0;
    } else {
      note_read(byte, self);
    }
    return nullptr;
  }

 private:
  // Whether what `thread` did up to `stamp`, in this epoch, happens before what `self` does now.
  bool comes_before(int thread, uint32_t stamp, int self) const {
    if (thread == self) return true;
    if (thread / kWarpLanes != self / kWarpLanes) return false;
    return all_known_[self / kWarpLanes] > stamp || known_[self][thread % kWarpLanes] > stamp;
  }

  int unordered_reader(const ByteState& byte, int self) const {
    const int first = byte.first_reader / kWarpLanes * kWarpLanes;
    if (byte.of_warps)
      return first == self / kWarpLanes * kWarpLanes ? byte.other_reader : byte.first_reader;
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      if (byte.readers >> lane & 1u && !comes_before(first + lane, byte.read_stamp, self)) {
        return first + lane;
      }
    }
    return -1;
  }

  void note_read(ByteState& byte, int self) {
    const unsigned lane = 1u << self % kWarpLanes;
    const uint32_t stamp = stamps_[self / kWarpLanes];
    if (byte.read_epoch != epoch_) {
      byte.read_epoch = epoch_;
      byte.read_stamp = stamp;
      byte.readers = lane;
      byte.first_reader = static_cast<uint16_t>(self);
      byte.of_warps = false;
      return;
    }
    if (byte.of_warps) return;
    if (byte.first_reader / kWarpLanes != self / kWarpLanes) {
      byte.of_warps = true;
      byte.other_reader = static_cast<uint16_t>(self);
      return;
    }
    if (byte.read_stamp != stamp) {
      // Happens-before is transitive: what this reader is ordered after, its successors are too.
      const int first = self / kWarpLanes * kWarpLanes;
      for (int i = 0; i < kWarpLanes; ++i) {
        if (comes_before(first + i, byte.read_stamp, self)) byte.readers &= ~(1u << i);
      }
      if (!byte.readers) byte.read_stamp = stamp;
    }
    byte.readers |= lane;
  }

  uint32_t epoch_ = 0;
  uint32_t first_epoch_ = 0;  // of the block
  uint32_t latest_stamp_ = 0;
  uint32_t stamps_[kMostThreads / kWarpLanes] = {};
  uint32_t all_known_[kMostThreads / kWarpLanes] = {};  // as of the last barrier of a whole warp
  uint32_t known_[kMostThreads][kWarpLanes] = {};
};

}  // namespace kvcupy_host
