// The router of a mixture of experts: who goes where, and with which gate.
#include <cstdint>

#include "parallel.h"
#include "softmax.h"

namespace {

constexpr int64_t COST_OF_EXP = 16;  // in multiply-adds

// The `each` largest of softmax(logits), of equals the lowest ids, with `memory[width]` to work in.
void route_row(const float* logits, int64_t width, int64_t each, bool normalised, float* memory, float* gates, int64_t* experts) {
  const Softmax s = softmax(logits, width, 1.0f);
  const V by = set1(1.0f), shift = set1(s.highest);
  each_vector(width, [&](int64_t i, int n) { put(memory + i, exp_shifted(logits, i, n, by, shift), n); });
  for (int64_t i = 0; i < width; ++i) memory[i] /= s.sum;
  float total = 0.0f;
  for (int64_t j = 0; j < each; ++j) {
    int64_t best = 0;
    // What was taken is negative; where nothing is a number, the lowest ids go.
    while (memory[best] < 0.0f) ++best;
    for (int64_t i = best + 1; i < width; ++i)
      if (memory[i] > memory[best]) best = i;
    experts[j] = best;
    gates[j] = memory[best];
    memory[best] = -1.0f;
    total = j == 0 ? gates[j] : total + gates[j];
  }
  if (normalised)
    for (int64_t j = 0; j < each; ++j) gates[j] /= total;
}

}  // namespace

extern "C" {

// logits[rows, width] -> gates, experts [rows, each]; bounds[width + 1], order and inverse [rows * each] as `Routing` has them.
int tandem_route(const float* logits, int64_t rows, int64_t width, int64_t each, int normalised, float* gates, int64_t* experts,
                 int64_t* bounds, int64_t* order, int64_t* inverse) {
  const int code = or_out_of_memory([&] {
    each_row(rows, rows * width * (COST_OF_EXP + each), [&](int64_t r) {
      thread_local Scratch memory;
      route_row(logits + r * width, width, each, normalised != 0, memory.floats(width), gates + r * each, experts + r * each);
    });
  });
  if (code != 0) return code;
  const int64_t places = rows * each;
  for (int64_t e = 0; e <= width; ++e) bounds[e] = 0;
  for (int64_t j = 0; j < places; ++j) ++bounds[experts[j] + 1];
  for (int64_t e = 0; e < width; ++e) bounds[e + 1] += bounds[e];
  // Each expert's start moves to its end while its rows are dealt, and goes back afterwards.
  for (int64_t j = 0; j < places; ++j) {
    const int64_t row = bounds[experts[j]]++;
    order[row] = j;
    inverse[j] = row;
  }
  for (int64_t e = width; e > 0; --e) bounds[e] = bounds[e - 1];
  bounds[0] = 0;
  return 0;
}

}  // extern "C"
