// Inputs of products in emulated fp8.
#include <algorithm>
#include <cstdint>

#include "calls.h"
#include "numbers.h"
#include "parallel.h"

extern "C" {

// Each run of `group` columns of a row rounded to e4m3 under a scale of its own, the largest magnitude over 448, and back: what a
// product of fp8 inputs sees. A run with an infinite or undefined number becomes undefined.
void tandem_round_fp8(const float* x, int64_t m, int64_t k, int64_t group, float* out) {
  const int threads = threads_for(m * k * 8);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < m; ++row)
    for (int64_t start = 0; start < k; start += group) {
      const float* from = x + row * k + start;
      float* to = out + row * k + start;
      const int64_t count = std::min(group, k - start);
      uint32_t largest_bits = 0;
      for (int64_t i = 0; i < count; ++i) largest_bits = std::max(largest_bits, bits_of(from[i]) & 0x7fffffff);
      const float scale = largest_bits >= 0x7f800000 ? __builtin_nanf("") : from_bits(largest_bits) / 448.0f;
      for (int64_t i = 0; i < count; ++i) {
        const float value = scale == 0.0f ? 0.0f : from[i] / scale;
        // Four significant bits, and below 2^-6 whole multiples of 2^-9: adding and taking away 1.5 2^23 of that unit rounds to it.
        const uint32_t exponent = std::max(bits_of(value) >> 23 & 0xff, 121u);
        const float shift = from_bits((exponent + 20) << 23) * 1.5f;
        const float rounded = (value + shift) - shift;
        to[i] = std::min(448.0f, std::max(-448.0f, rounded)) * scale;
      }
    }
}

}  // extern "C"
