// Sixteen fp32 lanes, the same arithmetic on every instruction set: every product that is added is an explicit fused
// multiply-add, so the bits do not depend on what a compiler chooses to contract.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

namespace tandem {

constexpr int LANES = 16;

#if defined(__AVX512F__)

struct Vec {
    __m512 v;
};
static inline Vec zero() { return {_mm512_setzero_ps()}; }
static inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
static inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
static inline Vec load_part(const float* p, int n) { return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p)}; }
static inline void store_part(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a.v); }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline Vec round_nearest(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for whole n in [-126, 127]
static inline Vec pow2(Vec n) {
    __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
    return {_mm512_castsi512_ps(e)};
}
static inline Vec zero_below(Vec x, float limit, Vec y) {  // y where x >= limit, else 0
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_GE_OQ), y.v)};
}

#else

struct Vec {
    float v[LANES];
};
#define TANDEM_LANES for (int i = 0; i < LANES; ++i)
static inline Vec zero() { Vec r; TANDEM_LANES r.v[i] = 0.f; return r; }
static inline Vec set1(float x) { Vec r; TANDEM_LANES r.v[i] = x; return r; }
static inline Vec load(const float* p) { Vec r; std::memcpy(r.v, p, sizeof r.v); return r; }
static inline void store(float* p, Vec a) { std::memcpy(p, a.v, sizeof a.v); }
static inline Vec load_part(const float* p, int n) { Vec r; TANDEM_LANES r.v[i] = i < n ? p[i] : 0.f; return r; }
static inline void store_part(float* p, Vec a, int n) { for (int i = 0; i < n; ++i) p[i] = a.v[i]; }
static inline Vec fma(Vec a, Vec b, Vec c) { Vec r; TANDEM_LANES r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]); return r; }
static inline Vec add(Vec a, Vec b) { Vec r; TANDEM_LANES r.v[i] = a.v[i] + b.v[i]; return r; }
static inline Vec sub(Vec a, Vec b) { Vec r; TANDEM_LANES r.v[i] = a.v[i] - b.v[i]; return r; }
static inline Vec mul(Vec a, Vec b) { Vec r; TANDEM_LANES r.v[i] = a.v[i] * b.v[i]; return r; }
static inline Vec div(Vec a, Vec b) { Vec r; TANDEM_LANES r.v[i] = a.v[i] / b.v[i]; return r; }
static inline Vec max(Vec a, Vec b) { Vec r; TANDEM_LANES r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r; }
static inline Vec min(Vec a, Vec b) { Vec r; TANDEM_LANES r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return r; }
static inline Vec round_nearest(Vec a) { Vec r; TANDEM_LANES r.v[i] = __builtin_rintf(a.v[i]); return r; }
static inline Vec pow2(Vec n) {
    Vec r;
    TANDEM_LANES { int32_t e = ((int32_t)n.v[i] + 127) << 23; std::memcpy(&r.v[i], &e, 4); }
    return r;
}
static inline Vec zero_below(Vec x, float limit, Vec y) { Vec r; TANDEM_LANES r.v[i] = x.v[i] >= limit ? y.v[i] : 0.f; return r; }

#endif

// The lanes' sum in one fixed tree, whatever the instruction set.
static inline float sum_lanes(Vec a) {
    alignas(64) float t[LANES];
    store(t, a);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) t[i] += t[i + width];
    return t[0];
}
static inline float max_lanes(Vec a) {
    alignas(64) float t[LANES];
    store(t, a);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) t[i] = t[i] > t[i + width] ? t[i] : t[i + width];
    return t[0];
}

// e^x within 2 units in the last place for x <= 88; exactly 0 below -87 (after Cephes' expf; range reduction by ln 2 in two
// parts, a polynomial of degree 5).
static inline Vec exp(Vec x) {
    const Vec low = set1(-87.0f), high = set1(88.0f);
    Vec c = max(min(x, high), low);
    Vec n = round_nearest(mul(c, set1(1.44269504088896341f)));
    Vec r = fma(n, set1(-0.693359375f), c);
    r = fma(n, set1(2.12194440e-4f), r);
    Vec p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), r);
    p = add(p, set1(1.0f));
    return zero_below(x, -87.0f, mul(p, pow2(n)));
}
static inline float exp1(float x) {
    alignas(64) float t[LANES];
    store(t, exp(set1(x)));
    return t[0];
}

}  // namespace tandem
