// The softmax of one row of logits at a temperature, in one fixed order.
#pragma once

#include "rows.h"

// With z_i = scale logit_i and m = max z: sum exp(z_i - m), in sixteen lanes over the row.
struct Softmax {
  float scale, highest, sum, log_sum;

  float logprob(float logit) const { return (logit * scale - highest) - log_sum; }
};

INLINE float highest_logit(const float* logits, int64_t width) {
  V most = set1(-INFINITY);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) most = max(most, load(logits + i));
  if (i < width) most = max(most, keep_lanes(load_n(logits + i, static_cast<int>(width - i)), 0, static_cast<int>(width - i), -INFINITY));
  return max_lane(most);
}

// exp(z_i - m) for the columns i .. i + n; lanes past n are 0.
INLINE V exp_shifted(const float* logits, int64_t i, int n, V scale, V highest) {
  const V e = exp(sub(mul(get(logits + i, n), scale), highest));
  return n == LANES ? e : keep_lanes(e, 0, n, 0.0f);
}

INLINE float log_of(float sum) { return static_cast<float>(std::log(static_cast<double>(sum))); }

// `most`: the highest logit. `weights`, where given, receive exp(z_i - m).
INLINE Softmax softmax(const float* logits, int64_t width, float scale, float most, float* weights = nullptr) {
  const float highest = most * scale;
  const V by = set1(scale), shift = set1(highest);
  V total = zero();
  each_vector(width, [&](int64_t i, int n) {
    const V e = exp_shifted(logits, i, n, by, shift);
    total = add(total, e);
    if (weights) put(weights + i, e, n);
  });
  const float all = sum(total);
  return {scale, highest, all, log_of(all)};
}

INLINE Softmax softmax(const float* logits, int64_t width, float scale) { return softmax(logits, width, scale, highest_logit(logits, width)); }
