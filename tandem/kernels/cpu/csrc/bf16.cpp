// Linear layers of bf16 operands with fp32 sums: operands are rounded, pairs of them multiplied by the dot product of dot.h.
#include "bf16.h"

#include <algorithm>

#include "calls.h"
#include "direct.h"
#include "dot.h"
#include "parallel.h"
#include "rows.h"

namespace {

constexpr int64_t SLAB_PAIRS = 8 << 20;  // of the right matrix packed at a time

int64_t wide_slab(int64_t columns, int64_t pairs) { return std::min(columns, std::max(PANEL, SLAB_PAIRS / std::max<int64_t>(pairs, 1) / PANEL * PANEL)); }

void narrow_row(const float* x, int64_t k, uint16_t* to) {
  int64_t i = 0;
#if HAS_DOT
  for (; i + 2 * LANES <= k; i += 2 * LANES) {
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + LANES), _mm512_loadu_ps(x + i));
    _mm512_storeu_si512(to + i, reinterpret_cast<const __m512i&>(both));
  }
#endif
  for (; i < k; ++i) to[i] = static_cast<uint16_t>(rounded_bits(x[i]) >> 16);
  if (k % 2) to[k] = 0;
}

// Pairs of `even` and `odd`, which is null behind the last row.
void narrow_two(const float* even, const float* odd, int64_t columns, float* to) {
  each_vector(columns, [&](int64_t i, int n) { put(to + i, pair(get(even + i, n), odd == nullptr ? zero() : get(odd + i, n)), n); });
}

// Packs columns first .. first + n of x[m][k] as the right matrix of a sum along m.
void pack_along_rows(const float* x, int64_t m, int64_t k, int64_t first, int64_t n, float* packed) {
  const int64_t pairs = pair_count(m), panels = (n + PANEL - 1) / PANEL;
  const int threads = threads_for(n * m);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t columns = std::min(PANEL, n - panel * PANEL), width = (columns + LANES - 1) / LANES * LANES;
    float* to = packed + panel * PANEL * pairs;
    for (int64_t i = 0; i < pairs; ++i, to += width) {
      const float* even = x + 2 * i * k + first + panel * PANEL;
      if (width > columns) store(to + width - LANES, zero());
      narrow_two(even, 2 * i + 1 < m ? even + k : nullptr, columns, to);
    }
  }
}

// out[m, n] (+)= left right, where `pack` packs columns of right: pack(first, columns, to).
template <typename Pack>
void multiply_slabs(int64_t m, int64_t n, int64_t pairs, const Left& left, bool accumulate, bool rounds, const float* bias, float* out, Pack pack) {
  thread_local Scratch memory;
  const int64_t wide = wide_slab(n, pairs);
  for (int64_t first = 0; first < n; first += wide) {
    const int64_t columns = std::min(wide, n - first);
    float* packed = memory.floats(packed_floats(columns, pairs));
    pack(first, columns, packed);
    multiply({m, columns, pairs, left, {packed, Layout::PACKED, 0}, out + first, n, bias ? bias + first : nullptr, accumulate, true, rounds});
  }
}

// The gates of gate_up[rows, 2 inner], rounded, as pairs: a row's numbers stay in the first-level cache between.
void gate_pairs(const float* gate_up, int64_t rows, int64_t inner, int activation, float* pairs) {
  const int64_t each = pair_count(inner);
  each_row(rows, rows * inner * 16, [&](int64_t r) {
    thread_local Scratch memory;
    float* gates = memory.floats(inner);
    gate_mul(gate_up + r * 2 * inner, 1, inner, activation, gates);
    narrow_row(gates, inner, reinterpret_cast<uint16_t*>(pairs + r * each));
  });
}

}  // namespace

void narrow_rows(const float* x, int64_t m, int64_t k, float* pairs) {
  const int64_t each = pair_count(k);
  const int threads = threads_for(m * k / 4);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < m; ++r) narrow_row(x + r * k, k, reinterpret_cast<uint16_t*>(pairs + r * each));
}

void narrow_columns(const float* x, int64_t m, int64_t k, float* pairs) {
  const int threads = threads_for(m * k / 4);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < pair_count(m); ++i)
    narrow_two(x + 2 * i * k, 2 * i + 1 < m ? x + (2 * i + 1) * k : nullptr, k, pairs + i * k);
}

void pack_pairs(const float* weight, int64_t n, int64_t k, float* packed) {
  const int64_t pairs = pair_count(k), panels = (n + PANEL - 1) / PANEL;
  each_row(panels, n * k, [&](int64_t panel) {
    thread_local Scratch memory;
    const int64_t rows = std::min(PANEL, n - panel * PANEL);
    float* narrowed = memory.floats(PANEL * pairs);
    for (int64_t r = 0; r < rows; ++r) narrow_row(weight + (panel * PANEL + r) * k, k, reinterpret_cast<uint16_t*>(narrowed + r * pairs));
    pack_part({narrowed, Layout::COLUMNS, pairs}, rows, 0, 0, pairs, packed + panel * PANEL * pairs);
  });
}

