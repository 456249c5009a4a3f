// Products of 8-bit inputs with codes of 8 or 4 bits, summed in int32: exactly, in any order, on every instruction set.
//
// A weight's codes are unsigned, as the dot-product instruction of AVX512-VNNI wants one operand: what they lie above the numbers is taken off the sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "gemm.h"
#include "numbers.h"
#include "parallel.h"
#include "vec.h"

#define HAS_HALVES 0  // 1: products with nibbles are summed in 16 bits first, of half of the lanes at once

constexpr int64_t DEEP = 4;  // k's that one lane multiplies at once
constexpr int VECTORS = PANEL / LANES;

#if defined(__AVX512F__) && defined(__AVX512VNNI__)

constexpr int MOST_ROWS = 6;
struct I {
  __m512i v;
};
INLINE I no_sum() { return {_mm512_setzero_si512()}; }
using Weight = I;
INLINE Weight codes_of_weight(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE I add_products(I acc, I weight, int32_t x) { return {_mm512_dpbusd_epi32(acc.v, weight.v, _mm512_set1_epi32(x))}; }
using Nibbles = I;
INLINE Nibbles low_nibbles(const uint8_t* p) { return {_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(15))}; }
INLINE Nibbles high_nibbles(const uint8_t* p) { return {_mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(15))}; }
INLINE I add_nibble_products(I acc, Nibbles weight, int32_t x) { return add_products(acc, weight, x); }
INLINE V minus_to_float(I a, int32_t offset) { return {_mm512_cvtepi32_ps(_mm512_sub_epi32(a.v, _mm512_set1_epi32(offset)))}; }
INLINE V minus_to_float(I a, const uint8_t* zeros, int32_t sum) {
  const __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros)));
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(a.v, _mm512_mullo_epi32(zero, _mm512_set1_epi32(sum))))};
}

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int MOST_ROWS = 3;
struct I {
  __m256i a, b;
};
// Bytes 0 and 2 of each lane, and bytes 1 and 3, as 16-bit numbers.
struct Weight {
  __m256i even_a, even_b, odd_a, odd_b;
};
INLINE I no_sum() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE __m256i half_of_weight(const uint8_t* p, int half) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * half)); }
INLINE Weight codes_of_weight(const uint8_t* p) {
  const __m256i a = half_of_weight(p, 0), b = half_of_weight(p, 1), low = _mm256_set1_epi16(0xff);
  return {_mm256_and_si256(a, low), _mm256_and_si256(b, low), _mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)};
}
INLINE I add_products(I acc, const Weight& w, int32_t x) {
  const __m256i four = _mm256_set1_epi32(x);
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), odd = _mm256_srai_epi16(four, 8);
  acc.a = _mm256_add_epi32(acc.a, _mm256_add_epi32(_mm256_madd_epi16(w.even_a, even), _mm256_madd_epi16(w.odd_a, odd)));
  acc.b = _mm256_add_epi32(acc.b, _mm256_add_epi32(_mm256_madd_epi16(w.even_b, even), _mm256_madd_epi16(w.odd_b, odd)));
  return acc;
}
// Products with nibbles in 16 bits, two of them at most 2 * 15 * 127: so many steps fit.
using Nibbles = I;
using NibbleSums = I;
constexpr int64_t NIBBLE_STEPS = 8;
INLINE NibbleSums no_nibble_sums() { return no_sum(); }
INLINE Nibbles low_nibbles(const uint8_t* p) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(half_of_weight(p, 0), mask), _mm256_and_si256(half_of_weight(p, 1), mask)};
}
INLINE Nibbles high_nibbles(const uint8_t* p) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(half_of_weight(p, 0), 4), mask), _mm256_and_si256(_mm256_srli_epi16(half_of_weight(p, 1), 4), mask)};
}
INLINE NibbleSums add_nibble_products(NibbleSums acc, Nibbles w, int32_t x) {
  const __m256i four = _mm256_set1_epi32(x);
  return {_mm256_add_epi16(acc.a, _mm256_maddubs_epi16(w.a, four)), _mm256_add_epi16(acc.b, _mm256_maddubs_epi16(w.b, four))};
}
// The same for half of the lanes, of ROWS rows: the sums of more than one row and all lanes would not fit the registers.
#undef HAS_HALVES
#define HAS_HALVES 1
template <int ROWS>
INLINE void add_half(const uint8_t* right, int64_t right_stride, const int8_t* left, int64_t left_stride, int64_t steps, __m256i (&low)[ROWS],
                     __m256i (&high)[ROWS]) {
  const __m256i mask = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
  for (int64_t step = 0; step < steps;) {
    const int64_t stop = std::min(steps, step + NIBBLE_STEPS);
    __m256i of_low[ROWS], of_high[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) of_low[r] = of_high[r] = _mm256_setzero_si256();
    for (; step < stop; ++step, right += right_stride, left += DEEP) {
      const __m256i codes = half_of_weight(right, 0);
      const __m256i weight = _mm256_and_si256(codes, mask), other = _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        int32_t x;
        std::memcpy(&x, left + r * left_stride, sizeof x);
        of_low[r] = _mm256_add_epi16(of_low[r], _mm256_maddubs_epi16(weight, _mm256_set1_epi32(x)));
        of_high[r] = _mm256_add_epi16(of_high[r], _mm256_maddubs_epi16(other, _mm256_set1_epi32(x)));
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(of_low[r], one));
      high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(of_high[r], one));
    }
  }
}
INLINE I add_nibble_sums(I acc, NibbleSums sums) {
  const __m256i one = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(sums.a, one)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(sums.b, one))};
}
INLINE V both_minus_to_float(I a, __m256i low_offset, __m256i high_offset) {
  V out;
  const __m256 low = _mm256_cvtepi32_ps(_mm256_sub_epi32(a.a, low_offset)), high = _mm256_cvtepi32_ps(_mm256_sub_epi32(a.b, high_offset));
  std::memcpy(&out, &low, sizeof low);
  std::memcpy(reinterpret_cast<char*>(&out) + sizeof low, &high, sizeof high);
  return out;
}
INLINE V minus_to_float(I a, int32_t offset) { return both_minus_to_float(a, _mm256_set1_epi32(offset), _mm256_set1_epi32(offset)); }
INLINE V minus_to_float(I a, const uint8_t* zeros, int32_t sum) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
  const __m256i times = _mm256_set1_epi32(sum);
  return both_minus_to_float(a, _mm256_mullo_epi32(_mm256_cvtepu8_epi32(bytes), times), _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)), times));
}

