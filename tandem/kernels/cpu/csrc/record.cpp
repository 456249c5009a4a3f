// Appends the tokens that a step has drawn to an engine's rows, and tells which of them have ended.
#include <cmath>
#include <cstdint>

#include "direct.h"

// The structure of decode_step.py, field by field: one number a row but for what is drawn, [rows, columns], of which row r has filled length[r] - start[r].
struct DrawnRows {
  int64_t *length, *last_token;
  const int64_t *start, *limit;
  int64_t* tokens;
  float *raw, *sampling;
  int64_t columns;
};

constexpr int NOT_FINITE = -2, IS_FULL = -3;

extern "C" {

// `ended` receives those of the rows index[count] that have reached their limit, or drawn one of their stop_tokens[rows, stops]. Returns how many they are;
// NOT_FINITE where a raw log-probability is not finite, and IS_FULL where a row has no place for its token: then nothing is recorded.
int tandem_record(const DrawnRows* to, const int64_t* stop_tokens, int64_t stops, const int64_t* index, int64_t count, const int64_t* tokens,
                  const float* raw, const float* sampling, int64_t* ended) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t drawn = to->length[index[i]] - to->start[index[i]];
    if (drawn < 0 || drawn >= to->columns) return IS_FULL;
    if (!std::isfinite(raw[i])) return NOT_FINITE;
  }
  int64_t ends = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t r = index[i], at = r * to->columns + to->length[r] - to->start[r];
    to->tokens[at] = tokens[i];
    to->raw[at] = raw[i];
    to->sampling[at] = sampling[i];
    to->last_token[r] = tokens[i];
    bool has_ended = ++to->length[r] >= to->limit[r];
    for (int64_t s = 0; s < stops; ++s) has_ended |= stop_tokens[r * stops + s] == tokens[i];
    if (has_ended) ended[ends++] = r;
  }
  return static_cast<int>(ends);
}

}  // extern "C"

DIRECT(record);
