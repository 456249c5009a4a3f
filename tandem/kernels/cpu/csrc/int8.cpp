// Linear layers in 8-bit integers: weights with one scale an output channel, inputs rounded to 8 bits with one scale a row.
//
// Sums of products are exact in int32, so their order is free and the bits are the same on every instruction set. A weight's
// code is stored as code + 128, because the dot-product instruction of AVX512-VNNI wants one unsigned operand; 128 times the sum
// of the row's codes is taken off at the end.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "gemm.h"
#include "parallel.h"
#include "vec.h"

namespace {

constexpr int64_t DEEP = 4;  // k's that one lane multiplies at once
constexpr int VECTORS = PANEL / LANES;

#if defined(__AVX512F__) && defined(__AVX512VNNI__)

constexpr int MOST_ROWS = 6;
struct I {
  __m512i v;
};
INLINE I no_sum() { return {_mm512_setzero_si512()}; }
INLINE I codes_of_weight(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE I add_products(I acc, I weight, int32_t x) { return {_mm512_dpbusd_epi32(acc.v, weight.v, _mm512_set1_epi32(x))}; }
INLINE V minus_to_float(I a, int32_t offset) { return {_mm512_cvtepi32_ps(_mm512_sub_epi32(a.v, _mm512_set1_epi32(offset)))}; }
using Weight = I;

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int MOST_ROWS = 3;
struct I {
  __m256i a, b;
};
// Bytes 0 and 2 of each lane, and bytes 1 and 3, as 16-bit numbers.
struct Weight {
  __m256i even[2], odd[2];
};
INLINE I no_sum() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE Weight codes_of_weight(const uint8_t* p) {
  Weight w;
  for (int half = 0; half < 2; ++half) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * half));
    w.even[half] = _mm256_and_si256(bytes, _mm256_set1_epi16(0xff));
    w.odd[half] = _mm256_srli_epi16(bytes, 8);
  }
  return w;
}
INLINE I add_products(I acc, const Weight& w, int32_t x) {
  const __m256i four = _mm256_set1_epi32(x);
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), odd = _mm256_srai_epi16(four, 8);
  acc.a = _mm256_add_epi32(acc.a, _mm256_add_epi32(_mm256_madd_epi16(w.even[0], even), _mm256_madd_epi16(w.odd[0], odd)));
  acc.b = _mm256_add_epi32(acc.b, _mm256_add_epi32(_mm256_madd_epi16(w.even[1], even), _mm256_madd_epi16(w.odd[1], odd)));
  return acc;
}
INLINE V minus_to_float(I a, int32_t offset) {
  const __m256i off = _mm256_set1_epi32(offset);
  V out;
  const __m256 low = _mm256_cvtepi32_ps(_mm256_sub_epi32(a.a, off)), high = _mm256_cvtepi32_ps(_mm256_sub_epi32(a.b, off));
  std::memcpy(&out, &low, sizeof low);
  std::memcpy(reinterpret_cast<char*>(&out) + sizeof low, &high, sizeof high);
  return out;
}

#else

constexpr int MOST_ROWS = 2;
struct I {
  int32_t x[LANES];
};
struct Weight {
  const uint8_t* at;
};
INLINE I no_sum() { return {}; }
INLINE Weight codes_of_weight(const uint8_t* p) { return {p}; }
INLINE I add_products(I acc, Weight w, int32_t x) {
  int8_t four[DEEP];
  std::memcpy(four, &x, sizeof four);
  for (int lane = 0; lane < LANES; ++lane)
    for (int i = 0; i < DEEP; ++i) acc.x[lane] += static_cast<int32_t>(w.at[lane * DEEP + i]) * four[i];
  return acc;
}
INLINE V minus_to_float(I a, int32_t offset) {
  float out[LANES];
  for (int lane = 0; lane < LANES; ++lane) out[lane] = static_cast<float>(a.x[lane] - offset);
  return load(out);
}

#endif

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows of inputs as codes, [m][deep] with zeros at the end, and of each row its scale and the sum of its codes.
struct Inputs {
  int8_t* codes;
  float* scales;
  int32_t* sums;
};

