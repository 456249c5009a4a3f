// The gradient of packed attention, by recomputation from the saved logarithms of the softmax's denominators
// (Dao et al., 2022). A task is one sequence, one key-value head and a section of its keys, walked in order; a query's gradients
// from the sections are added in order. Sections depend on the sequence's length, so no sum depends on the threads.
#include <vector>

#include "attention.h"
#include "parallel.h"

namespace {

constexpr int64_t MOST_SECTIONS = 8;  // bounds the memory for what a query gets from each

// Keys of a section: whole spans, one where the sequence is short.
int64_t section_keys(int64_t length) {
  const int64_t spans = (length + SPAN - 1) / SPAN;
  return (spans + MOST_SECTIONS - 1) / MOST_SECTIONS * SPAN;
}

struct Task {
  int64_t sequence, kv_head, begin, end;  // keys, in positions
  int64_t first_query, last_query;        // the positions whose queries see some of them
  float* grad_q;                          // [queries, group, size], or null: the only section, straight to the output
};

struct Section {
  int64_t size, first_tile, row_stride;  // of k and v, in elements
  const float* k;                        // rows from position 0, for grad_q
  const float *k_tiles, *v_tiles;        // [tiles][size][16] from first_tile
  float *grad_k_tiles, *grad_v_tiles;
};

// For R rows: with p = exp(score - log_sum) and e = p (grad.v - delta) times the score's slope by q.k,
// grad_q = e k, grad_k += e^T q, grad_v += p^T grad.
template <int ROWS, typename Scores>
void backward_rows(const Rows& rows, const float* const* grad, const float* const* out, const float* log_sum, Scores scoring, const Section& h,
                   float* const* grad_q) {
  alignas(64) SpanBuffer weights, slopes;
  alignas(64) float sums[ROWS][MAX_HEAD_SIZE];
  V delta[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    std::fill_n(sums[r], (h.size + LANES - 1) / LANES * LANES, 0.0f);
    V along = zero();
    each_vector(h.size, [&](int64_t d, int n) { along = fma(get(grad[r] + d, n), get(out[r] + d, n), along); });
    delta[r] = set1(sum(along));
  }
  const int64_t last_tile = rows.last_tile(), tile = h.size * BLOCK_TOKENS;
  for (int64_t first = rows.first_tile(); first < last_tile;) {
    const int64_t last = std::min(last_tile, (first / SPAN_TILES + 1) * SPAN_TILES);
    dot_tiles<ROWS, tiles_at_once(ROWS)>(rows.data, h.size, first, last, View{h.k_tiles, tile, 0, nullptr, h.first_tile}, weights[0]);
    dot_tiles<ROWS, tiles_at_once(ROWS)>(grad, h.size, first, last, View{h.v_tiles, tile, 0, nullptr, h.first_tile}, slopes[0]);
    for (int64_t t = first; t < last; ++t) {
      V p[ROWS], e[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        float *weight = weights[r] + (t - first) * LANES, *slope = slopes[r] + (t - first) * LANES;
        const V score = scoring.score(load(weight));
        p[r] = exp(sub(mask_unseen(score, rows, r, t, NEVER), set1(log_sum[r])));
        e[r] = mask_unseen(mul(mul(p[r], sub(load(slope), delta[r])), scoring.slope(score)), rows, r, t, 0.0f);
        store(slope, e[r]);
      }
      float *to_k = h.grad_k_tiles + (t - h.first_tile) * tile, *to_v = h.grad_v_tiles + (t - h.first_tile) * tile;
      for (int64_t d = 0; d < h.size; ++d) {
        V k = load(to_k + d * LANES), v = load(to_v + d * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          k = fma(e[r], set1(rows.data[r][d]), k);
          v = fma(p[r], set1(grad[r][d]), v);
        }
        store(to_k + d * LANES, k);
        store(to_v + d * LANES, v);
      }
    }
    const View key_rows = {h.k, BLOCK_TOKENS * h.row_stride, h.row_stride, nullptr, 0};
    add_weighted<ROWS>(slopes[0], rows, first, last, h.size, key_rows, sums);
    first = last;
  }
  for (int r = 0; r < ROWS; ++r) each_vector(h.size, [&](int64_t d, int n) { put(grad_q[r] + d, load(sums[r] + d), n); });
}

struct Call {
  const float *grad, *q, *k, *v, *out, *log_sum;
  const int32_t *bounds, *query_start;
  int64_t heads, kv_heads, size;
  float scale;
  int64_t window;
  float cap;  // of the scores; 0: none
  float *grad_q, *grad_k, *grad_v;

