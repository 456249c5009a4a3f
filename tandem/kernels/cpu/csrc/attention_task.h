// What one thread computes of attention at a time: some queries of one sequence against one key-value head, or one span of their keys.
#pragma once

#include "attention_source.h"

// Queries first .. last of one sequence and one key-value head; query i is at position i and row query_row + i.
struct Task {
  int64_t sequence, kv_head, first, last, query_row;
};

struct Queries {
  const float* data;  // [rows, heads, size]
  int64_t heads, kv_heads, size;
  float scale;
  int64_t window;  // 0: none
  float cap;       // of the scores; 0: none
  const float* sinks;  // the score of each head's sink, or null
  float* out;
  float* log_sum;  // [rows, heads] or null

  int64_t group() const { return heads / kv_heads; }
  int64_t rows_of(const Task& task) const { return (task.last - task.first) * group(); }
};

// Rows i .. i + MAX_ROWS_AT_ONCE of a task, and which row of `out` each is.
Rows rows_of(const Task& task, const Queries& q, int64_t i, int64_t* at);

void run_task(const Task& task, const Queries& q, Source source);

// The softmax of a task of few rows over one span, to `floats`: `width` numbers for each row, the sums of its values and, in the last LANES, its highest score and
// its total.
void run_piece(const Rows& rows, const Queries& q, const Source& source, int64_t span, int64_t width, float* floats);
// The outputs of a task from those of all its spans, in order. The bits are those of run_task.
void merge_pieces(const Rows& rows, const Queries& q, const int64_t* at, int64_t width, float* floats);
