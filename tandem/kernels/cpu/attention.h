// The core that every attention kernel calls: a few query rows against one head's keys and values, in absolute tiles.
//
// Keys come in tiles of 16 positions, transposed [size][16]; values as rows of `size`. Spans of SPAN absolute positions are
// taken in order. In a span a row's scores are fused multiply-add chains over the head size, sixteen keys at once; the row's
// maximum is exact in any order; its sum runs in sixteen lanes over the tiles; its output is one chain over the keys. Between
// spans the sums are rescaled to the new maximum (the online softmax of Milakov and Gimelshein, 2018). A row that sees nothing
// of a span is left as it is, bit for bit, so rows of unlike reach can share a walk.
#pragma once

#include <algorithm>
#include <limits>

#include "cache.h"
#include "rows.h"

constexpr int MAX_ROWS_AT_ONCE = 8;
constexpr int64_t SPAN = 512;
constexpr int64_t SPAN_TILES = SPAN / BLOCK_TOKENS;
constexpr int64_t MAX_HEAD_SIZE = 512;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// One head's keys and values in tiles: those of the cache through a block table, or consecutive ones.
struct Tiles {
  const float *keys, *values;
  int64_t key_tile_stride, value_tile_stride;  // elements from tile to tile
  int64_t value_row_stride;
  const int32_t* table;  // null: tile t is block t

  int64_t block(int64_t tile) const { return table ? table[tile] : tile; }
  const float* key_tile(int64_t tile) const { return keys + block(tile) * key_tile_stride; }
  const float* value_tile(int64_t tile) const { return values + block(tile) * value_tile_stride; }
};

// Up to MAX_ROWS_AT_ONCE query rows; row r sees the keys begin[r] <= position < end[r].
struct Rows {
  int count;
  const float* data[MAX_ROWS_AT_ONCE];
  int64_t begin[MAX_ROWS_AT_ONCE], end[MAX_ROWS_AT_ONCE];

  int64_t first_tile() const { return *std::min_element(begin, begin + count) / BLOCK_TOKENS; }
  int64_t last_position() const { return *std::max_element(end, end + count); }
};

using SpanBuffer = float[MAX_ROWS_AT_ONCE][SPAN];

// out[r SPAN + (t - first) 16 ..] = rows[r] . key for the tiles first <= t < last; `pick` names a tile's transposed [size][16].
// TILES are walked at once, so that few rows still keep the multipliers busy.
template <int ROWS, int TILES, typename Pick>
INLINE void dot_tiles(const float* const* rows, int64_t size, int64_t first, int64_t last, Pick pick, float* out) {
  int64_t t = first;
  for (; t + TILES <= last; t += TILES) {
    const float* keys[TILES];
    V acc[TILES][ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < TILES; ++i) {
      keys[i] = pick(t + i);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) acc[i][r] = zero();
    }
    for (int64_t d = 0; d < size; ++d)
#pragma GCC unroll 8
      for (int i = 0; i < TILES; ++i) {
        const V key = load(keys[i] + d * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) acc[i][r] = fma(set1(rows[r][d]), key, acc[i][r]);
      }
#pragma GCC unroll 8
    for (int i = 0; i < TILES; ++i)
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) store(out + r * SPAN + (t + i - first) * LANES, acc[i][r]);
  }
  if constexpr (TILES > 1)
    if (t < last) dot_tiles<ROWS, TILES / 2>(rows, size, t, last, pick, out + (t - first) * LANES);
}

// out[r][0..16 VECTORS) += sum over the keys of the tiles, in order, of weights[r][key] values[key][0..16 VECTORS).
// `columns` is the width of the last vector; out rows are `out_stride` apart and may be written to full vectors.
template <int ROWS, int VECTORS, typename Pick>
INLINE void add_weighted(const SpanBuffer weights, int64_t first, int64_t last_key, int64_t row_stride, int columns, Pick pick, float* out,
                         int64_t out_stride) {
  V acc[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) acc[r][v] = load(out + r * out_stride + v * LANES);
  for (int64_t t = first; t * BLOCK_TOKENS < last_key; ++t) {
    const float* values = pick(t);
    const int64_t keys = std::min(BLOCK_TOKENS, last_key - t * BLOCK_TOKENS), at = (t - first) * BLOCK_TOKENS;
    for (int64_t j = 0; j < keys; ++j, values += row_stride) {
      V value[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) value[v] = v == VECTORS - 1 ? get(values + v * LANES, columns) : load(values + v * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const V weight = set1(weights[r][at + j]);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) acc[r][v] = fma(weight, value[v], acc[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store(out + r * out_stride + v * LANES, acc[r][v]);
}

// The same over all of a head's columns.
template <int ROWS, typename Pick>
INLINE void add_weighted_rows(const SpanBuffer weights, int64_t first, int64_t last_key, int64_t row_stride, int64_t size, Pick pick,
                              float* out, int64_t out_stride) {
  constexpr int WIDE = ROWS <= 2 ? 4 : 2;
  int64_t d = 0;
  const auto from = [&](int64_t t) { return pick(t) + d; };
  for (; d + WIDE * LANES <= size; d += WIDE * LANES)
    add_weighted<ROWS, WIDE>(weights, first, last_key, row_stride, LANES, from, out + d, out_stride);
  for (; d < size; d += LANES)
    add_weighted<ROWS, 1>(weights, first, last_key, row_stride, static_cast<int>(std::min<int64_t>(LANES, size - d)), from, out + d,
                          out_stride);
}

constexpr int tiles_at_once(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }

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
