#include "gemm.h"

#include <algorithm>
#include <cstring>

#include "dot.h"
#include "numbers.h"
#include "parallel.h"
#include "team.h"
#include "vec.h"

namespace {

// Rows of an output tile by its width in vectors: as many accumulators as the registers hold.
#if defined(__AVX512F__)
constexpr int MAX_VECTORS = 4;
constexpr int MAX_ROWS[MAX_VECTORS + 1] = {0, 12, 12, 8, 6};
#elif defined(__AVX2__)
constexpr int MAX_VECTORS = 1;
constexpr int MAX_ROWS[MAX_VECTORS + 1] = {0, 6};
#else
constexpr int MAX_VECTORS = 1;
constexpr int MAX_ROWS[MAX_VECTORS + 1] = {0, 4};
#endif
constexpr int MOST_ROWS = 12;
constexpr int64_t LINE = LANES * sizeof(float);  // bytes
constexpr int64_t LINE_FLOATS = LANES;
constexpr int64_t LEFT_TILE = MAX_ROWS[MAX_VECTORS];  // rows of a tile of a packed left matrix
constexpr int64_t LEFT_GROUP = 2 * LEFT_TILE;         // whose rows lie side by side in it: copied in fewer pieces
constexpr int STREAMS = MAX_VECTORS == 4 ? 4 : 1;  // panels that a single row reads at once: their sums fill the registers

constexpr int64_t SLAB_FLOATS = 8 << 20;  // of the right matrix packed at a time
constexpr int64_t SLAB_K = 32 * K_BLOCK;
constexpr int64_t FEW_PANELS = 4;  // whose K_BLOCK stays in the second-level cache beside that of ROW_CHUNK rows

// The arithmetic of fp32: a unit of k is a number.
struct Floats {
  static constexpr int64_t BLOCK = K_BLOCK;
  static constexpr bool IN_REGISTERS = true;
  static INLINE_MEMBER V step(V a, V b, V acc) { return fma(a, b, acc); }
};

struct Tile {
  const float* left;
  int64_t row_stride, k_stride, k;
  const float* right;
  int64_t right_stride;
  float* out;
  int64_t out_stride;
  const float* bias;
  bool add, rounds;
  int columns;        // of the last vector, 1..16
  const char* ahead;   // what is read next: memory answers while the tile is computed
  int64_t ahead_step;  // bytes of it for each k
};

template <int ROWS, int VECTORS, typename Math>
INLINE void chains(const Tile& t, V (&acc)[ROWS][VECTORS]) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) acc[r][v] = zero();
  const float* left = t.left;
  const float* right = t.right;
  const char* ahead = t.ahead;
  const int64_t row_stride = t.row_stride, k_stride = t.k_stride, right_stride = t.right_stride, ahead_step = t.ahead_step;
#pragma GCC unroll 2
  for (int64_t k = 0; k < t.k; ++k) {
    V b[VECTORS];
    __builtin_prefetch(ahead, 0, 2);
    ahead += ahead_step;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) b[v] = load(right + v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const V a = set1(left[r * row_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = Math::step(a, b[v], acc[r][v]);
    }
    left += k_stride;
    right += right_stride;
  }
}

template <int ROWS, int VECTORS, typename Math>
void multiply_tile(const Tile& t) {
  V acc[ROWS][VECTORS];
  if constexpr (Math::IN_REGISTERS) {
    chains<ROWS, VECTORS, Math>(t, acc);
  } else {
    alignas(64) float sums[ROWS * VECTORS * LANES];
    with_flushing([&] { emulated_chains<ROWS, VECTORS>(t.left, t.row_stride, t.k_stride, t.right, t.right_stride, t.k, sums); });
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = load(sums + (r * VECTORS + v) * LANES);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    float* out = t.out + r * t.out_stride;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const int columns = v == VECTORS - 1 ? t.columns : LANES;
      V value = acc[r][v];
      if (columns == LANES) {
        if (t.add) value = add(load(out + v * LANES), value);
        if (t.bias) value = add(value, load(t.bias + v * LANES));
        if (t.rounds) value = round_bf16(value);
        store(out + v * LANES, value);
      } else {
        if (t.add) value = add(load_n(out + v * LANES, columns), value);
        if (t.bias) value = add(value, load_n(t.bias + v * LANES, columns));
        if (t.rounds) value = round_bf16(value);
        store_n(out + v * LANES, value, columns);
      }
    }
  }
}

