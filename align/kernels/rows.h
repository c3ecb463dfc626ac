/* Two rows of a weight times a few rows of x: what rows.c, layers.c and tree.c multiply with.
 *
 * The time of such a product is the time to read W once. Two rows of W at a time are streamed past up to six rows of
 * x, whose sums stay in registers; the arithmetic hides behind the reading. Every output is the sum over k in the same
 * order however many rows there are, so a row's result does not depend on its company, to the bit.
 */
#ifndef ROWS_H
#define ROWS_H
#include <stdint.h>

typedef struct {
    const void *weight; /* (out, in) */
    const float *bias;  /* (out), or 0 */
    int64_t half;       /* whether the weight is bf16 */
} Matrix;

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma")))
#define ROWS_HERE 1
#define GROUP 6

static inline __attribute__((always_inline)) AVX2 float total(__m256 v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

static inline __attribute__((always_inline)) AVX2 float largest_of(__m256 v)
{
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}

/* Eight weights of row w from column k on, and one weight; half: bf16, whose bits are the upper half of an fp32. */
static inline __attribute__((always_inline)) AVX2 __m256 eight(const void *w, int64_t k, const int half)
{
    if (!half) return _mm256_loadu_ps((const float *)w + k);
    const __m128i bits = _mm_loadu_si128((const __m128i *)((const uint16_t *)w + k));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

static inline __attribute__((always_inline)) float one(const void *w, int64_t k, const int half)
{
    if (!half) return ((const float *)w)[k];
    const uint32_t bits = (uint32_t)((const uint16_t *)w)[k] << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

/* m rows of x times two rows of W; m and half are constants wherever this is called. Meanwhile memory from `ahead` on is
 * fetched, `step` bytes for every eight columns. */
static inline __attribute__((always_inline)) AVX2 void pair(
    const float *x, const void *w, const void *v, const float *bias, float *y, int64_t K, int64_t N, const int m,
    const int half, const char *ahead, int64_t step)
{
    __m256 a[GROUP], b[GROUP];
#pragma GCC unroll 6
    for (int i = 0; i < m; i++) a[i] = b[i] = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + 8 <= K; k += 8) {
        const __m256 p = eight(w, k, half), q = eight(v, k, half);
        _mm_prefetch(ahead, _MM_HINT_T0);
        ahead += step;
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
            s += x[i * K + j] * one(w, j, half);
            t += x[i * K + j] * one(v, j, half);
        }
        y[i * N] = s + (bias ? bias[0] : 0.0f);
        if (v != w) y[i * N + 1] = t + (bias ? bias[1] : 0.0f);
    }
}

static inline __attribute__((always_inline)) AVX2 void rows_of(
    const float *x, const void *w, const void *v, const float *bias, float *y, int64_t M, int64_t K, int64_t N,
    const char *ahead, const int half)
{
    /* the two rows of W that come next, at `ahead`, are fetched in equal shares, so that the memory is never idle while sums
     * are made */
    const int64_t size = half ? 2 : 4, groups = (M + GROUP - 1) / GROUP;
    const int64_t step = 16 * size / groups, share = 2 * K * size / groups;
    for (int64_t i = 0; i < M; i += GROUP, x += GROUP * K, y += GROUP * N, ahead += share) {
        switch (M - i) {
        case 1: pair(x, w, v, bias, y, K, N, 1, half, ahead, step); break;
        case 2: pair(x, w, v, bias, y, K, N, 2, half, ahead, step); break;
        case 3: pair(x, w, v, bias, y, K, N, 3, half, ahead, step); break;
        case 4: pair(x, w, v, bias, y, K, N, 4, half, ahead, step); break;
        case 5: pair(x, w, v, bias, y, K, N, 5, half, ahead, step); break;
        default: pair(x, w, v, bias, y, K, N, 6, half, ahead, step); break;
        }
    }
}

static AVX2 void rows_fp32(
    const float *x, const void *w, const void *v, const float *bias, float *y, int64_t M, int64_t K, int64_t N,
    const char *ahead)
{
    rows_of(x, w, v, bias, y, M, K, N, ahead, 0);
}

static AVX2 void rows_bf16(
    const float *x, const void *w, const void *v, const float *bias, float *y, int64_t M, int64_t K, int64_t N,
    const char *ahead)
{
    rows_of(x, w, v, bias, y, M, K, N, ahead, 1);
}

/* y (M, N) = x · Wᵀ, or added to y (M ≤ 32): columns 2·from to 2·to. */
static inline AVX2 void product(
    const Matrix *m, const float *x, float *y, int64_t M, int64_t K, int64_t N, int64_t from, int64_t to, int add)
{
    const int64_t size = m->half ? 2 : 4;
    for (int64_t n = from; n < to; n++) {
        const char *first = (const char *)m->weight + 2 * n * K * size;
        const char *second = 2 * n + 1 < N ? first + K * size : first;
        const char *ahead = n + 1 < to ? first + 2 * K * size : first;
        const float *bias = m->bias ? m->bias + 2 * n : 0;
        float sums[2 * 32];
        float *out = add ? sums : y + 2 * n;
        const int64_t step = add ? 2 : N;
        if (m->half)
            rows_bf16(x, first, second, bias, out, M, K, step, ahead);
        else
            rows_fp32(x, first, second, bias, out, M, K, step, ahead);
        if (!add) continue;
        for (int64_t i = 0; i < M; i++) {
            y[i * N + 2 * n] += sums[2 * i];
            if (second != first) y[i * N + 2 * n + 1] += sums[2 * i + 1];
        }
    }
}

/* The share of thread t of T in `count` pieces. */
static inline void share(int64_t count, int t, int T, int64_t *from, int64_t *to)
{
    *from = count * t / T;
    *to = count * (t + 1) / T;
}

/* exp of eight numbers ≤ 88, to 2 units in the last place (Cephes' polynomial); far below 0 it is 0. NaN stays NaN: of a number
 * and NaN, min and max give their second operand. */
static inline AVX2 __m256 exp8(__m256 x)
{
    const __m256 least = _mm256_set1_ps(-87.0f);
    const __m256 gone = _mm256_cmp_ps(x, least, _CMP_LT_OQ);
    x = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(least, x));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)), 8);
    x = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    x = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), x);
    __m256 y = _mm256_set1_ps(1.9875691500e-4f);
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(1.3981999507e-3f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(8.3334519073e-3f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(4.1665795894e-2f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(1.6666665459e-1f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(5.0000001201e-1f));
    y = _mm256_add_ps(_mm256_fmadd_ps(y, _mm256_mul_ps(x, x), x), _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(gone, _mm256_mul_ps(y, _mm256_castsi256_ps(power)));
}
#endif
#endif
