// Chooses the instruction set: the best that this build has and this CPU runs, unless one was forced. Also the small C
// interface that Python reaches through ctypes: the storage table, the instruction set, the Paddle it was built for.
#include <atomic>
#include <cstdio>

#include "fastkv/kernel_table.h"
#include "fastkv/launch.h"

#ifndef FASTKV_BUILT_FOR
#define FASTKV_BUILT_FOR "unknown"
#endif

namespace fastkv {

namespace portable {
void fill_codecs(KernelTable* table);
void fill_attention(KernelTable* table);
}  // namespace portable
#ifdef FASTKV_HAVE_AVX2
namespace avx2 {
void fill_codecs(KernelTable* table);
void fill_attention(KernelTable* table);
}  // namespace avx2
#endif

namespace {

bool is_supported(Isa isa) {
#ifdef FASTKV_HAVE_AVX2
  if (isa == Isa::kAvx2 || isa == Isa::kAvx2Normal) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
#endif
  return isa == Isa::kPortable;
}

Isa best_isa() {
  if (!is_supported(Isa::kAvx2)) return Isa::kPortable;
#ifdef FASTKV_HAVE_AVX2
  return __builtin_cpu_is("amd") ? Isa::kAvx2 : Isa::kAvx2Normal;
#else
  return Isa::kPortable;
#endif
}

const KernelTable& table_of(Isa isa) {
  static const KernelTable portable_table = [] {
    KernelTable table{};
    portable::fill_codecs(&table);
    portable::fill_attention(&table);
    return table;
  }();
#ifdef FASTKV_HAVE_AVX2
  static const KernelTable avx2_table = [] {
    KernelTable table{};
    avx2::fill_codecs(&table);
    avx2::fill_attention(&table);
    return table;
  }();
  static const KernelTable subnormal_table = [] {
    KernelTable table = avx2_table;
    table.fast_subnormals = true;
    return table;
  }();
  if (isa == Isa::kAvx2) return subnormal_table;
  if (isa == Isa::kAvx2Normal) return avx2_table;
#endif
  (void)isa;
  return portable_table;
}

std::atomic<Isa> chosen{Isa::kBest};

}  // namespace

Isa current_isa() {
  const Isa isa = chosen.load(std::memory_order_relaxed);
  return isa == Isa::kBest ? best_isa() : isa;
}

bool force_isa(Isa isa) {
  if (isa != Isa::kBest && !is_supported(isa)) return false;
  chosen.store(isa);
  return true;
}

const KernelTable& kernels() {
  static const Isa best = best_isa();
  const Isa isa = chosen.load(std::memory_order_relaxed);
  return table_of(isa == Isa::kBest ? best : isa);
}

}  // namespace fastkv

extern "C" {

/// Found by scanning the file, before it is loaded: a library for another Paddle may not load at all.
__attribute__((used)) const char fastkv_built_for[] = "fastkv-built-for:" FASTKV_BUILT_FOR;

/// "portable", "avx2" or "avx2_normal".
__attribute__((visibility("default"))) const char* fastkv_isa() {
  const char* names[] = {"portable", "avx2", "avx2_normal"};
  return names[static_cast<int>(fastkv::current_isa())];
}

/// -1 best, 0 portable, 1 avx2, 2 avx2_normal; returns 0 if this build or CPU lacks it.
__attribute__((visibility("default"))) int fastkv_force_isa(int isa) {
  if (isa < -1 || isa > 2) return 0;
  return fastkv::force_isa(static_cast<fastkv::Isa>(isa)) ? 1 : 0;
}

/// Row `index` of the storage table as "name bits bound code_min has_zero_point scale_kind"; 0 past the last row.
__attribute__((visibility("default"))) int fastkv_storage_row(int index, char* text, int capacity) {
  if (index < 0 || index >= fastkv::kStorageCount) return 0;
  const fastkv::StorageRow& row = fastkv::kStorageTable[index];
  const char* kinds[] = {"none", "static", "dynamic"};
  std::snprintf(text, static_cast<size_t>(capacity), "%s %d %g %g %d %s", row.name, row.bits, row.bound, row.code_min,
                row.has_zero_point ? 1 : 0, kinds[static_cast<int>(row.scales)]);
  return 1;
}

}  // extern "C"
