// Linear layers for Python.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include "calls.h"
#include "direct.h"
#include "gemm.h"
#include "parallel.h"
#include "rows.h"

namespace {

// A weight of many pages is read from end to end for every token: with few rows that is limited by page walks, and by the
// hardware's prefetch, which stops at each page's end. Memory that was touched before stays as it is.
void ask_for_huge_pages(float* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t HUGE_PAGE = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / HUGE_PAGE * HUGE_PAGE;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

extern "C" {

int64_t tandem_packed_floats(int64_t n, int64_t k) { return packed_floats(n, k); }

void tandem_pack(const float* weight, int64_t n, int64_t k, float* packed) {
  ask_for_huge_pages(packed, packed_floats(n, k) * static_cast<int64_t>(sizeof(float)));
  pack({weight, Layout::COLUMNS, k}, n, k, packed);
}

// out[m, n] = x[m, k] weight[n, k]^T + bias, with the weight packed or plain.
int tandem_linear(const float* x, const float* weight, int packed, const float* bias, int64_t m, int64_t n, int64_t k, float* out) {
  return or_out_of_memory([&] { multiply({m, n, k, {x, k, 1}, {weight, packed ? Layout::PACKED : Layout::COLUMNS, k}, out, n, bias, false}); });
}

// out[m, hidden] = gate_mul(x gate_up^T + gate_up_bias) down^T + down_bias, with both weights packed, a few rows after the other:
// what lies between stays in the cache, and no [m, 2 inner] is ever allocated.
int tandem_gated_mlp(const float* x, const float* gate_up, const float* gate_up_bias, const float* down, const float* down_bias,
                     int64_t m, int64_t hidden, int64_t inner, int activation, float* out) {
  return or_out_of_memory([&] {
    thread_local Scratch memory;
    const int64_t at_once = std::min(m, ROW_CHUNK * threads_for(m * hidden * inner));
    float *both = memory.floats(at_once * 3 * inner), *gated = both + at_once * 2 * inner;
    for (int64_t first = 0; first < m; first += at_once) {
      const int64_t rows = std::min(at_once, m - first);
      multiply({rows, 2 * inner, hidden, {x + first * hidden, hidden, 1}, {gate_up, Layout::PACKED, hidden}, both, 2 * inner, gate_up_bias,
                false});
      gate_mul(both, rows, inner, activation, gated);
      multiply({rows, hidden, inner, {gated, inner, 1}, {down, Layout::PACKED, inner}, out + first * hidden, hidden, down_bias, false});
    }
  });
}

// grad_x[m, k] (+)= grad[m, n] weight[n, k]
int tandem_linear_grad_x(const float* grad, const float* weight, int64_t m, int64_t n, int64_t k, int accumulate, float* grad_x) {
  return or_out_of_memory([&] { multiply({m, k, n, {grad, n, 1}, {weight, Layout::ROWS, k}, grad_x, k, nullptr, accumulate != 0}); });
}

// grad_weight[n, k] (+)= grad[m, n]^T x[m, k]
int tandem_linear_grad_weight(const float* grad, const float* x, int64_t m, int64_t n, int64_t k, int accumulate, float* grad_weight) {
  return or_out_of_memory([&] { multiply({n, k, m, {grad, 1, n}, {x, Layout::ROWS, k}, grad_weight, k, nullptr, accumulate != 0}); });
}

// The same of m rows that are the rows grad_rows[m] of grad and x_rows[m] of x, where null their own.
int tandem_repeated_grad_weight(const float* grad, const int64_t* grad_rows, const float* x, const int64_t* x_rows, int64_t m, int64_t n, int64_t k,
                                float* grad_weight) {
  return or_out_of_memory([&] { multiply({n, k, m, {grad, 1, n, grad_rows}, {x, Layout::ROWS, k, nullptr, x_rows}, grad_weight, k, nullptr, false}); });
}

// grad_bias[n] = the sum of grad's rows, in order
void tandem_linear_grad_bias(const float* grad, int64_t m, int64_t n, float* grad_bias) { sum_partials(grad, m, n, grad_bias); }

}  // extern "C"

DIRECT(linear);
DIRECT(gated_mlp);
