// Where attention reads one head's keys and values from, and as which numbers.
#pragma once

#include "attention.h"
#include "parallel.h"

constexpr int64_t DECODED_TILES = 4;

// One head's keys and values: fp32 tiles, or stored numbers that are decoded a few tiles at a time, into memory that stays in the
// first-level cache. `kind` as in cache.h; scales null where it needs none. Where `keys` is null, the values are the keys too, as in
// the compressed cache of latent attention.
struct Source {
  int kind;
  const void *keys, *values;
  const float *key_scales, *value_scales;
  int64_t key_tile_stride, value_tile_stride, scale_tile_stride;  // in stored elements
  int64_t value_row_stride;
  const int32_t* table;  // null: tile t is block t - begin
  int64_t begin;
  // Whether each key is read once, so that it comes from memory; then also the keys of the task behind this one, up to tile `next_last`, in the same strides.
  bool is_read_once = false;
  const void* next_keys = nullptr;
  const int32_t* next_table = nullptr;
  int64_t next_last = 0;

  bool is_in_place() const { return kind == 0 && keys; }
  // bf16 numbers are widened as they are loaded, which costs few rows less than decoding them into memory.
  bool is_widened() const { return kind == 1 && keys; }
  template <typename T>
  Tiles<T> stored_keys() const { return {static_cast<const T*>(keys), key_tile_stride, 0, table, begin}; }
  template <typename T>
  Tiles<T> stored_values() const { return {static_cast<const T*>(values), value_tile_stride, value_row_stride, table, begin}; }
  template <typename T>
  Ahead<T> stored_next() const { return {{static_cast<const T*>(next_keys), key_tile_stride, 0, next_table, 0}, next_last}; }
  int64_t tiles_at_once() const { return is_in_place() ? SPAN_TILES : DECODED_TILES; }

  // Calls run(its stored numbers, t, its block) for the tiles first <= t < last of `data`.
  template <typename Run>
  void each_stored_tile(const void* data, int64_t stride, int64_t first, int64_t last, Run run) const {
    for_stored(kind, [&](auto stored) {
      for (int64_t t = first; t < last; ++t) {
        const int64_t block = table ? table[t] : t - begin;
        run(static_cast<const decltype(stored)*>(data) + block * stride, t, block);
      }
    });
  }

  View key_view(int64_t first, int64_t last, int64_t size, float* buffer) const {
    if (!keys) {
      alignas(64) float rows[BLOCK_TOKENS * MAX_HEAD_SIZE];
      for (int64_t t = first; t < last; ++t) {
        const View own = value_view(t, t + 1, size, rows);
        transpose_tiles(own.tile(t), own.row_stride, BLOCK_TOKENS, size, buffer + (t - first) * size * BLOCK_TOKENS, size * BLOCK_TOKENS);
      }
      return {buffer, size * BLOCK_TOKENS, 0, nullptr, first};
    }
    if (kind == 0) return {static_cast<const float*>(keys), key_tile_stride, 0, table, begin};
    each_stored_tile(keys, key_tile_stride, first, last, [&](auto* from, int64_t t, int64_t block) {
      using T = std::remove_cv_t<std::remove_pointer_t<decltype(from)>>;
      float* to = buffer + (t - first) * size * BLOCK_TOKENS;
      const V scale = IS_SCALED<T> ? load(key_scales + block * scale_tile_stride) : zero();
      if constexpr (IS_PAIR<T>) {
        float* behind = to + size / 2 * LANES;
        for (int64_t d = 0; d < size / 2; ++d) {
          store(to + d * LANES, mul(widen_half<false>(from + d * LANES), scale));
          store(behind + d * LANES, mul(widen_half<true>(from + d * LANES), scale));
        }
      } else {
        for (int64_t d = 0; d < size; ++d) {
          const V key = widen(from + d * LANES);
          store(to + d * LANES, IS_SCALED<T> ? mul(key, scale) : key);
        }
      }
    });
    return {buffer, size * BLOCK_TOKENS, 0, nullptr, first};
  }

  View value_view(int64_t first, int64_t last, int64_t size, float* buffer) const {
    if (kind == 0) return {static_cast<const float*>(values), value_tile_stride, value_row_stride, table, begin};
    each_stored_tile(values, value_tile_stride, first, last, [&](auto* from, int64_t t, int64_t block) {
      using T = std::remove_cv_t<std::remove_pointer_t<decltype(from)>>;
      float* to = buffer + (t - first) * size * BLOCK_TOKENS;
      for (int64_t j = 0; j < BLOCK_TOKENS; ++j, from += value_row_stride, to += size) {
        const V scale = IS_SCALED<T> ? set1(value_scales[block * scale_tile_stride + j]) : zero();
        each_code(from, size, [&](int64_t d, int n, V value) { put(to + d, IS_SCALED<T> ? mul(value, scale) : value, n); });
      }
    });
    return {buffer, size * BLOCK_TOKENS, size, nullptr, first};
  }

  // The tiles first <= t < last decoded into `memory`, for more rows than would decode them again and again.
  Source decoded(int64_t first, int64_t last, int64_t size, Scratch& memory) const {
    const int64_t tile = size * BLOCK_TOKENS, all = (last - first) * tile;
    float* floats = memory.floats(2 * all);
    key_view(first, last, size, floats);
    const View own = value_view(first, last, size, floats + all);
    if (own.data != floats + all)
      for (int64_t t = first; t < last; ++t) std::copy_n(own.tile(t), tile, floats + all + (t - first) * tile);
    return {0, floats, floats + all, nullptr, nullptr, tile, tile, 0, size, nullptr, first};
  }
};
