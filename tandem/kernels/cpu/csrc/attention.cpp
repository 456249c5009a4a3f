// Causal attention forward: over the paged cache and over packed sequences, both through one core.
#include "attention.h"

#include <vector>

#include "calls.h"
#include "direct.h"
#include "parallel.h"

namespace {

constexpr int64_t QUERIES_PER_TASK = 64;
constexpr int64_t DECODED_TILES = 4;

// Some rows' softmax over one span or over several: the highest score, the sum of the weights exp(score - highest), and the values
// by those weights.
template <int ROWS>
struct State {
  float highest[ROWS], total[ROWS];
  alignas(64) float sums[ROWS][MAX_HEAD_SIZE];
};

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
    for_stored(kind, [&](auto stored) {
      using T = decltype(stored);
      for (int64_t t = first; t < last; ++t) {
        const int64_t block = table ? table[t] : t - begin;
        const T* from = static_cast<const T*>(keys) + block * key_tile_stride;
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
      }
    });
    return {buffer, size * BLOCK_TOKENS, 0, nullptr, first};
  }

  View value_view(int64_t first, int64_t last, int64_t size, float* buffer) const {
    if (kind == 0) return {static_cast<const float*>(values), value_tile_stride, value_row_stride, table, begin};
    for_stored(kind, [&](auto stored) {
      using T = decltype(stored);
      for (int64_t t = first; t < last; ++t) {
        const int64_t block = table ? table[t] : t - begin;
        const T* from = static_cast<const T*>(values) + block * value_tile_stride;
        float* to = buffer + (t - first) * size * BLOCK_TOKENS;
        for (int64_t j = 0; j < BLOCK_TOKENS; ++j, from += value_row_stride, to += size) {
          const V scale = IS_SCALED<T> ? set1(value_scales[block * scale_tile_stride + j]) : zero();
          each_code(from, size, [&](int64_t d, int n, V value) { put(to + d, IS_SCALED<T> ? mul(value, scale) : value, n); });
        }
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

// The softmax over the keys of the tiles first <= t < last, which lie in one span.
template <int ROWS, typename Scores>
__attribute__((noinline)) void attend_span(const Rows& rows, const Source& source, int64_t size, Scores scoring, int64_t first, int64_t last,
                                           State<ROWS>& state) {
  alignas(64) SpanBuffer scores;
  alignas(64) float decoded[DECODED_TILES * BLOCK_TOKENS * MAX_HEAD_SIZE];
  const int64_t padded = (size + LANES - 1) / LANES * LANES, step = source.tiles_at_once();
  const bool fetches = source.is_read_once && source.is_in_place(), widened = source.is_widened(), fetches_wide = source.is_read_once && widened;
  const auto dot_stored = [&](auto stored, auto ahead) {
    using T = decltype(stored);
    const Tiles<T> values = source.stored_values<T>();
    dot_tiles<ROWS, tiles_at_once(ROWS), ahead.value>(rows.data, size, first, last, source.stored_keys<T>(), scores[0], &values);
  };
  const auto add_stored = [&](auto stored, auto ahead) {
    using T = decltype(stored);
    add_weighted<ROWS, ahead.value>(scores[0], rows, first, last, size, source.stored_values<T>(), state.sums, source.stored_next<T>());
  };
  constexpr std::true_type AHEAD;
  constexpr std::false_type PLAIN;
  if (fetches)
    dot_stored(float{}, AHEAD);
  else if (fetches_wide)
    dot_stored(Bf16{}, AHEAD);
  else if (widened)
    dot_stored(Bf16{}, PLAIN);
  for (int64_t t = widened || fetches ? last : first; t < last; t += step) {
    const int64_t end = std::min(last, t + step);
    dot_tiles<ROWS, tiles_at_once(ROWS)>(rows.data, size, t, end, source.key_view(t, end, size, decoded), scores[0] + (t - first) * LANES);
  }
  for (int r = 0; r < ROWS; ++r) {
    std::fill_n(state.sums[r], padded, 0.0f);
    if (!rows.sees_tiles(r, first, last)) continue;
    V most = set1(NEVER), total = zero();
    for (int64_t t = first; t < last; ++t) {
      float* at = scores[r] + (t - first) * LANES;
      const V score = mask_unseen(scoring.score(load(at)), rows, r, t, NEVER);
      most = max(most, score);
      store(at, score);
    }
    state.highest[r] = max_lane(most);
    const V shift = set1(state.highest[r]);
    for (int64_t t = first; t < last; ++t) {
      float* at = scores[r] + (t - first) * LANES;
      const V weight = exp(sub(load(at), shift));
      total = add(total, weight);
      store(at, weight);
    }
    state.total[r] = sum(total);
  }
  if (fetches) return add_stored(float{}, AHEAD);
  if (fetches_wide) return add_stored(Bf16{}, AHEAD);
  if (widened) return add_stored(Bf16{}, PLAIN);
  for (int64_t t = first; t < last; t += step) {
    const int64_t end = std::min(last, t + step);
    add_weighted<ROWS>(scores[0] + (t - first) * LANES, rows, t, end, size, source.value_view(t, end, size, decoded), state.sums);
  }
}

// One row's softmax with that of a later span merged in.
INLINE void merge(float& highest, float& total, float* sums, float more_highest, float more_total, const float* more_sums, int64_t size) {
  const float now = std::max(highest, more_highest);
  const V keep = exp(set1(highest - now)), take = exp(set1(more_highest - now));
  alignas(64) float totals[LANES];
  store(totals, fma(set1(total), keep, mul(set1(more_total), take)));
  for (int64_t d = 0; d < size; d += LANES) store(sums + d, fma(load(sums + d), keep, mul(load(more_sums + d), take)));
  highest = now;
  total = totals[0];
}

// out = the values by their softmax; log_sum (where asked for) the logarithm of the softmax's denominator.
INLINE void finish(float highest, float total, const float* sums, int64_t size, float* out, float* log_sum) {
  const V divisor = set1(total);
  each_vector(size, [&](int64_t d, int n) { put(out + d, div(load(sums + d), divisor), n); });
  if (log_sum) *log_sum = highest + std::log(total);
}

// One row's softmax with the score of its head's sink (Xiao et al., 2023) merged in: a key without a value.
INLINE void add_sink(float& highest, float& total, float* sums, float sink, int64_t size) {
  const float now = std::max(highest, sink);
  const V keep = exp(set1(highest - now)), take = exp(set1(sink - now));
  alignas(64) float totals[LANES];
  store(totals, fma(set1(total), keep, take));
  for (int64_t d = 0; d < size; d += LANES) store(sums + d, mul(load(sums + d), keep));
  highest = now;
  total = totals[0];
}

// The tiles of span `span` that some row sees.
INLINE std::pair<int64_t, int64_t> tiles_of_span(const Rows& rows, int64_t span) {
  return {std::max(rows.first_tile(), span * SPAN_TILES), std::min(rows.last_tile(), (span + 1) * SPAN_TILES)};
}

template <int ROWS, typename Scores>
void attend(const Rows& rows, const Source& source, int64_t size, Scores scoring, const float* sinks, float* const* out, float* const* log_sum) {
  State<ROWS> state, more;
  bool begun[ROWS] = {};
  for (int64_t span = rows.first_tile() / SPAN_TILES; span * SPAN_TILES < rows.last_tile(); ++span) {
    const auto [first, last] = tiles_of_span(rows, span);
    const bool is_first = span == rows.first_tile() / SPAN_TILES;
    attend_span(rows, source, size, scoring, first, last, is_first ? state : more);
    for (int r = 0; r < ROWS; ++r) {
      if (!rows.sees_tiles(r, first, last)) continue;
      if (begun[r]) {
        merge(state.highest[r], state.total[r], state.sums[r], more.highest[r], more.total[r], more.sums[r], size);
      } else if (!is_first) {
        state.highest[r] = more.highest[r];
        state.total[r] = more.total[r];
        std::copy_n(more.sums[r], size, state.sums[r]);
      }
      begun[r] = true;
    }
  }
  if (sinks)
    for (int r = 0; r < ROWS; ++r) add_sink(state.highest[r], state.total[r], state.sums[r], sinks[r], size);
  for (int r = 0; r < ROWS; ++r) finish(state.highest[r], state.total[r], state.sums[r], size, out[r], log_sum ? log_sum[r] : nullptr);
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
  float cap;       // of the scores; 0: none
  const float* sinks;  // the score of each head's sink, or null
  float* out;
  float* log_sum;  // [rows, heads] or null

  int64_t group() const { return heads / kv_heads; }
  int64_t rows_of(const Task& task) const { return (task.last - task.first) * group(); }
};

// Rows i .. i + MAX_ROWS_AT_ONCE of a task, and which row of `out` each is.
Rows rows_of(const Task& task, const Queries& q, int64_t i, int64_t* at) {
  Rows rows;
  rows.count = static_cast<int>(std::min<int64_t>(MAX_ROWS_AT_ONCE, q.rows_of(task) - i));
  for (int r = 0; r < rows.count; ++r) {
    const int64_t position = task.first + (i + r) / q.group();
    at[r] = (task.query_row + position) * q.heads + task.kv_head * q.group() + (i + r) % q.group();
    rows.data[r] = q.data + at[r] * q.size;
    rows.begin[r] = q.window ? std::max<int64_t>(0, position - q.window + 1) : 0;
    rows.end[r] = position + 1;
  }
  return rows;
}

void run_task(const Task& task, const Queries& q, Source source) {
  if (!source.is_in_place() && q.rows_of(task) > MAX_ROWS_AT_ONCE) {
    thread_local Scratch memory;
    const int64_t first = q.window ? std::max<int64_t>(0, task.first - q.window + 1) : 0;
    source = source.decoded(first / BLOCK_TOKENS, (task.last + BLOCK_TOKENS - 1) / BLOCK_TOKENS, q.size, memory);
  }
  for (int64_t i = 0; i < q.rows_of(task); i += MAX_ROWS_AT_ONCE) {
    int64_t at[MAX_ROWS_AT_ONCE];
    const Rows rows = rows_of(task, q, i, at);
    float *out[MAX_ROWS_AT_ONCE], *log_sum[MAX_ROWS_AT_ONCE], sinks[MAX_ROWS_AT_ONCE];
    for (int r = 0; r < rows.count; ++r) {
      if (q.sinks) sinks[r] = q.sinks[at[r] % q.heads];
      out[r] = q.out + at[r] * q.size;
      log_sum[r] = q.log_sum ? q.log_sum + at[r] : nullptr;
    }
    with_scores(q.scale, q.cap, [&](auto scoring) {
      for_row_count(rows.count, [&](auto n) { attend<decltype(n)::value>(rows, source, q.size, scoring, q.sinks ? sinks : nullptr, out, q.log_sum ? log_sum : nullptr); });
    });
  }
}

// One span of a task of few rows, for more threads than there are tasks. `floats` are the rows' states, 2 + padded each.
struct Piece {
  int64_t task, span;
};

void run_piece(const Rows& rows, const Queries& q, const Source& source, int64_t span, int64_t width, float* floats) {
  for_row_count(rows.count, [&](auto n) {
    State<decltype(n)::value> state;
    const auto [first, last] = tiles_of_span(rows, span);
    with_scores(q.scale, q.cap, [&](auto scoring) { attend_span(rows, source, q.size, scoring, first, last, state); });
    for (int r = 0; r < rows.count; ++r, floats += width) {
      std::copy_n(state.sums[r], width - LANES, floats);
      floats[width - LANES] = state.highest[r];
      floats[width - LANES + 1] = state.total[r];
    }
  });
}

void merge_pieces(const Rows& rows, const Queries& q, const int64_t* at, int64_t width, float* floats) {
  const int64_t first_span = rows.first_tile() / SPAN_TILES, spans = (rows.last_tile() - 1) / SPAN_TILES - first_span + 1;
  for (int r = 0; r < rows.count; ++r) {
    float* state = nullptr;
    for (int64_t i = 0; i < spans; ++i) {
      const auto [first, last] = tiles_of_span(rows, first_span + i);
      if (!rows.sees_tiles(r, first, last)) continue;
      float* more = floats + (i * rows.count + r) * width;
      const int64_t end = width - LANES;
      if (state)
        merge(state[end], state[end + 1], state, more[end], more[end + 1], more, q.size);
      else
        state = more;
    }
    if (q.sinks) add_sink(state[width - LANES], state[width - LANES + 1], state, q.sinks[at[r] % q.heads], q.size);
    finish(state[width - LANES], state[width - LANES + 1], state, q.size, q.out + at[r] * q.size, q.log_sum ? q.log_sum + at[r] : nullptr);
  }
}

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
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) {
    const Task& task = tasks[static_cast<size_t>(pieces[static_cast<size_t>(i)].task)];
    int64_t at[MAX_ROWS_AT_ONCE];
    Source source = source_of(task);
    source.is_read_once = source.table;
    run_piece(rows_of(task, q, 0, at), q, source, pieces[static_cast<size_t>(i)].span, width, states + offsets[static_cast<size_t>(i)]);
  }
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
  const int threads = threads_for(work);
  const int64_t count = static_cast<int64_t>(tasks.size()), at_once = std::max<int64_t>(1, count / (threads * 16));
  const bool few_rows = std::all_of(tasks.begin(), tasks.end(), [&](const Task& task) { return q.rows_of(task) <= MAX_ROWS_AT_ONCE; });
  if (threads > 1 && count < 4 * threads && few_rows) return run_in_pieces(tasks, q, threads, source_of);
  Failure failure;
#pragma omp parallel for schedule(dynamic, at_once) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count; ++i)
    failure.guard([&] {
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
  failure.raise();
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
      for (int64_t head = 0; head < kv_heads; ++head)
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
