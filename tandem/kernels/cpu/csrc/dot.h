// The dot product of pairs of bf16 numbers, as VDPBF16PS computes it, and conversions to such pairs.
//
// A pair is two bf16 numbers of a 32-bit lane: the even one in the low half, the odd one in the high half. For every lane
//
//   acc = flush(round(odd(a) odd(b) + acc)), then acc = flush(round(even(a) even(b) + acc))
//
// with one rounding to nearest (ties to even) each, denormal operands taken as zeros, and results that are denormal after rounding with an
// unbounded exponent flushed to zeros of their sign, whatever MXCSR says (Intel's manual, volume 2C; AMD's, volume 4: Zen 4 gives the same).
// Where the processor has no such instruction the same bits are computed from two fused multiply-adds.
#pragma once

#include "gemm.h"
#include "numbers.h"
#include "vec.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define HAS_DOT 1
#else
#define HAS_DOT 0
#endif

#if defined(__AVX512F__)
INLINE V dot_odd(V pairs) { return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs.v), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}; }
INLINE V dot_even(V pairs) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs.v), 16))}; }
#elif defined(__AVX2__) && defined(__FMA__)
INLINE __m256 odd_eight(__m256 x) { return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u)))); }
INLINE __m256 even_eight(__m256 x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 16)); }
INLINE V dot_odd(V pairs) { return {odd_eight(pairs.a), odd_eight(pairs.b)}; }
INLINE V dot_even(V pairs) { return {even_eight(pairs.a), even_eight(pairs.b)}; }
#endif

// The bits of the nearest bf16 number in the upper half; denormal numbers become zeros of their sign, NaN a quiet NaN.
INLINE uint32_t rounded_bits(float x) {
  const uint32_t bits = bits_of(x), size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return (bits | 0x00400000u) & 0xffff0000u;
  if (size < 0x00800000u) return bits & 0x80000000u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
}

// What `rounded_bits` gives for each lane, as numbers.
INLINE V round_bf16(V x) {
#if defined(__AVX512F__)
  const __m512i bits = _mm512_castps_si512(x.v), size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i lowest = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), lowest);
  rounded = _mm512_mask_or_epi32(rounded, _mm512_cmpgt_epi32_mask(size, _mm512_set1_epi32(0x7f800000)), bits, _mm512_set1_epi32(0x00400000));
  rounded = _mm512_mask_and_epi32(rounded, _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(0x00800000)), bits,
                                  _mm512_set1_epi32(static_cast<int>(0x80000000u)));
  return {_mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
#else
  alignas(64) float lanes[LANES];
  store(lanes, x);
  for (float& lane : lanes) lane = from_bits(rounded_bits(lane));
  return load(lanes);
#endif
}

// Pairs of `even` and `odd`, rounded.
INLINE V pair(V even, V odd) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(round_bf16(even).v), 16);
  return {_mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(round_bf16(odd).v)))};
#else
  alignas(64) float low[LANES], high[LANES];
  store(low, even);
  store(high, odd);
  for (int i = 0; i < LANES; ++i) low[i] = from_bits(rounded_bits(low[i]) >> 16 | rounded_bits(high[i]));
  return load(low);
#endif
}

#if !HAS_DOT
// One step of one lane: a b + c of numbers that are not denormal, rounded once and flushed.
inline float flushed_fma(float a, float b, float c) {
  const float out = __builtin_fmaf(a, b, c), size = std::fabs(out);
  constexpr float SMALLEST = 1.17549435e-38f, UP = 18446744073709551616.0f;  // 2^-126, 2^64
  if (size > SMALLEST || size != size) return out;
  if (size == SMALLEST) {
    // The denormal numbers' coarser grid may have rounded up to it.
    const float exact = std::fabs(a) < std::fabs(b) ? __builtin_fmaf(a * UP, b, c * UP) : __builtin_fmaf(a, b * UP, c * UP);
    if (std::fabs(exact) >= SMALLEST * UP) return out;
  }
  return std::copysign(0.0f, out);
}
inline float without_denormals(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
#endif

// The arithmetic of `multiply` for pairs: a unit of k is a pair.
struct Pairs {
  static constexpr int64_t BLOCK = K_BLOCK / 2;  // of one chain
  static constexpr bool IN_REGISTERS = HAS_DOT;

#if HAS_DOT
  static INLINE_MEMBER V step(V a, V b, V acc) {
    return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
  }
#else
  static INLINE_MEMBER V step(V, V, V acc) { return acc; }
#endif
};

// What the instruction's chains would be: sums[ROWS][16 VECTORS] over k pairs, of left[r row_stride + i k_stride] and right[i right_stride ...].
template <int ROWS, int VECTORS>
__attribute__((noinline)) void emulated_chains(const float* left, int64_t row_stride, int64_t k_stride, const float* right, int64_t right_stride,
                                               int64_t k, float* sums) {
#if !HAS_DOT && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
  V acc[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) acc[r][v] = zero();
  for (int64_t i = 0; i < k; ++i, left += k_stride, right += right_stride) {
    V odd[VECTORS], even[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const V pairs = load(right + v * LANES);
      odd[v] = dot_odd(pairs);
      even[v] = dot_even(pairs);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const V pairs = set1(left[r * row_stride]), a = dot_odd(pairs), b = dot_even(pairs);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = fma(b, even[v], fma(a, odd[v], acc[r][v]));
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) store(sums + (r * VECTORS + v) * LANES, acc[r][v]);
#elif !HAS_DOT
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < VECTORS * LANES; ++n) {
      float acc = 0.0f;
      for (int64_t i = 0; i < k; ++i) {
        const uint32_t a = bits_of(left[r * row_stride + i * k_stride]), b = bits_of(right[i * right_stride + n]);
        const auto high = [](uint32_t bits) { return without_denormals(from_bits(bits & 0xffff0000u)); };
        const auto low = [](uint32_t bits) { return without_denormals(from_bits(bits << 16)); };
        acc = flushed_fma(low(a), low(b), flushed_fma(high(a), high(b), acc));
      }
      sums[r * VECTORS * LANES + n] = acc;
    }
#endif
}

// Runs `call`, which is not inlined here, with the instruction's treatment of denormal numbers.
template <typename Call>
INLINE void with_flushing(Call call) {
#if !HAS_DOT && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x1f80u | 0x8040u);  // nearest even, no traps, denormal results and operands as zeros
  call();
  _mm_setcsr(before);
#else
  call();
#endif
}
