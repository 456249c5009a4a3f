// Linear layers for Python.
#include <cstdint>

#include "gemm.h"
#include "parallel.h"
#include "rows.h"

extern "C" {

int64_t tandem_packed_floats(int64_t n, int64_t k) { return packed_floats(n, k); }

void tandem_pack(const float* weight, int64_t n, int64_t k, float* packed) { pack({weight, Layout::COLUMNS, k}, n, k, packed); }

// out[m, n] = x[m, k] weight[n, k]^T + bias, with the weight packed or plain.
int tandem_linear(const float* x, const float* weight, int packed, const float* bias, int64_t m, int64_t n, int64_t k, float* out) {
  return or_out_of_memory([&] { multiply({m, n, k, {x, k, 1}, {weight, packed ? Layout::PACKED : Layout::COLUMNS, k}, out, n, bias, false}); });
}

// grad_x[m, k] = grad[m, n] weight[n, k]
int tandem_linear_grad_x(const float* grad, const float* weight, int64_t m, int64_t n, int64_t k, float* grad_x) {
  return or_out_of_memory([&] { multiply({m, k, n, {grad, n, 1}, {weight, Layout::ROWS, k}, grad_x, k, nullptr, false}); });
}

// grad_weight[n, k] (+)= grad[m, n]^T x[m, k]
int tandem_linear_grad_weight(const float* grad, const float* x, int64_t m, int64_t n, int64_t k, int accumulate, float* grad_weight) {
  return or_out_of_memory([&] { multiply({n, k, m, {grad, 1, n}, {x, Layout::ROWS, k}, grad_weight, k, nullptr, accumulate != 0}); });
}

// grad_bias[n] = the sum of grad's rows, in order
void tandem_linear_grad_bias(const float* grad, int64_t m, int64_t n, float* grad_bias) { sum_partials(grad, m, n, grad_bias); }

}  // extern "C"
