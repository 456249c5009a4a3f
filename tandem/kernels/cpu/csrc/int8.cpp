// Linear layers in 8-bit integers: weights with one scale an output channel, inputs rounded to 8 bits with one scale a row.
//
// A weight's code is stored as code + 128; 128 times the sum of the row's codes is taken off at the end.
#include <cstdint>
#include <cstring>

#include "calls.h"
#include "dot8.h"

namespace {

struct Tile {
  const int8_t* left;
  int64_t deep;
  const uint8_t* right;
  const float *row_scales, *column_scales, *bias;
  const int32_t* row_sums;
  float* out;
  int64_t out_stride, columns;

  template <int ROWS>
  static void multiply(const Tile& t);
};

// The outputs of WIDE vectors from vector `from` on.
template <int ROWS, int WIDE>
INLINE void multiply_vectors(const Tile& t, int from) {
  I acc[ROWS][WIDE];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < WIDE; ++v) acc[r][v] = no_sum();
  const uint8_t* right = t.right + from * LANES * DEEP;
  for (int64_t k = 0; k < t.deep; k += DEEP, right += PANEL * DEEP) {
    ask_ahead<WIDE * LANES * DEEP>(right);
    Weight weight[WIDE];
#pragma GCC unroll 4
    for (int v = 0; v < WIDE; ++v) weight[v] = codes_of_weight(right + v * LANES * DEEP);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      int32_t x;
      std::memcpy(&x, t.left + r * t.deep + k, sizeof x);
#pragma GCC unroll 4
      for (int v = 0; v < WIDE; ++v) acc[r][v] = add_products(acc[r][v], weight[v], x);
    }
  }
  each_output<ROWS, WIDE>(t.columns - from * LANES, [&](int r, int v, int count) {
    const int64_t first = (from + v) * LANES;
    const V scale = mul(set1(t.row_scales[r]), load_n(t.column_scales + first, count));
    V value = mul(minus_to_float(acc[r][v], 128 * t.row_sums[r]), scale);
    if (t.bias) value = add(value, load_n(t.bias + first, count));
    store_n(t.out + r * t.out_stride + first, value, count);
  });
}

template <int ROWS>
void Tile::multiply(const Tile& t) {
  for (int from = 0; from < VECTORS; from += wide_of(ROWS)) multiply_vectors<ROWS, wide_of(ROWS)>(t, from);
}

constexpr TileFunctions<Tile> TILES;

// out[m, n] = (codes of x . codes of the weight) (scale of the row x scale of the channel) + bias
void product(const float* x, const uint8_t* packed, const float* scales, const float* bias, int64_t m, int64_t n, int64_t k, float* out) {
  thread_local Scratch memory;
  // A weight of one row is read from memory once, whatever the arithmetic costs.
  const int threads = threads_for(m * n * k / 4 + n * k);
  const Inputs inputs = round_rows(x, m, k, std::max<int64_t>(k, 1), threads, memory);
  each_tile(m, n, threads, [&](int64_t panel, int64_t row, int64_t rows) {
    const int64_t first = panel * PANEL;
    TILES.of[rows]({inputs.codes + row * inputs.deep, inputs.deep, packed + first * inputs.deep, inputs.scales + row, scales + first,
                    bias ? bias + first : nullptr, inputs.sums + row, out + row * n + first, n, n - first});
  });
}

}  // namespace

extern "C" {

int64_t tandem_int8_packed_bytes(int64_t n, int64_t k) { return round_up(n, PANEL) * round_up(k, DEEP); }

// codes[n, k] to panels of 64 output channels, each [k / 4][64][4].
void tandem_int8_pack(const int8_t* codes, int64_t n, int64_t k, uint8_t* packed) {
  const int64_t deep = round_up(k, DEEP), wide = round_up(n, PANEL);
  const int threads = threads_for(n * k);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t column = 0; column < wide; ++column) {
    uint8_t* to = packed + column / PANEL * PANEL * deep + column % PANEL * DEEP;
    for (int64_t i = 0; i < deep; ++i)
      to[i / DEEP * PANEL * DEEP + i % DEEP] = column < n && i < k ? static_cast<uint8_t>(codes[column * k + i] + 128) : 128;
  }
}

int tandem_int8_linear(const float* x, const uint8_t* packed, const float* scales, const float* bias, int64_t m, int64_t n, int64_t k,
                       float* out) {
  return or_out_of_memory([&] { product(x, packed, scales, bias, m, n, k, out); });
}

// out[bounds[g] : bounds[g + 1], n]: the product with the weight of group g, whose codes are `packed_stride` bytes behind those of the one before.
int tandem_int8_grouped_linear(const float* x, const uint8_t* packed, int64_t packed_stride, const float* scales, const int64_t* bounds, int64_t groups,
                               int64_t n, int64_t k, float* out) {
  return or_out_of_memory([&] {
    each_group(bounds, groups, n * k / 4 + n, [&](int64_t g, int64_t first, int64_t rows) {
      product(x + first * k, packed + g * packed_stride, scales + g * n, nullptr, rows, n, k, out + first * n);
    });
  });
}

}  // extern "C"
