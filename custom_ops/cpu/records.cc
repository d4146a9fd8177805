// Gather and scatter of block records on the CPU.
//
// Streaming copies throughout (stream_copy.h). Chunks are handed out one by one, because a core that also runs a
// forward step is slower than the other.
#include "fastkv/records.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "stream_copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastkv {

namespace {

using ll = long long;

// Below this, waking a thread costs more than it saves.
constexpr int64_t kParallelBytes = 256 << 10;
// Work that a thread takes at a time.
constexpr int64_t kChunkBytes = 128 << 10;
// How far ahead the beginnings of units are fetched, where no copy of the unit before leads to: past small ones
// (scales) to the next large one. Records of 8 KiB parts and their scales were gathered 10 % slower without; 512 bytes
// gave half.
constexpr int64_t kFetchedUnits = 2, kFetchedBytes = 2048;
constexpr int kMaxThreads = 256;
// How often a thread looks before it sleeps: some 150 us, so that the pieces of one plan meet a thread that is awake.
// On a virtual machine a core that sleeps takes 0.3 to 2 ms to come back, and Linux does not count on it: a thread that
// sleeps is then woken on its waker's own core, and waits for it. 64 MiB took 6.5 to 8 ms instead of 5. A thread
// started for each copy (a new one should go to an idle core) and one that may not wake on the caller's core were no
// better.
constexpr int kSpins = 8000;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

/// One copy_records call. Work is cut into chunks, group after group; unit u of a group is one of its parts (u % parts)
/// of pair u / parts, so a record is written front to back.
class Job {
 public:
  Job(const RecordPart* parts, const RecordsView& records, const int32_t* device_ids, const int32_t* record_ids,
      RecordDirection direction, void (*landed)(int64_t))
      : parts_(parts),
        records_(records),
        device_ids_(device_ids),
        record_ids_(record_ids),
        direction_(direction),
        copy_(stream_copy()),
        landed_(landed) {}

  /// False if there is no memory.
  bool plan(const int64_t* first_part, int64_t num_groups, int64_t count) {
    groups_.reset(new (std::nothrow) Group[static_cast<size_t>(num_groups)]);
    if (groups_ == nullptr) return false;
    num_groups_ = num_groups;
    for (int64_t g = 0; g < num_groups; ++g) {
      Group& group = groups_[g];
      group.first_part = first_part[g];
      group.num_parts = first_part[g + 1] - first_part[g];
      int64_t bytes = 0;
      for (int64_t p = first_part[g]; p < first_part[g + 1]; ++p) bytes += parts_[p].bytes;
      const int64_t unit_bytes = group.num_parts > 0 ? std::max<int64_t>(1, bytes / group.num_parts) : 1;
      group.num_units = group.num_parts * count;
      group.chunk_units = std::max<int64_t>(1, kChunkBytes / unit_bytes);
      group.first_chunk = num_chunks_;
      group.left.store(group.num_units, std::memory_order_relaxed);
      num_chunks_ += (group.num_units + group.chunk_units - 1) / group.chunk_units;
    }
    return true;
  }

  /// Take chunks until there are none. The caller of copy_records also tells what has landed.
  void work(bool is_caller) {
    int64_t g = 0;
    for (;;) {
      const int64_t chunk = next_.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= num_chunks_) return;
      while (g + 1 < num_groups_ && groups_[g + 1].first_chunk <= chunk) ++g;
      Group& group = groups_[g];
      const int64_t begin = (chunk - group.first_chunk) * group.chunk_units;
      const int64_t end = std::min(begin + group.chunk_units, group.num_units);
      fetch(group, begin, std::min(begin + kFetchedUnits, end));
      for (int64_t unit = begin; unit < end; ++unit) {
        fetch(group, unit + kFetchedUnits, std::min(unit + kFetchedUnits + 1, end));
        const Piece piece = locate(group, unit);
        copy_(piece.to, piece.from, piece.bytes);
      }
      finish_stores();
      group.left.fetch_sub(end - begin, std::memory_order_release);
      if (is_caller) tell();
    }
  }

