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
#include "codes.h"
#include "gemm.h"
#include "int4_bytes.h"
#include "parallel.h"
#include "vec.h"

namespace {

// `k` rows of one group: (code - zero) scale, the zero and the scale where there are any.
template <int KIND, bool HAS_ZEROS>
void decode_rows(const uint8_t* from, const uint8_t* scales, const float* zeros, int64_t k, int64_t width, float* to) {
#if HAS_INT4_BYTES
  if (KIND == INT4 && width == PANEL) return decode_int4(from, reinterpret_cast<const float*>(scales), zeros, k, to);
#endif
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

// Rows of a tile, the vectors of a panel that they multiply at once, as many sums as the registers hold, and the most rows of a kind for which the decoded
// numbers are not written down.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6;
constexpr int wide_of(int) { return PANEL / LANES; }
constexpr int64_t few_rows(int) { return TILE_ROWS; }
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 4;
constexpr int wide_of(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
// Codes of two bytes are cheap to decode, and much to read again for each part of a panel.
constexpr int64_t few_rows(int kind) { return bytes_a_row(kind) > PANEL ? 2 : TILE_ROWS; }
#else
constexpr int TILE_ROWS = 1;
constexpr int wide_of(int) { return PANEL / LANES; }
constexpr int64_t few_rows(int) { return TILE_ROWS; }
#endif

struct Few {
  const float* x;
  const uint8_t *packed, *scales;
  const float *zeros, *bias;
  int64_t k, group, out_stride, columns;
  float* out;
};

// The chains of multiply-adds of ROWS rows over columns k0 .. end of a panel's vectors FIRST .. FIRST + WIDE.
template <int KIND, bool HAS_ZEROS, int FIRST, int WIDE, int ROWS>
INLINE void chains(const Few& t, int64_t k0, int64_t end, float (&sums)[ROWS][PANEL]) {
  constexpr bool HAS_SCALES = has_scales(KIND);
  constexpr int64_t BYTES = bytes_a_row(KIND);
  const uint8_t* from = t.packed + k0 * BYTES;
  V acc[ROWS][WIDE], scale[WIDE], zero_of[WIDE];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < WIDE; ++v) acc[r][v] = zero();
  for (int64_t i = k0; i < end;) {
    const int64_t group = i / t.group, stop = std::min(end, (group + 1) * t.group);
#pragma GCC unroll 4
    for (int v = 0; v < WIDE; ++v) {
      if (HAS_SCALES) scale[v] = scales_at<KIND>(t.scales + group * PANEL * bytes_a_scale(KIND), FIRST + v);
      zero_of[v] = HAS_ZEROS ? load(t.zeros + group * PANEL + (FIRST + v) * LANES) : zero();
      if (KIND == INT4) zero_of[v] = add(zero_of[v], set1(SHIFT));  // exact, as the difference is: zeros are small whole numbers
    }
    for (; i < stop; ++i, from += BYTES) {
      V codes[PANEL / LANES];
#if !HAS_INT4_BYTES
      if constexpr (KIND == INT4) shifted_nibbles(from, codes);
#endif
#pragma GCC unroll 4
      for (int v = 0; v < WIDE; ++v) {
        V value = KIND == INT4 ? codes[FIRST + v] : codes_at<KIND>(from, FIRST + v);
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
    for (int v = 0; v < WIDE; ++v) store(sums[r] + (FIRST + v) * LANES, acc[r][v]);
}

template <int KIND, bool HAS_ZEROS, int ROWS, int... PARTS>
INLINE void all_chains(const Few& t, int64_t k0, int64_t end, float (&sums)[ROWS][PANEL], std::integer_sequence<int, PARTS...>) {
  (chains<KIND, HAS_ZEROS, PARTS * wide_of(ROWS), wide_of(ROWS)>(t, k0, end, sums), ...);
}

// ROWS rows and one panel, each number used as it is decoded: the same chains of multiply-adds as a plain product's.
template <int KIND, bool HAS_ZEROS, int ROWS>
void multiply_few(const Few& t) {
  for (int64_t k0 = 0; k0 < t.k; k0 += K_BLOCK) {
    const int64_t end = std::min(t.k, k0 + K_BLOCK);
    alignas(64) float sums[ROWS][PANEL];
#if HAS_INT4_BYTES
    if constexpr (KIND == INT4)
      int4_chains(t.x, t.k, t.packed, reinterpret_cast<const float*>(t.scales), t.zeros, t.group, k0, end, sums);
    else
#endif
      all_chains<KIND, HAS_ZEROS>(t, k0, end, sums, std::make_integer_sequence<int, PANEL / LANES / wide_of(ROWS)>{});
    each_output<ROWS, PANEL / LANES>(t.columns, [&](int r, int v, int count) {
      float* to = t.out + r * t.out_stride + v * LANES;
      V value = load(sums[r] + v * LANES);
      if (k0 > 0) value = add(load_n(to, count), value);
      if (t.bias && end == t.k) value = add(value, load_n(t.bias + v * LANES, count));
      store_n(to, value, count);
    });
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
  if (p.m > few_rows(p.kind) || p.k == 0) {
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
