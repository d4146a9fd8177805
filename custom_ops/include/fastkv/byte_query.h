// A query as signed bytes, for products with stored codes: two bytes a channel for codes of 8 bits (dot_codes.h), one
// for codes of 4 bits (int4_rows.h).
//
// The query, with the scales in it, becomes integers, of two bytes as code = 256 * high + low:
//   q[i] = step * code[i] + e[i],  step = max|q| / bound,  bound = 127 or 32639,  |e[i]| <= step / 2.
// Offset and zero point are taken out with the rounded and the exact query, respectively, so a score is off by
//   |sum e[i] * (stored[i] - offset)| <= step / 2 * sum |stored[i] - offset|,
// q in units of a code. For codes of 8 bits that is max|q| * channels / 510, at most 1/256 of what rounding keys to
// codes may cost the score of a query whose channels are all alike: results that are rounded to half types do not show
// it, float32's would. For codes of 4 bits it is max|q| * channels / 32, at most 1/16 of that cost, and twice what
// rounding such a query to bfloat16 may cost.
#pragma once

#include <cmath>
#include <cstring>

#include "fastkv/vec.h"

namespace fastkv::FASTKV_ISA {

inline constexpr int64_t kGroupBytes = 4 * kLanes;  // stored bytes a group

/// Floats of room for one row's query as bytes, whatever the codes: two bytes a channel of whole groups.
static FASTKV_INLINE constexpr int64_t byte_query_floats(int64_t dim) { return round_up(dim, 2 * kGroupBytes) * 2 / 4; }

struct ByteQuery {
  float step;
  int64_t sum;     // of the codes
  bool is_usable;  // else only floats will do
};

/// Bytes of a channel of the query, for codes of so many bits.
template <int kBits>
inline constexpr int kQueryBytes = kBits == 8 ? 2 : 1;

/// Writes [group][code of a stored byte, the lowest bits' first][high, low; only low for 4 bits][kGroupBytes].
template <int kBits>
static inline ByteQuery query_to_bytes(const float* q, int64_t dim, int8_t* bytes) {
  constexpr int kCodes = 8 / kBits, kPlanes = kQueryBytes<kBits>;
  constexpr int kBound = kPlanes == 1 ? 127 : 127 * 256 + 127;
  float largest = 0.0f;
  bool is_finite = true;
  for (int64_t i = 0; i < dim; ++i) {
    largest = std::fabs(q[i]) > largest ? std::fabs(q[i]) : largest;
    is_finite = is_finite && q[i] - q[i] == 0.0f;
  }
  const ByteQuery refused{0.0f, 0, false};
  if (!is_finite) return refused;
  std::memset(bytes, 0, static_cast<size_t>(byte_query_floats(dim)) * sizeof(float));
  ByteQuery query{largest / static_cast<float>(kBound), 0, true};
  if (query.step < kMinScale) {  // no precision left: such a query is nothing, or as good as that
    query.step = 0.0f;
    return largest == 0.0f ? query : refused;
  }
  const double inverse = 1.0 / query.step;
  for (int64_t i = 0; i < dim; ++i) {
    const double exact = std::nearbyint(q[i] * inverse);
    const int32_t code = static_cast<int32_t>(exact < -kBound ? -kBound : exact > kBound ? kBound : exact);
    const int32_t low = ((code + 128) & 255) - 128;
    const int64_t byte = i / kCodes;
    int8_t* to = bytes + (byte / kGroupBytes * kCodes + i % kCodes) * kPlanes * kGroupBytes + byte % kGroupBytes;
    if (kPlanes == 2) to[0] = static_cast<int8_t>((code - low) / 256);
    to[(kPlanes - 1) * kGroupBytes] = static_cast<int8_t>(low);
    query.sum += code;
  }
  return query;
}

}  // namespace fastkv::FASTKV_ISA
