// Gather and scatter of block records on the CPU.
//
// Streaming copies throughout (stream_copy.h). Chunks are handed out one by one, because a core that also runs a
// forward step is slower than the other.
#include "fastkv/records.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "stream_copy.h"

namespace fastkv {

namespace {

using ll = long long;

// Below this, waking a thread costs more than it saves.
constexpr int64_t kParallelBytes = 256 << 10;
// Work that a thread takes at a time.
constexpr int64_t kChunkBytes = 128 << 10;
constexpr int kMaxThreads = 256;

/// One copy_records call. Unit u is part u % num_parts of pair u / num_parts, so a record is written front to back.
struct Job {
  const RecordPart* parts;
  int64_t num_parts;
  RecordsView records;
  const int32_t* device_ids;
  const int32_t* record_ids;
  int64_t num_units;
  int64_t chunk_units;
  RecordDirection direction;
  CopyBytes copy;
  std::atomic<int64_t> next{0};

  void copy_unit(int64_t unit) const {
    const RecordPart& part = parts[unit % num_parts];
    const int64_t pair = unit / num_parts;
    char* device = part.device + static_cast<int64_t>(device_ids[pair]) * part.block_stride;
    char* host = records.data + static_cast<int64_t>(record_ids[pair]) * records.stride + part.offset;
    if (direction == RecordDirection::kToHost)
      copy(host, device, part.bytes);
    else
      copy(device, host, part.bytes);
  }

  void work() {
    for (;;) {
      const int64_t begin = next.fetch_add(chunk_units, std::memory_order_relaxed);
      if (begin >= num_units) break;
      const int64_t end = begin + chunk_units < num_units ? begin + chunk_units : num_units;
      for (int64_t unit = begin; unit < end; ++unit) copy_unit(unit);
    }
    finish_stores();
  }
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

  void run(Job& job) {
    const std::lock_guard<std::mutex> turn(one_at_a_time_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      busy_ = static_cast<int>(threads_.size());
      ++generation_;
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    job_ = nullptr;
  }

 private:
  void loop() {
    int64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      Job* job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--busy_ == 0) done_.notify_all();
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
  int busy_ = 0;
  int64_t generation_ = 0;
  bool stopping_ = false;
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

Status copy_records(CopyPool* pool, const RecordPart* parts, int64_t num_parts, int64_t num_device_blocks,
                    const RecordsView& records, const int32_t* device_ids, const int32_t* record_ids, int64_t count,
                    RecordDirection direction) {
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
  if (count == 0 || block_bytes == 0) return {};
  Job job{parts, num_parts, records, device_ids, record_ids, count * num_parts, 1, direction, stream_copy()};
  const int64_t unit_bytes = block_bytes / num_parts;
  if (unit_bytes < kChunkBytes) job.chunk_units = kChunkBytes / (unit_bytes > 0 ? unit_bytes : 1);
  if (pool == nullptr || block_bytes * count < kParallelBytes)
    job.work();
  else
    pool->run(job);
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

/// parts: int64 [num_parts, 4] as RecordPart; direction: RecordDirection. Returns 0, or 1 with the refusal in
/// `message`.
__attribute__((visibility("default"))) int fastkv_copy_records(void* pool, const int64_t* parts, int64_t num_parts,
                                                               int64_t num_device_blocks, char* records,
                                                               int64_t record_stride, int64_t num_records,
                                                               const int32_t* device_ids, const int32_t* record_ids,
                                                               int64_t count, int direction, char* message,
                                                               int64_t capacity) {
  const fastkv::Status status = fastkv::copy_records(
      static_cast<fastkv::CopyPool*>(pool), reinterpret_cast<const fastkv::RecordPart*>(parts), num_parts,
      num_device_blocks, {records, record_stride, num_records}, device_ids, record_ids, count,
      direction == 0 ? fastkv::RecordDirection::kToHost : fastkv::RecordDirection::kToDevice);
  if (status.ok()) return 0;
  std::snprintf(message, static_cast<size_t>(capacity), "%s", status.message);
  return 1;
}

}  // extern "C"
