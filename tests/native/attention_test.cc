// The kernels without Paddle, for sanitizers: random shapes of every storage type and instruction set, in buffers of
// exactly the size that they need, against attention computed in double from what gather_cache reads back. Caches start
// as NaN bytes, so that anything read beyond a request's positions shows. Run by run.sh.
//   attention_test [rounds] [instruction set: only this one]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fastkv/launch.h"

namespace {

using namespace fastkv;

std::mt19937 generator(20240607);

int64_t pick(std::initializer_list<int64_t> values) {
  return values.begin()[std::uniform_int_distribution<size_t>(0, values.size() - 1)(generator)];
}

std::vector<float> random_floats(int64_t count, float low = -1.7f, float high = 1.7f) {
  std::uniform_real_distribution<float> distribution(low, high);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& value : x) value = distribution(generator);
  return x;
}

/// Rows of the model. Half types get values that they hold exactly, so that the reference sees the same numbers.
struct Rows {
  std::vector<char> bytes;
  std::vector<float> values;
  RowsView view;

  Rows(int64_t tokens, int64_t heads, int64_t dim, ModelDtype dtype) {
    values = random_floats(tokens * heads * dim);
    bytes.resize(values.size() * static_cast<size_t>(dtype_bytes(dtype)));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = std::round(values[i] * 64.0f) / 64.0f;
      uint32_t bits;
      std::memcpy(&bits, &values[i], 4);
      const uint16_t top = static_cast<uint16_t>(bits >> 16);
      if (dtype == ModelDtype::kFloat32) std::memcpy(&bytes[i * 4], &values[i], 4);
      if (dtype == ModelDtype::kBFloat16) std::memcpy(&bytes[i * 2], &top, 2);
      if (dtype == ModelDtype::kFloat16) {
        const int exponent = static_cast<int>((bits >> 23) & 255) - 112;
        const uint16_t half =
            exponent <= 0 ? 0 : static_cast<uint16_t>((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3FF));
        std::memcpy(&bytes[i * 2], &half, 2);
        if (exponent <= 0) values[i] = 0.0f;
      }
    }
    view = {bytes.data(), dtype, heads, dim};
  }
};