using TileFunction = void (*)(const Tile&);

template <int VECTORS, typename Math, int... ROWS>
constexpr void fill(TileFunction* table, std::integer_sequence<int, ROWS...>) {
  ((table[ROWS + 1] = multiply_tile<ROWS + 1, VECTORS, Math>), ...);
}

template <typename Math>
struct TileFunctions {
  TileFunction of[MAX_VECTORS + 1][MOST_ROWS + 1] = {};
  constexpr TileFunctions() {
    fill<1, Math>(of[1], std::make_integer_sequence<int, MAX_ROWS[1]>{});
#if defined(__AVX512F__)
    fill<2, Math>(of[2], std::make_integer_sequence<int, MAX_ROWS[2]>{});
    fill<3, Math>(of[3], std::make_integer_sequence<int, MAX_ROWS[3]>{});
    fill<4, Math>(of[4], std::make_integer_sequence<int, MAX_ROWS[4]>{});
#endif
  }
};
template <typename Math>
constexpr TileFunctions<Math> TILES;

int64_t panel_width(int64_t n, int64_t panel) { return std::min(PANEL, round_up(n - panel * PANEL, LANES)); }
int64_t panel_count(int64_t n) { return (n + PANEL - 1) / PANEL; }

// [k, columns] of a row-major matrix to [k][width].
void pack_rows(const float* first, const int64_t* k_rows, int64_t stride, int64_t k, int64_t columns, int64_t width, float* to) {
  for (int64_t i = 0; i < k; ++i, to += width) {
    const float* from = first + (k_rows ? k_rows[i] : i) * stride;
    for (int64_t n = 0; n < width; n += LANES) {
      const int64_t left = columns - n;
      store(to + n, left >= LANES ? load(from + n) : left > 0 ? load_n(from + n, static_cast<int>(left)) : zero());
    }
  }
}

// [columns, k] of a row-major matrix, transposed to [k][width].
void pack_columns(const float* from, int64_t stride, int64_t k, int64_t columns, int64_t width, float* to) {
  for (int64_t n = 0; n < width; n += LANES) {
    const int64_t rows = std::min<int64_t>(LANES, columns - n);
    for (int64_t i = 0; i < k; i += LANES) {
      const int deep = static_cast<int>(std::min<int64_t>(LANES, k - i));
      if (rows == LANES && deep == LANES) {
        transpose_block(from + n * stride + i, stride, to + i * width + n, width);
        continue;
      }
      V block[LANES];
#pragma GCC unroll 16
      for (int r = 0; r < LANES; ++r) block[r] = r >= rows ? zero() : load_n(from + (n + r) * stride + i, deep);
      transpose(block);
      for (int r = 0; r < deep; ++r) store(to + (i + r) * width + n, block[r]);
    }
  }
}

// One panel's rows k0 .. k0 + k.
void pack_panel(const Right& right, int64_t n, int64_t panel, int64_t k0, int64_t k, float* to) {
  const int64_t first = panel * PANEL, columns = std::min(PANEL, n - first), width = panel_width(n, panel);
  if (right.layout == Layout::CODED)
    right.codes->decode(panel, k0, k, width, to);
  else if (right.layout == Layout::ROWS)
    pack_rows(right.data + (right.k_rows ? 0 : k0 * right.stride) + first, right.k_rows ? right.k_rows + k0 : nullptr, right.stride, k, columns, width, to);
  else
    pack_columns(right.data + first * right.stride + k0, right.stride, k, columns, width, to);
}

// [rows, k] of a transposed left matrix to groups of LEFT_GROUP rows, each [k][LEFT_GROUP]. A few k at a time: the rows of a matrix as wide as a page lie in the
// same sets of the first-level cache, which holds no more of them.
void pack_left(const Left& left, int64_t rows, int64_t k, float* to) {
  constexpr int64_t FEW = 8;
  for (int64_t begin = 0; begin < k; begin += FEW) {
    // Rows lie pages apart, where the hardware's prefetch does not follow: the next ones are fetched while these are copied.
    if (left.row_stride == 1)
      for (int64_t i = begin + FEW; i < std::min(k, begin + 2 * FEW); ++i)
        for (int64_t m = 0; m < rows; m += LINE_FLOATS) __builtin_prefetch(left.of_k(i) + m, 0, 3);
    for (int64_t m = 0; m < rows; m += LEFT_GROUP) {
      const int64_t high = std::min(LEFT_GROUP, rows - m), end = std::min(k, begin + FEW);
      float* group = to + m * k + begin * LEFT_GROUP;
      for (int64_t i = begin; i < end; ++i, group += LEFT_GROUP) {
        const float* from = left.of_k(i) + m * left.row_stride;
        if (high == LEFT_GROUP && left.row_stride == 1)
          std::memcpy(group, from, sizeof(float) * LEFT_GROUP);
        else
          for (int64_t r = 0; r < high; ++r) group[r] = from[r * left.row_stride];
      }
    }
  }
}