// The scale is the largest magnitude over 127. A row with an infinite or undefined number gets that as its scale, which carries
// it to every output.
void round_row(const float* x, int64_t k, int64_t deep, int8_t* codes, float* scale_out, int32_t* sum) {
  int32_t largest_bits = 0;
  for (int64_t i = 0; i < k; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest_bits = std::max(largest_bits, bits & 0x7fffffff);
  }
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof largest);
  std::memset(codes + k, 0, static_cast<size_t>(deep - k));
  const float scale = largest_bits < 0x7f800000 ? largest / 127.0f : __builtin_nanf("");
  *scale_out = scale;
  *sum = 0;
  if (!(scale > 0.0f)) {
    std::memset(codes, 0, static_cast<size_t>(k));
    return;
  }
  const float shift = 12582912.0f;  // 1.5 2^23: adding it rounds to a whole number
  int32_t total = 0;
  for (int64_t i = 0; i < k; ++i) {
    const float whole = std::min(127.0f, std::max(-127.0f, (x[i] / scale + shift) - shift));
    const int32_t code = static_cast<int32_t>(whole);
    codes[i] = static_cast<int8_t>(code);
    total += code;
  }
  *sum = total;
}

struct Tile {
  const int8_t* left;
  int64_t deep;
  const uint8_t* right;
  const float *row_scales, *column_scales, *bias;
  const int32_t* row_sums;
  float* out;
  int64_t out_stride, columns;
};

template <int ROWS>
void multiply_tile(const Tile& t) {
  I acc[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) acc[r][v] = no_sum();
  const uint8_t* right = t.right;
  for (int64_t k = 0; k < t.deep; k += DEEP, right += PANEL * DEEP) {
    Weight weight[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) weight[v] = codes_of_weight(right + v * LANES * DEEP);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      int32_t x;
      std::memcpy(&x, t.left + r * t.deep + k, sizeof x);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = add_products(acc[r][v], weight[v], x);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const int count = static_cast<int>(std::min<int64_t>(LANES, t.columns - v * LANES));
      if (count <= 0) continue;
      const V scale = mul(set1(t.row_scales[r]), load_n(t.column_scales + v * LANES, count));
      V value = mul(minus_to_float(acc[r][v], 128 * t.row_sums[r]), scale);
      if (t.bias) value = add(value, load_n(t.bias + v * LANES, count));
      store_n(t.out + r * t.out_stride + v * LANES, value, count);
    }
}

using TileFunction = void (*)(const Tile&);
template <int... ROWS>
constexpr void fill(TileFunction* table, std::integer_sequence<int, ROWS...>) {
  ((table[ROWS + 1] = multiply_tile<ROWS + 1>), ...);
}
struct TileFunctions {
  TileFunction of[MOST_ROWS + 1] = {};
  constexpr TileFunctions() { fill(of, std::make_integer_sequence<int, MOST_ROWS>{}); }
};
constexpr TileFunctions TILES;

constexpr int64_t ROWS_AT_ONCE = 96;  // rows of codes that stay in the second-level cache beside a panel

// out[m, n] = (codes of x . codes of the weight) (scale of the row x scale of the channel) + bias
void product(const float* x, const uint8_t* packed, const float* scales, const float* bias, int64_t m, int64_t n, int64_t k, float* out) {
  const int64_t deep = round_up(k, DEEP), panels = (n + PANEL - 1) / PANEL;
  thread_local Scratch memory;
  float* held = memory.floats(m * deep / 4 + 2 * m);
  const Inputs inputs = {reinterpret_cast<int8_t*>(held + 2 * m), held, reinterpret_cast<int32_t*>(held + m)};
  // A weight of one row is read from memory once, whatever the arithmetic costs.
  const int threads = threads_for(m * n * k / 4 + n * k);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && m > 1)
  for (int64_t row = 0; row < m; ++row)
    round_row(x + row * k, k, deep, inputs.codes + row * deep, inputs.scales + row, inputs.sums + row);
  const int64_t chunks = (m + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < chunks * panels; ++task) {
    const int64_t chunk = task / panels, panel = task % panels, first = panel * PANEL;
    const int64_t end = std::min(m, (chunk + 1) * ROWS_AT_ONCE);
    Tile t;
    t.deep = deep;
    t.right = packed + first * deep;
    t.column_scales = scales + first;
    t.bias = bias ? bias + first : nullptr;
    t.out_stride = n;
    t.columns = n - first;
    for (int64_t row = chunk * ROWS_AT_ONCE; row < end; row += MOST_ROWS) {
      t.left = inputs.codes + row * deep;
      t.row_scales = inputs.scales + row;
      t.row_sums = inputs.sums + row;
      t.out = out + row * n + first;
      TILES.of[std::min<int64_t>(MOST_ROWS, end - row)](t);
    }
  }
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
