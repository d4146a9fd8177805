// A query as two signed bytes a channel, for dot products with stored codes (dot_codes.h).
//
// The query, with the scales in it, becomes integers of 16 bits, code = 256 * high + low:
//   q[i] = step * code[i] + e[i],  step = max|q| / 32639,  |e[i]| <= step / 2.
// Offset and zero point are taken out with the rounded and the exact query, respectively, so a score is off by
//   |sum e[i] * (stored[i] - offset)| <= step / 2 * sum |stored[i] - offset| <= max|q| * channels / 513,
// q in units of a code: at most 1/256 of what rounding keys to codes may cost the score of a query whose channels are
// all alike. Results that are rounded to half types do not show that; float32's would, so models of float32 multiply
// floats instead.
#pragma once

#include <cmath>
#include <cstring>

#include "fastkv/vec.h"

namespace fastkv::FASTKV_ISA {

inline constexpr int64_t kDotBytes = 64;  // stored bytes a group
inline constexpr int kQueryBound = 127 * 256 + 127;

/// Floats of room for one row's query as bytes, whatever the codes: two bytes a channel of whole groups.
static FASTKV_INLINE constexpr int64_t byte_query_floats(int64_t dim) { return round_up(dim, 2 * kDotBytes) * 2 / 4; }

struct ByteQuery {
  float step;
  int64_t sum;     // of the codes
  bool is_usable;  // else only floats will do
};

/// Writes [group][code of a stored byte, the lowest bits' first][high, low][64] for `codes` codes a stored byte.
static inline ByteQuery query_to_bytes(const float* q, int64_t dim, int64_t codes, int8_t* bytes) {
  float largest = 0.0f;
  bool is_finite = true;
  for (int64_t i = 0; i < dim; ++i) {
    largest = std::fabs(q[i]) > largest ? std::fabs(q[i]) : largest;
    is_finite = is_finite && q[i] - q[i] == 0.0f;
  }
  const ByteQuery refused{0.0f, 0, false};
  if (!is_finite) return refused;
  std::memset(bytes, 0, static_cast<size_t>(byte_query_floats(dim)) * sizeof(float));
  ByteQuery query{largest / kQueryBound, 0, true};
  if (query.step < kMinScale) {  // no precision left: such a query is nothing, or as good as that
    query.step = 0.0f;
    return largest == 0.0f ? query : refused;
  }
  const double inverse = 1.0 / query.step;
  for (int64_t i = 0; i < dim; ++i) {
    const double exact = std::nearbyint(q[i] * inverse);
    const int32_t code = static_cast<int32_t>(exact < -kQueryBound  ? -kQueryBound
                                              : exact > kQueryBound ? kQueryBound
                                                                    : exact);
    const int32_t low = ((code + 128) & 255) - 128;
    const int64_t byte = i / codes;
    int8_t* to = bytes + (byte / kDotBytes * codes + i % codes) * 2 * kDotBytes + byte % kDotBytes;
    to[0] = static_cast<int8_t>((code - low) / 256);
    to[kDotBytes] = static_cast<int8_t>(low);
    query.sum += code;
  }
  return query;
}

}  // namespace fastkv::FASTKV_ISA
