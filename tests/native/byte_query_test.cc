// A query as bytes against the bound that byte_query.h promises: sizes from 2^-100 to 2^90, outliers, zero. Needs no
// instruction set. Run by run.sh.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#define FASTKV_ISA test_isa
#include "fastkv/byte_query.h"

namespace {

using namespace fastkv::test_isa;

std::mt19937 generator(20261130);

int64_t pick(std::initializer_list<int64_t> values) {
  return values.begin()[std::uniform_int_distribution<size_t>(0, values.size() - 1)(generator)];
}

/// A query as bytes is the query, to half a step, and its sum is that of its codes.
template <int kBits>
void test_byte_query_of_any_size_is_near() {
  constexpr int64_t codes = 8 / kBits, planes = kQueryBytes<kBits>;
  for (int round = 0; round < 200; ++round) {
    const int64_t dim = pick({1, 2, 24, 64, 80, 128, 200, 256});
    std::vector<float> q(static_cast<size_t>(dim));
    const int exponent = static_cast<int>(pick({-100, -3, 0, 90}));
    std::uniform_real_distribution<float> distribution(-1.7f, 1.7f);
    for (float& x : q) x = std::ldexp(distribution(generator), exponent);
    if (round % 3 == 0) q[0] *= 1000.0f;
    if (round % 7 == 0) std::fill(q.begin(), q.end(), 0.0f);
    std::vector<float> room(static_cast<size_t>(byte_query_floats(dim)), std::nanf(""));
    int8_t* bytes = reinterpret_cast<int8_t*>(room.data());
    const ByteQuery query = query_to_bytes<kBits>(q.data(), dim, bytes);
    int64_t sum = 0;
    bool is_near = query.is_usable;
    for (int64_t i = 0; i < dim; ++i) {
      const int64_t byte = i / codes, group = byte / kGroupBytes * codes + i % codes;
      const int8_t* at = bytes + group * planes * kGroupBytes + byte % kGroupBytes;
      const int64_t code = planes == 2 ? at[0] * 256 + at[kGroupBytes] : at[0];
      sum += code;
      const double error = std::fabs(static_cast<double>(code) * query.step - q[static_cast<size_t>(i)]);
      is_near = is_near && error <= 0.501 * query.step;
    }
    if (is_near && sum == query.sum) continue;
    std::printf("FAILED query of %d channels as bytes, %d codes a byte\n", static_cast<int>(dim),
                static_cast<int>(codes));
    std::exit(1);
  }
}

void test_query_that_no_bytes_stand_for_is_refused() {
  std::vector<float> room(static_cast<size_t>(byte_query_floats(2)));
  for (const float bad : {HUGE_VALF, std::nanf(""), 1e-39f}) {  // no bytes stand for these: floats do the work
    const float q[] = {bad, 0.0f};
    if (!query_to_bytes<8>(q, 2, reinterpret_cast<int8_t*>(room.data())).is_usable) continue;
    std::printf("FAILED a query of %g became bytes\n", bad);
    std::exit(1);
  }
}

}  // namespace

int main() {
  test_byte_query_of_any_size_is_near<8>();
  test_byte_query_of_any_size_is_near<4>();
  test_query_that_no_bytes_stand_for_is_refused();
  std::printf("queries as bytes: passed\n");
  return 0;
}