  void tell() {
    if (landed_ == nullptr) return;
    const int64_t before = told_;
    while (told_ < num_groups_ && groups_[told_].left.load(std::memory_order_acquire) == 0) ++told_;
    if (told_ != before) landed_(told_);
  }

 private:
  struct Group {
    int64_t first_part, num_parts, num_units, chunk_units, first_chunk;
    std::atomic<int64_t> left;  // units that have not landed
  };

  struct Piece {
    char* to;
    const char* from;
    int64_t bytes;
  };

  Piece locate(const Group& group, int64_t unit) const {
    const RecordPart& part = parts_[group.first_part + unit % group.num_parts];
    const int64_t pair = unit / group.num_parts;
    char* device = part.device + static_cast<int64_t>(device_ids_[pair]) * part.block_stride;
    char* host = records_.data + static_cast<int64_t>(record_ids_[pair]) * records_.stride + part.offset;
    return direction_ == RecordDirection::kToHost ? Piece{host, device, part.bytes} : Piece{device, host, part.bytes};
  }

  /// Start reading the beginnings of these units.
  void fetch(const Group& group, int64_t begin, int64_t end) const {
    for (int64_t unit = begin; unit < end; ++unit) {
      const Piece piece = locate(group, unit);
      for (int64_t i = 0; i < std::min(piece.bytes, kFetchedBytes); i += 64) __builtin_prefetch(piece.from + i);
    }
  }

  const RecordPart* parts_;
  RecordsView records_;
  const int32_t* device_ids_;
  const int32_t* record_ids_;
  RecordDirection direction_;
  CopyBytes copy_;
  void (*landed_)(int64_t);
  std::unique_ptr<Group[]> groups_;
  int64_t num_groups_ = 0, num_chunks_ = 0, told_ = 0;
  std::atomic<int64_t> next_{0};
};

Status check_ids(const int32_t* ids, int64_t count, int64_t limit, const char* what) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= limit)
      return refuse(StatusCode::kOutOfRange, "%s %lld at place %lld, but there are %s 0 to %lld", what, (ll)ids[i],
                    (ll)i, what, (ll)(limit - 1));
  }
  return {};
}

}  // namespace

class CopyPool {
 public:
  /// Throws std::system_error when the system gives no thread.
  explicit CopyPool(int threads) {
    threads_.reserve(static_cast<size_t>(threads > 1 ? threads - 1 : 0));
    try {
      for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { loop(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;
  ~CopyPool() { stop(); }

  /// A copy is about to come: be awake when it does.
  void prepare() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_copy_near_ = true;
    }
    wake_.notify_all();
  }

  void run(Job& job) {
    const std::lock_guard<std::mutex> turn(one_at_a_time_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      busy_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job.work(true);
    for (int i = 0; i < kSpins && busy_.load(std::memory_order_acquire) != 0; ++i) relax();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_.load(std::memory_order_acquire) == 0; });
    job_ = nullptr;
    lock.unlock();
    job.tell();
  }

 private:
  void loop() {
    int64_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) relax();
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock,
                 [&] { return stopping_ || is_copy_near_ || generation_.load(std::memory_order_relaxed) != seen; });
      if (stopping_) return;
      is_copy_near_ = false;
      if (generation_.load(std::memory_order_relaxed) == seen) continue;
      seen = generation_.load(std::memory_order_relaxed);
      Job* job = job_;
      lock.unlock();
      job->work(false);
      lock.lock();
      if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.notify_all();
    }
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  std::vector<std::thread> threads_;
  std::mutex one_at_a_time_, mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  std::atomic<int> busy_{0};  // written under the mutex, read by spinning
  std::atomic<int64_t> generation_{0};
  bool stopping_ = false, is_copy_near_ = false;
};

