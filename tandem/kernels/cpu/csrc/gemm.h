// Matrix products whose bits depend on nothing but the numbers.
//
//   out[m, n] = sum over blocks of K_BLOCK absolute k, in order, of (one fused multiply-add chain over the block's k)
//
// whatever M, N, the tiles or the threads are.
#pragma once

#include <cstdint>

constexpr int64_t K_BLOCK = 256;  // numbers
constexpr int64_t PANEL = 64;
constexpr int64_t ROW_CHUNK = 192;  // rows whose K_BLOCK stays in the second-level cache; a multiple of every tile

// An [M, K] matrix by strides in elements, so that a transpose is a view. `k_rows`, where given: k is at the place k_rows[k] of a matrix in which several k
// are the same.
struct Left {
  const float* data;
  int64_t row_stride, k_stride;
  const int64_t* k_rows = nullptr;

  Left at(int64_t m, int64_t k) const { return {data + m * row_stride + (k_rows ? 0 : k * k_stride), row_stride, k_stride, k_rows ? k_rows + k : nullptr}; }
  const float* of_k(int64_t k) const { return data + (k_rows ? k_rows[k] : k) * k_stride; }
  bool is_transposed() const { return k_stride != 1 || k_rows; }
};

// The [K, N] matrix. PACKED: panels of 64 columns, each [K][64], the last as wide as its columns rounded up to 16 (see
// `packed_floats`). ROWS: row-major [K, N]. COLUMNS: row-major [N, K], the layout of a linear layer's weight. CODED: `codes`
// writes it.
enum class Layout { PACKED, ROWS, COLUMNS, CODED };

// A matrix that is stored in another form. `decode` writes rows k0 .. k0 + k of a panel as [k][width].
struct Codes {
  virtual void decode(int64_t panel, int64_t k0, int64_t k, int64_t width, float* to) const = 0;

 protected:
  ~Codes() = default;
};

struct Right {
  const float* data;
  Layout layout;
  int64_t stride;  // elements from row to row; unused when PACKED or CODED
  const Codes* codes = nullptr;
  const int64_t* k_rows = nullptr;  // of ROWS, as in Left
};

struct Product {
  int64_t m, n, k;
  Left left;
  Right right;
  float* out;
  int64_t out_stride;
  const float* bias;  // [n] or null, added last
  bool accumulate;    // out += instead of out =
  bool pairs = false;   // both matrices hold pairs of bf16 numbers (dot.h), which k, the strides and the panels count; right is PACKED
  bool rounds = false;  // results, with their bias, are rounded to bf16
};

int64_t packed_floats(int64_t n, int64_t k);
void pack(const Right& right, int64_t n, int64_t k, float* packed);
// Rows k0 .. k0 + deep of one panel of the packed form, which lie one behind the other there.
void pack_part(const Right& right, int64_t n, int64_t panel, int64_t k0, int64_t deep, float* to);
void multiply(const Product& product);
