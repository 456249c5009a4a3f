// The core that every attention kernel calls: a few query rows against one head's keys and values, in absolute tiles.
//
// Keys come in tiles of 16 positions, transposed [size][16]; values as rows of `size`. Every span of SPAN absolute positions has
// a softmax of its own, and spans are merged in their order (Milakov and Gimelshein, 2018), so it does not matter who computes
// them. In a span a row's scores are fused multiply-add chains over the head size, sixteen keys at once; the row's maximum is
// exact in any order; its sum runs in sixteen lanes over the tiles; its output is one chain over the keys. No key that a row does
// not see takes part in its sums, not even as 0 times something that may not be finite.
#pragma once

#include <algorithm>
#include <limits>

#include "cache.h"
#include "rows.h"

constexpr int MAX_ROWS_AT_ONCE = 8;
constexpr int64_t SPAN = 512;
constexpr int64_t SPAN_TILES = SPAN / BLOCK_TOKENS;
constexpr int64_t MAX_HEAD_SIZE = 576;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Tiles of numbers that are read as fp32: tile t is block table[t], or the (t - first)th in order.
template <typename T>
struct Tiles {
  const T* data;
  int64_t tile_stride;  // in elements
  int64_t row_stride;   // of values
  const int32_t* table;
  int64_t first;

  const T* tile(int64_t t) const { return data + (table ? table[t] : t - first) * tile_stride; }
};
using View = Tiles<float>;

// Tiles that are read next, up to tile `last`; behind it nothing new is fetched.
template <typename T>
struct Ahead {
  Tiles<T> tiles = {};
  int64_t last = 0;

  // From a tile that is read now to the one that is fetched, in bytes. They may be parts of two tensors, whose addresses are then numbers.
  uintptr_t distance(int64_t t, const T* now) const {
    return t < last ? reinterpret_cast<uintptr_t>(tiles.tile(t)) - reinterpret_cast<uintptr_t>(now) : 0;
  }
};

// Up to MAX_ROWS_AT_ONCE query rows; row r sees the keys begin[r] <= position < end[r].
struct Rows {
  int count;
  const float* data[MAX_ROWS_AT_ONCE];
  int64_t begin[MAX_ROWS_AT_ONCE], end[MAX_ROWS_AT_ONCE];

  int64_t last_position() const { return *std::max_element(end, end + count); }
  int64_t first_tile() const { return *std::min_element(begin, begin + count) / BLOCK_TOKENS; }
  int64_t last_tile() const { return (last_position() + BLOCK_TOKENS - 1) / BLOCK_TOKENS; }
  bool sees_tiles(int r, int64_t first, int64_t last) const { return begin[r] < last * BLOCK_TOKENS && first * BLOCK_TOKENS < end[r]; }
};

using SpanBuffer = float[MAX_ROWS_AT_ONCE][SPAN];

// A query's scores from its dot products with keys, and the slope of a score by the dot product.
struct Scaled {
  float scale;

  INLINE_MEMBER V score(V dot) const { return mul(dot, set1(scale)); }
  INLINE_MEMBER V slope(V) const { return set1(scale); }
};

// With a soft cap (Bello et al., 2016).
struct Capped {
  float scale, cap;

  INLINE_MEMBER V score(V dot) const { return soft_cap(mul(dot, set1(scale)), set1(cap)); }
  INLINE_MEMBER V slope(V score) const { return mul(soft_cap_slope(score, set1(cap)), set1(scale)); }
};

// Runs call(scores) with one of the two; `cap` 0: none.
template <typename Call>
INLINE void with_scores(float scale, float cap, Call call) {
  if (cap == 0.0f)
    call(Scaled{scale});
  else
    call(Capped{scale, cap});
}

// How many rows are computed at once, and for so many rows how many tiles of keys and vectors of values: as many sums as the registers hold beside what they
// are computed from, and where rows are few enough of them to keep the multipliers busy.
#if defined(__AVX512F__)
constexpr int MOST_ROWS_OF_SUMS = 8;
constexpr int tiles_at_once(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }
constexpr int vectors_at_once(int rows) { return rows <= 2 ? 4 : 2; }
#else
constexpr int MOST_ROWS_OF_SUMS = 6;
constexpr int tiles_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
constexpr int vectors_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif

// Few rows wait for memory longer than they compute: while they read some tiles, the cache lines of others are fetched, each where
// its counterpart is read. `AHEAD` false: none.
template <typename T>
INLINE void fetch(const T* line) {
  __builtin_prefetch(line, 0, 2);
}

