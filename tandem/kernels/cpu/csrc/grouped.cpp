// Linear layers of several groups in one call: rows that lie group by group, a weight of its own for each group.
#include <cstdint>

#include "gemm.h"
#include "parallel.h"

extern "C" {

// out[bounds[g] : bounds[g + 1], n] = x[..., k] weight[g][n, k]^T, with each weight packed or plain, one `stride` floats
// behind the other.
int tandem_grouped_linear(
    const float* x, const float* weight, int packed, int64_t stride, const int64_t* bounds, int64_t groups, int64_t n, int64_t k,
    float* out) {
  return or_out_of_memory([&] {
    each_group(bounds, groups, n * k, [&](int64_t g, int64_t first, int64_t rows) {
      const Right right = {weight + g * stride, packed ? Layout::PACKED : Layout::COLUMNS, k};
      multiply({rows, n, k, {x + first * k, k, 1}, right, out + first * n, n, nullptr, false});
    });
  });
}

}  // extern "C"
