// The C++ side of the table of storage types: one row a type. fastkv/core/dtype.py holds the same table for Python; a
// test compares the two row by row. Codecs (codec.h) take their bounds from here and nowhere else.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

// Never an out-of-line copy: sources for several instruction sets share these headers, and the linker would keep any
// one of the copies.
#define FASTKV_INLINE inline __attribute__((always_inline))

namespace fastkv {

// Not std::min and std::max, of which the linker might keep the copy compiled for the newest CPU.
template <typename A, typename B>
FASTKV_INLINE constexpr std::common_type_t<A, B> smaller(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
FASTKV_INLINE constexpr std::common_type_t<A, B> larger(A a, B b) {
  return a < b ? b : a;
}

/// dtype that the model computes in, and that unquantised caches are stored in.
enum class ModelDtype : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

FASTKV_INLINE constexpr const char* dtype_name(ModelDtype dtype) {
  return dtype == ModelDtype::kFloat32 ? "float32" : dtype == ModelDtype::kFloat16 ? "float16" : "bfloat16";
}
FASTKV_INLINE constexpr int64_t dtype_bytes(ModelDtype dtype) { return dtype == ModelDtype::kFloat32 ? 4 : 2; }

enum class Storage : int {
  kNone = 0,
  kInt8,
  kInt8Zp,
  kFloat8E4M3,
  kFloat8E4M3Zp,
  kBlockWiseFp8,
  kInt4Zp,
  kInt8Token,
  kCount,
};

enum class ScaleKind : int { kNone, kStatic, kDynamic };

struct StorageRow {
  const char* name;
  int bits;             // of one stored element; 0 = bits of the model dtype
  float bound;          // largest code value, before the scale
  float code_min;       // smallest code value, before the scale
  bool has_zero_point;  // value = (code - zero_point) * scale
  ScaleKind scales;
};

inline constexpr StorageRow kStorageTable[] = {
    {"none", 0, 0.0f, 0.0f, false, ScaleKind::kNone},
    {"int8", 8, 127.0f, -127.0f, false, ScaleKind::kStatic},
    {"int8_zp", 8, 127.0f, -128.0f, true, ScaleKind::kStatic},
    {"float8_e4m3fn", 8, 448.0f, -448.0f, false, ScaleKind::kStatic},
    {"float8_e4m3fn_zp", 8, 448.0f, -448.0f, true, ScaleKind::kStatic},
    {"block_wise_fp8", 8, 448.0f, -448.0f, false, ScaleKind::kDynamic},
    {"int4_zp", 4, 7.0f, -8.0f, true, ScaleKind::kStatic},
    {"int8_token", 8, 127.0f, -127.0f, false, ScaleKind::kDynamic},
};
inline constexpr int kStorageCount = static_cast<int>(Storage::kCount);
static_assert(sizeof(kStorageTable) / sizeof(kStorageTable[0]) == kStorageCount, "one row a storage type");

FASTKV_INLINE constexpr const StorageRow& storage_row(Storage storage) {
  return kStorageTable[static_cast<int>(storage)];
}

/// The type of that name, or kCount if there is none.
FASTKV_INLINE Storage find_storage(const char* name) {
  for (int i = 0; i < kStorageCount; ++i) {
    if (std::strcmp(kStorageTable[i].name, name) == 0) return static_cast<Storage>(i);
  }
  return Storage::kCount;
}

/// Bytes of one row of `dim` logical elements as stored.
FASTKV_INLINE constexpr int64_t stored_row_bytes(Storage storage, ModelDtype dtype, int64_t dim) {
  const int bits = storage_row(storage).bits;
  return bits == 0 ? dim * dtype_bytes(dtype) : dim * bits / 8;
}

/// Static scales must lie in [2^-126, 2^126]: then neither the scale nor its reciprocal is subnormal or infinite.
inline constexpr float kMinScale = 0x1p-126f;

}  // namespace fastkv