// out[r SPAN + (t - first) 16 ..] = rows[r] . key for the tiles first <= t < last.
// TILES are walked at once, so that few rows still keep the multipliers busy. `ahead`: tiles of the same size and the same numbers.
template <int ROWS, int TILES, bool AHEAD = false, typename T>
INLINE void dot_tiles(const float* const* rows, int64_t size, int64_t first, int64_t last, const Tiles<T>& view, float* out,
                      const Tiles<T>* ahead = nullptr) {
  if constexpr (ROWS > MOST_ROWS_OF_SUMS) {
    constexpr int HALF = ROWS / 2, REST = ROWS - HALF;
    dot_tiles<HALF, tiles_at_once(HALF), AHEAD>(rows, size, first, last, view, out, ahead);
    dot_tiles<REST, tiles_at_once(REST)>(rows + HALF, size, first, last, view, out + HALF * SPAN);
  } else {
    int64_t t = first;
    for (; t + TILES <= last; t += TILES) {
      const T *keys[TILES], *next[TILES];
      V acc[TILES][ROWS];
#pragma GCC unroll 8
      for (int i = 0; i < TILES; ++i) {
        keys[i] = view.tile(t + i);
        if constexpr (AHEAD) next[i] = ahead->tile(t + i);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) acc[i][r] = zero();
      }
      for (int64_t d = 0; d < size; ++d)
#pragma GCC unroll 8
        for (int i = 0; i < TILES; ++i) {
          const V key = widen(keys[i] + d * LANES);
          if constexpr (AHEAD) fetch(next[i] + d * LANES);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) acc[i][r] = fma(set1(rows[r][d]), key, acc[i][r]);
        }
#pragma GCC unroll 8
      for (int i = 0; i < TILES; ++i)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) store(out + r * SPAN + (t + i - first) * LANES, acc[i][r]);
    }
    if constexpr (TILES > 1)
      if (t < last) dot_tiles<ROWS, TILES / 2, AHEAD>(rows, size, t, last, view, out + (t - first) * LANES, ahead);
  }
}

