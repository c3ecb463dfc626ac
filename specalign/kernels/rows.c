/* y (M, N) = x (M, K) · Wᵀ for few rows M and a weight W (N, K) that does not fit the cache, row-major; x and y in
 * fp32, W in fp32, bf16 or int8. */
#include "rows.h"

int second_cache = 0, eight_bits = 0; /* by what this processor is; switched in tests */

#ifdef ROWS_HERE
#include <cpuid.h>
#include <omp.h>

/* AMD's family 25 with AVX512. */
static int is_zen4(void)
{
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != 0x68747541) return 0; /* Auth(enticAMD) */
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    return (a >> 8 & 15) + (a >> 20 & 255) == 25 && __builtin_cpu_supports("avx512f");
}

int rows_available(void)
{
    second_cache = is_zen4();
#ifdef ROWS512
    if (!__builtin_cpu_supports("avx512f")) return 0;
    eight_bits = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
    eight_bits = 1;
#endif
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

/* Whether rows that meet an INT8 weight of K columns are rounded to eight bits too. */
int rows_rounded(int64_t K)
{
    return eight_bits && K <= LONGEST;
}

void matrix_product(const Matrix *w, const float *x, float *y, int64_t M, int64_t K, int64_t N)
{
#pragma omp parallel
    {
        int64_t from, to;
        share(STRIPS(N), omp_get_thread_num(), omp_get_num_threads(), &from, &to);
        product(w, x, y, M, K, N, from, to, 0);
    }
}

void matrix_row(const Matrix *w, int64_t i, int64_t K, float *out) { take_row(w, i, K, out); }
#else
int rows_available(void) { return 0; }
int rows_rounded(int64_t K) { return 0; }
void matrix_row(const Matrix *w, int64_t i, int64_t K, float *out) {}
void matrix_product(const Matrix *w, const float *x, float *y, int64_t M, int64_t K, int64_t N) {}
#endif
