// Numbers stored in few bits, as fp32: the formats of coded.cpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm.h"
#include "numbers.h"
#include "vec.h"

// The codes of quantized.py.
enum Kind : int { INT4 = 0, INT8 = 1, FP8 = 2, BF16 = 3, FP16 = 4, NF4 = 5, MXFP4 = 6, KINDS = 7 };

constexpr bool has_nibbles(int kind) { return kind == INT4 || kind == NF4 || kind == MXFP4; }
constexpr bool has_scales(int kind) { return kind != BF16 && kind != FP16; }
constexpr int64_t bytes_a_scale(int kind) { return kind == MXFP4 ? 1 : 4; }
constexpr int64_t bytes_a_row(int kind) { return has_nibbles(kind) ? PANEL / 2 : kind == BF16 || kind == FP16 ? PANEL * 2 : PANEL; }

// The numbers of the 4-bit NormalFloat (Dettmers et al., 2023, appendix E).
alignas(64) constexpr float NORMAL_FLOATS[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f,
    1.0f};
// E2M1 (Open Compute Project, 2023).
alignas(64) constexpr float MXFP4_NUMBERS[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// 2^23: the last bit of a number from here on is 1.
constexpr float SHIFT = 8388608.0f;

#if defined(__AVX512F__)

INLINE V ints(__m512i a) { return {_mm512_cvtepi32_ps(a)}; }
INLINE __m128i bytes_at(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
INLINE V low_nibbles(const uint8_t* p) { return ints(_mm512_cvtepu8_epi32(_mm_and_si128(bytes_at(p), _mm_set1_epi8(15)))); }
INLINE V high_nibbles(const uint8_t* p) {
  return ints(_mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(bytes_at(p), 4), _mm_set1_epi8(15))));
}
// The numbers of 64 nibbles plus SHIFT, whose lowest bits they replace: no conversion, and each byte is widened once for both of its nibbles.
INLINE void shifted_nibbles(const uint8_t* p, V* out) {
  const __m512i shift = _mm512_castps_si512(_mm512_set1_ps(SHIFT)), nibble = _mm512_set1_epi32(15);
  constexpr int MASKED_OR = 0xec;  // (a & c) | b
  for (int v = 0; v < 2; ++v) {
    const __m512i bytes = _mm512_cvtepu8_epi32(bytes_at(p + v * LANES));
    out[v] = {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(bytes, shift, nibble, MASKED_OR))};
    out[v + 2] = {_mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(bytes, 4), shift))};
  }
}
// A permutation reads the lowest four bits of an index.
INLINE V low_numbers(const uint8_t* p, const float* of) { return {_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(bytes_at(p)), _mm512_load_ps(of))}; }
INLINE V high_numbers(const uint8_t* p, const float* of) {
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(bytes_at(p)), 4), _mm512_load_ps(of))};
}
// Powers of two by their exponents; that of 0 is 2^-127, which fp32 has without its leading one.
INLINE V powers(const uint8_t* p) {
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes_at(p)), 23);
  return {_mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(1 << 22)))};
}
INLINE V signed_bytes(const uint8_t* p) { return ints(_mm512_cvtepi8_epi32(bytes_at(p))); }
INLINE V fp8(const uint8_t* p) {
  const __m512i code = _mm512_cvtepi8_epi32(bytes_at(p));
  const __m512i rest = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x7f)), 20);
  const __m512i bits = _mm512_or_si512(_mm512_and_si512(code, _mm512_set1_epi32(static_cast<int>(0x80000000))), rest);
  return mul({_mm512_castsi512_ps(bits)}, set1(0x1p120f));
}
INLINE V bf16(const uint8_t* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
INLINE V fp16(const uint8_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

INLINE __m256i eight_at(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
INLINE __m256i signed_eight_at(const uint8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
INLINE __m256i eight_halves_at(const uint8_t* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
INLINE __m256i low_four(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi32(15)); }
INLINE V ints(__m256i a, __m256i b) { return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)}; }
INLINE V low_nibbles(const uint8_t* p) { return ints(low_four(eight_at(p)), low_four(eight_at(p + 8))); }
INLINE V high_nibbles(const uint8_t* p) { return ints(_mm256_srli_epi32(eight_at(p), 4), _mm256_srli_epi32(eight_at(p + 8), 4)); }
// A permutation reads the lowest three bits of an index; the fourth chooses the half of the table.
INLINE __m256 eight_numbers(__m256i index, const float* of) {
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(of), index), high = _mm256_permutevar8x32_ps(_mm256_load_ps(of + 8), index);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
INLINE V low_numbers(const uint8_t* p, const float* of) { return {eight_numbers(eight_at(p), of), eight_numbers(eight_at(p + 8), of)}; }
INLINE V high_numbers(const uint8_t* p, const float* of) {
  return {eight_numbers(_mm256_srli_epi32(eight_at(p), 4), of), eight_numbers(_mm256_srli_epi32(eight_at(p + 8), 4), of)};
}
INLINE __m256 eight_powers(const uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(eight_at(p), 23), _mm256_set1_epi32(1 << 22)));
}
INLINE V powers(const uint8_t* p) { return {eight_powers(p), eight_powers(p + 8)}; }
INLINE V signed_bytes(const uint8_t* p) { return ints(signed_eight_at(p), signed_eight_at(p + 8)); }
INLINE __m256 eight_fp8(const uint8_t* p) {
  const __m256i code = signed_eight_at(p);
  const __m256i rest = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(0x7f)), 20);
  return _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(code, _mm256_set1_epi32(static_cast<int>(0x80000000))), rest));
}
INLINE V fp8(const uint8_t* p) { return mul({eight_fp8(p), eight_fp8(p + 8)}, set1(0x1p120f)); }
INLINE __m256 eight_bf16(const uint8_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(eight_halves_at(p), 16)); }
INLINE V bf16(const uint8_t* p) { return {eight_bf16(p), eight_bf16(p + 16)}; }
INLINE V fp16(const uint8_t* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}

