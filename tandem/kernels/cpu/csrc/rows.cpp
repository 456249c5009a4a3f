// Row-wise kernels: RMS norm (with and without a residual, and of centred rows, which is LayerNorm without a bias) and the gated activation, forward and backward.
//
// A row's sums run in sixteen lanes over its columns and close with one fixed tree. Sums over rows (gradients of norm weights)
// run in order inside chunks of ROWS_PER_SUM rows and then over the chunks, whoever computed them.
#include "rows.h"

#include <algorithm>
#include <vector>

#include "calls.h"
#include "direct.h"
#include "parallel.h"

namespace {

constexpr int64_t ROWS_PER_SUM = 64;

void add_norm_row(const float* x, const float* residual, const float* weight, int64_t width, float eps, bool centred, float* out,
                  float* total, float* rstd) {
  if (residual) {
    each_vector(width, [&](int64_t i, int n) { put(total + i, add(get(x + i, n), get(residual + i, n)), n); });
    x = total;
  }
  if (centred) {
    centre_row(x, width, out);
    x = out;
  }
  *rstd = norm_row(x, weight, width, eps, out);
}

// The gradient of one row into grad_x, and of the weight added to weight_sum.
void norm_row_backward(const float* x, const float* weight, const float* grad, const float* grad_total, float rstd, int64_t width,
                       bool centred, float* grad_x, float* weight_sum) {
  if (centred) {
    centre_row(x, width, grad_x);
    norm_row_grad(grad_x, weight, grad, rstd, width, grad_x, weight_sum);
    // Centring is a symmetric matrix, so the gradient passes through it as the row did.
    centre_row(grad_x, width, grad_x);
  } else {
    norm_row_grad(x, weight, grad, rstd, width, grad_x, weight_sum);
  }
  if (grad_total) each_vector(width, [&](int64_t i, int n) { put(grad_x + i, add(get(grad_x + i, n), get(grad_total + i, n)), n); });
}

}  // namespace

void sum_partials(const float* partials, int64_t count, int64_t width, float* out) {
  each_vector(width, [&](int64_t i, int n) {
    V total = zero();
    for (int64_t c = 0; c < count; ++c) total = add(total, get(partials + c * width + i, n));
    put(out + i, total, n);
  });
}

namespace {

template <typename Activation>
void gate_rows(const float* gate_up, int64_t rows, int64_t width, Activation activation, float* out) {
  const int threads = threads_for(rows * width * 16);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const float *gate = gate_up + r * 2 * width, *up = gate + width;
    float* to = out + r * width;
    each_vector(width, [&](int64_t i, int n) { put(to + i, gated(activation, get(gate + i, n), get(up + i, n)), n); });
  }
}

template <typename Activation>
void gate_rows_backward(const float* gate_up, const int64_t* saved, const float* grad, int64_t rows, int64_t width, Activation activation,
                        float* grad_gate_up) {
  const int threads = threads_for(rows * width * 16);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const float *gate = gate_up + (saved ? saved[r] : r) * 2 * width, *up = gate + width, *from = grad + r * width;
    float *to_gate = grad_gate_up + r * 2 * width, *to_up = to_gate + width;
    each_vector(width, [&](int64_t i, int n) {
      V by_gate, by_up;
      gated_slopes(activation, get(gate + i, n), get(up + i, n), get(from + i, n), by_gate, by_up);
      put(to_gate + i, by_gate, n);
      put(to_up + i, by_up, n);
    });
  }
}

}  // namespace

void gate_mul(const float* gate_up, int64_t rows, int64_t width, int activation, float* out) {
  if (activation == SILU)
    gate_rows(gate_up, rows, width, Silu{}, out);
  else if (activation == GELU_TANH)
    gate_rows(gate_up, rows, width, GeluTanh{}, out);
  else
    gate_rows(gate_up, rows, width, ClampedSwiglu{}, out);
}

