// Online soft-max of a step's scores (rows.h has their layout): the largest score and the sum of weights of each row go
// from chunk to chunk, and what was summed before shrinks when a larger score comes.
#pragma once

#include "fastkv/rows.h"

namespace fastkv::FASTKV_ISA {

/// What soft-max needs to turn raw scores into weights.
struct FoldTerms {
  const float* factor;  // score = raw * factor[r] + constant[r], times key_scale of the position
  const float* constant;
  const float* key_scale;    // null: none
  const float* value_scale;  // null: none; else joins the weight
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
template <int R>
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
    if (terms.key_scale != nullptr) x *= by_position(terms.key_scale + s * T);
    if (s == steps - 1) {
      for (int l = 0; l < kLanes; ++l) {
        if (s * T + l % T >= count) x[l] = minus_infinity();
      }
    }
    store(scores + s * kLanes, x);
    top = max_each(x, top);
  }
  top = max_of_runs<T>(top);
  // with nothing but -inf so far, subtracting it would give NaN; 0 makes every weight 0
  const Floats base = select(top == splat(minus_infinity()), splat(0.0f), top);
  const Floats old_factor = select(old_maximum == base, splat(1.0f), exp_nonpositive(old_maximum - base));
  Floats total = splat(0.0f), scaled = splat(0.0f);
  for (int64_t s = 0; s < steps; ++s) {
    Floats weight = exp_nonpositive(load(scores + s * kLanes) - base);
    const auto is_nothing = weight == splat(0.0f);
    total += weight;
    weight *= terms.weight_factor;
    if (terms.value_scale != nullptr) {
      weight *= by_position(terms.value_scale + s * T);
      // past the chunk's end weights are 0, and scales what memory held: 0 * NaN is NaN
      scaled += select(is_nothing, splat(0.0f), weight);
    }
    store(scores + s * kLanes, weight);
  }
  total = sum_of_runs<T>(total);
  scaled = sum_of_runs<T>(scaled);
  for (int r = 0; r < R; ++r) {
    state.maximum[r] = top[r * T];
    shrink[r] = old_factor[r * T];
    state.sum[r] = state.sum[r] * shrink[r] + total[r * T];
    state.scaled_sum[r] = state.scaled_sum[r] * shrink[r] + scaled[r * T];
  }
}

}  // namespace fastkv::FASTKV_ISA
