// All layers of a dense decoder over an engine's flat batch, in one call: between two kernels of a small model, Python takes as long as they do.
//
// The kernels are those that Python would call one by one (`tandem/model/layer_pass.py`), in the same order, so the bits are the same too.
#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "batch_parts.h"
#include "calls.h"
#include "dense_layers.h"
#include "dense_matrix.h"
#include "direct.h"
#include "numbers.h"
#include "parallel.h"
#include "rows.h"
#include "team.h"

// The structures of dense_program.py, field by field.
//
// Norms, sinks: null where there are none. The cos_sin[positions, size] of one position is that of all.
struct DenseLayer {
  DenseMatrix qkv, output, gate_up, down;
  const float *input_norm, *mlp_norm, *q_norm, *k_norm, *sinks, *attention_output_norm, *mlp_output_norm, *cos_sin;
  int64_t positions, heads, kv_heads, head_size, window, activation, is_centred, has_parallel_blocks;
  float eps, scale, cap, attention_output_factor, mlp_output_factor;
};

struct DenseCache {
  void *keys, *values;
  float *key_scales, *value_scales;
  int64_t kind, blocks;
};

namespace {

constexpr int IN_ROPE = 10, IN_ATTENTION = 20;  // added to the codes of these functions

// Working memory; each is on a cache line. `residual` is the caller's at first.
struct Working {
  float *residual, *wanted_residual, *normed, *wanted_normed, *x, *qkv, *q, *attended;
  int64_t* zeros;
};

void pick_rows(const float* from, const int64_t* rows, int64_t count, int64_t width, float* to) {
  for (int64_t i = 0; i < count; ++i) std::copy_n(from + rows[i] * width, width, to + i * width);
}

// What attention or MLP has computed, as it is added to the residual stream.
void write_output(const DenseLayer& layer, const float* norm, float factor, int64_t rows, int64_t width, float* x) {
  if (norm) tandem_rms_norm(x, nullptr, norm, rows, width, 1, layer.eps, layer.is_centred != 0, x, nullptr, nullptr);
  if (factor == 1.0f) return;
  const V by = set1(factor);
  each_vector(rows * width, [&](int64_t i, int n) { put(x + i, mul(get(x + i, n), by), n); });
}

// Computes rows.x, which is still to be added to rows.residual. `is_first`: there is no rows.x before.
int run_layer(const DenseLayer& layer, const DenseCache& cache, const FlatBatch& batch, int precision, bool is_first, bool is_last, Working& rows) {
  const int64_t hidden = layer.output.rows;
  const int kind = static_cast<int>(cache.kind), is_centred = layer.is_centred != 0;
  tandem_rms_norm(is_first ? rows.residual : rows.x, is_first ? nullptr : rows.residual, layer.input_norm, batch.tokens, hidden, 1, layer.eps, is_centred,
                  rows.normed, rows.residual, nullptr);
  multiply(layer.qkv, precision, rows.normed, batch.tokens, rows.qkv);
  int code = tandem_rope_to_cache(rows.qkv, layer.positions > 1 ? batch.positions : rows.zeros, layer.cos_sin, batch.tokens, layer.positions, layer.heads,
                                  layer.kv_heads, layer.head_size, layer.q_norm, layer.k_norm, layer.eps, rows.q, kind, cache.keys, cache.values,
                                  cache.key_scales, cache.value_scales, cache.blocks, batch.slots);
  if (code) return IN_ROPE + code;
  code = tandem_paged_attention(rows.q, kind, cache.keys, cache.values, cache.key_scales, cache.value_scales, batch.tokens, cache.blocks, layer.heads,
                                layer.kv_heads, layer.head_size, batch.query_start, batch.context_lens, batch.block_tables, batch.sequences,
                                batch.table_width, layer.scale, layer.window, layer.cap, layer.sinks, rows.attended);
  allocated(code);
  if (code) return IN_ATTENTION + code;
  int64_t count = batch.tokens;
  if (is_last && batch.wanted_count >= 0) {
    count = batch.wanted_count;
    pick_rows(rows.attended, batch.wanted, count, layer.output.columns, rows.q);
    pick_rows(rows.residual, batch.wanted, count, hidden, rows.wanted_residual);
    if (layer.has_parallel_blocks) pick_rows(rows.normed, batch.wanted, count, hidden, rows.wanted_normed);
    std::swap(rows.attended, rows.q);
    std::swap(rows.residual, rows.wanted_residual);
    std::swap(rows.normed, rows.wanted_normed);
  }
  multiply(layer.output, precision, rows.attended, count, rows.x);
  write_output(layer, layer.attention_output_norm, layer.attention_output_factor, count, hidden, rows.x);
  if (layer.has_parallel_blocks)
    each_vector(count * hidden, [&](int64_t i, int n) { put(rows.residual + i, add(get(rows.x + i, n), get(rows.residual + i, n)), n); });
  else
    tandem_rms_norm(rows.x, rows.residual, layer.mlp_norm, count, hidden, 1, layer.eps, is_centred, rows.normed, rows.residual, nullptr);
  multiply_gated(layer.gate_up, layer.down, static_cast<int>(layer.activation), precision, rows.normed, count, rows.x);
  write_output(layer, layer.mlp_output_norm, layer.mlp_output_factor, count, hidden, rows.x);
  return 0;
}

// Keeps the input of a layer: the residual stream with what the layer before it has computed, if there is one (null).
void keep_input(const LayerInputs& inputs, int64_t layer, const float* x, const float* residual, int64_t rows, int64_t width) {
  for (int64_t place = 0; place < inputs.count; ++place) {
    if (inputs.layers[place] != layer) continue;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = row * width;
      float* to = inputs.to + (row * inputs.count + place) * width;
      if (x)
        each_vector(width, [&](int64_t i, int n) { put(to + i, add(get(x + at + i, n), get(residual + at + i, n)), n); });
      else
        std::copy_n(residual + at, width, to);
    }
  }
}

