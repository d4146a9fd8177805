// What the machine can do, on the threads that the kernels run on: read memory in a stream, copy it, multiply and add.
// Compiled against Paddle's OpenMP runtime, so that it is the same pool of threads. Each function returns seconds.
#include <immintrin.h>
#include <omp.h>

#include <chrono>
#include <cstdint>
#include <cstring>

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// This thread's part of `bytes`, whole pages.
void part(int64_t bytes, int64_t* begin, int64_t* end) {
  const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
  const auto bound = [&](int64_t i) { return i == threads ? bytes : bytes * i / threads / 4096 * 4096; };
  *begin = bound(thread);
  *end = bound(thread + 1);
}

__attribute__((target("avx2"))) void read_part(const char* data, int64_t begin, int64_t end) {
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t i = begin; i + 256 <= end; i += 256) {
    for (int64_t line = 0; line < 256; line += 64) {
      __builtin_prefetch(data + i + line + 2048);
      a = _mm256_or_si256(a, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i + line)));
      b = _mm256_or_si256(b, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i + line + 32)));
    }
  }
  asm volatile("" ::"x"(a), "x"(b));
}

__attribute__((target("avx2,fma"))) void multiply_add(int64_t rounds) {
  __m256 sums[12];
  for (int i = 0; i < 12; ++i) sums[i] = _mm256_set1_ps(static_cast<float>(i));
  __m256 half = _mm256_set1_ps(0.5f);
  asm volatile("" : "+x"(half));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sums[i] = _mm256_fmadd_ps(sums[i], half, half);
  }
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) asm volatile("" ::"x"(sums[i]));
}

}  // namespace

extern "C" {

int floor_threads() { return omp_get_max_threads(); }

/// Reads `bytes` once.
double floor_read(const char* data, int64_t bytes) {
  const double start = now();
#pragma omp parallel
  {
    int64_t begin, end;
    part(bytes, &begin, &end);
    read_part(data, begin, end);
  }
  return now() - start;
}

/// Copies `bytes` once.
double floor_copy(char* to, const char* from, int64_t bytes) {
  const double start = now();
#pragma omp parallel
  {
    int64_t begin, end;
    part(bytes, &begin, &end);
    std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
  }
  return now() - start;
}

/// rounds * 12 multiply-adds of 8 floats on every thread: rounds * 192 floating-point operations each.
double floor_multiply_add(int64_t rounds) {
  const double start = now();
#pragma omp parallel
  multiply_add(rounds);
  return now() - start;
}

}  // extern "C"
