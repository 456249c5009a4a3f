// fp32 matrices as pairs of bf16 numbers along the sum of a product, and products of such pairs.
#pragma once

#include <cstdint>

#include "gemm.h"

inline int64_t pair_count(int64_t numbers) { return (numbers + 1) / 2; }

// [m][k] to [m][pair_count(k)]: a pair is two numbers of a row; 0 fills the last.
void narrow_rows(const float* x, int64_t m, int64_t k, float* pairs);
// [m][k] to [pair_count(m)][k]: a pair is two numbers of a column.
void narrow_columns(const float* x, int64_t m, int64_t k, float* pairs);

// A weight [n, k] that a product sums along k: plain, or packed.
struct PairWeight {
  const float* data;
  bool packed;
  int64_t n, k;
};
void pack_pairs(const float* weight, int64_t n, int64_t k, float* packed);
// out[m, n] (+)= pairs[m, k] weight^T + bias
void multiply_pairs(const float* pairs, int64_t m, const PairWeight& weight, const float* bias, bool rounds, float* out);