extern "C" {

// out = norm(x [+ residual]), total = x + residual (where there is one), rstd[rows]. Row r has the weights weight[r % groups][width].
void tandem_rms_norm(const float* x, const float* residual, const float* weight, int64_t rows, int64_t width, int64_t groups, float eps,
                     int centred, float* out, float* total, float* rstd) {
  const int threads = threads_for(rows * width * 8);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    float scale;
    add_norm_row(x + r * width, residual ? residual + r * width : nullptr, weight + r % groups * width, width, eps, centred,
                 out + r * width, residual ? total + r * width : nullptr, rstd ? rstd + r : &scale);
  }
}

// grad_x also receives grad_total (the gradient that reaches x + residual by its other way), where given. saved, grad_rows, first: of RepeatedRows.
int tandem_rms_norm_backward(const float* x, const float* weight, const float* grad, const float* grad_total, const float* rstd, const int64_t* saved,
                             const int64_t* grad_rows, const int64_t* first, int64_t rows, int64_t width, int64_t groups, int centred, float* grad_x,
                             float* grad_weight) {
  return or_out_of_memory([&] {
    const RepeatedRows same = {saved, grad_rows, first};
    const int64_t chunks = (rows + ROWS_PER_SUM - 1) / ROWS_PER_SUM, all = groups * width;
    std::vector<float> partials(static_cast<size_t>(chunks * all), 0.0f), unused(static_cast<size_t>(same.grad ? chunks * width : 0));
    const int threads = threads_for(rows * width * 8);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t c = 0; c < chunks; ++c)
      for (int64_t r = c * ROWS_PER_SUM; r < std::min(rows, (c + 1) * ROWS_PER_SUM); ++r) {
        const int64_t from = same.saved_of(r), g = same.grad_of(r);
        float* to = same.is_first(r) ? grad_x + g * width : unused.data() + c * width;
        norm_row_backward(x + from * width, weight + r % groups * width, grad + g * width, grad_total ? grad_total + g * width : nullptr, rstd[from],
                          width, centred, to, partials.data() + c * all + r % groups * width);
      }
    sum_partials(partials.data(), chunks, all, grad_weight);
  });
}

// `activation`: a code of rows.h.
void tandem_gate_mul(const float* gate_up, int64_t rows, int64_t width, int activation, float* out) {
  gate_mul(gate_up, rows, width, activation, out);
}

// Row r of `grad` is that of the row saved[r] of gate_up, where null its own.
void tandem_gate_mul_backward(const float* gate_up, const int64_t* saved, const float* grad, int64_t rows, int64_t width, int activation,
                              float* grad_gate_up) {
  if (activation == SILU)
    gate_rows_backward(gate_up, saved, grad, rows, width, Silu{}, grad_gate_up);
  else if (activation == GELU_TANH)
    gate_rows_backward(gate_up, saved, grad, rows, width, GeluTanh{}, grad_gate_up);
  else
    gate_rows_backward(gate_up, saved, grad, rows, width, ClampedSwiglu{}, grad_gate_up);
}

// out[rows, width] = cap tanh(x / cap); out may be x.
void tandem_soft_cap(const float* x, int64_t rows, int64_t width, float cap, float* out) {
  const V most = set1(cap);
  const int threads = threads_for(rows * width * 16);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r)
    each_vector(width, [&](int64_t i, int n) { put(out + r * width + i, soft_cap(get(x + r * width + i, n), most), n); });
}

// grad_x = grad times the slope of the cap where its value is capped[rows, width].
void tandem_soft_cap_backward(const float* capped, const float* grad, int64_t rows, int64_t width, float cap, float* grad_x) {
  const V most = set1(cap);
  const int threads = threads_for(rows * width * 8);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r)
    each_vector(width, [&](int64_t i, int n) {
      const int64_t at = r * width + i;
      put(grad_x + at, mul(get(grad + at, n), soft_cap_slope(get(capped + at, n), most)), n);
    });
}

}  // extern "C"

DIRECT(rms_norm);
DIRECT(gate_mul);
