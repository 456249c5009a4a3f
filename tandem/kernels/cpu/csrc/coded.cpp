// Linear layers whose weights are stored in few bits and multiplied in fp32: int4, nf4, mxfp4 and int8 with a scale (and zero) a group, fp8,
// bf16 and fp16.
//
// A panel's block of k is decoded to fp32 and then multiplied as a plain one; few rows use each number as it is decoded. Either way
// the bits are those of the plain product with the decoded weight.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "calls.h"
#include "gemm.h"
#include "parallel.h"
#include "vec.h"

namespace {

enum Kind : int { INT4 = 0, INT8 = 1, FP8 = 2, BF16 = 3, FP16 = 4, NF4 = 5, MXFP4 = 6, KINDS = 7 };

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
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

float from_bits(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

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

#else

float from_fp16(uint16_t half) {
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

// `k` rows of one group: (code - zero) scale, the zero and the scale where there are any.
template <int KIND, bool HAS_ZEROS>
void decode_rows(const uint8_t* from, const uint8_t* scales, const float* zeros, int64_t k, int64_t width, float* to) {
  constexpr bool HAS_SCALES = has_scales(KIND);
  constexpr int64_t BYTES = bytes_a_row(KIND);
  const int vectors = static_cast<int>(width / LANES);
  V scale[PANEL / LANES], zero_of[PANEL / LANES];
  for (int v = 0; v < PANEL / LANES; ++v) {
    if (HAS_SCALES) scale[v] = scales_at<KIND>(scales, v);
    if (HAS_ZEROS) zero_of[v] = load(zeros + v * LANES);
  }
  for (int64_t i = 0; i < k; ++i, from += BYTES, to += width)
#pragma GCC unroll 4
    for (int v = 0; v < PANEL / LANES; ++v) {
      if (v >= vectors) break;
      V value = codes_at<KIND>(from, v);
      if (HAS_ZEROS) value = sub(value, zero_of[v]);
      if (HAS_SCALES) value = mul(value, scale[v]);
      store(to + v * LANES, value);
    }
}

using Decode = void (*)(const uint8_t*, const uint8_t*, const float*, int64_t, int64_t, float*);
constexpr Decode DECODE[KINDS][2] = {{decode_rows<INT4, false>, decode_rows<INT4, true>},
                                 {decode_rows<INT8, false>, decode_rows<INT8, true>},
                                 {decode_rows<FP8, false>, decode_rows<FP8, true>},
                                 {decode_rows<BF16, false>, decode_rows<BF16, false>},
                                 {decode_rows<FP16, false>, decode_rows<FP16, false>},
                                 {decode_rows<NF4, false>, decode_rows<NF4, false>},
                                 {decode_rows<MXFP4, false>, decode_rows<MXFP4, false>}};

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6;      // as many sums as the registers hold
constexpr int64_t FEW_ROWS = 6;  // more are quicker with the decoded numbers written down
#else
constexpr int TILE_ROWS = 1;
constexpr int64_t FEW_ROWS = 1;
#endif

struct Few {
  const float* x;
  const uint8_t *packed, *scales;
  const float *zeros, *bias;
  int64_t k, group, out_stride, columns;
  float* out;
};

// ROWS rows and one panel, each number used as it is decoded: the same chains of multiply-adds as a plain product's.
template <int KIND, bool HAS_ZEROS, int ROWS>
void multiply_few(const Few& t) {
  constexpr bool HAS_SCALES = has_scales(KIND);
  constexpr int VECTORS = PANEL / LANES;
  constexpr int64_t BYTES = bytes_a_row(KIND);
  const uint8_t* from = t.packed;
  V scale[VECTORS], zero_of[VECTORS];
  for (int64_t k0 = 0; k0 < t.k; k0 += K_BLOCK) {
    V acc[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = zero();
    const int64_t end = std::min(t.k, k0 + K_BLOCK);
    for (int64_t i = k0; i < end;) {
      const int64_t group = i / t.group, stop = std::min(end, (group + 1) * t.group);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        if (HAS_SCALES) scale[v] = scales_at<KIND>(t.scales + group * PANEL * bytes_a_scale(KIND), v);
        zero_of[v] = HAS_ZEROS ? load(t.zeros + group * PANEL + v * LANES) : zero();
        if (KIND == INT4) zero_of[v] = add(zero_of[v], set1(SHIFT));  // exact, as the difference is: zeros are small whole numbers
      }
      for (; i < stop; ++i, from += BYTES) {
        V codes[VECTORS];
        if constexpr (KIND == INT4) shifted_nibbles(from, codes);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          V value = KIND == INT4 ? codes[v] : codes_at<KIND>(from, v);
          if (HAS_ZEROS || KIND == INT4) value = sub(value, zero_of[v]);
          if (HAS_SCALES) value = mul(value, scale[v]);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) acc[r][v] = fma(set1(t.x[r * t.k + i]), value, acc[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const int count = static_cast<int>(std::min<int64_t>(LANES, t.columns - v * LANES));
        if (count <= 0) continue;
        float* to = t.out + r * t.out_stride + v * LANES;
        V value = k0 > 0 ? add(load_n(to, count), acc[r][v]) : acc[r][v];
        if (t.bias && end == t.k) value = add(value, load_n(t.bias + v * LANES, count));
        store_n(to, value, count);
      }
  }
}

using MultiplyFew = void (*)(const Few&);
template <int KIND, bool HAS_ZEROS, int... ROWS>
constexpr void fill(MultiplyFew* table, std::integer_sequence<int, ROWS...>) {
  ((table[ROWS] = multiply_few<KIND, HAS_ZEROS, ROWS + 1>), ...);
}
struct FewFunctions {
  MultiplyFew of[KINDS][2][TILE_ROWS] = {};
  template <int KIND, bool HAS_ZEROS>
  constexpr void fill_kind() {
    fill<KIND, HAS_ZEROS>(of[KIND][HAS_ZEROS], std::make_integer_sequence<int, TILE_ROWS>{});
  }
  constexpr FewFunctions() {
    fill_kind<INT4, false>();
    fill_kind<INT4, true>();
    fill_kind<INT8, false>();
    fill_kind<INT8, true>();
    fill_kind<FP8, false>();
    fill_kind<FP8, true>();
    fill_kind<BF16, false>();
    fill_kind<FP16, false>();
    fill_kind<NF4, false>();
    fill_kind<MXFP4, false>();
  }
};
constexpr FewFunctions FEW;

class CodedWeight : public Codes {
 public:
  CodedWeight(int kind, const uint8_t* packed, const uint8_t* scales, const float* zeros, int64_t k, int64_t group)
      : kind_(kind), packed_(packed), scales_(scales), zeros_(zeros), k_(k), group_(group), groups_((k + group - 1) / group) {}

  void decode(int64_t panel, int64_t k0, int64_t k, int64_t width, float* to) const override {
    const Decode run = DECODE[kind_][zeros_ != nullptr];
    const int64_t bytes = bytes_a_row(kind_);
    for (int64_t i = 0; i < k;) {
      const int64_t group = (k0 + i) / group_, end = std::min(k, (group + 1) * group_ - k0);
      const int64_t at = (panel * groups_ + group) * PANEL;
      run(packed_ + (panel * k_ + k0 + i) * bytes, scales_ ? scales_ + at * bytes_a_scale(kind_) : nullptr, zeros_ ? zeros_ + at : nullptr, end - i, width,
          to + i * width);
      i = end;
    }
  }

 private:
  int kind_;
  const uint8_t *packed_, *scales_;
  const float* zeros_;
  int64_t k_, group_, groups_;
};

struct CodedProduct {
  const float* x;
  int kind;
  const uint8_t *packed, *scales;
  const float* zeros;
  int64_t group;
  const float* bias;
  int64_t m, n, k;
  float* out;
};

void product(const CodedProduct& p) {
  if (p.m > FEW_ROWS || p.k == 0) {
    const CodedWeight codes(p.kind, p.packed, p.scales, p.zeros, p.k, p.group);
    return multiply({p.m, p.n, p.k, {p.x, p.k, 1}, {nullptr, Layout::CODED, 0, &codes}, p.out, p.n, p.bias, false});
  }
  const int64_t panels = (p.n + PANEL - 1) / PANEL, groups = (p.k + p.group - 1) / p.group;
  const int threads = threads_for(p.m * p.n * p.k + p.n * p.k);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t first = panel * PANEL, at = panel * groups * PANEL;
    Few t = {p.x, p.packed + panel * p.k * bytes_a_row(p.kind), p.scales ? p.scales + at * bytes_a_scale(p.kind) : nullptr,
             p.zeros ? p.zeros + at : nullptr, p.bias ? p.bias + first : nullptr, p.k, p.group, p.n, p.n - first, p.out + first};
    for (int64_t row = 0; row < p.m; row += TILE_ROWS, t.x += TILE_ROWS * p.k, t.out += TILE_ROWS * p.n)
      FEW.of[p.kind][p.zeros != nullptr][std::min<int64_t>(TILE_ROWS, p.m - row) - 1](t);
  }
}

}  // namespace

extern "C" {

int64_t tandem_coded_bytes(int kind, int64_t n, int64_t k) { return round_up(n, PANEL) / PANEL * k * bytes_a_row(kind); }

// codes[n, k], of one byte (int4, nf4, int8, fp8) or two, to panels of 64 output channels, each [k][64]; 4 bits have columns i and i + 32
// in one byte.
void tandem_coded_pack(int kind, const uint8_t* codes, int64_t n, int64_t k, uint8_t* packed) {
  const int64_t panels = (n + PANEL - 1) / PANEL, bytes = bytes_a_row(kind), wide = kind == BF16 || kind == FP16 ? 2 : 1;
  const int threads = threads_for(n * k);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t panel = 0; panel < panels; ++panel) {
    uint8_t* to = packed + panel * k * bytes;
    std::memset(to, 0, static_cast<size_t>(k * bytes));
    for (int64_t column = 0; column < std::min(PANEL, n - panel * PANEL); ++column) {
      const uint8_t* from = codes + (panel * PANEL + column) * k * wide;
      for (int64_t i = 0; i < k; ++i) {
        if (has_nibbles(kind))
          to[i * bytes + column % 32] |= static_cast<uint8_t>((from[i] & 15) << (column / 32 * 4));
        else
          std::memcpy(to + i * bytes + column * wide, from + i * wide, static_cast<size_t>(wide));
      }
    }
  }
}

// out[m, n] = x[m, k] (decoded weight)[n, k]^T + bias. scales and zeros are [panel][group][64], or null; scales are fp32, those of mxfp4 exponents in bytes.
int tandem_coded_linear(const float* x, int kind, const uint8_t* packed, const uint8_t* scales, const float* zeros, int64_t group,
                        const float* bias, int64_t m, int64_t n, int64_t k, float* out) {
  return or_out_of_memory([&] { product({x, kind, packed, scales, zeros, group, bias, m, n, k, out}); });
}

// out[bounds[g] : bounds[g + 1], n] = x[..., k] (decoded weight)[g][n, k]^T, with the codes of each weight `packed_stride`, its scales `scale_stride` and its
// zeros `zero_stride` bytes behind those of the one before.
int tandem_coded_grouped_linear(const float* x, int kind, const uint8_t* packed, int64_t packed_stride, const uint8_t* scales, int64_t scale_stride,
                                const uint8_t* zeros, int64_t zero_stride, int64_t group, const int64_t* bounds, int64_t groups, int64_t n, int64_t k,
                                float* out) {
  return or_out_of_memory([&] {
    each_group(bounds, groups, n * k, [&](int64_t g, int64_t first, int64_t rows) {
      const float* zeros_of = zeros ? reinterpret_cast<const float*>(zeros + g * zero_stride) : nullptr;
      product({x + first * k, kind, packed + g * packed_stride, scales ? scales + g * scale_stride : nullptr, zeros_of, group, nullptr, rows, n, k,
               out + first * n});
    });
  });
}

}  // extern "C"