  int64_t group() const { return heads / kv_heads; }
  int64_t length(int64_t s) const { return bounds[s + 1] - bounds[s]; }
  // The first position that has a query, and the row of q of position 0 if it had one.
  int64_t first(int64_t s) const { return length(s) - (query_start[s + 1] - query_start[s]); }
  int64_t query_row(int64_t s) const { return query_start[s] - first(s); }
};

void run_task(const Task& task, const Call& c) {
  thread_local Scratch memory;
  const int64_t row = c.kv_heads * c.size, tile = BLOCK_TOKENS * c.size, keys = task.end - task.begin, group = c.group();
  const int64_t all = (keys + BLOCK_TOKENS - 1) / BLOCK_TOKENS * tile, begin = c.bounds[task.sequence];
  const int64_t head = begin * row + task.kv_head * c.size, offset = head + task.begin * row;
  if (task.first_query >= task.last_query) {
    for (int64_t key = 0; key < keys; ++key) {
      std::fill_n(c.grad_k + offset + key * row, c.size, 0.0f);
      std::fill_n(c.grad_v + offset + key * row, c.size, 0.0f);
    }
    return;
  }
  float* at = memory.floats(4 * all);
  std::fill_n(at + 2 * all, 2 * all, 0.0f);
  transpose_tiles(c.k + offset, row, keys, c.size, at, tile);
  transpose_tiles(c.v + offset, row, keys, c.size, at + all, tile);
  const Section section = {c.size, task.begin / BLOCK_TOKENS, row, c.k + head, at, at + all, at + 2 * all, at + 3 * all};
  const int64_t count = (task.last_query - task.first_query) * group;
  for (int64_t i = 0; i < count; i += MAX_ROWS_AT_ONCE) {
    Rows rows;
    const float *row_grad[MAX_ROWS_AT_ONCE], *row_out[MAX_ROWS_AT_ONCE];
    float row_log_sum[MAX_ROWS_AT_ONCE], *row_grad_q[MAX_ROWS_AT_ONCE];
    rows.count = static_cast<int>(std::min<int64_t>(MAX_ROWS_AT_ONCE, count - i));
    for (int r = 0; r < rows.count; ++r) {
      const int64_t position = task.first_query + (i + r) / group;
      const int64_t index = (c.query_row(task.sequence) + position) * c.heads + task.kv_head * group + (i + r) % group;
      rows.data[r] = c.q + index * c.size;
      rows.begin[r] = std::max(task.begin, c.window ? position - c.window + 1 : 0);
      rows.end[r] = std::min(task.end, position + 1);
      row_grad[r] = c.grad + index * c.size;
      row_out[r] = c.out + index * c.size;
      row_log_sum[r] = c.log_sum[index];
      row_grad_q[r] = task.grad_q ? task.grad_q + (i + r) * c.size : c.grad_q + index * c.size;
    }
    with_scores(c.scale, c.cap, [&](auto scoring) {
      for_row_count(rows.count,
                    [&](auto n) { backward_rows<decltype(n)::value>(rows, row_grad, row_out, row_log_sum, scoring, section, row_grad_q); });
    });
  }
  untranspose_tiles(section.grad_k_tiles, tile, keys, c.size, c.grad_k + offset, row);
  untranspose_tiles(section.grad_v_tiles, tile, keys, c.size, c.grad_v + offset, row);
}

// A query's gradients from the sections that it sees, added in order. The tasks first .. last are those of one sequence and head.
void add_sections(const Task* first, const Task* last, const Call& c) {
  const int64_t group = c.group(), length = c.length(first->sequence);
  for (int64_t position = c.first(first->sequence); position < length; ++position) {
    float* to = c.grad_q + ((c.query_row(first->sequence) + position) * c.heads + first->kv_head * group) * c.size;
    std::fill_n(to, group * c.size, 0.0f);
    for (const Task* task = first; task < last; ++task) {
      if (position < task->first_query || position >= task->last_query) continue;
      const float* from = task->grad_q + (position - task->first_query) * group * c.size;
      each_vector(group * c.size, [&](int64_t i, int n) { put(to + i, add(get(to + i, n), get(from + i, n)), n); });
    }
  }
}

void run(const Call& c, int64_t sequences) {
  std::vector<Task> tasks;
  std::vector<size_t> first_task;  // of each sequence and head with several sections; then the end of its tasks
  std::vector<int64_t> offsets;    // into the sections' gradients, -1: the output itself
  int64_t work = 0, floats = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t length = c.length(s), first = c.first(s);
    if (length == 0) continue;
    const int64_t keys = section_keys(length);
    work += (length - first) * length;
    for (int64_t head = 0; head < c.kv_heads; ++head) {
      if (length > keys) first_task.push_back(tasks.size());
      for (int64_t begin = 0; begin < length; begin += keys) {
        const int64_t end = std::min(length, begin + keys), from = std::max(begin, first);
        // Keys that no query sees have a task too, which sets their gradients to 0.
        const int64_t last = std::max(from, c.window ? std::min(length, end + c.window - 1) : length);
        tasks.push_back({s, head, begin, end, from, last, nullptr});
        offsets.push_back(length > keys ? floats : -1);
        if (length > keys) floats += (last - from) * c.group() * c.size;
      }
      if (length > keys) first_task.push_back(tasks.size());
    }
  }
  thread_local Scratch memory;
  float* sections = memory.floats(floats);
  for (size_t t = 0; t < tasks.size(); ++t)
    if (offsets[t] >= 0) tasks[t].grad_q = sections + offsets[t];
  const int threads = threads_for(work * c.heads * c.size * 2);
  const int64_t count = static_cast<int64_t>(tasks.size()), split = static_cast<int64_t>(first_task.size() / 2);
  Failure failure;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < count; ++t) failure.guard([&] { run_task(tasks[static_cast<size_t>(t)], c); });
  failure.raise();
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < split; ++i)
    add_sections(tasks.data() + first_task[static_cast<size_t>(2 * i)], tasks.data() + first_task[static_cast<size_t>(2 * i) + 1], c);
}

}  // namespace

