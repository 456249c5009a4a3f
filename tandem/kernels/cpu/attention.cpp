// Causal attention forward: over the paged cache and over packed sequences, both through one core.
#include "attention.h"

#include <vector>

#include "direct.h"
#include "parallel.h"

namespace {

constexpr int64_t QUERIES_PER_TASK = 64;

// out[r] = softmax(scale rows[r] . keys) values; log_sum[r] (where asked for) the logarithm of the softmax's denominator.
template <int ROWS>
void attend(const Rows& rows, const Tiles& tiles, int64_t size, float scale, float* const* out, float* const* log_sum) {
  alignas(64) SpanBuffer scores;
  alignas(64) float sums[ROWS][MAX_HEAD_SIZE];
  float highest[ROWS];
  V total[ROWS];
  const int64_t padded = (size + LANES - 1) / LANES * LANES;
  for (int r = 0; r < ROWS; ++r) {
    highest[r] = NEVER;
    total[r] = zero();
    std::fill_n(sums[r], padded, 0.0f);
  }
  const int64_t first_tile = rows.first_tile(), last_position = rows.last_position();
  const int64_t last_tile = (last_position + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  const V factor = set1(scale);
  for (int64_t first = first_tile; first < last_tile;) {
    const int64_t last = std::min(last_tile, (first / SPAN_TILES + 1) * SPAN_TILES);
    dot_tiles<ROWS, tiles_at_once(ROWS)>(rows.data, size, first, last, [&](int64_t t) { return tiles.key_tile(t); }, scores[0]);
    for (int r = 0; r < ROWS; ++r) {
      V most = set1(NEVER);
      for (int64_t t = first; t < last; ++t) {
        float* at = scores[r] + (t - first) * LANES;
        const V score = mask_unseen(mul(load(at), factor), rows, r, t, NEVER);
        most = max(most, score);
        store(at, score);
      }
      const float now = std::max(highest[r], max_lane(most));
      if (now == NEVER) {
        std::fill_n(scores[r], (last - first) * LANES, 0.0f);
        continue;
      }
      const V shift = set1(now);
      if (now != highest[r]) {
        const V shrink = exp(sub(set1(highest[r]), shift));
        total[r] = mul(total[r], shrink);
        for (int64_t d = 0; d < padded; d += LANES) store(sums[r] + d, mul(load(sums[r] + d), shrink));
        highest[r] = now;
      }
      for (int64_t t = first; t < last; ++t) {
        float* at = scores[r] + (t - first) * LANES;
        const V weight = exp(sub(load(at), shift));
        total[r] = add(total[r], weight);
        store(at, weight);
      }
    }
    add_weighted_rows<ROWS>(scores, first, std::min(last_position, last * BLOCK_TOKENS), tiles.value_row_stride, size,
                            [&](int64_t t) { return tiles.value_tile(t); }, sums[0], MAX_HEAD_SIZE);
    first = last;
  }
  for (int r = 0; r < ROWS; ++r) {
    const float denominator = sum(total[r]);
    const V divisor = set1(denominator);
    each_vector(size, [&](int64_t d, int n) { put(out[r] + d, div(load(sums[r] + d), divisor), n); });
    if (log_sum) *log_sum[r] = highest[r] + std::log(denominator);
  }
}

// Queries first .. last of one sequence and one key-value head; query i stands at position i and row query_row + i.
struct Task {
  int64_t sequence, kv_head, first, last, query_row;
};

struct Queries {
  const float* data;  // [rows, heads, size]
  int64_t heads, kv_heads, size;
  float scale;
  int64_t window;  // 0: none
  float* out;
  float* log_sum;  // [rows, heads] or null
};

void run_task(const Task& task, const Queries& q, const Tiles& tiles) {
  const int64_t group = q.heads / q.kv_heads, count = (task.last - task.first) * group;
  for (int64_t i = 0; i < count; i += MAX_ROWS_AT_ONCE) {
    Rows rows;
    float *out[MAX_ROWS_AT_ONCE], *log_sum[MAX_ROWS_AT_ONCE];
    rows.count = static_cast<int>(std::min<int64_t>(MAX_ROWS_AT_ONCE, count - i));
    for (int r = 0; r < rows.count; ++r) {
      const int64_t position = task.first + (i + r) / group;
      const int64_t at = (task.query_row + position) * q.heads + task.kv_head * group + (i + r) % group;
      rows.data[r] = q.data + at * q.size;
      rows.begin[r] = q.window ? std::max<int64_t>(0, position - q.window + 1) : 0;
      rows.end[r] = position + 1;
      out[r] = q.out + at * q.size;
      log_sum[r] = q.log_sum ? q.log_sum + at : nullptr;
    }
    for_row_count(rows.count, [&](auto n) { attend<decltype(n)::value>(rows, tiles, q.size, q.scale, out, q.log_sum ? log_sum : nullptr); });
  }
}

// Longest first would be best; in order of the batch is close, and simple.
template <typename TilesOf>
void run_tasks(const std::vector<Task>& tasks, const Queries& q, int64_t work, TilesOf tiles_of) {
  const int threads = threads_for(work);
  const int64_t count = static_cast<int64_t>(tasks.size()), at_once = std::max<int64_t>(1, count / (threads * 16));
#pragma omp parallel for schedule(dynamic, at_once) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count; ++i) run_task(tasks[static_cast<size_t>(i)], q, tiles_of(tasks[static_cast<size_t>(i)]));
}

int64_t add_tasks(std::vector<Task>& tasks, int64_t sequence, int64_t kv_heads, int64_t first, int64_t last, int64_t query_row) {
  for (int64_t at = first; at < last; at += QUERIES_PER_TASK)
    for (int64_t head = 0; head < kv_heads; ++head)
      tasks.push_back({sequence, head, at, std::min(last, at + QUERIES_PER_TASK), query_row});
  return (last - first) * last;
}

}  // namespace

extern "C" {

// Returns 0, or 1 where a head is too large, 2 where a sequence's bounds do not fit, 3 where a block lies outside the cache.
int tandem_paged_attention(const float* q, const float* keys, const float* values, int64_t tokens, int64_t blocks, int64_t heads,
                           int64_t kv_heads, int64_t size, const int32_t* query_start, const int32_t* context_lens,
                           const int32_t* block_tables, int64_t sequences, int64_t table_width, float scale, int64_t window, float* out) {
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
  const int64_t tile = BLOCK_TOKENS * size;
  run_tasks(tasks, {q, heads, kv_heads, size, scale, window, out, nullptr}, work * heads * size, [&](const Task& task) -> Tiles {
    return {keys + task.kv_head * tile, values + task.kv_head * tile,          kv_heads * tile, kv_heads * tile, size,
            block_tables + task.sequence * table_width};
  });
  return 0;
}

// The same over k, v[tokens, kv_heads, size] of whole sequences. log_sum[tokens, heads] may be null.
int tandem_packed_attention(const float* q, const float* k, const float* v, const int32_t* bounds, int64_t sequences, int64_t tokens,
                            int64_t heads, int64_t kv_heads, int64_t size, float scale, int64_t window, float* out, float* log_sum) {
  if (size > MAX_HEAD_SIZE) return 1;
  if (bounds[0] != 0 || bounds[sequences] != tokens) return 2;
  std::vector<Task> tasks;
  std::vector<int64_t> first_tile(static_cast<size_t>(sequences) + 1, 0);
  int64_t work = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t length = bounds[s + 1] - bounds[s];
    if (length < 0 || bounds[s + 1] > tokens) return 2;
    first_tile[static_cast<size_t>(s) + 1] = first_tile[static_cast<size_t>(s)] + (length + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    work += add_tasks(tasks, s, kv_heads, 0, length, bounds[s]);
  }
  thread_local Scratch memory;
  const int64_t tile = BLOCK_TOKENS * size, row = kv_heads * size;
  float* transposed = memory.floats(first_tile.back() * kv_heads * tile);
  const int threads = threads_for(tokens * row * 4);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t s = 0; s < sequences; ++s)
    for (int64_t head = 0; head < kv_heads; ++head)
      transpose_tiles(k + bounds[s] * row + head * size, row, bounds[s + 1] - bounds[s], size,
                      transposed + (first_tile[static_cast<size_t>(s)] * kv_heads + head) * tile, kv_heads * tile);
  run_tasks(tasks, {q, heads, kv_heads, size, scale, window, out, log_sum}, work * heads * size, [&](const Task& task) -> Tiles {
    const int64_t begin = bounds[task.sequence];
    return {transposed + (first_tile[static_cast<size_t>(task.sequence)] * kv_heads + task.kv_head) * tile,
            v + begin * row + task.kv_head * size,
            kv_heads * tile,
            BLOCK_TOKENS * row,
            row,
            nullptr};
  });
  return 0;
}

}  // extern "C"

DIRECT(paged_attention);
