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
#ifdef FASTKV_HAVE_X86
namespace avx2 {
void fill_codecs(KernelTable* table);
void fill_attention(KernelTable* table);
}  // namespace avx2
namespace avx512 {
void fill_codecs(KernelTable* table);
void fill_attention(KernelTable* table);
}  // namespace avx512
#endif

namespace {

constexpr int kIsaCount = static_cast<int>(Isa::kCount);
constexpr const char* kIsaNames[] = {"portable", "avx2", "avx2_normal", "avx512", "avx512_vnni"};
static_assert(sizeof(kIsaNames) / sizeof(kIsaNames[0]) == kIsaCount, "one name an instruction set");

Isa best_isa() {
#ifdef FASTKV_HAVE_X86
  if (has_isa(Isa::kAvx512Vnni)) return Isa::kAvx512Vnni;
  if (has_isa(Isa::kAvx512)) return Isa::kAvx512;
  if (has_isa(Isa::kAvx2)) return __builtin_cpu_is("amd") ? Isa::kAvx2 : Isa::kAvx2Normal;
#endif
  return Isa::kPortable;
}

KernelTable make_table(Isa isa) {
  KernelTable table{};
#ifdef FASTKV_HAVE_X86
  if (isa == Isa::kAvx512 || isa == Isa::kAvx512Vnni) {
    table.dot_products = isa == Isa::kAvx512Vnni;
    avx512::fill_codecs(&table);
    avx512::fill_attention(&table);
    return table;
  }
  if (isa != Isa::kPortable) {
    table.fast_subnormals = isa == Isa::kAvx2;
    avx2::fill_codecs(&table);
    avx2::fill_attention(&table);
    return table;
  }
#endif
  (void)isa;
  portable::fill_codecs(&table);
  portable::fill_attention(&table);
  return table;
}

/// Those of the instruction sets that there are: even filling a table runs code compiled for its set.
struct Tables {
  KernelTable of[kIsaCount] = {};
  Tables() {
    for (int i = 0; i < kIsaCount; ++i) {
      if (has_isa(static_cast<Isa>(i))) of[i] = make_table(static_cast<Isa>(i));
    }
  }
};

std::atomic<Isa> chosen{Isa::kBest};

}  // namespace

bool has_isa(Isa isa) {
#ifdef FASTKV_HAVE_X86
  // GCC's run-time support reads CPUID, and XGETBV too: a CPU's wide registers count only if the system saves them
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == Isa::kAvx2 || isa == Isa::kAvx2Normal) return has_avx2;
  if (isa == Isa::kAvx512Vnni) return has_isa(Isa::kAvx512) && __builtin_cpu_supports("avx512vnni");
  if (isa == Isa::kAvx512) {
    return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
#endif
  return isa == Isa::kPortable;
}

const char* isa_name(Isa isa) { return kIsaNames[static_cast<int>(isa)]; }

Isa current_isa() {
  static const Isa best = best_isa();
  const Isa isa = chosen.load(std::memory_order_relaxed);
  return isa == Isa::kBest ? best : isa;
}

bool force_isa(Isa isa) {
  if (isa != Isa::kBest && !has_isa(isa)) return false;
  chosen.store(isa);
  return true;
}

const KernelTable& kernels() {
  static const Tables tables;
  return tables.of[static_cast<int>(current_isa())];
}

}  // namespace fastkv

extern "C" {

/// Found by scanning the file, before it is loaded: a library for another Paddle may not load at all.
__attribute__((used)) const char fastkv_built_for[] = "fastkv-built-for:" FASTKV_BUILT_FOR;

/// Code of the instruction set in use.
__attribute__((visibility("default"))) int fastkv_isa() { return static_cast<int>(fastkv::current_isa()); }

/// Name of an instruction set, whether or not this CPU runs it; null past the last code.
__attribute__((visibility("default"))) const char* fastkv_isa_name(int isa) {
  return isa >= 0 && isa < fastkv::kIsaCount ? fastkv::kIsaNames[isa] : nullptr;
}

/// 1 if this build and this CPU have it.
__attribute__((visibility("default"))) int fastkv_has_isa(int isa) {
  return isa >= 0 && isa < fastkv::kIsaCount && fastkv::has_isa(static_cast<fastkv::Isa>(isa)) ? 1 : 0;
}

/// Forces the instruction set of that code, or -1 the best; returns 0 if this build or CPU lacks it.
__attribute__((visibility("default"))) int fastkv_force_isa(int isa) {
  if (isa < -1 || isa >= fastkv::kIsaCount) return 0;
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
