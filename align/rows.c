/* y (M, N) = x (M, K) · Wᵀ for few rows M and a weight W (N, K) that does not fit the cache, fp32, row-major.
 *
 * The time of such a product is the time to read W once. Two rows of W at a time are streamed past up to six rows of
 * x, whose sums stay in registers; the arithmetic hides behind the reading. Every output is the sum over k in the same
 * order however many rows there are, so a row's result does not depend on its company, to the bit.
 */
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma")))
#define GROUP 6

static inline __attribute__((always_inline)) AVX2 float total(__m256 v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* m rows of x times two rows of W; m is a constant wherever this is called. */
static inline __attribute__((always_inline)) AVX2 void pair(
    const float *x, const float *w, const float *v, const float *bias, float *y, int64_t K, int64_t N, const int m)
{
    __m256 a[GROUP], b[GROUP];
#pragma GCC unroll 6
    for (int i = 0; i < m; i++) a[i] = b[i] = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + 8 <= K; k += 8) {
        const __m256 p = _mm256_loadu_ps(w + k), q = _mm256_loadu_ps(v + k);
        _mm_prefetch((const char *)(w + k) + 8 * K, _MM_HINT_T0);
        _mm_prefetch((const char *)(v + k) + 8 * K, _MM_HINT_T0);
#pragma GCC unroll 6
        for (int i = 0; i < m; i++) {
            const __m256 r = _mm256_loadu_ps(x + i * K + k);
            a[i] = _mm256_fmadd_ps(r, p, a[i]);
            b[i] = _mm256_fmadd_ps(r, q, b[i]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < m; i++) {
        float s = total(a[i]), t = total(b[i]);
        for (int64_t j = k; j < K; j++) {
            s += x[i * K + j] * w[j];
            t += x[i * K + j] * v[j];
        }
        y[i * N] = s + (bias ? bias[0] : 0.0f);
        if (v != w) y[i * N + 1] = t + (bias ? bias[1] : 0.0f);
    }
}

static AVX2 void rows_of(
    const float *x, const float *w, const float *v, const float *bias, float *y, int64_t M, int64_t K, int64_t N)
{
    for (int64_t i = 0; i < M; i += GROUP, x += GROUP * K, y += GROUP * N) {
        switch (M - i) {
        case 1: pair(x, w, v, bias, y, K, N, 1); break;
        case 2: pair(x, w, v, bias, y, K, N, 2); break;
        case 3: pair(x, w, v, bias, y, K, N, 3); break;
        case 4: pair(x, w, v, bias, y, K, N, 4); break;
        case 5: pair(x, w, v, bias, y, K, N, 5); break;
        default: pair(x, w, v, bias, y, K, N, 6); break;
        }
    }
}

int rows_available(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

void rows_product(const float *x, const float *w, const float *bias, float *y, int64_t M, int64_t K, int64_t N)
{
    const int64_t pairs = (N + 1) / 2;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < pairs; n++) {
        const float *first = w + 2 * n * K;
        rows_of(x, first, 2 * n + 1 < N ? first + K : first, bias ? bias + 2 * n : 0, y + 2 * n, M, K, N);
    }
}
#else
int rows_available(void) { return 0; }
void rows_product(const float *x, const float *w, const float *bias, float *y, int64_t M, int64_t K, int64_t N) {}
#endif
