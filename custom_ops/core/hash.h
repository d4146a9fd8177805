// The fast hash that proposes a block. It decides nothing: the index compares tokens and identity afterwards.
//
// A block's hash chains over its parent's, so it stands for the whole prefix:
//     hash(i) = mix(hash(i-1) ^ body(tokens of block i) , extra)
// body() runs four independent lanes of 64 x 64 -> 128 bit multiplications, so that consecutive blocks overlap in the
// pipeline and only one multiplication a block sits on the chain. About 5 ns for 16 tokens, 10 ns for 64.
// Seeds are drawn for each index, so nobody outside can prepare prompts that collide.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace fastkv::core {

constexpr uint64_t kHashRoot = 0x9e3779b97f4a7c15ull;

inline uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t load64(const void* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

class TokenHash {
 public:
  explicit TokenHash(uint64_t seed, uint64_t mask = ~uint64_t{0}) : mask_(mask) {
    for (int lane = 0; lane < 4; ++lane) {
      seed += kHashRoot;
      secret_[lane] = mix(seed ^ 0xd6e8feb86659fd93ull, seed | 1) | 1;
    }
  }

  // Hash of the block of num_tokens tokens whose parent has the hash parent. Never 0 unless the mask forces it.
  inline uint64_t block(uint64_t parent, const int32_t* tokens, size_t num_tokens, std::string_view extra) const {
    uint64_t hash = mix(parent ^ secret_[0], body(reinterpret_cast<const char*>(tokens), num_tokens * 4) ^ secret_[1]);
    if (!extra.empty()) hash = mix(hash ^ body(extra.data(), extra.size()), secret_[2] ^ extra.size());
    return hash & mask_;
  }

 private:
  uint64_t body(const char* bytes, size_t size) const {
    uint64_t a = secret_[0], b = secret_[1], c = secret_[2], d = secret_[3];
    size_t at = 0;
    for (; at + 64 <= size; at += 64) {
      a = mix(load64(bytes + at) ^ a, load64(bytes + at + 8) ^ secret_[1]);
      b = mix(load64(bytes + at + 16) ^ b, load64(bytes + at + 24) ^ secret_[2]);
      c = mix(load64(bytes + at + 32) ^ c, load64(bytes + at + 40) ^ secret_[3]);
      d = mix(load64(bytes + at + 48) ^ d, load64(bytes + at + 56) ^ secret_[0]);
    }
    for (; at < size; at += 16) {
      char tail[16] = {0};
      std::memcpy(tail, bytes + at, size - at < 16 ? size - at : 16);
      a = mix(load64(tail) ^ a, load64(tail + 8) ^ secret_[3]);
    }
    return (a + (b << 1 | b >> 63)) ^ (c + (d << 1 | d >> 63));
  }

  uint64_t secret_[4];
  uint64_t mask_;
};

}  // namespace fastkv::core
