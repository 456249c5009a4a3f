// Linear layers of 4-bit weights, with a scale and a zero for every group of inputs, and of inputs rounded to 8 bits with one scale a row ("W4A8").
//
// Sums of a group are exact in int32. They are scaled and added in fp32, one group after the other.
#include <cstdint>
#include <cstring>

#include "calls.h"
#include "dot8.h"

namespace {

constexpr int64_t BYTES = PANEL * DEEP / 2;  // of DEEP k's of a panel
constexpr int64_t LINE = 2 * LANES * DEEP / 2;  // of two of its vectors: one in the low halves, one in the high ones

struct Tile {
  const int8_t* left;
  int64_t deep;
  const uint8_t* right;
  const float* scales;   // [groups][PANEL], as the zeros
  const uint8_t* zeros;  // or null
  int64_t group, groups;
  const float *row_scales, *bias;
  const int32_t* sums;  // [rows][groups]
  float* out;
  int64_t out_stride, columns;

  template <int ROWS>
  static void multiply(const Tile& t);
};

// Adds the products of columns first .. end to `sums`; returns where the codes of the next ones are.
template <int ROWS, int WIDE, typename Sum>
INLINE const uint8_t* add_steps(const Tile& t, int64_t first, int64_t end, const uint8_t* right, Sum (&sums)[ROWS][WIDE]) {
  for (int64_t k = first; k < end; k += DEEP, right += BYTES) {
    ask_ahead<WIDE * LINE / 2>(right);
#pragma GCC unroll 2
    for (int v = 0; v < WIDE; v += 2) {
      const Nibbles low = low_nibbles(right + v / 2 * LINE), high = high_nibbles(right + v / 2 * LINE);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        int32_t x;
        std::memcpy(&x, t.left + r * t.deep + k, sizeof x);
        sums[r][v] = add_nibble_products(sums[r][v], low, x);
        sums[r][v + 1] = add_nibble_products(sums[r][v + 1], high, x);
      }
    }
  }
  return right;
}

// The sums of columns first .. end of one group, of WIDE vectors from `right` on.
template <int ROWS, int WIDE>
INLINE void add_group(const Tile& t, int64_t first, int64_t end, const uint8_t* right, I (&acc)[ROWS][WIDE]) {
#if HAS_HALVES
  if constexpr (ROWS > 1) {
    for (int v = 0; v < WIDE; v += 2)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m256i low[ROWS], high[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) low[r] = high[r] = _mm256_setzero_si256();
        add_half<ROWS>(right + v / 2 * LINE + half * LINE / 2, BYTES, t.left + first, t.deep, (end - first + DEEP - 1) / DEEP, low, high);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          (half == 0 ? acc[r][v].a : acc[r][v].b) = low[r];
          (half == 0 ? acc[r][v + 1].a : acc[r][v + 1].b) = high[r];
        }
      }
    return;
  }
#endif
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < WIDE; ++v) acc[r][v] = no_sum();
#if HAS_HALVES
  for (int64_t k = first; k < end;) {
    const int64_t stop = std::min(end, k + NIBBLE_STEPS * DEEP);
    NibbleSums sums[ROWS][WIDE];
#pragma GCC unroll 4
    for (int v = 0; v < WIDE; ++v) sums[0][v] = no_nibble_sums();
    right = add_steps<ROWS, WIDE>(t, k, stop, right, sums);
    k = stop;
#pragma GCC unroll 4
    for (int v = 0; v < WIDE; ++v) acc[0][v] = add_nibble_sums(acc[0][v], sums[0][v]);
  }
#else
  add_steps<ROWS, WIDE>(t, first, end, right, acc);
#endif
}

template <int ROWS>
void Tile::multiply(const Tile& t) {
  constexpr int WIDE = wide_of(ROWS);
  alignas(64) float totals[ROWS][PANEL];
  for (int64_t g = 0; g < t.groups; ++g) {
    const int64_t first = g * t.group, end = std::min(t.deep, first + t.group);
#pragma GCC unroll 2
    for (int from = 0; from < VECTORS; from += WIDE) {
      I acc[ROWS][WIDE];
      add_group<ROWS, WIDE>(t, first, end, t.right + first / DEEP * BYTES + from / 2 * LINE, acc);
#pragma GCC unroll 4
      for (int v = 0; v < WIDE; ++v) {
        const int64_t at = g * PANEL + (from + v) * LANES;
        const V scale = load(t.scales + at);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const V sum = t.zeros ? minus_to_float(acc[r][v], t.zeros + at, t.sums[r * t.groups + g]) : minus_to_float(acc[r][v], 0);
          float* total = totals[r] + (from + v) * LANES;
          store(total, g > 0 ? add(load(total), mul(sum, scale)) : mul(sum, scale));
        }
      }
    }
  }
  each_output<ROWS, VECTORS>(t.columns, [&](int r, int v, int count) {
    V value = mul(load(totals[r] + v * LANES), set1(t.row_scales[r]));
    if (t.bias) value = add(value, load_n(t.bias + v * LANES, count));
    store_n(t.out + r * t.out_stride + v * LANES, value, count);
  });
}

