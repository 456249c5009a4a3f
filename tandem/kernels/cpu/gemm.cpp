// Matrix products in a fixed order.
//
// out[m, n] = sum over blocks of BLOCK_K absolute k of (a chain of fused multiply-adds over the block's k, from 0), the blocks
// added in order. Each output's arithmetic is written here once and is the same for every tile shape, every row count and
// every number of threads, so a row's bits never depend on its neighbours.
#include <cstdlib>
#include <omp.h>

#include "vec.h"

namespace tandem {

constexpr int64_t PANEL = 64;     // columns of a packed panel
constexpr int64_t BLOCK_K = 256;  // k summed in one chain
constexpr int ROWS = 6;           // rows of the largest tile

// A tile of MR rows by NV vectors. `a` is addressed by a row and a k stride, so a transposed operand needs no copy.
template <int MR, int NV>
static inline void tile(const float* a, int64_t row_stride, int64_t k_stride, const float* b, int64_t k, float* c, int64_t ldc,
                        int columns, const float* bias, bool first) {
    Vec acc[MR][NV];
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) acc[i][j] = zero();
    for (int64_t kk = 0; kk < k; ++kk) {
        Vec bv[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) bv[j] = load(b + kk * PANEL + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i) {
            Vec av = set1(a[i * row_stride + kk * k_stride]);
#pragma GCC unroll 4
            for (int j = 0; j < NV; ++j) acc[i][j] = fma(av, bv[j], acc[i][j]);
        }
    }
    for (int i = 0; i < MR; ++i)
        for (int j = 0; j < NV; ++j) {
            int width = columns - j * LANES;
            if (width <= 0) break;
            if (width > LANES) width = LANES;
            float* at = c + i * ldc + j * LANES;
            Vec sum = acc[i][j];
            if (!first) sum = add(load_part(at, width), sum);
            if (bias) sum = add(sum, load_part(bias + j * LANES, width));
            store_part(at, sum, width);
        }
}

template <int NV>
static void rows_of_panel(const float* a, int64_t row_stride, int64_t k_stride, const float* b, int64_t k, float* c, int64_t ldc,
                          int columns, const float* bias, bool first, int64_t rows) {
    int64_t m = 0;
    for (; m + ROWS <= rows; m += ROWS)
        tile<ROWS, NV>(a + m * row_stride, row_stride, k_stride, b, k, c + m * ldc, ldc, columns, bias, first);
    const float* at = a + m * row_stride;
    float* ct = c + m * ldc;
    switch (rows - m) {
        case 5: tile<5, NV>(at, row_stride, k_stride, b, k, ct, ldc, columns, bias, first); break;
        case 4: tile<4, NV>(at, row_stride, k_stride, b, k, ct, ldc, columns, bias, first); break;
        case 3: tile<3, NV>(at, row_stride, k_stride, b, k, ct, ldc, columns, bias, first); break;
        case 2: tile<2, NV>(at, row_stride, k_stride, b, k, ct, ldc, columns, bias, first); break;
        case 1: tile<1, NV>(at, row_stride, k_stride, b, k, ct, ldc, columns, bias, first); break;
        default: break;
    }
}

// Rows [m0, m1) of panels [p0, p1).
static void block(const float* a, int64_t row_stride, int64_t k_stride, const float* packed, int64_t k, int64_t n, float* c,
                  const float* bias, int64_t m0, int64_t m1, int64_t p0, int64_t p1) {
    for (int64_t k0 = 0; k0 < k; k0 += BLOCK_K) {
        int64_t part = k - k0 < BLOCK_K ? k - k0 : BLOCK_K;
        bool first = k0 == 0, last = k0 + part == k;
        for (int64_t p = p0; p < p1; ++p) {
            int64_t left = n - p * PANEL;
            int columns = (int)(left < PANEL ? left : PANEL);
            const float* b = packed + (p * k + k0) * PANEL;
            const float* at = a + m0 * row_stride + k0 * k_stride;
            float* ct = c + m0 * n + p * PANEL;
            const float* add_bias = bias && last ? bias + p * PANEL : nullptr;
            switch ((columns + LANES - 1) / LANES) {
                case 4: rows_of_panel<4>(at, row_stride, k_stride, b, part, ct, n, columns, add_bias, first, m1 - m0); break;
                case 3: rows_of_panel<3>(at, row_stride, k_stride, b, part, ct, n, columns, add_bias, first, m1 - m0); break;
                case 2: rows_of_panel<2>(at, row_stride, k_stride, b, part, ct, n, columns, add_bias, first, m1 - m0); break;
                default: rows_of_panel<1>(at, row_stride, k_stride, b, part, ct, n, columns, add_bias, first, m1 - m0); break;
            }
        }
    }
}

