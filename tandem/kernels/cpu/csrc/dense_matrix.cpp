// The products of dense layers by format.
#include "dense_matrix.h"

#include <algorithm>
#include <utility>

#include "calls.h"
#include "codes.h"
#include "gemm.h"
#include "numbers.h"
#include "parallel.h"
#include "rows.h"

namespace {

// Rounded to the nearest bf16 number, ties to even, denormal numbers too: as torch converts what quantized weights multiply in mixed precision.
void round_like_torch(const float* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(x[i]);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    out[i] = from_bits(is_nan ? 0x7fc00000u : (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
  }
}

void pick_columns(const float* x, int64_t rows, int64_t columns, const int64_t* order, float* out) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < columns; ++i) out[r * columns + i] = x[r * columns + order[i]];
}

void multiply_packed(const DenseMatrix& matrix, int precision, const float* x, int64_t rows, float* out) {
  const float* data = static_cast<const float*>(matrix.data);
  allocated(precision == FP32 ? tandem_linear(x, data, 1, matrix.bias, rows, matrix.rows, matrix.columns, out)
                              : tandem_bf16_linear(x, data, 1, matrix.bias, precision == BF16_ROUNDED, rows, matrix.rows, matrix.columns, out));
}

// What a quantized matrix multiplies: x, or a copy of it in one of the two halves of `memory`.
const float* inputs_of(const DenseMatrix& matrix, int precision, const float* x, int64_t rows, Scratch& memory) {
  const int64_t count = rows * matrix.columns;
  if (precision == FP32 && !matrix.order && !matrix.fp8_group) return x;
  float *to = memory.floats(2 * count), *next = to + count;
  const auto written = [&] {
    x = to;
    std::swap(to, next);
  };
  if (precision != FP32) {
    round_like_torch(x, count, to);
    written();
  }
  if (matrix.order) {
    pick_columns(x, rows, matrix.columns, matrix.order, to);
    written();
  }
  if (matrix.fp8_group) {
    tandem_round_fp8(x, rows, matrix.columns, matrix.fp8_group, to);
    written();
  }
  return x;
}

}  // namespace

int64_t bytes_of(const DenseMatrix& matrix, int precision) {
  const int64_t numbers = matrix.rows * matrix.columns;
  if (matrix.format == PACKED) return numbers * (precision == FP32 ? 4 : 2);
  const int64_t groups = matrix.rows * ((matrix.columns + matrix.group - 1) / std::max<int64_t>(matrix.group, 1));
  const auto of_groups = [&](int64_t scale, int64_t zero) { return groups * ((matrix.scales ? scale : 0) + (matrix.zeros ? zero : 0)); };
  if (matrix.format == INT8_INTEGERS) return numbers + of_groups(4, 4);
  if (matrix.format == INT4_INTEGERS) return numbers / 2 + of_groups(4, 1);
  const int kind = static_cast<int>(matrix.format - CODED);
  return tandem_coded_bytes(kind, matrix.rows, matrix.columns) + of_groups(bytes_a_scale(kind), 4);
}

void multiply(const DenseMatrix& matrix, int precision, const float* x, int64_t rows, float* out) {
  if (matrix.format == PACKED) return multiply_packed(matrix, precision, x, rows, out);
  thread_local Scratch memory;
  x = inputs_of(matrix, precision, x, rows, memory);
  const int64_t n = matrix.rows, k = matrix.columns;
  const uint8_t* data = static_cast<const uint8_t*>(matrix.data);
  if (matrix.format == INT8_INTEGERS)
    allocated(tandem_int8_linear(x, data, static_cast<const float*>(matrix.scales), matrix.bias, rows, n, k, out));
  else if (matrix.format == INT4_INTEGERS)
    allocated(tandem_int4_linear(x, data, static_cast<const float*>(matrix.scales), static_cast<const uint8_t*>(matrix.zeros), matrix.group, matrix.bias,
                                 rows, n, k, out));
  else
    allocated(tandem_coded_linear(x, static_cast<int>(matrix.format - CODED), data, static_cast<const uint8_t*>(matrix.scales),
                                  static_cast<const float*>(matrix.zeros), matrix.group, matrix.bias, rows, n, k, out));
  if (precision == BF16_ROUNDED) round_like_torch(out, rows * n, out);
}

void multiply_gated(const DenseMatrix& gate_up, const DenseMatrix& down, int activation, int precision, const float* x, int64_t rows, float* out) {
  const int64_t hidden = down.rows, inner = down.columns;
  if (gate_up.format == PACKED && down.format == PACKED) {
    const float *first = static_cast<const float*>(gate_up.data), *second = static_cast<const float*>(down.data);
    allocated(precision == FP32 ? tandem_gated_mlp(x, first, gate_up.bias, second, down.bias, rows, hidden, inner, activation, out)
                                : tandem_bf16_gated_mlp(x, first, gate_up.bias, second, down.bias, precision == BF16_ROUNDED, rows, hidden, inner,
                                                        activation, out));
    return;
  }
  thread_local Scratch memory;
  const int64_t at_once = std::min(rows, ROW_CHUNK * threads_for(rows * hidden * inner));
  float *both = memory.floats(at_once * 3 * inner), *gated = both + at_once * 2 * inner;
  for (int64_t first = 0; first < rows; first += at_once) {
    const int64_t count = std::min(at_once, rows - first);
    multiply(gate_up, precision, x + first * hidden, count, both);
    gate_mul(both, count, inner, activation, gated);
    multiply(down, precision, gated, count, out + first * hidden);
  }
}