CopyPool* make_copy_pool(int threads) {
  if (threads < 1 || threads > kMaxThreads) return nullptr;
  try {
    return new CopyPool(threads);
  } catch (const std::bad_alloc&) {
    return nullptr;
  } catch (const std::system_error&) {
    return nullptr;
  }
}

void free_copy_pool(CopyPool* pool) { delete pool; }

void prepare_copy(CopyPool* pool) { pool->prepare(); }

Status copy_records(CopyPool* pool, const RecordPart* parts, int64_t num_parts, int64_t num_device_blocks,
                    const RecordsView& records, const int32_t* device_ids, const int32_t* record_ids, int64_t count,
                    RecordDirection direction, const LandingOrder& order) {
  Status status = check_ids(device_ids, count, num_device_blocks, "device blocks");
  if (status.ok()) status = check_ids(record_ids, count, records.count, "host records");
  if (!status.ok()) return status;
  int64_t block_bytes = 0;
  for (int64_t part = 0; part < num_parts; ++part) {
    if (parts[part].offset < 0 || parts[part].bytes < 0 || parts[part].offset + parts[part].bytes > records.stride)
      return refuse(StatusCode::kInvalidArgument, "part %lld ends at %lld of a record of %lld bytes", (ll)part,
                    (ll)(parts[part].offset + parts[part].bytes), (ll)records.stride);
    block_bytes += parts[part].bytes;
  }
  const int64_t whole[2] = {0, num_parts};
  const int64_t* first_part = order.num_groups > 0 ? order.first_part : whole;
  const int64_t num_groups = order.num_groups > 0 ? order.num_groups : 1;
  if (first_part[0] != 0 || first_part[num_groups] != num_parts || !std::is_sorted(first_part, first_part + num_groups))
    return refuse(StatusCode::kInvalidArgument, "%lld landing groups do not cover %lld parts in order", (ll)num_groups,
                  (ll)num_parts);
  Job job(parts, records, device_ids, record_ids, direction, order.landed);
  if (!job.plan(first_part, num_groups, count)) return out_of_memory();
  if (pool == nullptr || block_bytes * count < kParallelBytes) {
    job.work(true);
    job.tell();
  } else {
    pool->run(job);
  }
  return {};
}

}  // namespace fastkv

// What Python reaches through ctypes, which releases the GIL for the call.
extern "C" {

__attribute__((visibility("default"))) void* fastkv_copy_pool_create(int threads) {
  return fastkv::make_copy_pool(threads);
}

__attribute__((visibility("default"))) void fastkv_copy_pool_destroy(void* pool) {
  fastkv::free_copy_pool(static_cast<fastkv::CopyPool*>(pool));
}

__attribute__((visibility("default"))) void fastkv_copy_pool_prepare(void* pool) {
  fastkv::prepare_copy(static_cast<fastkv::CopyPool*>(pool));
}

/// parts: int64 [num_parts, 4] as RecordPart; direction: RecordDirection; the last three before message: LandingOrder,
/// or null, 0, null. Returns 0, or 1 with the refusal in `message`.
__attribute__((visibility("default"))) int fastkv_copy_records(void* pool, const int64_t* parts, int64_t num_parts,
                                                               int64_t num_device_blocks, char* records,
                                                               int64_t record_stride, int64_t num_records,
                                                               const int32_t* device_ids, const int32_t* record_ids,
                                                               int64_t count, int direction, const int64_t* first_part,
                                                               int64_t num_groups, void (*landed)(int64_t),
                                                               char* message, int64_t capacity) {
  const fastkv::Status status = fastkv::copy_records(
      static_cast<fastkv::CopyPool*>(pool), reinterpret_cast<const fastkv::RecordPart*>(parts), num_parts,
      num_device_blocks, {records, record_stride, num_records}, device_ids, record_ids, count,
      direction == 0 ? fastkv::RecordDirection::kToHost : fastkv::RecordDirection::kToDevice,
      {first_part, num_groups, landed});
  if (status.ok()) return 0;
  std::snprintf(message, static_cast<size_t>(capacity), "%s", status.message);
  return 1;
}

}  // extern "C"
