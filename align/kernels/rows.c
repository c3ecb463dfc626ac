/* y (M, N) = x (M, K) · Wᵀ for few rows M and a weight W (N, K) that does not fit the cache, row-major; x and y in
 * fp32, W in fp32 or bf16. */
#include "rows.h"

#ifdef ROWS_HERE
int rows_available(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#define PRODUCT(NAME, TYPE, ROWS)                                                                                      \
    void NAME(const float *x, const TYPE *w, const float *bias, float *y, int64_t M, int64_t K, int64_t N)             \
    {                                                                                                                  \
        const int64_t pairs = (N + 1) / 2;                                                                             \
        _Pragma("omp parallel for schedule(static)") for (int64_t n = 0; n < pairs; n++)                               \
        {                                                                                                              \
            const TYPE *first = w + 2 * n * K;                                                                         \
            ROWS(x, first, 2 * n + 1 < N ? first + K : first, bias ? bias + 2 * n : 0, y + 2 * n, M, K, N,             \
                 (const char *)(first + 2 * K));                                                                       \
        }                                                                                                              \
    }

PRODUCT(rows_product, float, rows_fp32)
PRODUCT(rows_product_bf16, uint16_t, rows_bf16)
#else
int rows_available(void) { return 0; }
void rows_product(const float *x, const float *w, const float *bias, float *y, int64_t M, int64_t K, int64_t N) {}
void rows_product_bf16(const float *x, const uint16_t *w, const float *bias, float *y, int64_t M, int64_t K, int64_t N)
{
}
#endif
