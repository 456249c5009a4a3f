// Sixteen fp32 lanes, the one width in which every kernel of this folder thinks.
//
// AVX-512 holds them in one register, AVX2 in two, anything else in a plain loop that the compiler vectorises. Multiply-adds
// are always explicit fused ones and horizontal sums always take the same tree, so the three give the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "numbers.h"

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

constexpr int LANES = 16;

#if defined(__AVX512F__)

struct V {
  __m512 v;
};
INLINE V zero() { return {_mm512_setzero_ps()}; }
INLINE V set1(float x) { return {_mm512_set1_ps(x)}; }
INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
// The first n (1..16) lanes of memory; the others are 0 and their memory is not touched.
INLINE V load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
INLINE void store_n(float* p, V a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
INLINE V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }    // a b + c
INLINE V fnma(V a, V b, V c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a b
// Lanes lo <= i < hi of a, `fill` elsewhere.
INLINE V keep_lanes(V a, int lo, int hi, float fill) {
  const __mmask16 keep = static_cast<__mmask16>(((1u << hi) - 1u) & ~((1u << lo) - 1u));
  return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), keep, a.v)};
}
// Where a < b: x, else y.
INLINE V where_less(V a, V b, V x, V y) {
  return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), x.v)};
}
// a 2^n for whole n in -126..127.
INLINE V scale_by_power(V a, V n) { return {_mm512_scalef_ps(a.v, n.v)}; }
INLINE float sum(V a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float max_lane(V a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#elif defined(__AVX2__) && defined(__FMA__)

struct V {
  __m256 a, b;
};
INLINE V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, V v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
INLINE __m256i lanes_below(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
INLINE V load_n(const float* p, int n) {
  return {_mm256_maskload_ps(p, lanes_below(n)), n > 8 ? _mm256_maskload_ps(p + 8, lanes_below(n - 8)) : _mm256_setzero_ps()};
}
INLINE void store_n(float* p, V v, int n) {
  _mm256_maskstore_ps(p, lanes_below(n), v.a);
  if (n > 8) _mm256_maskstore_ps(p + 8, lanes_below(n - 8), v.b);
}
INLINE V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE V fnma(V x, V y, V z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
INLINE __m256 keep_eight(__m256 v, int lo, int hi, float fill) {
  const __m256i keep = _mm256_andnot_si256(lanes_below(lo), lanes_below(hi));
  return _mm256_blendv_ps(_mm256_set1_ps(fill), v, _mm256_castsi256_ps(keep));
}
INLINE V keep_lanes(V v, int lo, int hi, float fill) { return {keep_eight(v.a, lo, hi, fill), keep_eight(v.b, lo - 8, hi - 8, fill)}; }
INLINE V where_less(V p, V q, V x, V y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(p.a, q.a, _CMP_LT_OQ)), _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(p.b, q.b, _CMP_LT_OQ))};
}
INLINE __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE V scale_by_power(V x, V n) { return {_mm256_mul_ps(x.a, power_of_two(n.a)), _mm256_mul_ps(x.b, power_of_two(n.b))}; }
INLINE float sum(V v) {
  const __m256 eight = _mm256_add_ps(v.a, v.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float max_lane(V v) {
  const __m256 eight = _mm256_max_ps(v.a, v.b);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#else

struct V {
  float x[LANES];
};
#define EACH_LANE(expression)                           \
  V out;                                                \
  for (int i = 0; i < LANES; ++i) out.x[i] = expression; \
  return out
INLINE V set1(float x) { EACH_LANE(x); }
INLINE V zero() { return set1(0.0f); }
INLINE V load(const float* p) { EACH_LANE(p[i]); }
INLINE void store(float* p, V a) { std::memcpy(p, a.x, sizeof a.x); }
INLINE V load_n(const float* p, int n) { EACH_LANE(i < n ? p[i] : 0.0f); }
INLINE void store_n(float* p, V a, int n) { std::memcpy(p, a.x, sizeof(float) * static_cast<size_t>(n)); }
INLINE V add(V a, V b) { EACH_LANE(a.x[i] + b.x[i]); }
INLINE V sub(V a, V b) { EACH_LANE(a.x[i] - b.x[i]); }
INLINE V mul(V a, V b) { EACH_LANE(a.x[i] * b.x[i]); }
INLINE V div(V a, V b) { EACH_LANE(a.x[i] / b.x[i]); }
INLINE V max(V a, V b) { EACH_LANE(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
INLINE V min(V a, V b) { EACH_LANE(a.x[i] < b.x[i] ? a.x[i] : b.x[i]); }
INLINE V fma(V a, V b, V c) { EACH_LANE(__builtin_fmaf(a.x[i], b.x[i], c.x[i])); }
INLINE V fnma(V a, V b, V c) { EACH_LANE(__builtin_fmaf(-a.x[i], b.x[i], c.x[i])); }
INLINE V keep_lanes(V a, int lo, int hi, float fill) { EACH_LANE(i >= lo && i < hi ? a.x[i] : fill); }
INLINE V where_less(V a, V b, V x, V y) { EACH_LANE(a.x[i] < b.x[i] ? x.x[i] : y.x[i]); }
INLINE float power_of_two(float n) { return from_bits(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23); }
INLINE V scale_by_power(V a, V n) { EACH_LANE(a.x[i] * power_of_two(n.x[i])); }
#undef EACH_LANE
INLINE float sum(V a) {
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.x[i] = a.x[i] + a.x[i + half];
  return a.x[0];
}
INLINE float max_lane(V a) {
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.x[i] = a.x[i] > a.x[i + half] ? a.x[i] : a.x[i + half];
  return a.x[0];
}

#endif

INLINE float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// exp within about one unit in the last place for x up to 88.37, where it stays; 0 below -87.33 (and at -inf); NaN stays NaN
// (max and min return their second operand where one is NaN).
// Range reduction by ln 2 in two parts and the polynomial of Cephes' expf (Moshier, 1989).
INLINE V exp(V x) {
  const V low = set1(-87.33f);
  const V clamped = min(set1(88.37f), max(low, x));
  const V shift = set1(12582912.0f);  // 1.5 2^23: adding it rounds to a whole number
  const V n = sub(add(mul(clamped, set1(1.44269504088896341f)), shift), shift);
  V r = fnma(n, set1(0.693359375f), clamped);
  r = fnma(n, set1(-2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return where_less(x, low, zero(), scale_by_power(p, n));
}

// tanh within about two units in the last place; NaN stays NaN.
// Near 0 the polynomial of Cephes' tanhf (Moshier, 1989), else 1 - 2 / (exp(2 |x|) + 1) with the sign of x.
INLINE V tanh(V x) {
  const V size = max(x, sub(zero(), x)), square = mul(x, x), one = set1(1.0f);
  V p = set1(-5.70498872745e-3f);
  p = fma(p, square, set1(2.06390887954e-2f));
  p = fma(p, square, set1(-5.37397155531e-2f));
  p = fma(p, square, set1(1.33314422036e-1f));
  p = fma(p, square, set1(-3.33332819422e-1f));
  const V near = fma(mul(p, square), x, x);
  const V far = sub(one, div(set1(2.0f), add(exp(add(size, size)), one)));
  return where_less(size, set1(0.625f), near, where_less(x, zero(), sub(zero(), far), far));
}

// cap tanh(x / cap): x where it is small beside cap, never more than cap.
INLINE V soft_cap(V x, V cap) { return mul(cap, tanh(div(x, cap))); }

// Its slope where its value is `capped`.
INLINE V soft_cap_slope(V capped, V cap) {
  const V share = div(capped, cap);
  return fnma(share, share, set1(1.0f));
}

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
// 8 rows of 8 lanes, each `stride` registers behind the other, transposed in place.
INLINE void transpose_eight(__m256* rows, int stride) {
  __m256 t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(rows[2 * i * stride], rows[(2 * i + 1) * stride]);
    t[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i * stride], rows[(2 * i + 1) * stride]);
  }
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i * stride] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    rows[(i + 4) * stride] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}
#endif

// Calls write(row, vector, how many of its lanes there are) for the vectors of a tile of ROWS rows that have some of its `columns`.
template <int ROWS, int VECTORS, typename Write>
INLINE void each_output(int64_t columns, Write write) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const int count = static_cast<int>(columns - v * LANES < LANES ? columns - v * LANES : LANES);
      if (count > 0) write(r, v, count);
    }
}

// 16 rows of 16 lanes, transposed in place.
INLINE void transpose(V rows[LANES]) {
#if defined(__AVX512F__)
  __m512 t[16], u[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(rows[2 * i].v, rows[2 * i + 1].v);
    t[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i].v, rows[2 * i + 1].v);
  }
  for (int i = 0; i < 4; ++i) {
    u[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    rows[i].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    rows[i + 8].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
  }
#elif defined(__AVX2__) && defined(__FMA__)
  transpose_eight(&rows[0].a, 2);
  transpose_eight(&rows[8].b, 2);
  transpose_eight(&rows[0].b, 2);
  transpose_eight(&rows[8].a, 2);
  for (int i = 0; i < 8; ++i) {
    const __m256 high = rows[i].b;
    rows[i].b = rows[i + 8].a;
    rows[i + 8].a = high;
  }
#else
  float from[LANES][LANES], to[LANES][LANES];
  for (int i = 0; i < LANES; ++i) store(from[i], rows[i]);
  for (int i = 0; i < LANES; ++i)
    for (int j = 0; j < LANES; ++j) to[j][i] = from[i][j];
  for (int i = 0; i < LANES; ++i) rows[i] = load(to[i]);
#endif
}

// 16 rows of 16 numbers, `from_stride` apart, to 16 columns of rows `to_stride` apart.
INLINE void transpose_block(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  // Eight by eight: so many rows stay in registers.
  for (int r = 0; r < LANES; r += 8)
    for (int c = 0; c < LANES; c += 8) {
      __m256 rows[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(from + (r + i) * from_stride + c);
      transpose_eight(rows, 1);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) _mm256_storeu_ps(to + (c + i) * to_stride + r, rows[i]);
    }
#else
  V rows[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) rows[i] = load(from + i * from_stride);
  transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) store(to + i * to_stride, rows[i]);
#endif
}