// Everything of the product in rows m0 .. m1 and panels p0 .. p1, with the right matrix packed.
template <typename Math>
class Block {
  static constexpr int64_t DEEP = Math::BLOCK;

 public:
  Block(const Product& product, const float* packed) : p_(product), packed_(packed) {}

  void run(int64_t m0, int64_t m1, int64_t p0, int64_t p1) const {
    if (Math::IN_REGISTERS && m1 - m0 == 1 && !p_.left.is_transposed() && !p_.accumulate)
      for (; p0 + STREAMS <= p1 && (p0 + STREAMS) * PANEL <= p_.n; p0 += STREAMS) row_of_panels(m0, p0);
    thread_local Scratch memory;
    const bool repack = p_.left.is_transposed();
    for (int64_t c0 = m0; c0 < m1; c0 += ROW_CHUNK) {
      const int64_t c1 = std::min(m1, c0 + ROW_CHUNK);
      if (!repack && (c1 - c0) * p_.k <= ROW_CHUNK * 4 * K_BLOCK) {
        // All of the left rows stay in the second-level cache, so that a panel's outputs are finished while they do.
        for (int64_t panel = p0; panel < p1; ++panel)
          for (int64_t k0 = 0; k0 < p_.k; k0 += DEEP)
            panel_rows(left_at(c0, k0), 0, c0, c1, panel, k0, packed_at(panel, k0));
        continue;
      }
      for (int64_t k0 = 0; k0 < p_.k; k0 += DEEP) {
        Left left = left_at(c0, k0);
        int64_t tile = 0;
        if (repack) {
          tile = LEFT_TILE;
          float* to = memory.floats((ROW_CHUNK + MOST_ROWS) * DEEP);
          pack_left(left, c1 - c0, std::min(DEEP, p_.k - k0), to);
          left = {to, 1, 1};
        }
        for (int64_t panel = p0; panel < p1; ++panel) panel_rows(left, tile, c0, c1, panel, k0, packed_at(panel, k0));
      }
    }
  }

  // All of at most ROW_CHUNK rows of a transposed left matrix, with both matrices packed block by block and used while they are in the second-level cache.
  void run_transposed(int64_t p0, int64_t p1) const {
    thread_local Scratch left_memory, right_memory;
    float *left = left_memory.floats((ROW_CHUNK + MOST_ROWS) * DEEP), *right = right_memory.floats(FEW_PANELS * PANEL * DEEP);
    for (int64_t k0 = 0; k0 < p_.k; k0 += DEEP) {
      const int64_t k = std::min(DEEP, p_.k - k0);
      const auto packed = [&](int64_t panel) { return right + (panel - p0) * PANEL * k; };
      pack_left(left_at(0, k0), p_.m, k, left);
      for (int64_t panel = p0; panel < p1; ++panel) pack_panel(p_.right, p_.n, panel, k0, k, packed(panel));
      for (int64_t panel = p0; panel < p1; ++panel) panel_rows({left, 1, 1}, LEFT_TILE, 0, p_.m, panel, k0, packed(panel));
    }
  }

  // All rows of one panel, with the right matrix packed block by block and used while it is in the cache.
  void run_unpacked(int64_t panel) const {
    thread_local Scratch memory;
    float* to = memory.floats(PANEL * DEEP);
    for (int64_t k0 = 0; k0 < p_.k; k0 += DEEP) {
      pack_panel(p_.right, p_.n, panel, k0, std::min(DEEP, p_.k - k0), to);
      panel_rows(left_at(0, k0), 0, 0, p_.m, panel, k0, to);
    }
  }

 private:
  const Product& p_;
  const float* packed_;

  Left left_at(int64_t m, int64_t k) const { return p_.left.at(m, k); }