#else

constexpr int MOST_ROWS = 2;
struct I {
  int32_t x[LANES];
};
struct Weight {
  uint8_t at[LANES * DEEP];
};
INLINE I no_sum() { return {}; }
using Nibbles = Weight;
#define EACH_CODE(expression)                                  \
  Weight w;                                                    \
  for (int i = 0; i < LANES * DEEP; ++i) w.at[i] = (expression); \
  return w
INLINE Weight codes_of_weight(const uint8_t* p) { EACH_CODE(p[i]); }
INLINE Nibbles low_nibbles(const uint8_t* p) { EACH_CODE(p[i] & 15); }
INLINE Nibbles high_nibbles(const uint8_t* p) { EACH_CODE(p[i] >> 4); }
#undef EACH_CODE
INLINE I add_products(I acc, const Weight& w, int32_t x) {
  int8_t four[DEEP];
  std::memcpy(four, &x, sizeof four);
  for (int lane = 0; lane < LANES; ++lane)
    for (int i = 0; i < DEEP; ++i) acc.x[lane] += static_cast<int32_t>(w.at[lane * DEEP + i]) * four[i];
  return acc;
}
INLINE I add_nibble_products(I acc, const Nibbles& w, int32_t x) { return add_products(acc, w, x); }
INLINE V minus_to_float(I a, int32_t offset) {
  float out[LANES];
  for (int lane = 0; lane < LANES; ++lane) out[lane] = static_cast<float>(a.x[lane] - offset);
  return load(out);
}
INLINE V minus_to_float(I a, const uint8_t* zeros, int32_t sum) {
  float out[LANES];
  for (int lane = 0; lane < LANES; ++lane) out[lane] = static_cast<float>(a.x[lane] - zeros[lane] * sum);
  return load(out);
}

#endif

