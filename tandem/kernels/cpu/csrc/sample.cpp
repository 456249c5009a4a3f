// Drawing tokens: temperature, filters and the inverse of the cumulative distribution, row by row.
#include <algorithm>
#include <vector>

#include "calls.h"
#include "direct.h"
#include "filter.h"
#include "parallel.h"
#include "softmax.h"

namespace {

struct RowMemory {
  Scratch weights;
  std::vector<double> cumulative;
  FilterMemory filtering;
};

// The first token, in order, whose cumulative weight exceeds uniform times the total.
int64_t draw(const float* weights, int64_t width, double uniform, std::vector<double>& cumulative) {
  cumulative.resize(static_cast<size_t>((width + LANES - 1) / LANES));
  double total = 0.0;
  each_vector(width, [&](int64_t i, int n) {
    total += static_cast<double>(sum(get(weights + i, n)));
    cumulative[static_cast<size_t>(i / LANES)] = total;
  });
  const double threshold = uniform * total;
  const auto at = std::upper_bound(cumulative.begin(), cumulative.end(), threshold);
  int64_t last = width;
  if (at != cumulative.end()) {
    const int64_t first = (at - cumulative.begin()) * LANES;
    last = std::min(width, first + LANES);
    double sum_so_far = first == 0 ? 0.0 : *(at - 1);
    for (int64_t i = first; i < last; ++i) {
      sum_so_far += static_cast<double>(weights[i]);
      if (weights[i] > 0.0f && sum_so_far > threshold) return i;
    }
  }
  // Rounding carried the threshold past the last sum: the last token that has any weight.
  while (last > 1 && !(weights[last - 1] > 0.0f)) --last;
  return last - 1;
}

int64_t first_of(float logit, const float* logits, int64_t width) {
  const float* at = std::find(logits, logits + width, logit);
  return at == logits + width ? 0 : at - logits;
}

struct Drawn {
  int64_t token;
  float raw, sampling;
};

Drawn sample_row(const float* logits, int64_t width, float temperature, const Filters& filters, double uniform, RowMemory& memory) {
  const float most = highest_logit(logits, width);
  if (temperature == 0.0f) {
    const int64_t token = first_of(most, logits, width);
    return {token, softmax(logits, width, 1.0f, most).logprob(logits[token]), 0.0f};
  }
  float* weights = memory.weights.floats(width + LANES);
  Softmax tempered = softmax(logits, width, 1.0f / temperature, most, weights);
  const Softmax one = temperature == 1.0f ? tempered : softmax(logits, width, 1.0f, most);
  if (filters.any(width)) {
    filter(logits, weights, width, filters, memory.filtering);
    V total = zero();
    each_vector(width, [&](int64_t i, int n) { total = add(total, get(weights + i, n)); });
    tempered.sum = sum(total);
    tempered.log_sum = log_of(tempered.sum);
  }
  const int64_t token = draw(weights, width, uniform, memory.cumulative);
  return {token, one.logprob(logits[token]), tempered.logprob(logits[token])};
}

}  // namespace

extern "C" int tandem_sample(const float* logits, int64_t rows, int64_t width, const float* temperature, const int64_t* top_k,
                              const float* top_p, const float* min_p, const double* uniform, int64_t* tokens, float* raw,
                              float* sampling) {
  return or_out_of_memory([&] {
    each_row(rows, rows * width * 32, [&](int64_t r) {
      thread_local RowMemory memory;
      const Drawn drawn = sample_row(logits + r * width, width, temperature[r], {top_k[r], top_p[r], min_p[r]}, uniform[r], memory);
      tokens[r] = drawn.token;
      raw[r] = drawn.raw;
      sampling[r] = drawn.sampling;
    });
  });
}

DIRECT(sample);
