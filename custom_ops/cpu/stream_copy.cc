#include "stream_copy.h"

#include <cstring>

#include "fastkv/launch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastkv {

namespace {

#if defined(__x86_64__)
constexpr int64_t kLine = 64;

/// Bytes before dst's next line, at most n: partial lines are not streamed.
int64_t head_bytes(const char* dst, int64_t n) {
  const int64_t head = -reinterpret_cast<intptr_t>(dst) & (kLine - 1);
  return head < n ? head : n;
}

void copy_stream_sse2(char* dst, const char* src, int64_t n) {
  const int64_t head = head_bytes(dst, n);
  std::memcpy(dst, src, static_cast<size_t>(head));
  int64_t i = head;
  for (; i + kLine <= n; i += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(src + i);
    auto* to = reinterpret_cast<__m128i*>(dst + i);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(dst + i, src + i, static_cast<size_t>(n - i));
}

__attribute__((target("avx2"), always_inline)) inline void stream_line(char* dst, const char* src) {
  const auto* from = reinterpret_cast<const __m256i*>(src);
  auto* to = reinterpret_cast<__m256i*>(dst);
  const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
  _mm256_stream_si256(to, a);
  _mm256_stream_si256(to + 1, b);
}

__attribute__((target("avx2"))) void copy_stream_avx2(char* dst, const char* src, int64_t n) {
  constexpr int64_t kAhead = 512;
  int64_t i = head_bytes(dst, n);
  std::memcpy(dst, src, static_cast<size_t>(i));
  for (; i + kAhead < n; i += kLine) {  // what lies past the end is somebody else's, and seldom read next
    _mm_prefetch(src + i + kAhead, _MM_HINT_NTA);
    stream_line(dst + i, src + i);
  }
  for (; i + kLine <= n; i += kLine) stream_line(dst + i, src + i);
  std::memcpy(dst + i, src + i, static_cast<size_t>(n - i));
}
#else
void copy_plain(char* dst, const char* src, int64_t n) { std::memcpy(dst, src, static_cast<size_t>(n)); }
#endif

}  // namespace

CopyBytes stream_copy() {
#if defined(__x86_64__)
  return current_isa() == Isa::kPortable ? copy_stream_sse2 : copy_stream_avx2;
#else
  return copy_plain;
#endif
}

void finish_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace fastkv