// Vectors of a panel that ROWS rows multiply at once: as many sums as the registers hold.
constexpr int wide_of(int rows) { return MOST_ROWS > 3 || rows == 1 ? VECTORS : 2; }

// Rows of inputs as codes, [m][deep] with zeros at the end, and of each row its scale and the sums of its codes, [m][groups].
struct Inputs {
  int64_t deep, groups;
  int8_t* codes;
  float* scales;
  int32_t* sums;
};

// The scale is the largest magnitude over 127. A row with an infinite or undefined number gets that as its scale, which carries
// it to every output.
inline void round_row(const float* x, int64_t k, int64_t deep, int8_t* codes, float* scale_out) {
  uint32_t largest_bits = 0;
  for (int64_t i = 0; i < k; ++i) largest_bits = std::max(largest_bits, bits_of(x[i]) & 0x7fffffff);
  std::memset(codes + k, 0, static_cast<size_t>(deep - k));
  const float scale = largest_bits < 0x7f800000 ? from_bits(largest_bits) / 127.0f : __builtin_nanf("");
  *scale_out = scale;
  if (!(scale > 0.0f)) {
    std::memset(codes, 0, static_cast<size_t>(k));
    return;
  }
  const float shift = 12582912.0f;  // 1.5 2^23: adding it rounds to a whole number
  for (int64_t i = 0; i < k; ++i) {
    const float whole = std::min(127.0f, std::max(-127.0f, (x[i] / scale + shift) - shift));
    codes[i] = static_cast<int8_t>(static_cast<int32_t>(whole));
  }
}

// x[m, k] as codes in `memory`, with a sum of every `group` of them.
inline Inputs round_rows(const float* x, int64_t m, int64_t k, int64_t group, int threads, Scratch& memory) {
  const int64_t deep = round_up(k, DEEP), groups = std::max<int64_t>(1, (k + group - 1) / group);
  float* held = memory.floats(m * (deep / DEEP + 1 + groups));
  const Inputs to = {deep, groups, reinterpret_cast<int8_t*>(held + m * (1 + groups)), held, reinterpret_cast<int32_t*>(held + m)};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && m > 1)
  for (int64_t row = 0; row < m; ++row) {
    int8_t* codes = to.codes + row * deep;
    round_row(x + row * k, k, deep, codes, to.scales + row);
    for (int64_t g = 0; g < groups; ++g) {
      int32_t sum = 0;
      for (int64_t i = g * group; i < std::min(k, (g + 1) * group); ++i) sum += codes[i];
      to.sums[row * groups + g] = sum;
    }
  }
  return to;
}

// Tile::multiply<ROWS> by the number of rows.
template <typename Tile>
struct TileFunctions {
  using Function = void (*)(const Tile&);
  Function of[MOST_ROWS + 1] = {};

  constexpr TileFunctions() { fill(std::make_integer_sequence<int, MOST_ROWS>{}); }
  template <int... ROWS>
  constexpr void fill(std::integer_sequence<int, ROWS...>) {
    ((of[ROWS + 1] = Tile::template multiply<ROWS + 1>), ...);
  }
};

constexpr int64_t ROWS_AT_ONCE = 96;  // rows of codes that stay in the second-level cache beside a panel

// Calls run(panel, first row, rows) for all tiles of the product, rows of a panel one behind the other. A task has panels that lie behind each other, which
// memory sends faster than panels of several threads in turn; there are a few for each thread, so that one that was interrupted has less of them.
template <typename Run>
void each_tile(int64_t m, int64_t n, int threads, Run run) {
  const int64_t panels = (n + PANEL - 1) / PANEL, chunks = (m + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  const int64_t groups = std::min(panels, std::max<int64_t>(1, (4 * threads + chunks - 1) / std::max<int64_t>(chunks, 1)));
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < chunks * groups; ++task) {
    const int64_t chunk = task / groups, group = task % groups, end = std::min(m, (chunk + 1) * ROWS_AT_ONCE);
    for (int64_t panel = panels * group / groups; panel < panels * (group + 1) / groups; ++panel)
      for (int64_t row = chunk * ROWS_AT_ONCE; row < end; row += MOST_ROWS) run(panel, row, std::min<int64_t>(MOST_ROWS, end - row));
  }
}