#else

inline float from_fp16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
  const uint32_t magic = 113u << 23;  // the exponent of the smallest normal half
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return from_bits(sign | ((rest << 13) + (112u << 23)));
  const float small = from_bits(magic + (rest << 13)) - from_bits(magic);
  return sign ? -small : small;
}

#define EACH(expression)                                   \
  float out[LANES];                                        \
  for (int i = 0; i < LANES; ++i) out[i] = (expression);   \
  return load(out)
INLINE V low_nibbles(const uint8_t* p) { EACH(static_cast<float>(p[i] & 15)); }
INLINE V high_nibbles(const uint8_t* p) { EACH(static_cast<float>(p[i] >> 4)); }
INLINE V low_shifted(const uint8_t* p) { EACH(from_bits(0x4b000000u | (p[i] & 15))); }
INLINE V high_shifted(const uint8_t* p) { EACH(from_bits(0x4b000000u | p[i] >> 4)); }
INLINE void shifted_nibbles(const uint8_t* p, V* out) {
  for (int v = 0; v < 2; ++v) {
    out[v] = low_shifted(p + v * LANES);
    out[v + 2] = high_shifted(p + v * LANES);
  }
}
INLINE V low_numbers(const uint8_t* p, const float* of) { EACH(of[p[i] & 15]); }
INLINE V high_numbers(const uint8_t* p, const float* of) { EACH(of[p[i] >> 4]); }
// Powers of two by their exponents; that of 0 is 2^-127, which fp32 has without its leading one.
INLINE V powers(const uint8_t* p) { EACH(from_bits(p[i] == 0 ? 1u << 22 : static_cast<uint32_t>(p[i]) << 23)); }
INLINE V signed_bytes(const uint8_t* p) { EACH(static_cast<float>(static_cast<int8_t>(p[i]))); }
INLINE V fp8(const uint8_t* p) {
  EACH(from_bits(static_cast<uint32_t>(p[i] & 0x80) << 24 | static_cast<uint32_t>(p[i] & 0x7f) << 20) * 0x1p120f);
}
INLINE V bf16(const uint8_t* p) {
  uint16_t halves[LANES];
  std::memcpy(halves, p, sizeof halves);
  EACH(from_bits(static_cast<uint32_t>(halves[i]) << 16));
}
INLINE V fp16(const uint8_t* p) {
  uint16_t halves[LANES];
  std::memcpy(halves, p, sizeof halves);
  EACH(from_fp16(halves[i]));
}
#undef EACH

#endif

// Vector v of the 64 codes at `from` as numbers.
template <int KIND>
INLINE V codes_at(const uint8_t* from, int v) {
  if constexpr (KIND == INT4) return v < 2 ? low_nibbles(from + v * LANES) : high_nibbles(from + (v - 2) * LANES);
  if constexpr (KIND == NF4 || KIND == MXFP4) {
    const float* numbers = KIND == NF4 ? NORMAL_FLOATS : MXFP4_NUMBERS;
    return v < 2 ? low_numbers(from + v * LANES, numbers) : high_numbers(from + (v - 2) * LANES, numbers);
  }
  if constexpr (KIND == INT8) return signed_bytes(from + v * LANES);
  if constexpr (KIND == FP8) return fp8(from + v * LANES);
  if constexpr (KIND == BF16) return bf16(from + v * LANES * 2);
  return fp16(from + v * LANES * 2);
}

// Vector v of the 64 scales at `from`.
template <int KIND>
INLINE V scales_at(const uint8_t* from, int v) {
  if constexpr (KIND == MXFP4) return powers(from + v * LANES);
  return load(reinterpret_cast<const float*>(from) + v * LANES);
}
