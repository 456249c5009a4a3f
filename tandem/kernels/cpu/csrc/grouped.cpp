// Linear layers of several groups in one call: rows that stand group by group, a weight of its own for each group.
#include <algorithm>
#include <cstdint>

#include "gemm.h"
#include "parallel.h"

extern "C" {

// out[bounds[g] : bounds[g + 1], n] = x[..., k] weight[g][n, k]^T, with each weight packed or plain, one `stride` floats
// behind the other.
int tandem_grouped_linear(
    const float* x, const float* weight, int packed, int64_t stride, const int64_t* bounds, int64_t groups, int64_t n, int64_t k,
    float* out) {
  Failure failure;
  const auto run = [&](int64_t g) {
    failure.guard([&] {
      const int64_t first = bounds[g], rows = bounds[g + 1] - first;
      const Right right = {weight + g * stride, packed ? Layout::PACKED : Layout::COLUMNS, k};
      if (rows > 0) multiply({rows, n, k, {x + first * k, k, 1}, right, out + first * n, n, nullptr, false});
    });
  };
  int64_t busy = 0, most = 0;
  for (int64_t g = 0; g < groups; ++g) {
    busy += bounds[g + 1] > bounds[g];
    most = std::max(most, bounds[g + 1] - bounds[g]);
  }
  const int64_t total = bounds[groups] - bounds[0];
  const int threads = threads_for(total * n * k + busy * n * k);
  // A group a thread, where no group is more than one thread's share; else all threads on one group after another.
  if (threads > 1 && busy >= 2 * threads && most * threads <= total) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t g = 0; g < groups; ++g) run(g);
  } else {
    for (int64_t g = 0; g < groups; ++g) run(g);
  }
  return or_out_of_memory([&] { failure.raise(); });
}

}  // extern "C"