// The floats of one token's row in each part of `Working`, in whole cache lines.
struct Widths {
  int64_t hidden, qkv, attended;

  Widths(const DenseLayer* layers, int64_t count) : hidden(lines(layers->output.rows)), qkv(0), attended(0) {
    for (const DenseLayer* layer = layers; layer < layers + count; ++layer) {
      qkv = std::max(qkv, lines(layer->qkv.rows));
      attended = std::max(attended, lines(layer->output.columns));
    }
  }
  int64_t all() const { return 4 * hidden + qkv + 2 * attended + LANES; }
  static int64_t lines(int64_t floats) { return round_up(floats, LANES); }
};

// Each thread with a part of its own reads all weights: worth it for some rows, and for weights that stay in the last cache. Measured on two threads: 3.7M
// parameters take 0.75 to 0.82 of the time from 8 rows on, and 84M 1.04 to 1.16.
constexpr int64_t ROWS_OF_A_PART = 4, BYTES_IN_CACHE = 32 << 20;

// Computes all layers of `batch`, and the final norm of the wanted rows to the rows `places` of `out`, or of all to its rows in order where `places` is null.
int run_layers(const DenseModel& model, const FlatBatch& batch, const LayerInputs& inputs, const int64_t* places, float* residual, float* out) {
  thread_local Scratch memory;
  const Widths each(model.layers, model.count);
  float* at = memory.floats(batch.tokens * each.all());
  const auto take = [&](int64_t width) { return std::exchange(at, at + batch.tokens * width); };
  Working rows = {residual};
  for (float** own : {&rows.wanted_residual, &rows.normed, &rows.wanted_normed, &rows.x}) *own = take(each.hidden);
  rows.qkv = take(each.qkv);
  for (float** own : {&rows.q, &rows.attended}) *own = take(each.attended);
  rows.zeros = reinterpret_cast<int64_t*>(at);
  std::fill_n(rows.zeros, batch.tokens, 0);
  for (int64_t i = 0; i < model.count; ++i) {
    keep_input(inputs, i, i ? rows.x : nullptr, rows.residual, batch.tokens, model.layers->output.rows);
    if (const int code = run_layer(model.layers[i], model.caches[i], batch, model.precision, i == 0, i + 1 == model.count, rows)) return code;
  }
  const DenseLayer& last = model.layers[model.count - 1];
  const int64_t width = last.output.rows, count = batch.wanted_count >= 0 ? batch.wanted_count : batch.tokens;
  float* to = places ? rows.normed : out;
  tandem_rms_norm(rows.x, rows.residual, model.norm, count, width, 1, last.eps, last.is_centred != 0, to, rows.residual, nullptr);
  if (places)
    for (int64_t i = 0; i < count; ++i) std::copy_n(to + i * width, width, out + places[i] * width);
  return 0;
}