  // One row of STREAMS whole panels at once: a single row waits for memory, and memory gives most to several streams.
  void row_of_panels(int64_t m, int64_t panel) const {
    constexpr int VECTORS = PANEL / LANES;
    const float *left = p_.left.data + m * p_.left.row_stride, *right = packed_at(panel, 0);
    float* out = p_.out + m * p_.out_stride + panel * PANEL;
    for (int64_t k0 = 0; k0 < p_.k; k0 += DEEP) {
      V acc[STREAMS][VECTORS];
#pragma GCC unroll 4
      for (int s = 0; s < STREAMS; ++s)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) acc[s][v] = zero();
      const int64_t end = std::min(p_.k, k0 + DEEP);
      for (int64_t k = k0; k < end; ++k, right += PANEL) {
        const V a = set1(left[k]);
#pragma GCC unroll 4
        for (int s = 0; s < STREAMS; ++s)
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v) acc[s][v] = Math::step(a, load(right + s * PANEL * p_.k + v * LANES), acc[s][v]);
      }
#pragma GCC unroll 4
      for (int s = 0; s < STREAMS; ++s)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          float* to = out + s * PANEL + v * LANES;
          V value = k0 > 0 ? add(load(to), acc[s][v]) : acc[s][v];
          if (p_.bias && end == p_.k) value = add(value, load(p_.bias + (panel + s) * PANEL + v * LANES));
          if (p_.rounds && end == p_.k) value = round_bf16(value);
          store(to, value);
        }
    }
  }

  const float* packed_at(int64_t panel, int64_t k0) const { return packed_ + panel * PANEL * p_.k + k0 * panel_width(p_.n, panel); }

  // Rows m0 .. m1 of one panel and one block of k, whose [k][width] is `right`. `left` starts at (m0, k0), or is packed in
  // tiles of `tile` rows.
  void panel_rows(const Left& left, int64_t tile, int64_t m0, int64_t m1, int64_t panel, int64_t k0, const float* right) const {
    const int64_t k = std::min(DEEP, p_.k - k0), width = panel_width(p_.n, panel), first = panel * PANEL;
    const bool last = k0 + k == p_.k;
    for (int64_t n = 0; n < width;) {
      const int vectors = static_cast<int>(std::min<int64_t>(MAX_VECTORS, (width - n) / LANES));
      const int64_t most = tile ? tile : MAX_ROWS[vectors];
      Tile t;
      t.k = k;
      t.right = right + n;
      t.right_stride = width;
      t.out_stride = p_.out_stride;
      t.bias = last && p_.bias ? p_.bias + first + n : nullptr;
      t.add = p_.accumulate || k0 > 0;
      t.rounds = p_.rounds && last;
      t.columns = static_cast<int>(std::min<int64_t>(LANES, p_.n - first - n - (vectors - 1) * LANES));
      const int64_t count = (m1 - m0 + most - 1) / most;
      // Packed blocks lie one behind the other, so each tile fetches its share of those columns of the next block.
      t.ahead_step = std::min<int64_t>(LINE, (vectors * LINE + count - 1) / count);
      t.ahead = reinterpret_cast<const char*>(right + k * (width + n));
      for (int64_t i = 0; i < count; ++i, t.ahead += k * t.ahead_step) {
        // Tiles of about the same height: one of few rows waits for its own sums.
        const int64_t m = tile ? m0 + i * tile : m0 + (m1 - m0) * i / count, end = tile ? std::min(m1, m + tile) : m0 + (m1 - m0) * (i + 1) / count;
        const int64_t in_group = (m - m0) % LEFT_GROUP;
        t.left = left.data + (tile ? (m - m0 - in_group) * k + in_group : (m - m0) * left.row_stride);
        t.row_stride = tile ? 1 : left.row_stride;
        t.k_stride = tile ? LEFT_GROUP : left.k_stride;
        t.out = p_.out + m * p_.out_stride + first + n;
        TILES<Math>.of[vectors][end - m](t);
      }
      n += vectors * LANES;
    }
  }
};

