// Copies between device tensors and host records, without Python: bytes, landing order, pools that come and go, threads
// that are woken in advance. Built by tests/native/run.sh under AddressSanitizer + UBSan, and under ThreadSanitizer.
#include "fastkv/records.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "fastkv/launch.h"

namespace {

fastkv::Isa isa = fastkv::Isa::kPortable;

}  // namespace

// Instead of cpu/dispatch.cc's, so that both loops run.
fastkv::Isa fastkv::current_isa() { return isa; }

namespace {

using fastkv::CopyPool;
using fastkv::RecordDirection;
using fastkv::RecordPart;

constexpr int64_t kBlocks = 24, kRecords = 20, kCopied = 16;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

/// Layers of two parts each, of odd and even sizes, with padding on both sides.
struct World {
  std::vector<std::vector<char>> tensors;
  std::vector<RecordPart> parts;
  std::vector<int64_t> first_part{0};
  std::vector<char> host;
  int64_t stride = 0;
  std::vector<int32_t> device_ids, record_ids;

  World(std::mt19937& random, int64_t layers) {
    const int64_t num_parts = 2 * layers;
    tensors.resize(static_cast<size_t>(num_parts));
    for (auto& tensor : tensors) {
      const int64_t bytes = 1 + static_cast<int64_t>(random() % 40000), block_stride = bytes + 64;
      tensor.resize(static_cast<size_t>(kBlocks * block_stride));
      for (char& byte : tensor) byte = static_cast<char>(random());
      parts.push_back({tensor.data(), block_stride, bytes, stride});
      stride = (stride + bytes + 15) / 16 * 16;
      if (parts.size() % 2 == 0) first_part.push_back(static_cast<int64_t>(parts.size()));
    }
    host.resize(static_cast<size_t>(kRecords * stride));
    for (char& byte : host) byte = static_cast<char>(random());
    std::vector<int32_t> blocks(kBlocks), records(kRecords);
    for (int32_t i = 0; i < kBlocks; ++i) blocks[static_cast<size_t>(i)] = i;
    for (int32_t i = 0; i < kRecords; ++i) records[static_cast<size_t>(i)] = i;
    std::shuffle(blocks.begin(), blocks.end(), random);
    std::shuffle(records.begin(), records.end(), random);
    device_ids.assign(blocks.begin(), blocks.begin() + kCopied);
    record_ids.assign(records.begin(), records.begin() + kCopied);
  }

  bool has_landed(int64_t first, int64_t last) const {
    for (int64_t p = first; p < last; ++p) {
      const RecordPart& part = parts[static_cast<size_t>(p)];
      for (size_t i = 0; i < kCopied; ++i) {
        if (std::memcmp(part.device + device_ids[i] * part.block_stride,
                        host.data() + record_ids[i] * stride + part.offset, static_cast<size_t>(part.bytes)) != 0)
          return false;
      }
    }
    return true;
  }
};

World* current = nullptr;
int64_t told = 0;

/// Reads what is said to have landed: a race if it has not.
void landed(int64_t num_groups) {
  CHECK(num_groups > told);
  CHECK(current->has_landed(current->first_part[static_cast<size_t>(told)],
                            current->first_part[static_cast<size_t>(num_groups)]));
  told = num_groups;
}

void round(std::mt19937& random, int threads) {
  World world(random, 1 + static_cast<int64_t>(random() % 9));
  current = &world;
  const auto num_parts = static_cast<int64_t>(world.parts.size());
  const auto num_groups = static_cast<int64_t>(world.first_part.size()) - 1;
  const fastkv::RecordsView records{world.host.data(), world.stride, kRecords};
  CopyPool* pool = fastkv::make_copy_pool(threads);
  CHECK(pool != nullptr);
  for (int repeat = 0; repeat < 4; ++repeat) {
    const auto direction = random() % 2 == 0 ? RecordDirection::kToHost : RecordDirection::kToDevice;
    for (char& byte : world.tensors[0]) byte = static_cast<char>(random());
    if (random() % 2 == 0) fastkv::prepare_copy(pool);
    told = 0;
    const fastkv::Status status = fastkv::copy_records(pool, world.parts.data(), num_parts, kBlocks, records,
                                                       world.device_ids.data(), world.record_ids.data(), kCopied,
                                                       direction, {world.first_part.data(), num_groups, landed});
    CHECK(status.ok());
    CHECK(told == num_groups);
    CHECK(world.has_landed(0, num_parts));
  }
  fastkv::prepare_copy(pool);  // ending a pool that waits for a copy is legal
  fastkv::free_copy_pool(pool);
}

}  // namespace

int main(int argc, char** argv) {
  std::mt19937 random(5);
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  for (int i = 0; i < rounds; ++i) {
#if defined(__x86_64__)
    isa = i % 2 == 0 && __builtin_cpu_supports("avx2") ? fastkv::Isa::kAvx2 : fastkv::Isa::kPortable;
#endif
    round(random, 1 + i % 3);
  }
  std::printf("records: %d rounds\n", rounds);
  return 0;
}
