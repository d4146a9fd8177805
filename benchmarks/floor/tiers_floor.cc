// The bound of moving blocks between device tensors and host records: plain C loops over the same pieces, split between
// as many threads (started for each call: some 20 us of several ms). One loop uses memcpy, one streams its stores.
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace {

void copy_stream(char* to, const char* from, int64_t bytes) {
#if defined(__x86_64__)
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    for (int part = 0; part < 4; ++part)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i) + part,
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i) + part));
  }
  std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
#else
  std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
}

}  // namespace

extern "C" {

// parts: [num_parts][4] of address, block stride, bytes, offset in the record. Pairs are split between the threads.
__attribute__((visibility("default"))) void floor_move(const int64_t* parts, int64_t num_parts, char* records,
                                                       int64_t stride, const int32_t* blocks, const int32_t* rows,
                                                       int64_t count, int to_device, int stream, int threads) {
  const auto share = [&](int thread) {
    for (int64_t pair = count * thread / threads; pair < count * (thread + 1) / threads; ++pair) {
      for (int64_t p = 0; p < num_parts; ++p) {
        const int64_t* part = parts + 4 * p;
        char* device = reinterpret_cast<char*>(part[0]) + blocks[pair] * part[1];
        char* host = records + rows[pair] * stride + part[3];
        char* to = to_device ? device : host;
        const char* from = to_device ? host : device;
        if (stream)
          copy_stream(to, from, part[2]);
        else
          std::memcpy(to, from, static_cast<size_t>(part[2]));
      }
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(share, thread);
  share(0);
  for (std::thread& other : others) other.join();
}

}  // extern "C"
