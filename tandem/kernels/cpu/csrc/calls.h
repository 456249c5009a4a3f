// The C functions that other C functions call. Their own files include this too, so that a change of one does not compile until its callers have it.
#pragma once

#include <cstdint>

extern "C" {
void tandem_rms_norm(const float* x, const float* residual, const float* weight, int64_t rows, int64_t width, int64_t groups, float eps, int centred,
                     float* out, float* total, float* rstd);
int tandem_linear(const float* x, const float* weight, int packed, const float* bias, int64_t m, int64_t n, int64_t k, float* out);
int tandem_gated_mlp(const float* x, const float* gate_up, const float* gate_up_bias, const float* down, const float* down_bias, int64_t m,
                     int64_t hidden, int64_t inner, int activation, float* out);
int tandem_bf16_linear(const float* x, const float* weight, int packed, const float* bias, int rounds, int64_t m, int64_t n, int64_t k, float* out);
int tandem_bf16_gated_mlp(const float* x, const float* gate_up, const float* gate_up_bias, const float* down, const float* down_bias, int rounds,
                          int64_t m, int64_t hidden, int64_t inner, int activation, float* out);
int tandem_int8_linear(const float* x, const uint8_t* packed, const float* scales, const float* bias, int64_t m, int64_t n, int64_t k, float* out);
int tandem_int4_linear(const float* x, const uint8_t* packed, const float* scales, const uint8_t* zeros, int64_t group, const float* bias, int64_t m,
                       int64_t n, int64_t k, float* out);
int64_t tandem_coded_bytes(int kind, int64_t n, int64_t k);
int tandem_coded_linear(const float* x, int kind, const uint8_t* packed, const uint8_t* scales, const float* zeros, int64_t group, const float* bias,
                        int64_t m, int64_t n, int64_t k, float* out);
void tandem_round_fp8(const float* x, int64_t m, int64_t k, int64_t group, float* out);
int tandem_rope_to_cache(const float* qkv, const int64_t* positions, const float* cos_sin, int64_t tokens, int64_t limit, int64_t hq, int64_t hkv,
                         int64_t size, const float* q_norm, const float* k_norm, float eps, float* q, int kind, void* keys, void* values,
                         float* key_scales, float* value_scales, int64_t blocks, const int64_t* slots);
int tandem_paged_attention(const float* q, int kind, const void* keys, const void* values, const float* key_scales, const float* value_scales,
                           int64_t tokens, int64_t blocks, int64_t heads, int64_t kv_heads, int64_t size, const int32_t* query_start,
                           const int32_t* context_lens, const int32_t* block_tables, int64_t sequences, int64_t table_width, float scale,
                           int64_t window, float cap, const float* sinks, float* out);
void tandem_soft_cap(const float* x, int64_t rows, int64_t width, float cap, float* out);
int tandem_packed_rows(const float* packed, int64_t n, int64_t k, const int64_t* rows, int64_t count, float* out);
int tandem_sample(const float* logits, int64_t rows, int64_t width, const float* temperature, const int64_t* top_k, const float* top_p, const float* min_p,
                  const double* uniform, int64_t* tokens, float* raw, float* sampling);
}
