// All layers of a dense decoder (dense_layers.cpp), for calls that compute more of a step.
#pragma once

#include <functional>

#include "batch_parts.h"

struct DenseLayer;
struct DenseCache;

struct DenseModel {
  const DenseLayer* layers;
  int64_t count;
  const DenseCache* caches;
  int precision;
  const float* norm;
};

// Where the inputs of the layers `layers[count]` of all tokens are kept, side by side: to[tokens, count * hidden].
struct LayerInputs {
  const int64_t* layers;
  int64_t count;
  float* to;
};

// What a step computes of the rows `first` to `first + rows` of its batch before and after all layers, called by the thread that computes those. Both return
// 0, or a code with which the step ends.
class RowWork {
 public:
  virtual int before(int64_t first, int64_t rows) const = 0;  // writes the residual stream
  virtual int after(int64_t first, int64_t rows) const = 0;   // reads the last norm

 protected:
  ~RowWork() = default;
};

// Runs call(), which computes `batch` through the layers: with a team of threads where the rows are few.
void in_team(const DenseModel& model, const FlatBatch& batch, const std::function<void()>& call);

// As tandem_dense_layers, which says what it returns. With `work` all rows are wanted.
int run_dense_layers(const DenseModel& model, const FlatBatch& batch, const LayerInputs& inputs, float* residual, float* out, const RowWork* work);