float to_float(const char* p, ModelDtype dtype) {
  uint16_t half;
  float value;
  if (dtype == ModelDtype::kFloat32) {
    std::memcpy(&value, p, 4);
    return value;
  }
  std::memcpy(&half, p, 2);
  if (dtype == ModelDtype::kBFloat16) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  const int exponent = half >> 10 & 31;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(half & 1023), -24)
                                        : std::ldexp(static_cast<float>(1024 + (half & 1023)), exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

struct Cache {
  std::vector<char> bytes;
  std::vector<float> scale, zero, token_scale;
  CacheView view;

  Cache(Storage storage, ModelDtype dtype, int64_t blocks, int64_t heads, int64_t block_size, int64_t dim) {
    view.dtype = dtype;
    view.num_blocks = blocks;
    view.kv_heads = heads;
    view.block_size = block_size;
    view.dim = dim;
    view.row_bytes = stored_row_bytes(storage, dtype, dim);
    bytes.assign(static_cast<size_t>(blocks * view.block_bytes()), static_cast<char>(0xFF));
    view.data = bytes.data();
    view.quant.storage = storage;
    const StorageRow& row = storage_row(storage);
    if (row.scales == ScaleKind::kStatic) {
      scale = random_floats(heads * dim, 1.8f / row.bound, 2.5f / row.bound);
      view.quant.scale = scale.data();
      view.quant.head_stride = dim;
      view.quant.channel_stride = 1;
    }
    if (row.has_zero_point) {
      zero = random_floats(heads * dim);
      view.quant.zero_point = zero.data();
    }
    if (row.scales == ScaleKind::kDynamic) {
      token_scale.assign(static_cast<size_t>(blocks * heads * block_size), std::nanf(""));
      view.quant.token_scale = token_scale.data();
    }
  }

  std::vector<float> read(const std::vector<int64_t>& slots) const {
    std::vector<float> out(slots.size() * static_cast<size_t>(view.kv_heads * view.dim));
    const Status status = gather_cache(view, slots.data(), static_cast<int64_t>(slots.size()), out.data());
    if (!status.ok()) std::printf("gather: %s\n", status.message), std::exit(1);
    return out;
  }
};

struct Case {
  Storage storage;
  ModelDtype dtype;
  bool is_latent = false;
  int64_t heads = pick({1, 2, 3}), group = pick({1, 2, 3, 4, 5, 7, 8, 16}), block_size = pick({16, 64, 128});
  int64_t dim = pick({24, 64, 80, 96, 128, 192, 256}), value_dim = dim == 192 ? 128 : dim;
  int64_t window = pick({0, 0, 1, 40}), requests = pick({1, 2, 3});
  std::vector<int64_t> queries, contexts;

  Case(Storage s, ModelDtype d, bool latent) : storage(s), dtype(d), is_latent(latent) {
    if (is_latent) heads = 1, dim = pick({24, 576}), value_dim = dim == 24 ? 16 : 512;
    for (int64_t r = 0; r < requests; ++r) {
      queries.push_back(pick({0, 1, 1, 1, 2, 5, 17, 70}));
      contexts.push_back(pick({0, 1, 15, 16, 17, 63, 64, 65, 130}));
    }
    if (pick({0, 0, 0, 1}) == 1) contexts[0] = 2100, queries[0] = 1;  // long enough to be cut into pieces
  }

  std::string text() const {
    std::string lens;
    for (size_t r = 0; r < queries.size(); ++r)
      lens += " " + std::to_string(queries[r]) + "+" + std::to_string(contexts[r]);
    return std::string(storage_row(storage).name) + " " + dtype_name(dtype) + " heads " + std::to_string(heads) + "x" +
           std::to_string(group) + " dim " + std::to_string(dim) + "/" + std::to_string(value_dim) + " block " +
           std::to_string(block_size) + " window " + std::to_string(window) + lens;
  }
};

/// Attention of one query head over rows that were read back.
std::vector<double> attend(const float* q, const std::vector<float>& keys, const std::vector<float>& values,
                           const Case& c, int64_t head, int64_t count, double scale, double sink) {
  const size_t key_stride = static_cast<size_t>(c.heads * c.dim);
  const size_t value_stride = c.is_latent ? key_stride : static_cast<size_t>(c.heads * c.value_dim);
  std::vector<double> scores(static_cast<size_t>(count)), out(static_cast<size_t>(c.value_dim), 0.0);
  double top = sink, total = 0.0;
  for (size_t i = 0; i < scores.size(); ++i) {
    for (int64_t d = 0; d < c.dim; ++d)
      scores[i] += q[d] * static_cast<double>(keys[i * key_stride + static_cast<size_t>(head * c.dim + d)]);
    scores[i] *= scale;
    top = std::max(top, scores[i]);
  }
  total = std::exp(sink - top);
  for (size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scores[i] - top);
    total += weight;
    const size_t at = i * value_stride + static_cast<size_t>(c.is_latent ? 0 : head * c.value_dim);
    for (int64_t d = 0; d < c.value_dim; ++d)
      out[static_cast<size_t>(d)] += weight * values[at + static_cast<size_t>(d)];
  }
  for (double& x : out) x /= total;
  return out;
}

struct Problem {
  Case c;
  int64_t tokens = 0, blocks = 0, columns = 0;
  std::vector<int32_t> starts{0}, lengths, tables;
  std::vector<int64_t> slots;

  explicit Problem(const Case& given) : c(given) {
    for (size_t r = 0; r < c.queries.size(); ++r) {
      const int64_t needed = (c.queries[r] + c.contexts[r] + c.block_size - 1) / c.block_size;
      columns = std::max(columns, needed);
      blocks += needed;
      tokens += c.queries[r];
      starts.push_back(static_cast<int32_t>(tokens));
      lengths.push_back(static_cast<int32_t>(c.contexts[r]));
    }
    blocks += 1;
    columns += 1;
    std::vector<int32_t> ids(static_cast<size_t>(blocks));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    std::shuffle(ids.begin(), ids.end(), generator);
    tables.assign(c.queries.size() * static_cast<size_t>(columns), -1);
    for (size_t r = 0, next = 0; r < c.queries.size(); ++r) {
      for (int64_t b = 0; b * c.block_size < c.queries[r] + c.contexts[r]; ++b)
        tables[r * static_cast<size_t>(columns) + static_cast<size_t>(b)] = ids[next++];
      for (int64_t t = 0; t < c.queries[r]; ++t) slots.push_back(slot(r, c.contexts[r] + t));
    }
  }

  int64_t slot(size_t request, int64_t pos) const {
    return tables[request * static_cast<size_t>(columns) + static_cast<size_t>(pos / c.block_size)] * c.block_size +
           pos % c.block_size;
  }
};

void fail(const Case& c, const std::string& what) {
  std::printf("FAILED %s: %s\n", c.text().c_str(), what.c_str());
  std::exit(1);
}