extern "C" {

// Gradients by q[queries, heads, size] and k, v[tokens, kv_heads, size]; every token must lie in a sequence.
int tandem_packed_attention_backward(const float* grad, const float* q, const float* k, const float* v, const float* out,
                                     const float* log_sum, const int32_t* bounds, const int32_t* query_start, int64_t sequences, int64_t heads, int64_t kv_heads,
                                     int64_t size, float scale, int64_t window, float cap, float* grad_q, float* grad_k, float* grad_v) {
  return or_out_of_memory(
      [&] { run({grad, q, k, v, out, log_sum, bounds, query_start, heads, kv_heads, size, scale, window, cap, grad_q, grad_k, grad_v}, sequences); });
}

// The gradient by the sinks[heads], whose share of the softmax of a row is exp(sink - log_sum): minus the sum over the rows, in order, of that share times
// grad.out. The other gradients are those without sinks, given a log_sum with them.
void tandem_sinks_backward(const float* grad, const float* out, const float* log_sum, const float* sinks, int64_t queries, int64_t heads, int64_t size,
                           float* grad_sinks) {
  const int threads = threads_for(queries * heads * size);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t head = 0; head < heads; ++head) {
    V total = zero();
    for (int64_t i = head; i < queries * heads; i += heads) {
      V along = zero();
      each_vector(size, [&](int64_t d, int n) { along = fma(get(grad + i * size + d, n), get(out + i * size + d, n), along); });
      total = fnma(exp(set1(sinks[head] - log_sum[i])), set1(sum(along)), total);
    }
    alignas(64) float totals[LANES];
    store(totals, total);
    grad_sinks[head] = totals[0];
  }
}

}  // extern "C"