// The bounds, in sequences, of the parts that threads compute from the first layer to the last without waiting for each other; one part where they would
// have to, or where each would have few rows.
std::vector<int64_t> parts_of(const DenseModel& model, const FlatBatch& batch) {
  const DenseLayer& layer = model.layers[0];
  int64_t row_work = 0, weight_bytes = 0;
  for (const DenseMatrix* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
    row_work += matrix->rows * matrix->columns;
    weight_bytes += model.count * bytes_of(*matrix, model.precision);
  }
  const int64_t most = std::min<int64_t>({threads_for(model.count * batch.tokens * row_work), batch.tokens / ROWS_OF_A_PART, batch.sequences, MOST_PARTS});
  if (most > 1 && weight_bytes <= BYTES_IN_CACHE && is_ordered(batch)) {
    std::vector<int64_t> bounds = bounds_of_parts(batch, most, row_work, 2 * layer.heads * layer.head_size);
    if (are_independent(batch, model.caches[0].blocks, bounds)) return bounds;
  }
  return {0, batch.sequences};
}

}  // namespace

void in_team(const DenseModel& model, const FlatBatch& batch, const std::function<void()>& call) {
  // Of more rows there are parts, or products that take long beside their sharing. Quantized products share their loops by OpenMP. Where one thread computes
  // the largest product alone, it computes all: on cores that other processes use too, a step of microseconds would wait for milliseconds until a second
  // thread runs.
  bool is_packed = true;
  int64_t most = 0;
  for (const DenseLayer* layer = model.layers; layer < model.layers + model.count; ++layer)
    for (const DenseMatrix* matrix : {&layer->qkv, &layer->output, &layer->gate_up, &layer->down}) {
      is_packed = is_packed && matrix->format == PACKED;
      most = std::max(most, matrix->rows * matrix->columns);
    }
  const int threads = is_packed && batch.tokens < 2 * ROWS_OF_A_PART ? threads_for(batch.tokens * most) : 1;
  if (threads > 1)
    Team::run(threads, call);
  else
    call();
}

int run_dense_layers(const DenseModel& model, const FlatBatch& batch, const LayerInputs& inputs, float* residual, float* out, const RowWork* work) {
  const int64_t hidden = model.layers->output.rows;
  const auto run = [&](const FlatBatch& own, int64_t first, const int64_t* places, float* to) {
    int code = work ? work->before(first, own.tokens) : 0;
    const LayerInputs own_inputs = {inputs.layers, inputs.count, inputs.to + first * inputs.count * hidden};
    if (code == 0) code = run_layers(model, own, own_inputs, places, residual + first * hidden, to);
    return code == 0 && work ? work->after(first, own.tokens) : code;
  };
  const std::vector<int64_t> bounds = parts_of(model, batch);
  const int64_t parts = static_cast<int64_t>(bounds.size()) - 1;
  if (parts == 1) return run(batch, 0, nullptr, out);
  Failure failure;
  std::atomic<int> code{0};
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(parts))
  for (int64_t i = 0; i < parts; ++i)
    failure.guard([&] {
      const BatchPart part(batch, bounds[static_cast<size_t>(i)], bounds[static_cast<size_t>(i) + 1]);
      const bool has_places = batch.wanted_count >= 0;
      const int own = run(part.batch, part.first_row, has_places ? part.places.data() : nullptr, has_places ? out : out + part.first_row * hidden);
      if (own) code = own;
    });
  failure.raise();
  return code.load();
}

extern "C" {

// out = the norm of the residual stream behind `count` layers, of the wanted rows in their order, or of all with a count below 0. residual[tokens, hidden] is
// the stream before them, and overwritten. The inputs of `kept_count` layers are kept as in LayerInputs. Returns 0, 1 where a wanted row is none of the tokens or there are more of them, or the code
// of tandem_rope_to_cache plus 10, or of tandem_paged_attention plus 20.
int tandem_dense_layers(const DenseLayer* layers, int64_t count, const DenseCache* caches, int precision, int64_t tokens, const int64_t* positions,
                        const int64_t* slots, const int32_t* query_start, const int32_t* context_lens, const int32_t* block_tables, int64_t sequences,
                        int64_t table_width, const int64_t* wanted, int64_t wanted_count, const float* norm, float* residual, float* out,
                        const int64_t* kept_layers, int64_t kept_count, float* kept) {
  return or_out_of_memory([&] {
    for (int64_t i = 0; i < wanted_count; ++i)
      if (wanted_count > tokens || wanted[i] < 0 || wanted[i] >= tokens) return 1;
    const FlatBatch batch = {tokens, positions, slots, query_start, context_lens, block_tables, sequences, table_width, wanted, wanted_count};
    const DenseModel model = {layers, count, caches, precision, norm};
    int code = 0;
    in_team(model, batch, [&] { code = run_dense_layers(model, batch, {kept_layers, kept_count, kept}, residual, out, nullptr); });
    return code;
  });
}

}  // extern "C"

DIRECT(dense_layers);
