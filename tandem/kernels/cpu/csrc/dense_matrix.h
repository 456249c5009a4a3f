// A packed matrix of a dense layer in one of its formats, and its products: those that Python would call one by one.
#pragma once

#include <cstdint>

// The formats of dense_matrix.py. PACKED: fp32, or pairs of bf16 by the precision of products. INT8 and INT4: multiplied in integers (int8.cpp, int4.cpp). From
// CODED on: decoded, of the kind `format - CODED` of coded.cpp.
constexpr int64_t PACKED = 0, INT8_INTEGERS = 1, INT4_INTEGERS = 2, CODED = 3;

// The precision of products: bf16 operands with fp32 or bf16 results.
constexpr int FP32 = 0, BF16_PRODUCTS = 1, BF16_ROUNDED = 2;

// The structure of dense_matrix.py, field by field.
struct DenseMatrix {
  const void* data;
  const float* bias;  // null where there is none
  const void *scales, *zeros;
  const int64_t* order;  // [columns]: the input of each column; null: in order
  int64_t rows, columns, format, group;
  int64_t fp8_group;  // columns of a row that are rounded to fp8 under one scale; 0: none
};

// The memory that a product reads.
int64_t bytes_of(const DenseMatrix& matrix, int precision);

// out[rows, matrix.rows] = x[rows, matrix.columns] matrix^T + bias. Throws where an allocation failed.
void multiply(const DenseMatrix& matrix, int precision, const float* x, int64_t rows, float* out);

// out[rows, down.rows] = the gated MLP of both: see tandem_gated_mlp.
void multiply_gated(const DenseMatrix& gate_up, const DenseMatrix& down, int activation, int precision, const float* x, int64_t rows, float* out);