constexpr TileFunctions<Tile> TILES;

struct Weights {
  const uint8_t* packed;
  const float* scales;
  const uint8_t* zeros;
  int64_t group;
};

// out[m, n] = (sum over groups of (codes of x . (codes of the weight - zero)) scale of the group) scale of the row + bias
void product(const float* x, const Weights& weight, const float* bias, int64_t m, int64_t n, int64_t k, float* out) {
  thread_local Scratch memory;
  // A weight of one row is read from memory once, whatever the arithmetic costs.
  const int threads = threads_for(m * n * k / 4 + n * k / 2);
  const Inputs inputs = round_rows(x, m, k, weight.group, threads, memory);
  each_tile(m, n, threads, [&](int64_t panel, int64_t row, int64_t rows) {
    const int64_t first = panel * PANEL, of_groups = first * inputs.groups;
    TILES.of[rows]({inputs.codes + row * inputs.deep, inputs.deep, weight.packed + panel * (inputs.deep / DEEP) * BYTES, weight.scales + of_groups,
                    weight.zeros ? weight.zeros + of_groups : nullptr, weight.group, inputs.groups, inputs.scales + row,
                    bias ? bias + first : nullptr, inputs.sums + row * inputs.groups, out + row * n + first, n, n - first});
  });
}

}  // namespace

extern "C" {

int64_t tandem_int4_packed_bytes(int64_t n, int64_t k) { return round_up(n, PANEL) * round_up(k, DEEP) / 2; }

// codes[n, k] to panels of 64 output channels, each [k / 4][2][16][4]: a byte has the codes of channels c (its low half) and c + 16 of 32.
void tandem_int4_pack(const uint8_t* codes, int64_t n, int64_t k, uint8_t* packed) {
  const int64_t quads = round_up(k, DEEP) / DEEP, panels = (n + PANEL - 1) / PANEL;
  const int threads = threads_for(n * k);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t panel = 0; panel < panels; ++panel) {
    uint8_t* to = packed + panel * quads * BYTES;
    std::memset(to, 0, static_cast<size_t>(quads * BYTES));
    for (int64_t column = 0; column < std::min(PANEL, n - panel * PANEL); ++column) {
      const uint8_t* from = codes + (panel * PANEL + column) * k;
      const int64_t at = column / 32 * LANES * DEEP + column % LANES * DEEP;
      for (int64_t i = 0; i < k; ++i)
        to[i / DEEP * BYTES + at + i % DEEP] |= static_cast<uint8_t>((from[i] & 15) << (column % 32 / LANES * 4));
    }
  }
}

// scales fp32 and zeros uint8 (or null): [panel][groups][64]. `group`: a multiple of 4, or at least k.
int tandem_int4_linear(const float* x, const uint8_t* packed, const float* scales, const uint8_t* zeros, int64_t group, const float* bias, int64_t m,
                       int64_t n, int64_t k, float* out) {
  return or_out_of_memory([&] { product(x, {packed, scales, zeros, group}, bias, m, n, k, out); });
}

// out[bounds[g] : bounds[g + 1], n]: the product with the weight of group g, whose codes, scales and zeros are so many bytes behind those of the one before.
int tandem_int4_grouped_linear(const float* x, const uint8_t* packed, int64_t packed_stride, const uint8_t* scales, int64_t scale_stride, const uint8_t* zeros,
                               int64_t zero_stride, int64_t group, const int64_t* bounds, int64_t groups, int64_t n, int64_t k, float* out) {
  return or_out_of_memory([&] {
    each_group(bounds, groups, n * k / 4 + n, [&](int64_t g, int64_t first, int64_t rows) {
      const Weights weight = {packed + g * packed_stride, reinterpret_cast<const float*>(scales + g * scale_stride), zeros ? zeros + g * zero_stride : nullptr, group};
      product(x + first * k, weight, nullptr, rows, n, k, out + first * n);
    });
  });
}

}  // extern "C"
