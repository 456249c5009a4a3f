// Log-probabilities of given tokens, their entropy, and the gradient by the logits.
#include "direct.h"
#include "parallel.h"
#include "softmax.h"

namespace {

constexpr int64_t COST_OF_EXP = 16;  // in multiply-adds

// -sum p log p, with p log p = 0 where p = 0.
float entropy_of(const float* logits, int64_t width, const Softmax& s) {
  const V by = set1(s.scale), shift = set1(s.highest), floor = set1(-3.0e38f);
  V along = zero();
  each_vector(width, [&](int64_t i, int n) {
    const V below = max(floor, sub(mul(get(logits + i, n), by), shift));
    along = fma(exp_shifted(logits, i, n, by, shift), below, along);
  });
  return s.log_sum - sum(along) / s.sum;
}

bool targets_fit(const int64_t* targets, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r)
    if (targets[r] < 0 || targets[r] >= width) return false;
  return true;
}

}  // namespace

extern "C" {

// raw[rows] at temperature 1; scaled[rows] (null where inverse_temperature is 1) and entropy[rows] (or null) at the other.
// softmaxes (or null) receives what the backward pass needs of each row: {highest, sum} at temperature 1, then, where `scaled` is
// given, {highest, sum} at the other. Returns 1 where a target lies outside the row.
int tandem_logprobs(const float* logits, const int64_t* targets, int64_t rows, int64_t width, float inverse_temperature, float* raw,
                    float* scaled, float* entropy, float* softmaxes) {
  if (!targets_fit(targets, rows, width)) return 1;
  const int64_t each = scaled ? 4 : 2;
  const int threads = threads_for(rows * width * COST_OF_EXP);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = logits + r * width;
    float* kept = softmaxes ? softmaxes + r * each : nullptr;
    Softmax s = softmax(row, width, 1.0f);
    raw[r] = s.logprob(row[targets[r]]);
    if (kept) kept[0] = s.highest, kept[1] = s.sum;
    if (scaled) {
      s = softmax(row, width, inverse_temperature);
      scaled[r] = s.logprob(row[targets[r]]);
      if (kept) kept[2] = s.highest, kept[3] = s.sum;
    }
    if (entropy) entropy[r] = entropy_of(row, width, s);
  }
  return 0;
}

// The columns first .. first + width of the gradient by the logits: grad (onehot - softmax) of each of the two temperatures, added.
// A row of `logits` holds these columns and starts `stride` floats after the one before it; `each` floats of `softmaxes` are those
// that tandem_logprobs wrote of a row. `cap` (0: none): the logits are soft-capped, and the gradient is that by what was capped.
// grad_logits[rows][width] may be the logits.
void tandem_logprobs_backward(const float* logits, int64_t stride, const int64_t* targets, int64_t rows, int64_t first, int64_t width,
                              float inverse_temperature, float cap, const float* softmaxes, int64_t each, const float* grad_raw,
                              const float* grad_scaled, float* grad_logits) {
  const int threads = threads_for(rows * width * COST_OF_EXP);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const float *row = logits + r * stride, *kept = softmaxes + r * each;
    float* to = grad_logits + r * width;
    const V minus = set1(-grad_raw[r] / kept[1]), by = set1(1.0f), shift = set1(kept[0]);
    float at_target = grad_raw[r];
    const int64_t target = targets[r] - first;
    const bool has_target = target >= 0 && target < width;
    const auto write = [&](int64_t i, V grad, int n) {
      put(to + i, cap == 0.0f ? grad : mul(grad, soft_cap_slope(get(row + i, n), set1(cap))), n);
    };
    // Read before the row is written over.
    const float share = has_target && cap != 0.0f ? row[target] / cap : 0.0f;
    if (grad_scaled) {
      const float slope = grad_scaled[r] * inverse_temperature;
      const V other_minus = set1(-slope / kept[3]), other_by = set1(inverse_temperature), other_shift = set1(kept[2]);
      at_target += slope;
      each_vector(width, [&](int64_t i, int n) {
        const V e = mul(exp_shifted(row, i, n, by, shift), minus);
        write(i, fma(exp_shifted(row, i, n, other_by, other_shift), other_minus, e), n);
      });
    } else {
      each_vector(width, [&](int64_t i, int n) { write(i, mul(exp_shifted(row, i, n, by, shift), minus), n); });
    }
    if (has_target) to[target] += at_target * fma1(-share, share, 1.0f);
  }
}

}  // extern "C"

DIRECT(logprobs);
