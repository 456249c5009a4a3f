// The layout of the key-value cache, as `tandem/kernels/api.py` lays it down, and the numbers that are stored in it.
//
// A number is fp32, bf16, or a code of 8 or 4 bits whose token and head have a scale: number = code scale, one fp32 product. The codes
// are whole numbers up to 127 or 7, or e4m3 (Micikevicius et al., 2022). Encoding divides, rounds to nearest even and nothing else, so
// that plain torch finds the same bits (`tandem/kernels/kv_dtype.py`).
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "numbers.h"
#include "rows.h"

constexpr int64_t BLOCK_TOKENS = 16;  // keys[blocks, hkv, size, 16], values[blocks, hkv, 16, size], scales[blocks, hkv, 16]

struct Bf16 {
  uint16_t bits;
};
struct Int8 {
  int8_t code;
};
struct Fp8 {
  uint8_t bits;
};
// Two codes of 4 bits, each plus 8: component d of a head in the low bits of byte d, component d + size / 2 in the high ones.
struct Int4 {
  uint8_t pair;
};

template <typename T>
constexpr bool IS_SCALED = sizeof(T) == 1;
template <typename T>
constexpr bool IS_PAIR = std::is_same_v<T, Int4>;

// The stored elements of a head of `size` components.
template <typename T>
constexpr int64_t stored_size(int64_t size) {
  return IS_PAIR<T> ? size / 2 : size;
}

// Runs call(T{}) for what `kind` names: the codes of _STORED in attention_calls.py.
template <typename Call>
INLINE auto for_stored(int kind, Call call) {
  switch (kind) {
    case 1: return call(Bf16{});
    case 2: return call(Int8{});
    case 3: return call(Fp8{});
    case 4: return call(Int4{});
    default: return call(float{});
  }
}

// -- sixteen stored numbers as fp32, without their scale ------------------------------------------------------------------------

INLINE V widen(const float* p) { return load(p); }

#if defined(__AVX512F__) && defined(__AVX2__)
INLINE V widen(const Bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
INLINE V widen(const Int8* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))}; }
#elif defined(__AVX2__) && defined(__FMA__)
INLINE V widen(const Bf16* p) {
  const auto half = [](const Bf16* at) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))), 16));
  };
  return {half(p), half(p + 8)};
}
INLINE V widen(const Int8* p) {
  const auto half = [](const Int8* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
  };
  return {half(p), half(p + 8)};
}
#else
INLINE V widen(const Bf16* p) {
  uint32_t bits[LANES];
  float out[LANES];
  for (int i = 0; i < LANES; ++i) bits[i] = static_cast<uint32_t>(p[i].bits) << 16;
  std::memcpy(out, bits, sizeof out);
  return load(out);
}
INLINE V widen(const Int8* p) {
  float out[LANES];
  for (int i = 0; i < LANES; ++i) out[i] = p[i].code;
  return load(out);
}
#endif

// An e4m3 number is an fp16 number with 8 less in its exponent's bias and 7 zeros behind it; subnormal ones too.
#if defined(__AVX2__) && defined(__F16C__)
INLINE V widen(const Fp8* p) {
  const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x80)), 8);
  const __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x7f)), 7));
#if defined(__AVX512F__)
  return mul({_mm512_cvtph_ps(half)}, set1(256.0f));
#else
  return mul({_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))}, set1(256.0f));
#endif
}
#else
INLINE V widen(const Fp8* p) {
  float out[LANES];
  for (int i = 0; i < LANES; ++i) {
    const int exponent = p[i].bits >> 3 & 15, fraction = p[i].bits & 7;
    const float size = exponent ? std::ldexp(8.0f + static_cast<float>(fraction), exponent - 10) : std::ldexp(static_cast<float>(fraction), -9);
    out[i] = p[i].bits & 0x80 ? -size : size;
  }
  return load(out);
}
#endif

// The codes in the low bits of sixteen pairs, or in the high ones.
template <bool HIGH>
INLINE V widen_half(const Int4* p) {
#if defined(__AVX512F__) && defined(__AVX2__)
  const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i codes = HIGH ? _mm512_srli_epi32(pairs, 4) : _mm512_and_si512(pairs, _mm512_set1_epi32(15));
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(8)))};
#elif defined(__AVX2__) && defined(__FMA__)
  const auto half = [](const Int4* at) {
    const __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    const __m256i codes = HIGH ? _mm256_srli_epi32(pairs, 4) : _mm256_and_si256(pairs, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(8)));
  };
  return {half(p), half(p + 8)};
