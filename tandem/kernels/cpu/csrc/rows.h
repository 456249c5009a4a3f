// What the row kernels share: walking a row in vectors, and the RMS norm of one row.
#pragma once

#include "vec.h"

INLINE V get(const float* p, int n) { return n == LANES ? load(p) : load_n(p, n); }
INLINE void put(float* p, V v, int n) {
  if (n == LANES)
    store(p, v);
  else
    store_n(p, v, n);
}

// step(i, n) for every vector of a row: n = LANES columns from i, and what is left at the end.
template <typename Step>
INLINE void each_vector(int64_t width, Step step) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) step(i, LANES);
  if (i < width) step(i, static_cast<int>(width - i));
}

INLINE float sum_of_squares(const float* x, int64_t width) {
  V even = zero(), odd = zero();
  int64_t i = 0;
  for (; i + 2 * LANES <= width; i += 2 * LANES) {
    const V a = load(x + i), b = load(x + i + LANES);
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  each_vector(width - i, [&](int64_t j, int n) {
    const V a = get(x + i + j, n);
    even = fma(a, a, even);
  });
  return sum(add(even, odd));
}

// out = weight x / sqrt(mean(x^2) + eps); returns 1 / sqrt(...). out may be x.
INLINE float norm_row(const float* x, const float* weight, int64_t width, float eps, float* out) {
  const float rstd = 1.0f / std::sqrt(sum_of_squares(x, width) / static_cast<float>(width) + eps);
  const V scale = set1(rstd);
  each_vector(width, [&](int64_t i, int n) { put(out + i, mul(get(weight + i, n), mul(get(x + i, n), scale)), n); });
  return rstd;
}

// out = x - mean(x); out may be x.
INLINE void centre_row(const float* x, int64_t width, float* out) {
  V even = zero(), odd = zero();
  int64_t i = 0;
  for (; i + 2 * LANES <= width; i += 2 * LANES) {
    even = add(even, load(x + i));
    odd = add(odd, load(x + i + LANES));
  }
  each_vector(width - i, [&](int64_t j, int n) { even = add(even, get(x + i + j, n)); });
  const V mean = set1(sum(add(even, odd)) / static_cast<float>(width));
  each_vector(width, [&](int64_t j, int n) { put(out + j, sub(get(x + j, n), mean), n); });
}

// With h = x rstd and u = grad weight: grad_x = rstd (u - h mean(u h)), weight_sum += grad h. grad_x may be grad, or x.
INLINE void norm_row_grad(const float* x, const float* weight, const float* grad, float rstd, int64_t width, float* grad_x,
                          float* weight_sum) {
  const V scale = set1(rstd);
  V along = zero();
  each_vector(width, [&](int64_t i, int n) {
    const V h = mul(get(x + i, n), scale), d = get(grad + i, n);
    along = fma(mul(d, get(weight + i, n)), h, along);
    put(weight_sum + i, fma(d, h, get(weight_sum + i, n)), n);
  });
  const V mean = set1(sum(along) / static_cast<float>(width));
  each_vector(width, [&](int64_t i, int n) {
    const V h = mul(get(x + i, n), scale);
    put(grad_x + i, mul(scale, fnma(h, mean, mul(get(grad + i, n), get(weight + i, n)))), n);
  });
}

// Rows of which several are the same, each of which is computed once: row r is the row saved[r] of what the forward pass computed, and grad[r] of the
// gradients; first[g] is the first row that has the gradient g. Null: all rows are their own.
struct RepeatedRows {
  const int64_t *saved, *grad, *first;

  int64_t saved_of(int64_t r) const { return saved ? saved[r] : r; }
  int64_t grad_of(int64_t r) const { return grad ? grad[r] : r; }
  bool is_first(int64_t r) const { return !grad || first[grad[r]] == r; }
};

// out[width] = the partials[count][width] added in order.
void sum_partials(const float* partials, int64_t count, int64_t width, float* out);

// x sigmoid(x), and its slope.
struct Silu {
  INLINE_MEMBER V value(V x) const { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }
  // (value, slope) in the roundings of the backward pass.
  INLINE_MEMBER void both(V x, V& value, V& slope) const {
    const V one = set1(1.0f), sigmoid = div(one, add(one, exp(sub(zero(), x))));
    value = mul(x, sigmoid);
    slope = mul(sigmoid, fma(x, sub(one, sigmoid), one));
  }
};

// GELU by tanh (Hendrycks and Gimpel, 2016): x (1 + tanh(y)) / 2 = x sigmoid(2 y) with y = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  // exp(-2 y)
  INLINE_MEMBER V decay(V x) const { return exp(mul(fma(mul(mul(x, x), x), set1(0.044715f), x), set1(-1.5957691216057308f))); }
  INLINE_MEMBER V value(V x) const { return mul(x, div(set1(1.0f), add(set1(1.0f), decay(x)))); }
  INLINE_MEMBER void both(V x, V& value, V& slope) const {
    const V one = set1(1.0f), e = decay(x), sigmoid = div(one, add(one, e));
    const V rise = fma(mul(x, x), set1(0.2140644488f), set1(1.5957691216057308f));  // d(2 y) / dx
    value = mul(x, sigmoid);
    // 1 - sigmoid is e sigmoid, without the cancellation.
    slope = mul(sigmoid, fma(mul(x, rise), mul(e, sigmoid), one));
  }
};