static inline int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }

static int threads_for(double work) {
    // A parallel region costs some microseconds; below about 100 of them of work it does not pay.
    return work < 2e6 ? 1 : omp_get_max_threads();
}

extern "C" {

int64_t tandem_packed_size(int64_t n, int64_t k) { return panels_of(n) * k * PANEL; }

// weight[N, K] -> panels [N / 64][K][64], missing columns zero.
void tandem_pack_weight(const float* weight, int64_t n, int64_t k, float* packed) {
    int64_t panels = panels_of(n);
#pragma omp parallel for schedule(static) num_threads(threads_for((double)n * k * 4))
    for (int64_t p = 0; p < panels; ++p) {
        int64_t width = n - p * PANEL < PANEL ? n - p * PANEL : PANEL;
        float* out = packed + p * k * PANEL;
        if (width < PANEL) std::memset(out, 0, sizeof(float) * k * PANEL);
        for (int64_t k0 = 0; k0 < k; k0 += 16) {
            int64_t k1 = k0 + 16 < k ? k0 + 16 : k;
            for (int64_t j = 0; j < width; ++j) {
                const float* row = weight + (p * PANEL + j) * k;
                for (int64_t kk = k0; kk < k1; ++kk) out[kk * PANEL + j] = row[kk];
            }
        }
    }
}

// matrix[K, N] (rows are already k) -> panels.
void tandem_pack_rows(const float* matrix, int64_t k, int64_t n, float* packed) {
    int64_t panels = panels_of(n);
#pragma omp parallel for schedule(static) num_threads(threads_for((double)n * k * 4))
    for (int64_t p = 0; p < panels; ++p) {
        int64_t width = n - p * PANEL < PANEL ? n - p * PANEL : PANEL;
        float* out = packed + p * k * PANEL;
        for (int64_t kk = 0; kk < k; ++kk) {
            std::memcpy(out + kk * PANEL, matrix + kk * n + p * PANEL, sizeof(float) * width);
            if (width < PANEL) std::memset(out + kk * PANEL + width, 0, sizeof(float) * (PANEL - width));
        }
    }
}

// c[M, N] = a[M, K] times packed[K, N] (+ bias[N]); a's element (m, k) is at a[m * row_stride + k * k_stride].
void tandem_gemm(const float* a, int64_t row_stride, int64_t k_stride, const float* packed, const float* bias, float* c,
                 int64_t m, int64_t n, int64_t k) {
    int64_t panels = panels_of(n);
    int threads = threads_for((double)m * n * k);
    if (threads == 1) {
        constexpr int64_t CHUNK = 192;
        for (int64_t m0 = 0; m0 < m; m0 += CHUNK)
            block(a, row_stride, k_stride, packed, k, n, c, bias, m0, m0 + CHUNK < m ? m0 + CHUNK : m, 0, panels);
        return;
    }
    int64_t row_chunk = m >= 96 * threads ? 96 : (m + ROWS - 1) / ROWS * ROWS;
    int64_t row_parts = (m + row_chunk - 1) / row_chunk;
    int64_t panel_chunk = row_parts >= 2 * threads ? panels : (panels + 4 * threads - 1) / (4 * threads);
    int64_t panel_parts = (panels + panel_chunk - 1) / panel_chunk;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t task = 0; task < row_parts * panel_parts; ++task) {
        int64_t m0 = task / panel_parts * row_chunk, p0 = task % panel_parts * panel_chunk;
        block(a, row_stride, k_stride, packed, k, n, c, bias, m0, m0 + row_chunk < m ? m0 + row_chunk : m, p0,
              p0 + panel_chunk < panels ? p0 + panel_chunk : panels);
    }
}

}  // extern "C"
}  // namespace tandem
