// SHA-256 (FIPS 180-4), for prefix digests: names of blocks outside this process.
//
// Uses the processor's SHA instructions where there are any (about 0.25 us a block of 64 tokens), portable code
// elsewhere (about 1.5 us). Never called between two decode steps unless KV events or storage ask for digests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace fastkv::core {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  Sha256();
  void update(const void* data, size_t size);
  Digest finish();

  // Off: the portable code, whatever the processor has (for tests).
  static void use_hardware(bool on);
  static bool has_hardware();

 private:
  uint32_t state_[8];
  uint8_t buffer_[64];
  size_t buffered_ = 0;
  uint64_t total_ = 0;
};

// What block 0's digest is chained to: SHA-256 of "fastkv-prefix-1".
const Digest& root_digest();

// SHA-256(parent | u32 len(extra) | extra | tokens as little-endian int32), see fastkv/core/digest.py.
Digest block_digest(const Digest& parent, std::string_view extra, const int32_t* tokens, size_t num_tokens);

}  // namespace fastkv::core
