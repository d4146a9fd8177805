#include "sha256.h"

#include <atomic>

#include "row.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace fastkv::core {
namespace {

alignas(64) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr uint32_t kStart[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

inline uint32_t rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

void compress_portable(uint32_t* state, const uint8_t* block, size_t blocks) {
  for (; blocks; --blocks, block += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i)
      w[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 | uint32_t{block[4 * i + 2]} << 8 |
             block[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
      const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t v[8];
    std::memcpy(v, state, sizeof(v));
    for (int i = 0; i < 64; ++i) {
      const uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
      const uint32_t t1 = v[7] + s1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + kRound[i] + w[i];
      const uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
      const uint32_t t2 = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
      std::memmove(v + 1, v, 7 * sizeof(uint32_t));
      v[4] += t1;
      v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; ++i) state[i] += v[i];
  }
}

#if defined(__x86_64__)
// Two rounds an instruction; the state is kept as {ABEF, CDGH}, as sha256rnds2 wants it.
__attribute__((target("sha,sse4.1"))) void compress_sha_ni(uint32_t* state, const uint8_t* block, size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bll, 0x0405060700010203ll);
  __m128i dcba = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state)), 0xb1);
  __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4)), 0x1b);
  __m128i abef = _mm_alignr_epi8(dcba, hgfe, 8);
  __m128i cdgh = _mm_blend_epi16(hgfe, dcba, 0xf0);
  for (; blocks; --blocks, block += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i)
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 16 * i)), swap);
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {
      __m128i& now = w[group % 4];
      if (group >= 4) {
        const __m128i last = w[(group + 3) % 4];
        now = _mm_sha256msg1_epu32(now, w[(group + 1) % 4]);
        now = _mm_add_epi32(now, _mm_alignr_epi8(last, w[(group + 2) % 4], 4));
        now = _mm_sha256msg2_epu32(now, last);
      }
      const __m128i sum = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * group)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

bool detect() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1)) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}
#else
bool detect() { return false; }
#endif

std::atomic<bool> hardware{detect()};

void compress(uint32_t* state, const uint8_t* block, size_t blocks) {
#if defined(__x86_64__)
  if (hardware.load(std::memory_order_relaxed)) return compress_sha_ni(state, block, blocks);
#endif
  compress_portable(state, block, blocks);
}

}  // namespace

void Sha256::use_hardware(bool on) { hardware = on && detect(); }
bool Sha256::has_hardware() { return detect(); }

Sha256::Sha256() { std::memcpy(state_, kStart, sizeof(state_)); }

void Sha256::update(const void* data, size_t size) {
  const uint8_t* from = static_cast<const uint8_t*>(data);
  total_ += size;
  if (buffered_) {
    const size_t take = size < 64 - buffered_ ? size : 64 - buffered_;
    std::memcpy(buffer_ + buffered_, from, take);
    buffered_ += take;
    from += take;
    size -= take;
    if (buffered_ < 64) return;
    compress(state_, buffer_, 1);
    buffered_ = 0;
  }
  compress(state_, from, size / 64);
  from += size / 64 * 64;
  buffered_ = size % 64;
  if (buffered_) std::memcpy(buffer_, from, buffered_);
}

namespace {

Digest big_endian(const uint32_t* state) {
  Digest out;
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = __builtin_bswap32(state[i]);
    std::memcpy(&out[static_cast<size_t>(4 * i)], &word, 4);
  }
  return out;
}

}  // namespace

Digest Sha256::finish() {
  const uint64_t bits = __builtin_bswap64(total_ * 8);
  uint8_t pad[72] = {0x80};
  const size_t zeros = (buffered_ < 56 ? 56 : 120) - buffered_;
  std::memcpy(pad + zeros, &bits, 8);
  update(pad, zeros + 8);
  return big_endian(state_);
}

const Digest& root_digest() {
  static const Digest root = [] {
    Sha256 hash;
    hash.update("fastkv-prefix-1", 15);
    return hash.finish();
  }();
  return root;
}

Digest block_digest(const Digest& parent, std::string_view extra, const int32_t* tokens, size_t num_tokens) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "digests are defined over little-endian tokens");
  // The whole message, padding included, goes to the compression function in one piece.
  const uint32_t extra_bytes = static_cast<uint32_t>(extra.size());
  const size_t size = parent.size() + sizeof(extra_bytes) + extra.size() + num_tokens * sizeof(int32_t);
  const size_t padded = (size + 9 + 63) / 64 * 64;
  static thread_local Row<uint8_t> message;
  message.resize(static_cast<int64_t>(padded));
  uint8_t* at = message.data();
  const auto put = [&at](const void* data, size_t bytes) {
    if (bytes) std::memcpy(at, data, bytes);
    at += bytes;
  };
  put(parent.data(), parent.size());
  put(&extra_bytes, sizeof(extra_bytes));
  put(extra.data(), extra.size());
  put(tokens, num_tokens * sizeof(int32_t));
  std::memset(at, 0, padded - size);
  *at = 0x80;
  const uint64_t bits = __builtin_bswap64(static_cast<uint64_t>(size) * 8);
  std::memcpy(message.data() + padded - 8, &bits, 8);
  uint32_t state[8];
  std::memcpy(state, kStart, sizeof(state));
  compress(state, message.data(), padded / 64);
  return big_endian(state);
}

}  // namespace fastkv::core
