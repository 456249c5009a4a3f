// An engine's flat batch, and its division into parts that need nothing of each other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cache.h"
#include "parallel.h"

struct FlatBatch {
  int64_t tokens;
  const int64_t *positions, *slots;
  const int32_t *query_start, *context_lens, *block_tables;
  int64_t sequences, table_width;
  const int64_t* wanted;  // the rows that the last layer computes after its attention
  int64_t wanted_count;   // below 0: all
};

// The sequences from `first` up to `end` as a batch of their own. `places`: where each of its wanted rows is among those of the whole batch.
class BatchPart {
 public:
  BatchPart(const FlatBatch& whole, int64_t first, int64_t end) : first_row(whole.query_start[first]), batch(whole) {
    starts_.assign(whole.query_start + first, whole.query_start + end + 1);
    for (int32_t& start : starts_) start -= static_cast<int32_t>(first_row);
    const int64_t tokens = starts_.back();
    for (int64_t i = 0; i < whole.wanted_count; ++i)
      if (const int64_t row = whole.wanted[i] - first_row; row >= 0 && row < tokens) {
        wanted_.push_back(row);
        places.push_back(i);
      }
    batch.tokens = tokens;
    batch.positions += first_row;
    batch.slots += first_row;
    batch.query_start = starts_.data();
    batch.context_lens += first;
    batch.block_tables += first * whole.table_width;
    batch.sequences = end - first;
    batch.wanted = wanted_.data();
    if (whole.wanted_count >= 0) batch.wanted_count = static_cast<int64_t>(wanted_.size());
  }
  BatchPart(const BatchPart&) = delete;
  BatchPart& operator=(const BatchPart&) = delete;

  const int64_t first_row;
  FlatBatch batch;
  std::vector<int64_t> places;

 private:
  std::vector<int32_t> starts_;
  std::vector<int64_t> wanted_;
};

// Whether sequences follow each other in `batch`, and wanted rows ascend, so that those of some sequences are neighbours and no more than their tokens.
inline bool is_ordered(const FlatBatch& batch) {
  const int32_t *start = batch.query_start, *end = start + batch.sequences;
  const int64_t* last = batch.wanted + std::max<int64_t>(batch.wanted_count, 0);
  return *start == 0 && *end == batch.tokens && std::is_sorted(start, end + 1) &&
         std::adjacent_find(batch.wanted, last, [](int64_t row, int64_t next) { return row >= next; }) == last;
}

// Whether no sequence reads a block that one of another part writes in this step, as one does whose prompt begins with a block of a prompt beside it.
// `bounds`: of the parts, in sequences. False for a batch that is not valid, too.
inline bool are_independent(const FlatBatch& batch, int64_t blocks, const std::vector<int64_t>& bounds) {
  thread_local std::vector<int8_t> writer;
  writer.assign(static_cast<size_t>(blocks), -1);
  const int64_t parts = static_cast<int64_t>(bounds.size()) - 1;
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t row = batch.query_start[bounds[static_cast<size_t>(part)]]; row < batch.query_start[bounds[static_cast<size_t>(part) + 1]]; ++row) {
      const int64_t slot = batch.slots[row];
      if (slot < 0 || slot >= blocks * BLOCK_TOKENS) return false;
      writer[static_cast<size_t>(slot / BLOCK_TOKENS)] = static_cast<int8_t>(part);
    }
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t s = bounds[static_cast<size_t>(part)]; s < bounds[static_cast<size_t>(part) + 1]; ++s) {
      const int64_t held = (batch.context_lens[s] + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
      if (held > batch.table_width) return false;
      for (int64_t i = 0; i < held; ++i) {
        const int64_t block = batch.block_tables[s * batch.table_width + i];
        if (block >= blocks) return false;
        if (block >= 0 && writer[static_cast<size_t>(block)] >= 0 && writer[static_cast<size_t>(block)] != part) return false;
      }
    }
  return true;
}

constexpr int64_t MOST_PARTS = 127;

// Divides the sequences into at most `parts` of about the same work; returns the bounds. `row_work`, `key_work`: multiply-adds of a row, and of a row and a
// key.
inline std::vector<int64_t> bounds_of_parts(const FlatBatch& batch, int64_t parts, int64_t row_work, int64_t key_work) {
  const auto work = [&](int64_t s) { return (batch.query_start[s + 1] - batch.query_start[s]) * (row_work + key_work * batch.context_lens[s]); };
  int64_t total = 0, done = 0;
  for (int64_t s = 0; s < batch.sequences; ++s) total += work(s);
  std::vector<int64_t> bounds = {0};
  for (int64_t s = 0; s < batch.sequences && static_cast<int64_t>(bounds.size()) < parts; ++s) {
    // In the part in whose middle it is.
    if (done + work(s) / 2 >= total * static_cast<int64_t>(bounds.size()) / parts && s > bounds.back()) bounds.push_back(s);
    done += work(s);
  }
  bounds.push_back(batch.sequences);
  return bounds;
}
