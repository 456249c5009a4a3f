// int4 weights as fp32 on AVX2: of 32 columns at once the codes less their zeros in bytes, of which a shuffle puts each on top of a lane of 32 bits.
//
// A lane is 2^24 times the number before its scale, and the scale is divided by as much: both exactly, so that their product has the bits of
// (code - zero) scale. Groups in which that is not exact (scales near 2^-126, zeros that are no small whole numbers) take the plain way.
#pragma once

#include <algorithm>
#include <type_traits>

#include "codes.h"
#include "parallel.h"

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define HAS_INT4_BYTES 1

constexpr int EIGHTS = 4;  // registers of the 32 columns of half a panel
// Register e has columns 4 e .. 4 e + 3 and 16 + 4 e .. 16 + 4 e + 3 of the 32: those that a shuffle, which stays within 16 bytes, reaches.
INLINE __m256 eight_columns(const float* of_half, int e) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(of_half + 4 * e)), _mm_loadu_ps(of_half + 16 + 4 * e), 1);
}

struct TopBytes {
  alignas(32) int8_t of[EIGHTS][32] = {};
  constexpr TopBytes() {
    for (int e = 0; e < EIGHTS; ++e)
      for (int i = 0; i < 32; ++i) of[e][i] = static_cast<int8_t>(i % 4 == 3 ? 4 * e + i % 16 / 4 : -1);
  }
};
constexpr TopBytes TOP_BYTES;

// What the codes of half a panel and one group become numbers with.
struct HalfGroup {
  __m256i zeros;  // bytes, in the order of the columns
  __m256 plain_zeros[EIGHTS], scales[EIGHTS], smaller_scales[EIGHTS];  // these: over 2^24
  bool is_exact;
};

INLINE HalfGroup half_group(const float* scales, const float* zeros) {
  HalfGroup out;
  __m256i whole[EIGHTS];
  __m256 exact = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
#pragma GCC unroll 4
  for (int e = 0; e < EIGHTS; ++e) {
    const __m256 scale = eight_columns(scales, e), zero = zeros ? eight_columns(zeros, e) : _mm256_setzero_ps();
    whole[e] = _mm256_cvtps_epi32(zero);
    out.smaller_scales[e] = _mm256_mul_ps(scale, _mm256_set1_ps(0x1p-24f));
    exact = _mm256_and_ps(exact, _mm256_cmp_ps(_mm256_mul_ps(out.smaller_scales[e], _mm256_set1_ps(0x1p24f)), scale, _CMP_EQ_OQ));
    exact = _mm256_and_ps(exact, _mm256_cmp_ps(_mm256_cvtepi32_ps(whole[e]), zero, _CMP_EQ_OQ));
    exact = _mm256_and_ps(exact, _mm256_cmp_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), zero), _mm256_set1_ps(100.0f), _CMP_LE_OQ));
    out.plain_zeros[e] = zero;
    out.scales[e] = scale;
  }
  out.is_exact = _mm256_movemask_ps(exact) == 0xff;
  out.zeros = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
  return out;
}

// The codes of 32 of the 64 columns at `from`, less their zeros where EXACT.
template <bool EXACT>
INLINE __m256i half_codes(const uint8_t* from, int half, const HalfGroup& group) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i codes = _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
  return EXACT ? _mm256_sub_epi8(codes, group.zeros) : codes;
}

// Register e of them as numbers.
template <bool EXACT>
INLINE __m256 eight_weights(__m256i codes, int e, const HalfGroup& group) {
  const __m256i top = _mm256_shuffle_epi8(codes, _mm256_load_si256(reinterpret_cast<const __m256i*>(TOP_BYTES.of[e])));
  const __m256 number = _mm256_cvtepi32_ps(top);
  if (EXACT) return _mm256_mul_ps(number, group.smaller_scales[e]);
  return _mm256_mul_ps(_mm256_sub_ps(_mm256_mul_ps(number, _mm256_set1_ps(0x1p-24f)), group.plain_zeros[e]), group.scales[e]);
}

// `k` rows of one group of a whole panel as fp32, [k][PANEL].
template <bool EXACT>
INLINE void decode_halves(const uint8_t* from, const HalfGroup (&groups)[2], int64_t k, float* to) {
  for (int64_t i = 0; i < k; ++i, from += PANEL / 2, to += PANEL) {
    ask_ahead<PANEL / 2>(from);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i codes = half_codes<EXACT>(from, half, groups[half]);
#pragma GCC unroll 2
      for (int e = 0; e < EIGHTS; e += 2) {
        const __m256 a = eight_weights<EXACT>(codes, e, groups[half]), b = eight_weights<EXACT>(codes, e + 1, groups[half]);
        float* columns = to + half * 32 + e * 4;
        _mm256_storeu_ps(columns, _mm256_permute2f128_ps(a, b, 0x20));
        _mm256_storeu_ps(columns + 16, _mm256_permute2f128_ps(a, b, 0x31));
      }
    }
  }
}
INLINE void decode_int4(const uint8_t* from, const float* scales, const float* zeros, int64_t k, float* to) {
  const HalfGroup groups[2] = {half_group(scales, zeros), half_group(scales + 32, zeros ? zeros + 32 : nullptr)};
  if (groups[0].is_exact && groups[1].is_exact)
    decode_halves<true>(from, groups, k, to);
  else
    decode_halves<false>(from, groups, k, to);
}

