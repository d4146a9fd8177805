// Online soft-max of a step's scores (rows.h has their layout): the largest score and the sum of weights of each row go
// from chunk to chunk, and what was summed before shrinks when a larger score comes.
#pragma once

#include "fastkv/rows.h"

namespace fastkv::FASTKV_ISA {

/// What soft-max needs to turn raw scores into weights.
struct FoldTerms {
  const float* factor;  // score = raw * factor[r] + constant[r], times key_scale of the position
  const float* constant;
  const float* key_scale;    // read with dynamic scales only, as is
  const float* value_scale;  // what joins the weight
  float weight_factor;       // joins the weight
};

/// Running state of R rows: largest score, sum of weights, and sum of what values with dynamic scales are multiplied
/// by.
struct FoldState {
  float* maximum;
  float* sum;
  float* scaled_sum;
};

/// Folds raw scores of R rows into their running state; leaves weights in place of the scores, and the factors for what
/// was summed before.
template <int R, bool kHasTokenScale>
static void fold_rows(float* scores, int64_t count, const FoldTerms& terms, const FoldState& state, float* shrink) {
  constexpr int T = kStep<R>;
  Floats factor, constant, old_maximum;
  for (int l = 0; l < kLanes; ++l) {
    const int r = l / T < R ? l / T : R - 1;
    factor[l] = terms.factor[r];
    constant[l] = terms.constant[r];
    old_maximum[l] = state.maximum[r];
  }
  const auto by_position = [](const float* x) { return permute(load(x), [](int l) { return l % T; }); };
  const int64_t steps = (count + T - 1) / T;
  Floats top = old_maximum;
  for (int64_t s = 0; s < steps; ++s) {
    Floats x = load(scores + s * kLanes) * factor + constant;
    if constexpr (kHasTokenScale) x *= by_position(terms.key_scale + s * T);
    store(scores + s * kLanes, x);
    if (s < steps - 1) top = max_each(x, top);
  }
  Floats last = load(scores + (steps - 1) * kLanes);
  for (int l = 0; l < kLanes; ++l) {
    if ((steps - 1) * T + l % T >= count) last[l] = minus_infinity();
  }
  store(scores + (steps - 1) * kLanes, last);
  top = max_of_runs<T>(max_each(last, top));
  // with nothing but -inf so far, subtracting it would give NaN; 0 makes every weight 0
  const Floats base = select(top == splat(minus_infinity()), splat(0.0f), top);
  const Floats old_factor = select(old_maximum == base, splat(1.0f), exp_nonpositive(old_maximum - base));
  Floats total = splat(0.0f), scaled = splat(0.0f);
  const auto weigh = [&](int64_t s, Floats weight) FASTKV_INLINE_BODY {
    total += weight;
    if constexpr (kHasTokenScale) {
      const auto is_nothing = weight == splat(0.0f);
      weight *= terms.weight_factor * by_position(terms.value_scale + s * T);
      // past the chunk's end weights are 0, and scales what memory held: 0 * NaN is NaN
      scaled += select(is_nothing, splat(0.0f), weight);
    } else {
      weight *= terms.weight_factor;
    }
    store(scores + s * kLanes, weight);
  };
  constexpr int N = 4;
  int64_t s = 0;
  for (; s + N <= steps; s += N) {
    Floats weights[N];
    for (int i = 0; i < N; ++i) weights[i] = load(scores + (s + i) * kLanes) - base;
    exp_nonpositive(weights);
    for (int i = 0; i < N; ++i) weigh(s + i, weights[i]);
  }
  for (; s < steps; ++s) weigh(s, exp_nonpositive(load(scores + s * kLanes) - base));
  total = sum_of_runs<T>(total);
  scaled = sum_of_runs<T>(scaled);
  for (int r = 0; r < R; ++r) {
    state.maximum[r] = top[r * T];
    shrink[r] = old_factor[r * T];
    state.sum[r] = state.sum[r] * shrink[r] + total[r * T];
    state.scaled_sum[r] = state.scaled_sum[r] * shrink[r] + scaled[r * T];
  }
}

/// fold_rows by whether there are dynamic scales, and by R - 1.
inline constexpr decltype(&fold_rows<1, false>) kFoldRows[2][kMaxRows] = {
    {&fold_rows<1, false>, &fold_rows<2, false>, &fold_rows<3, false>, &fold_rows<4, false>},
    {&fold_rows<1, true>, &fold_rows<2, true>, &fold_rows<3, true>, &fold_rows<4, true>}};

}  // namespace fastkv::FASTKV_ISA
