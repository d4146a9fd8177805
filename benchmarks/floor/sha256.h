// SHA-256 as fast as this CPU can, for the digest floor: SHA instructions where there are any, plain C++ elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace floor_sha {

alignas(16) constexpr uint32_t kRound[64] = {
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

inline uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

inline void compress_plain(uint32_t state[8], const uint8_t* data, size_t blocks) {
  for (; blocks; --blocks, data += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      std::memcpy(&w[i], data + 4 * i, 4);
      w[i] = __builtin_bswap32(w[i]);
    }
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
      const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t v[8];
    std::memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; ++i) {
      const uint32_t t1 = v[7] + (rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25)) +
                          ((v[4] & v[5]) ^ (~v[4] & v[6])) + kRound[i] + w[i];
      const uint32_t t2 =
          (rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22)) + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
      for (int j = 7; j > 0; --j) v[j] = v[j - 1];
      v[4] += t1;
      v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; ++i) state[i] += v[i];
  }
}

#if defined(__x86_64__)
__attribute__((target("sha,sse4.1"))) inline void compress_sha(uint32_t state[8], const uint8_t* data, size_t blocks) {
  const __m128i flip = _mm_set_epi64x(0x0c0d0e0f08090a0bll, 0x0405060700010203ll);
  const auto* k = reinterpret_cast<const __m128i*>(kRound);
  // The instructions want the state as ABEF and CDGH.
  const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  for (; blocks; --blocks, data += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i)
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), flip);
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {  // four rounds a group; w is a ring of the last 16 message words
      __m128i& now = w[group & 3];
      if (group >= 4) {
        const __m128i last = w[(group + 3) & 3];
        now = _mm_sha256msg1_epu32(now, w[(group + 1) & 3]);
        now = _mm_add_epi32(now, _mm_alignr_epi8(last, w[(group + 2) & 3], 4));
        now = _mm_sha256msg2_epu32(now, last);
      }
      __m128i sum = _mm_add_epi32(now, k[group]);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      sum = _mm_shuffle_epi32(sum, 0x0e);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, sum);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}
#endif

inline bool has_sha() {
#if defined(__x86_64__)
  static const bool yes = [] {
    unsigned regs[4];
    __asm__("cpuid" : "=a"(regs[0]), "=b"(regs[1]), "=c"(regs[2]), "=d"(regs[3]) : "a"(7), "c"(0));
    return (regs[1] >> 29 & 1) != 0;
  }();
  return yes;
#else
  return false;
#endif
}

// message has size bytes and room for 72 more, which are overwritten with the padding.
inline void sha256(uint8_t* message, size_t size, uint8_t digest[32]) {
  const size_t padded = (size + 9 + 63) / 64 * 64;
  std::memset(message + size, 0, padded - size);
  message[size] = 0x80;
  const uint64_t bits = __builtin_bswap64(static_cast<uint64_t>(size) * 8);
  std::memcpy(message + padded - 8, &bits, 8);
  uint32_t state[8];
  std::memcpy(state, kStart, sizeof state);
#if defined(__x86_64__)
  if (has_sha())
    compress_sha(state, message, padded / 64);
  else
#endif
    compress_plain(state, message, padded / 64);
  for (int i = 0; i < 8; ++i) state[i] = __builtin_bswap32(state[i]);
  std::memcpy(digest, state, 32);
}

}  // namespace floor_sha