void multiply_pairs(const float* x, int64_t m, const PairWeight& weight, const float* bias, bool rounds, float* out) {
  const int64_t pairs = pair_count(weight.k);
  const Left left = {x, pairs, 1};
  if (weight.packed) return multiply({m, weight.n, pairs, left, {weight.data, Layout::PACKED, 0}, out, weight.n, bias, false, true, rounds});
  multiply_slabs(m, weight.n, pairs, left, false, rounds, bias, out,
                 [&](int64_t first, int64_t columns, float* to) { pack_pairs(weight.data + first * weight.k, columns, weight.k, to); });
}

extern "C" {

int tandem_bf16_has_instruction() { return HAS_DOT; }

// In pairs.
int64_t tandem_bf16_packed_pairs(int64_t n, int64_t k) { return packed_floats(n, pair_count(k)); }

int tandem_bf16_pack(const float* weight, int64_t n, int64_t k, float* packed) {
  return or_out_of_memory([&] { pack_pairs(weight, n, k, packed); });
}

// out[m, n] = x[m, k] weight[n, k]^T + bias of rounded operands, with the weight packed or plain.
int tandem_bf16_linear(const float* x, const float* weight, int packed, const float* bias, int rounds, int64_t m, int64_t n, int64_t k, float* out) {
  return or_out_of_memory([&] {
    thread_local Scratch memory;
    float* pairs = memory.floats(m * pair_count(k));
    narrow_rows(x, m, k, pairs);
    multiply_pairs(pairs, m, {weight, packed != 0, n, k}, bias, rounds != 0, out);
  });
}

// As tandem_gated_mlp: the results of both products are rounded where `rounds`.
int tandem_bf16_gated_mlp(const float* x, const float* gate_up, const float* gate_up_bias, const float* down, const float* down_bias, int rounds,
                          int64_t m, int64_t hidden, int64_t inner, int activation, float* out) {
  return or_out_of_memory([&] {
    thread_local Scratch memory;
    const int64_t at_once = std::min(m, ROW_CHUNK * threads_for(m * hidden * inner));
    float *both = memory.floats(at_once * (2 * inner + std::max(pair_count(inner), pair_count(hidden)))), *pairs = both + at_once * 2 * inner;
    for (int64_t first = 0; first < m; first += at_once) {
      const int64_t rows = std::min(at_once, m - first);
      narrow_rows(x + first * hidden, rows, hidden, pairs);
      multiply_pairs(pairs, rows, {gate_up, true, 2 * inner, hidden}, gate_up_bias, rounds != 0, both);
      gate_pairs(both, rows, inner, activation, pairs);
      multiply_pairs(pairs, rows, {down, true, hidden, inner}, down_bias, rounds != 0, out + first * hidden);
    }
  });
}

// As tandem_grouped_linear; `stride` between packed weights is in pairs, between plain ones in numbers.
int tandem_bf16_grouped_linear(const float* x, const float* weight, int packed, int64_t stride, const int64_t* bounds, int64_t groups, int rounds,
                               int64_t n, int64_t k, float* out) {
  return or_out_of_memory([&] {
    thread_local Scratch memory;
    const int64_t total = bounds[groups], each = pair_count(k);
    float* pairs = memory.floats(total * each);
    narrow_rows(x, total, k, pairs);
    each_group(bounds, groups, n * k, [&](int64_t g, int64_t first, int64_t rows) {
      multiply_pairs(pairs + first * each, rows, {weight + g * stride, packed != 0, n, k}, nullptr, rounds != 0, out + first * n);
    });
  });
}

// grad_x[m, k] (+)= grad[m, n] weight[n, k]
int tandem_bf16_linear_grad_x(const float* grad, const float* weight, int64_t m, int64_t n, int64_t k, int accumulate, int rounds, float* grad_x) {
  return or_out_of_memory([&] {
    thread_local Scratch memory;
    const int64_t pairs = pair_count(n);
    float* left = memory.floats(m * pairs);
    narrow_rows(grad, m, n, left);
    multiply_slabs(m, k, pairs, {left, pairs, 1}, accumulate != 0, rounds != 0, nullptr, grad_x,
                   [&](int64_t first, int64_t columns, float* to) { pack_along_rows(weight, n, k, first, columns, to); });
  });
}

// grad_weight[n, k] (+)= grad[m, n]^T x[m, k]
int tandem_bf16_linear_grad_weight(const float* grad, const float* x, int64_t m, int64_t n, int64_t k, int accumulate, float* grad_weight) {
  return or_out_of_memory([&] {
    thread_local Scratch memory;
    const int64_t pairs = pair_count(m);
    float* left = memory.floats(pairs * n);
    narrow_columns(grad, m, n, left);
    multiply_slabs(n, k, pairs, {left, 1, n}, accumulate != 0, false, nullptr, grad_weight,
                   [&](int64_t first, int64_t columns, float* to) { pack_along_rows(x, m, k, first, columns, to); });
  });
}

}  // extern "C"

DIRECT(bf16_linear);
DIRECT(bf16_gated_mlp);