void compare(const Problem& problem, const Cache& key, const Cache* value, const Rows& q, const std::vector<char>& out,
             const std::vector<float>& sinks, double scale) {
  const Case& c = problem.c;
  const double tolerance = c.dtype == ModelDtype::kFloat32 ? 3e-5 : c.dtype == ModelDtype::kFloat16 ? 2e-3 : 1.6e-2;
  for (size_t r = 0; r < c.queries.size(); ++r) {
    for (int64_t t = 0; t < c.queries[r]; ++t) {
      const int64_t pos = c.contexts[r] + t, first = c.window > 0 ? std::max<int64_t>(0, pos + 1 - c.window) : 0;
      std::vector<int64_t> read;
      for (int64_t p = first; p <= pos; ++p) read.push_back(problem.slot(r, p));
      const std::vector<float> keys = key.read(read), values = value != nullptr ? value->read(read) : keys;
      for (int64_t h = 0; h < c.heads * c.group; ++h) {
        const int64_t row = (problem.starts[r] + t) * c.heads * c.group + h;
        const double sink = sinks.empty() ? -HUGE_VAL : sinks[static_cast<size_t>(h)];
        const auto expected = attend(&q.values[static_cast<size_t>(row * c.dim)], keys, values, c, h / c.group,
                                     static_cast<int64_t>(read.size()), scale, sink);
        for (int64_t d = 0; d < c.value_dim; ++d) {
          const double got = to_float(out.data() + (row * c.value_dim + d) * dtype_bytes(c.dtype), c.dtype);
          const double want = expected[static_cast<size_t>(d)];
          if (!(std::fabs(got - want) <= tolerance * (1.0 + std::fabs(want)))) {
            fail(c, "request " + std::to_string(r) + " token " + std::to_string(t) + " head " + std::to_string(h) +
                        " channel " + std::to_string(d) + ": " + std::to_string(got) + " instead of " +
                        std::to_string(want));
          }
        }
      }
    }
  }
}

/// Scores as dot products of bytes move a result by no more than the last bit of a half and what dot_codes.h allows.
void compare_dots(const Case& c, AttentionParams p, const std::vector<char>& out) {
  std::vector<char> by_floats(out.size());
  p.out.data = by_floats.data();
  force_isa(Isa::kAvx512);
  const Status status = append_attention(p);
  force_isa(Isa::kAvx512Vnni);
  if (!status.ok()) fail(c, status.message);
  for (size_t i = 0; i < out.size(); i += sizeof(uint16_t)) {
    const double got = to_float(&out[i], c.dtype), want = to_float(&by_floats[i], c.dtype);
    if (!(std::fabs(got - want) <= std::fabs(want) * 0x1p-10 + 1e-4))
      fail(c, "dot products: " + std::to_string(got) + " instead of " + std::to_string(want));
  }
}

void run(const Case& c) {
  const Problem problem(c);
  Cache key(c.storage, c.dtype, problem.blocks, c.heads, c.block_size, c.dim);
  std::unique_ptr<Cache> value;
  if (!c.is_latent) value.reset(new Cache(c.storage, c.dtype, problem.blocks, c.heads, c.block_size, c.value_dim));
  const int64_t tokens = problem.tokens;
  const Rows q(tokens, c.heads * c.group, c.dim, c.dtype), k(tokens, c.heads, c.dim, c.dtype),
      v(tokens, c.heads, c.value_dim, c.dtype);
  for (size_t r = 0; r < c.queries.size(); ++r) {  // the context
    const Rows old_k(c.contexts[r], c.heads, c.dim, c.dtype), old_v(c.contexts[r], c.heads, c.value_dim, c.dtype);
    std::vector<int64_t> slots;
    for (int64_t p = 0; p < c.contexts[r]; ++p)
      if (c.queries[r] > 0 || problem.tables[r * static_cast<size_t>(problem.columns)] >= 0)
        slots.push_back(problem.slot(r, p));
    const Status status =
        write_cache(old_k.view, value ? old_v.view : RowsView{}, key.view, value ? value->view : CacheView{},
                    slots.data(), static_cast<int64_t>(slots.size()));
    if (!status.ok()) fail(c, status.message);
  }
  const std::vector<float> sinks = pick({0, 1}) == 1 ? random_floats(c.heads * c.group) : std::vector<float>{};
  std::vector<char> out(static_cast<size_t>(tokens * c.heads * c.group * c.value_dim * dtype_bytes(c.dtype)), 0x7F);
  AttentionParams p;
  p.q = q.view;
  p.k = k.view;
  if (value) p.v = v.view;
  p.out = {out.data(), c.dtype, c.heads * c.group, c.value_dim};
  p.key = key.view;
  if (value) p.value = value->view;
  p.value_in_key = c.is_latent;
  p.batch = {static_cast<int64_t>(c.queries.size()),
             tokens,
             problem.columns,
             problem.tables.data(),
             problem.starts.data(),
             problem.lengths.data(),
             problem.slots.data()};
  p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(c.dim));
  p.window = c.window;
  p.sinks = sinks.empty() ? nullptr : sinks.data();
  const Status status = append_attention(p);
  if (!status.ok()) fail(c, status.message);
  compare(problem, key, value.get(), q, out, sinks, p.softmax_scale);
  if (current_isa() == Isa::kAvx512Vnni && c.dtype == ModelDtype::kFloat16) compare_dots(c, p, out);
}