template <typename Math>
void multiply_packed(const Product& p, const float* packed) {
  const Block<Math> block(p, packed);
  const int64_t panels = panel_count(p.n);
  const int threads = sharing_threads_for(p.m * p.n * p.k);
  if (threads == 1) return block.run(0, p.m, 0, panels);
  const int64_t chunks = (p.m + ROW_CHUNK - 1) / ROW_CHUNK;
  // Enough tasks to share the work out evenly, and no more: a task reads its whole part of both matrices.
  const int64_t groups = std::min(panels, std::max<int64_t>(1, (4 * threads + chunks - 1) / chunks));
  share(threads, chunks * groups, 1, [&](int64_t task) {
    const int64_t chunk = task / groups, group = task % groups;
    block.run(chunk * ROW_CHUNK, std::min(p.m, (chunk + 1) * ROW_CHUNK), panels * group / groups, panels * (group + 1) / groups);
  });
}

// Decoded again for every CODED_ROWS rows, in the order of their columns: the outputs of so many rows and one panel stay in the cache.
constexpr int64_t CODED_ROWS = 4 * ROW_CHUNK;

// At most ROW_CHUNK rows: packing the whole right matrix first would cost much beside the product.
void multiply_few_rows(const Product& p) {
  const Block<Floats> block(p, nullptr);
  const int64_t panels = panel_count(p.n);
  const int threads = threads_for(p.m * p.n * p.k + p.n * p.k);
  // A gradient of a weight, whose left rows would be read from a cache line each: several panels share their packed form.
  const bool transposed = p.left.is_transposed();
  const int64_t groups = transposed ? std::max<int64_t>((panels + FEW_PANELS - 1) / FEW_PANELS, threads) : panels;
  Failure failure;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t group = 0; group < groups; ++group)
    failure.guard([&] {
      if (transposed)
        block.run_transposed(panels * group / groups, panels * (group + 1) / groups);
      else
        block.run_unpacked(group);
    });
  failure.raise();
}

}  // namespace

int64_t packed_floats(int64_t n, int64_t k) { return round_up(n, LANES) * k; }

void pack(const Right& right, int64_t n, int64_t k, float* packed) {
  const int64_t panels = panel_count(n);
  const int threads = threads_for(n * k);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t panel = 0; panel < panels; ++panel) pack_panel(right, n, panel, 0, k, packed + panel * PANEL * k);
}

void pack_part(const Right& right, int64_t n, int64_t panel, int64_t k0, int64_t deep, float* to) { pack_panel(right, n, panel, k0, deep, to); }

void multiply(const Product& p) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) {
    for (int64_t m = 0; m < p.m; ++m)
      for (int64_t n = 0; n < p.n; ++n) {
        float* out = p.out + m * p.out_stride + n;
        *out = (p.accumulate ? *out : 0.0f) + (p.bias ? p.bias[n] : 0.0f);
        if (p.rounds) *out = from_bits(rounded_bits(*out));
      }
    return;
  }
  if (p.pairs) return multiply_packed<Pairs>(p, p.right.data);
  if (p.right.layout == Layout::PACKED) return multiply_packed<Floats>(p, p.right.data);
  if (p.right.layout == Layout::CODED) {
    for (int64_t m = 0; m < p.m; m += CODED_ROWS) {
      Product part = p;
      part.m = std::min(CODED_ROWS, p.m - m);
      part.left.data += m * p.left.row_stride;
      part.out += m * p.out_stride;
      multiply_few_rows(part);
    }
    return;
  }
  if (p.m <= ROW_CHUNK && panel_count(p.n) >= omp_get_max_threads()) return multiply_few_rows(p);
  thread_local Scratch memory;
  const int64_t deep = std::min(p.k, SLAB_K);
  const int64_t wide = std::min(p.n, std::max(PANEL, SLAB_FLOATS / deep / PANEL * PANEL));
  for (int64_t n = 0; n < p.n; n += wide)
    for (int64_t k = 0; k < p.k; k += deep) {
      Product part = p;
      part.n = std::min(wide, p.n - n);
      part.k = std::min(deep, p.k - k);
      part.left = p.left.at(0, k);
      part.out += n;
      part.bias = p.bias && k + part.k == p.k ? p.bias + n : nullptr;
      part.accumulate = p.accumulate || k > 0;
      const bool rows = p.right.layout == Layout::ROWS;
      const int64_t* k_rows = p.right.k_rows ? p.right.k_rows + k : nullptr;
      const float* first = p.right.data + (k_rows ? n : rows ? k * p.right.stride + n : n * p.right.stride + k);
      const Right slab = {first, p.right.layout, p.right.stride, nullptr, k_rows};
      float* packed = memory.floats(packed_floats(part.n, part.k));
      pack(slab, part.n, part.k, packed);
      multiply_packed<Floats>(part, packed);
    }
}