// Multiply-adds of ROWS rows of x, `stride` apart, with `k` rows of one group of a panel: of its halves from HALF on the registers from FIRST on.
template <bool EXACT, int HALF, int FIRST, int ROWS, int HALVES, int COUNT>
INLINE void add_int4_products(const float* x, int64_t stride, const uint8_t* from, const HalfGroup (&groups)[HALVES], int64_t k,
                              __m256 (&acc)[ROWS][HALVES][COUNT]) {
  for (int64_t i = 0; i < k; ++i, from += PANEL / 2) {
    ask_ahead<PANEL / 2>(from);
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) {
      const __m256i codes = half_codes<EXACT>(from, HALF + h, groups[h]);
#pragma GCC unroll 4
      for (int e = 0; e < COUNT; ++e) {
        const __m256 weights = eight_weights<EXACT>(codes, FIRST + e, groups[h]);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) acc[r][h][e] = _mm256_fmadd_ps(_mm256_set1_ps(x[r * stride + i]), weights, acc[r][h][e]);
      }
    }
  }
}

// The chains of ROWS rows over columns k0 .. end of a panel's registers FIRST .. FIRST + COUNT of HALVES halves from HALF on, to sums[ROWS][PANEL]. `from`,
// `scales` and `zeros` are the panel's.
template <int HALF, int HALVES, int FIRST, int COUNT, int ROWS>
INLINE void int4_part_chains(const float* x, int64_t stride, const uint8_t* from, const float* scales, const float* zeros, int64_t group, int64_t k0, int64_t end,
                        float (&sums)[ROWS][PANEL]) {
  __m256 acc[ROWS][HALVES][COUNT];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h)
#pragma GCC unroll 4
      for (int e = 0; e < COUNT; ++e) acc[r][h][e] = _mm256_setzero_ps();
  for (int64_t i = k0; i < end;) {
    const int64_t g = i / group, stop = std::min(end, (g + 1) * group);
    HalfGroup groups[HALVES];
    bool exact = true;
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) {
      const int64_t at = g * PANEL + (HALF + h) * 32;
      groups[h] = half_group(scales + at, zeros ? zeros + at : nullptr);
      exact = exact && groups[h].is_exact;
    }
    const uint8_t* codes = from + i * PANEL / 2;
    if (exact)
      add_int4_products<true, HALF, FIRST>(x + i, stride, codes, groups, stop - i, acc);
    else
      add_int4_products<false, HALF, FIRST>(x + i, stride, codes, groups, stop - i, acc);
    i = stop;
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h)
#pragma GCC unroll 4
      for (int e = 0; e < COUNT; ++e) {
        float* to = sums[r] + (HALF + h) * 32 + (FIRST + e) * 4;
        _mm_storeu_ps(to, _mm256_castps256_ps128(acc[r][h][e]));
        _mm_storeu_ps(to + 16, _mm256_extractf128_ps(acc[r][h][e], 1));
      }
}

// Those of all of a panel, in parts whose sums fit the registers.
template <int ROWS>
INLINE void int4_chains(const float* x, int64_t stride, const uint8_t* from, const float* scales, const float* zeros, int64_t group, int64_t k0, int64_t end,
                        float (&sums)[ROWS][PANEL]) {
  const auto part = [&](auto half, auto halves, auto first, auto count) {
    int4_part_chains<half, halves, first, count>(x, stride, from, scales, zeros, group, k0, end, sums);
  };
  constexpr std::integral_constant<int, 0> ZERO;
  constexpr std::integral_constant<int, 1> ONE;
  constexpr std::integral_constant<int, 2> TWO;
  constexpr std::integral_constant<int, EIGHTS> ALL;
  if constexpr (ROWS == 1) {
    part(ZERO, TWO, ZERO, ALL);
  } else if constexpr (ROWS == 2) {
    part(ZERO, ONE, ZERO, ALL);
    part(ONE, ONE, ZERO, ALL);
  } else {
    part(ZERO, ONE, ZERO, TWO);
    part(ZERO, ONE, TWO, TWO);
    part(ONE, ONE, ZERO, TWO);
    part(ONE, ONE, TWO, TWO);
  }
}

#else
#define HAS_INT4_BYTES 0
#endif