/// Codes, scales and decoded values of an instruction set are those of the portable one, bit for bit. Rows have
/// numbers of all sizes, NaN and infinity; lengths that no vector divides are among them.
void compare_codes(Isa isa, Storage storage, ModelDtype dtype) {
  for (const int64_t dim : {2, 24, 70, 128, 136}) {
    const int64_t tokens = 40, heads = 3, block_size = 16, blocks = 4;
    Rows rows(tokens, heads, dim, dtype);
    for (size_t i = 0; i < rows.values.size() && dtype == ModelDtype::kFloat32; ++i) {
      float x = std::ldexp(rows.values[i], static_cast<int>(pick({-160, -20, -3, 0, 0, 0, 2, 30, 130})));
      if (pick({0, 0, 0, 0, 0, 0, 0, 1}) == 1) x = i % 2 == 0 ? std::nanf("") : HUGE_VALF;
      std::memcpy(&rows.bytes[i * 4], &x, 4);
    }
    Cache own(storage, dtype, blocks, heads, block_size, dim), portable = own;
    portable.view.data = portable.bytes.data();  // scales may stay shared: they are only read
    if (!own.token_scale.empty()) portable.view.quant.token_scale = portable.token_scale.data();
    std::vector<int64_t> slots(static_cast<size_t>(tokens));
    for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int64_t>(i) + block_size / 2;
    force_isa(Isa::kPortable);
    Status status = write_cache(rows.view, {}, portable.view, {}, slots.data(), tokens);
    const std::vector<float> expected = portable.read(slots);
    force_isa(isa);
    if (status.ok()) status = write_cache(rows.view, {}, own.view, {}, slots.data(), tokens);
    const std::vector<float> got = own.read(slots);
    const auto differ = [](const std::vector<float>& a, const std::vector<float>& b) {
      for (size_t i = 0; i < a.size(); ++i) {
        const bool both_nan = a[i] != a[i] && b[i] != b[i];  // whatever their sign
        if (!both_nan && std::memcmp(&a[i], &b[i], sizeof(float)) != 0) return true;
      }
      return false;
    };
    const char* what = !status.ok()                                    ? status.message
                       : own.bytes != portable.bytes                   ? "codes differ"
                       : differ(own.token_scale, portable.token_scale) ? "scales differ"
                       : differ(got, expected)                         ? "decoded values differ"
                                                                       : nullptr;
    if (what == nullptr) continue;
    std::printf("FAILED codec of %s, %s, dim %d with %s: %s\n", storage_row(storage).name, dtype_name(dtype),
                static_cast<int>(dim), isa_name(isa), what);
    std::exit(1);
  }
}

/// The cases of one round with the instruction set in use.
int run_cases() {
  int done = 0;
  for (const ModelDtype dtype : {ModelDtype::kFloat32, ModelDtype::kFloat16, ModelDtype::kBFloat16}) {
    for (int storage = 0; storage < kStorageCount; ++storage, ++done)
      run(Case(static_cast<Storage>(storage), dtype, false));
    for (const Storage storage : {Storage::kNone, Storage::kFloat8E4M3}) run(Case(storage, dtype, true)), ++done;
  }
  return done;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 4;
  const std::string only = argc > 2 ? argv[2] : "";
  for (int i = 0; i < static_cast<int>(Isa::kCount); ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (!only.empty() && only != isa_name(isa)) continue;
    if (!force_isa(isa)) {
      std::printf("%s: this CPU or system has no such instructions, nothing was run\n", isa_name(isa));
      continue;
    }
    for (int storage = 0; storage < kStorageCount; ++storage) {
      for (const ModelDtype dtype : {ModelDtype::kFloat32, ModelDtype::kFloat16, ModelDtype::kBFloat16})
        compare_codes(isa, static_cast<Storage>(storage), dtype);
    }
    int done = 0;
    for (int round = 0; round < rounds; ++round) done += run_cases();
    std::printf("%s: codecs equal, %d cases of attention passed\n", isa_name(isa), done);
    std::fflush(stdout);
  }
  return 0;
}