// For the rows r: out[r][d .. d + 16 VECTORS) += sum over the keys from <= key < to, in order, of weights[r][key - first_key]
// values[key][the same columns). `columns` is the width of the last vector; out may be written to full vectors.
template <int ROWS, int VECTORS, bool AHEAD, typename T>
INLINE void add_keys(const float* weights, int64_t first_key, int64_t from, int64_t to, int64_t d, int columns, const Tiles<T>& view, float* out,
                     const Ahead<T>& ahead) {
  V acc[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) acc[r][v] = load(out + r * MAX_HEAD_SIZE + d + v * LANES);
  for (int64_t key = from; key < to;) {
    const int64_t tile = key / BLOCK_TOKENS, next = std::min(to, (tile + 1) * BLOCK_TOKENS);
    const T* values = view.tile(tile) + (key - tile * BLOCK_TOKENS) * view.row_stride + d;
    const uintptr_t distance = AHEAD ? ahead.distance(tile, view.tile(tile)) : 0;
    for (; key < next; ++key, values += view.row_stride) {
      if constexpr (AHEAD)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) fetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(values + v * LANES) + distance));
      V value[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) value[v] = v == VECTORS - 1 ? widen_n(values + v * LANES, columns) : widen(values + v * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const V weight = set1(weights[r * SPAN + key - first_key]);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) acc[r][v] = fma(weight, value[v], acc[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store(out + r * MAX_HEAD_SIZE + d + v * LANES, acc[r][v]);
}

// The same over all of a head's columns.
template <int ROWS, bool AHEAD = false, typename T>
INLINE void add_all_columns(const float* weights, int64_t first_key, int64_t from, int64_t to, int64_t size, const Tiles<T>& view, float* out,
                            const Ahead<T>& ahead = {}) {
  if (from >= to) return;
  if constexpr (ROWS > MOST_ROWS_OF_SUMS) {
    constexpr int HALF = ROWS / 2;
    add_all_columns<HALF, AHEAD>(weights, first_key, from, to, size, view, out, ahead);
    add_all_columns<ROWS - HALF>(weights + HALF * SPAN, first_key, from, to, size, view, out + HALF * MAX_HEAD_SIZE);
  } else {
    int64_t d = 0;
    if constexpr (vectors_at_once(ROWS) >= 4)
      for (; d + 4 * LANES <= size; d += 4 * LANES) add_keys<ROWS, 4, AHEAD>(weights, first_key, from, to, d, LANES, view, out, ahead);
    if constexpr (vectors_at_once(ROWS) >= 2)
      for (; d + 2 * LANES <= size; d += 2 * LANES) add_keys<ROWS, 2, AHEAD>(weights, first_key, from, to, d, LANES, view, out, ahead);
    for (; d < size; d += LANES)
      add_keys<ROWS, 1, AHEAD>(weights, first_key, from, to, d, static_cast<int>(std::min<int64_t>(LANES, size - d)), view, out, ahead);
  }
}

template <typename T>
inline void add_row(const float* weights, int64_t first_key, int64_t from, int64_t to, int64_t size, const Tiles<T>& view, float* out) {
  add_all_columns<1>(weights, first_key, from, to, size, view, out);
}

// out[r] += the values of the tiles first <= t < last by weights[r SPAN ..], for exactly the keys that row r sees: those that all rows see
// at once, those before and behind by themselves.
template <int ROWS, bool AHEAD = false, typename T>
INLINE void add_weighted(const float* weights, const Rows& rows, int64_t first, int64_t last, int64_t size, const Tiles<T>& view,
                         float (*out)[MAX_HEAD_SIZE], const Ahead<T>& ahead = {}) {
  const int64_t begin = first * BLOCK_TOKENS, end = last * BLOCK_TOKENS;
  const int64_t shared_begin = std::clamp(*std::max_element(rows.begin, rows.begin + ROWS), begin, end);
  const int64_t shared_end = std::clamp(*std::min_element(rows.end, rows.end + ROWS), shared_begin, end);
  for (int r = 0; r < ROWS; ++r)
    add_row(weights + r * SPAN, begin, std::max(begin, rows.begin[r]), std::min(shared_begin, rows.end[r]), size, view, out[r]);
  add_all_columns<ROWS, AHEAD>(weights, begin, shared_begin, shared_end, size, view, out[0], ahead);
  for (int r = 0; r < ROWS; ++r)
    add_row(weights + r * SPAN, begin, std::max(shared_end, rows.begin[r]), std::min(end, rows.end[r]), size, view, out[r]);
}

// Runs call<ROWS>() for rows.count.
template <typename Call>
INLINE void for_row_count(int count, Call call) {
  switch (count) {
    case 1: return call(std::integral_constant<int, 1>{});
    case 2: return call(std::integral_constant<int, 2>{});
    case 3: return call(std::integral_constant<int, 3>{});
    case 4: return call(std::integral_constant<int, 4>{});
    case 5: return call(std::integral_constant<int, 5>{});
    case 6: return call(std::integral_constant<int, 6>{});
    case 7: return call(std::integral_constant<int, 7>{});
    default: return call(std::integral_constant<int, 8>{});
  }
}

// Lanes of tile `tile` that row r sees.
INLINE V mask_unseen(V scores, const Rows& rows, int r, int64_t tile, float fill) {
  const int64_t at = tile * BLOCK_TOKENS;
  if (rows.begin[r] <= at && at + BLOCK_TOKENS <= rows.end[r]) return scores;
  const auto lane = [&](int64_t position) { return static_cast<int>(std::clamp<int64_t>(position - at, 0, LANES)); };
  return keep_lanes(scores, lane(rows.begin[r]), std::max(lane(rows.begin[r]), lane(rows.end[r])), fill);
}

// rows[count, size] at `stride` to tiles [size][16] that are `tile_stride` apart; zeros fill the last one.
INLINE void transpose_tiles(const float* rows, int64_t stride, int64_t count, int64_t size, float* out, int64_t tile_stride) {
  for (int64_t first = 0; first < count; first += BLOCK_TOKENS, out += tile_stride) {
    const int64_t high = std::min(BLOCK_TOKENS, count - first);
    for (int64_t d = 0; d < size; d += LANES) {
      const int deep = static_cast<int>(std::min<int64_t>(LANES, size - d));
      V block[LANES];
      for (int r = 0; r < LANES; ++r) block[r] = r < high ? get(rows + (first + r) * stride + d, deep) : zero();
      transpose(block);
      for (int i = 0; i < deep; ++i) store(out + (d + i) * LANES, block[i]);
    }
  }
}

// The inverse: tiles [size][16] to rows.
INLINE void untranspose_tiles(const float* tiles, int64_t tile_stride, int64_t count, int64_t size, float* rows, int64_t stride) {
  for (int64_t first = 0; first < count; first += BLOCK_TOKENS, tiles += tile_stride) {
    const int64_t high = std::min(BLOCK_TOKENS, count - first);
    for (int64_t d = 0; d < size; d += LANES) {
      const int deep = static_cast<int>(std::min<int64_t>(LANES, size - d));
      V block[LANES];
      for (int i = 0; i < LANES; ++i) block[i] = i < deep ? load(tiles + (d + i) * LANES) : zero();
      transpose(block);
      for (int r = 0; r < high; ++r) put(rows + (first + r) * stride + d, block[r], deep);
    }
  }
}