#else
  float out[LANES];
  for (int i = 0; i < LANES; ++i) out[i] = static_cast<float>((HIGH ? p[i].pair >> 4 : p[i].pair & 15) - 8);
  return load(out);
#endif
}

// The first n (1..16) numbers; the others are 0 and their memory is not touched.
template <typename T>
INLINE V widen_n(const T* p, int n) {
  if (n == LANES) return widen(p);
  T whole[LANES] = {};
  std::memcpy(whole, p, sizeof(T) * static_cast<size_t>(n));
  return widen(whole);
}
INLINE V widen_n(const float* p, int n) { return get(p, n); }

// step(d, n, codes) for the vectors of n codes from component d of a head on that is stored in `from`, in any order.
template <typename T, typename Step>
INLINE void each_code(const T* from, int64_t size, Step step) {
  if constexpr (IS_PAIR<T>) {
    const int64_t half = size / 2;
    each_vector(half, [&](int64_t d, int n) {
      Int4 whole[LANES] = {};
      std::memcpy(whole, from + d, static_cast<size_t>(n));
      step(d, n, widen_half<false>(whole));
      step(half + d, n, widen_half<true>(whole));
    });
  } else {
    each_vector(size, [&](int64_t d, int n) { step(d, n, widen_n(from + d, n)); });
  }
}

// -- one head of one token to stored numbers ------------------------------------------------------------------------------------

// What the codes are multiplied with: the largest magnitude over `limit`, at least the least normal number; NaN where one of the
// numbers is not finite.
INLINE float scale_of(const float* x, int64_t size, float limit) {
  V most = zero(), poison = zero();
  each_vector(size, [&](int64_t i, int n) {
    const V a = get(x + i, n);
    most = max(most, max(a, sub(zero(), a)));
    poison = add(poison, sub(a, a));
  });
  return std::max(max_lane(most) / limit, FLT_MIN) + sum(poison);
}

INLINE Fp8 to_e4m3(float x) {
  const uint32_t all = bits_of(x), sign = all >> 24 & 0x80, size = all & 0x7fffffff;
  const float magnitude = from_bits(size);
  // Below 2^-6 the step is 2^-9, that of fp32 at 2^14: the addition rounds.
  const uint32_t small = bits_of(magnitude + 16384.0f) - bits_of(16384.0f);
  const uint32_t normal = (size - (120u << 23) + 0x7ffff + (size >> 20 & 1)) >> 20;
  return {static_cast<uint8_t>(sign | (size < (121u << 23) ? small : normal))};
}

// x[size] as stored numbers; returns the scale (1 where there is none).
INLINE float encode(const float* x, int64_t size, float* out) {
  std::copy_n(x, size, out);
  return 1.0f;
}
INLINE float encode(const float* x, int64_t size, Bf16* out) {
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = bits_of(x[i]);
    out[i].bits = x[i] == x[i] ? static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
  }
  return 1.0f;
}
INLINE float encode(const float* x, int64_t size, Int8* out) {
  const float scale = scale_of(x, size, 127.0f), shift = 12582912.0f;  // 1.5 2^23: adding it rounds to a whole number
  const bool finite = scale == scale;
  for (int64_t i = 0; i < size; ++i) out[i].code = finite ? static_cast<int8_t>((x[i] / scale + shift) - shift) : 0;
  return scale;
}
INLINE float encode(const float* x, int64_t size, Fp8* out) {
  const float scale = scale_of(x, size, 448.0f);
  const bool finite = scale == scale;
  for (int64_t i = 0; i < size; ++i) out[i] = finite ? to_e4m3(x[i] / scale) : Fp8{0};
  return scale;
}
INLINE float encode(const float* x, int64_t size, Int4* out) {
  const float scale = scale_of(x, size, 7.0f), shift = 12582912.0f;
  const bool finite = scale == scale;
  const auto code = [&](int64_t i) { return finite ? static_cast<int>((x[i] / scale + shift) - shift) + 8 : 8; };
  for (int64_t i = 0, half = size / 2; i < half; ++i) out[i].pair = static_cast<uint8_t>(code(i) | code(half + i) << 4);
  return scale;
}
