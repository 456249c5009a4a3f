// Causal attention forward: over the paged cache and over packed sequences, both divided into tasks of one kind.
#include "attention_task.h"

#include <vector>

#include "calls.h"
#include "direct.h"
#include "parallel.h"
#include "team.h"

namespace {

constexpr int64_t QUERIES_PER_TASK = 64;

// One span of a task of few rows, for more threads than there are tasks.
struct Piece {
  int64_t task, span;
};

// A long context that few tasks share, span by span. The bits are those of run_task.
template <typename SourceOf>
void run_in_pieces(const std::vector<Task>& tasks, const Queries& q, int threads, SourceOf source_of) {
  const int64_t width = (q.size + LANES - 1) / LANES * LANES + LANES;
  std::vector<Piece> pieces;
  std::vector<int64_t> offsets;
  int64_t floats = 0;
  for (size_t t = 0; t < tasks.size(); ++t) {
    int64_t at[MAX_ROWS_AT_ONCE];
    const Rows rows = rows_of(tasks[t], q, 0, at);
    for (int64_t span = rows.first_tile() / SPAN_TILES; span * SPAN_TILES < rows.last_tile(); ++span) {
      pieces.push_back({static_cast<int64_t>(t), span});
      offsets.push_back(floats);
      floats += rows.count * width;
    }
  }
  thread_local Scratch memory;
  float* states = memory.floats(floats);
  const int64_t count = static_cast<int64_t>(pieces.size());
  share(threads, count, 1, [&](int64_t i) {
    const Task& task = tasks[static_cast<size_t>(pieces[static_cast<size_t>(i)].task)];
    int64_t at[MAX_ROWS_AT_ONCE];
    Source source = source_of(task);
    source.is_read_once = source.table;
    run_piece(rows_of(task, q, 0, at), q, source, pieces[static_cast<size_t>(i)].span, width, states + offsets[static_cast<size_t>(i)]);
  });
  for (int64_t i = 0; i < count; ++i) {
    const int64_t owner = pieces[static_cast<size_t>(i)].task;
    if (i > 0 && pieces[static_cast<size_t>(i) - 1].task == owner) continue;
    int64_t at[MAX_ROWS_AT_ONCE];
    const Rows rows = rows_of(tasks[static_cast<size_t>(owner)], q, 0, at);
    merge_pieces(rows, q, at, width, states + offsets[static_cast<size_t>(i)]);
  }
}

// Longest first would be best; in order of the batch is close, and simple.
template <typename SourceOf>
void run_tasks(const std::vector<Task>& tasks, const Queries& q, int64_t work, SourceOf source_of) {
  const int threads = sharing_threads_for(work);
  const int64_t count = static_cast<int64_t>(tasks.size()), at_once = std::max<int64_t>(1, count / (threads * 16));
  const bool few_rows = std::all_of(tasks.begin(), tasks.end(), [&](const Task& task) { return q.rows_of(task) <= MAX_ROWS_AT_ONCE; });
  if (threads > 1 && count < 4 * threads && few_rows) return run_in_pieces(tasks, q, threads, source_of);
  share(threads, count, at_once, [&](int64_t i) {
    Source source = source_of(tasks[static_cast<size_t>(i)]);
    source.is_read_once = few_rows && source.table;
    if (source.is_read_once && i + 1 < count) {
      const Task& behind = tasks[static_cast<size_t>(i) + 1];
      const Source next = source_of(behind);
      source.next_keys = next.keys;
      source.next_table = next.table;
      source.next_last = (behind.last + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    }
    run_task(tasks[static_cast<size_t>(i)], q, source);
  });
}

int64_t add_tasks(std::vector<Task>& tasks, int64_t sequence, int64_t kv_heads, int64_t first, int64_t last, int64_t query_row) {
  for (int64_t at = first; at < last; at += QUERIES_PER_TASK)
    for (int64_t head = 0; head < kv_heads; ++head)
      tasks.push_back({sequence, head, at, std::min(last, at + QUERIES_PER_TASK), query_row});
  return (last - first) * last;
}

}  // namespace

extern "C" {

// keys and values as `kind` says (cache.h), keys null where the values are the keys too, scales null where it needs none; cap of the scores, 0 for none;
// sinks[heads] or null. Returns 0, or 1 where a head is too large, 2 where a sequence's bounds do not fit, 3 where a block lies outside the cache.
int tandem_paged_attention(const float* q, int kind, const void* keys, const void* values, const float* key_scales,
                           const float* value_scales, int64_t tokens, int64_t blocks, int64_t heads, int64_t kv_heads, int64_t size,
                           const int32_t* query_start, const int32_t* context_lens, const int32_t* block_tables, int64_t sequences,
                           int64_t table_width, float scale, int64_t window, float cap, const float* sinks, float* out) {
  return or_out_of_memory([&] {
    if (size > MAX_HEAD_SIZE) return 1;
    std::vector<Task> tasks;
    int64_t work = 0;
    for (int64_t s = 0; s < sequences; ++s) {
      const int64_t count = query_start[s + 1] - query_start[s], last = context_lens[s], first = last - count;
      if (count < 0 || first < 0 || query_start[s] < 0 || query_start[s + 1] > tokens || last > table_width * BLOCK_TOKENS) return 2;
      if (count == 0) continue;
      const int64_t seen = window ? std::max<int64_t>(0, first - window + 1) : 0;
      for (int64_t t = seen / BLOCK_TOKENS; t * BLOCK_TOKENS < last; ++t) {
        const int32_t block = block_tables[s * table_width + t];
        if (block < 0 || block >= blocks) return 3;
      }
      work += add_tasks(tasks, s, kv_heads, first, last, query_start[s] - first);
    }
    const int64_t stored = for_stored(kind, [&](auto number) { return stored_size<decltype(number)>(size); }), tile = BLOCK_TOKENS * stored;
    const int64_t bytes = kind == 0 ? 4 : kind == 1 ? 2 : 1;
    run_tasks(tasks, {q, heads, kv_heads, size, scale, window, cap, sinks, out, nullptr}, work * heads * size, [&](const Task& task) -> Source {
      const int64_t scales = task.kv_head * BLOCK_TOKENS;
      return {kind,
              keys ? static_cast<const char*>(keys) + task.kv_head * tile * bytes : nullptr,
              static_cast<const char*>(values) + task.kv_head * tile * bytes,
              key_scales ? key_scales + scales : nullptr,
              value_scales ? value_scales + scales : nullptr,
              kv_heads * tile,
              kv_heads * tile,
              kv_heads * BLOCK_TOKENS,
              stored,
              block_tables + task.sequence * table_width,
              0};
    });
    return 0;
  });
}

// bounds[sequences + 1] rise from 0 to tokens, the rows of k and v. query_start[sequences + 1] rise from 0 to queries, the rows of q: a
// sequence's queries are its last positions. Returns 0, 1 where a head is too large, 2 where the bounds do not fit.
int tandem_packed_attention(const float* q, const float* k, const float* v, const int32_t* bounds, const int32_t* query_start,
                            int64_t sequences, int64_t tokens, int64_t queries, int64_t heads, int64_t kv_heads, int64_t size, float scale,
                            int64_t window, float cap, const float* sinks, float* out, float* log_sum) {
  return or_out_of_memory([&] {
    if (size > MAX_HEAD_SIZE) return 1;
    if (bounds[0] != 0 || bounds[sequences] != tokens || query_start[0] != 0 || query_start[sequences] != queries) return 2;
    std::vector<Task> tasks;
    std::vector<int64_t> first_tile(static_cast<size_t>(sequences) + 1, 0);
    int64_t work = 0;
    for (int64_t s = 0; s < sequences; ++s) {
      const int64_t length = bounds[s + 1] - bounds[s], first = length - (query_start[s + 1] - query_start[s]);
      if (length < 0 || bounds[s + 1] > tokens || first < 0 || first > length || query_start[s + 1] > queries) return 2;
      first_tile[static_cast<size_t>(s) + 1] = first_tile[static_cast<size_t>(s)] + (length + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
      work += add_tasks(tasks, s, kv_heads, first, length, query_start[s] - first);
    }
    thread_local Scratch memory;
    const int64_t tile = BLOCK_TOKENS * size, row = kv_heads * size;
    float* transposed = memory.floats(first_tile.back() * kv_heads * tile);
    const int threads = threads_for(tokens * row * 4);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t s = 0; s < sequences; ++s)
      for (int64_t head = 0; head < kv_heads && query_start[s] < query_start[s + 1]; ++head)
        transpose_tiles(k + bounds[s] * row + head * size, row, bounds[s + 1] - bounds[s], size,
                        transposed + (first_tile[static_cast<size_t>(s)] * kv_heads + head) * tile, kv_heads * tile);
    run_tasks(tasks, {q, heads, kv_heads, size, scale, window, cap, sinks, out, log_sum}, work * heads * size, [&](const Task& task) -> Source {
      const int64_t begin = bounds[task.sequence];
      return {0,
              transposed + (first_tile[static_cast<size_t>(task.sequence)] * kv_heads + task.kv_head) * tile,
              v + begin * row + task.kv_head * size,
              nullptr,
              nullptr,
              kv_heads * tile,
              BLOCK_TOKENS * row,
              0,
              row,
              nullptr,
              0};
    });
    return 0;
  });
}

}  // extern "C"

DIRECT(paged_attention);