// The gate of an MLP: activation(gate) up.
template <typename Activation>
INLINE V gated(Activation activation, V gate, V up) {
  return mul(activation.value(gate), up);
}

// Its slopes by gate and up, times d.
template <typename Activation>
INLINE void gated_slopes(Activation activation, V gate, V up, V d, V& by_gate, V& by_up) {
  V value, slope;
  activation.both(gate, value, slope);
  by_gate = mul(mul(d, up), slope);
  by_up = mul(d, value);
}

// That of gpt-oss (OpenAI, 2025): g sigmoid(1.702 g) (u + 1), with g the gate up to 7 and u up between -7 and 7.
struct ClampedSwiglu {
  static constexpr float ALPHA = 1.702f, LIMIT = 7.0f;

  // NaN stays NaN.
  INLINE_MEMBER static V at_most(V x) { return where_less(set1(LIMIT), x, set1(LIMIT), x); }
  INLINE_MEMBER static V bounded(V x) { return where_less(x, set1(-LIMIT), set1(-LIMIT), at_most(x)); }
  INLINE_MEMBER static V decay(V g) { return exp(mul(g, set1(-ALPHA))); }
};

INLINE V gated(ClampedSwiglu, V gate, V up) {
  const V g = ClampedSwiglu::at_most(gate), one = set1(1.0f);
  return mul(div(g, add(one, ClampedSwiglu::decay(g))), add(ClampedSwiglu::bounded(up), one));
}

INLINE void gated_slopes(ClampedSwiglu, V gate, V up, V d, V& by_gate, V& by_up) {
  const V g = ClampedSwiglu::at_most(gate), u = ClampedSwiglu::bounded(up), one = set1(1.0f), limit = set1(ClampedSwiglu::LIMIT);
  const V sigmoid = div(one, add(one, ClampedSwiglu::decay(g)));
  const V slope = mul(sigmoid, fma(mul(g, set1(ClampedSwiglu::ALPHA)), sub(one, sigmoid), one));
  by_gate = where_less(limit, gate, zero(), mul(mul(d, add(u, one)), slope));
  const V inside = mul(d, mul(g, sigmoid));
  by_up = where_less(limit, up, zero(), where_less(up, sub(zero(), limit), zero(), inside));
}

// The codes of an MLP's activation.
constexpr int SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2;

// out[rows, width] = the gate of gate_up[:, :width] and gate_up[:, width:].
void gate_mul(const float* gate_up, int64_t rows, int64_t width, int activation, float* out);
