/* A strip of rows of an int8 weight times a few rows of x that are rounded to eight bits as well (AVX512 VNNI), for drafts. */
#ifndef BYTES_H
#define BYTES_H
#include "lanes.h"

#ifdef ROWS_HERE
/* Whether INT8 weights of K columns meet rows of x that are rounded to eight bits too, row by row: where the processor multiplies such
 * numbers (AVX512 VNNI), which takes a quarter of the instructions and less. */
int rows_rounded(int64_t K);

#ifdef ROWS512
#define BYTES __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")))
/* Columns of a weight that is multiplied so; of one step; how many bytes further on what is fetched lies: a strip takes less time than
 * the memory's answer. */
enum { LONGEST = 1 << 14, STEP = 64, FURTHER = 8192 };
/* SUM += P · R by fours of bytes, those of P without a sign. Around the intrinsic GCC 12 copies sums to memory and back: a quarter of
 * the time. */
#define DOT(SUM, P, R) __asm__("vpdpbusd %2, %1, %0" : "+v"(SUM) : "v"(P), "v"(R))

/* A row of x rounded so that its largest number becomes ±127, zeros up to a whole step behind it. Returns what 1 stands for, NaN
 * where a number is not finite; sum: of the rounded numbers. */
static BYTES float rounded_row(const float *x, int8_t *to, int64_t K, int32_t *sum)
{
    Lanes most = ZERO, odd = ZERO;
    for (int64_t k = 0; k < K; k += LANES) {
        const Lanes v = load(x, k, K - k, FP32);
        most = _mm512_max_ps(most, _mm512_abs_ps(v)), odd = FMA(v, ZERO, odd);
    }
    const float largest = _mm512_reduce_max_ps(most), not_finite = _mm512_reduce_add_ps(odd);
    const Lanes by = SAME(largest > 1e-30f ? 127.0f / largest : 0.0f);
    __m512i all = _mm512_setzero_si512();
    for (int64_t k = 0; k < (K + STEP - 1) / STEP * STEP; k += LANES) {
        const __m512i n = k < K ? _mm512_cvtps_epi32(_mm512_mul_ps(load(x, k, K - k, FP32), by)) : _mm512_setzero_si512();
        _mm_storeu_si128((__m128i *)(to + k), _mm512_cvtsepi32_epi8(n));
        all = _mm512_add_epi32(all, n);
    }
    *sum = _mm512_reduce_add_epi32(all);
    return largest / 127.0f + not_finite;
}

/* sums[i] (STRIP): m rounded rows, `apart` from each other, times a strip. The instruction takes one side without a sign, so W is
 * raised by 128. ahead: as many bytes as a strip has, which are fetched; 0 = none. m is a constant wherever this is called. */
static inline __attribute__((always_inline)) BYTES void strip_of_bytes(
    const int8_t *x, int64_t apart, const char *const *w, __m128i *sums, int64_t K, const char *ahead, const int m)
{
    const __m512i raise = _mm512_set1_epi8(-128);
    __m512i all[GROUP][STRIP];
#pragma GCC unroll 6
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int j = 0; j < STRIP; j++) all[i][j] = _mm512_setzero_si512();
#define ADD(LOAD)                                                                                                      \
    do {                                                                                                               \
        __m512i p[STRIP];                                                                                              \
        _Pragma("GCC unroll 4") for (int j = 0; j < STRIP; j++) p[j] = _mm512_xor_si512(LOAD, raise);                  \
        _Pragma("GCC unroll 6") for (int i = 0; i < m; i++)                                                            \
        {                                                                                                              \
            const __m512i r = _mm512_loadu_si512(x + i * apart + k);                                                   \
            _Pragma("GCC unroll 4") for (int j = 0; j < STRIP; j++) DOT(all[i][j], p[j], r);                               \
        }                                                                                                              \
    } while (0)
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP) {
#pragma GCC unroll 4
        for (int j = 0; j < STRIP && ahead; j++) FETCH(ahead + k * STRIP + j * STEP, m);
        ADD(_mm512_loadu_si512(w[j] + k));
    }
    const __mmask64 left = ((__mmask64)1 << (K - k)) - 1;
    if (k < K) ADD(_mm512_maskz_loadu_epi8(left, w[j] + k));
#undef ADD
#pragma GCC unroll 6
    for (int i = 0; i < m; i++) {
        const __m512i *v = all[i];
        const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
        const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
        const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        const __m256i d = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
        sums[i] = _mm_add_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
    }
}

/* As `product`, of an INT8 weight and rows rounded to eight bits. Sums are exact, so their order does not matter. */
static __attribute__((unused)) BYTES void product_of_bytes(
    const Matrix *m, const float *x, float *y, int64_t M, int64_t K, int64_t N, int64_t first, int64_t last, int add)
{
    const int64_t apart = (K + STEP - 1) / STEP * STEP, groups = (M + GROUP - 1) / GROUP, most = (M + groups - 1) / groups;
    int8_t rows[M * apart];
    float one[M];
    int32_t raised[M];
    for (int64_t i = 0; i < M; i++) one[i] = rounded_row(x + i * K, rows + i * apart, K, raised + i), raised[i] *= 128;
    for (int64_t n = first; n < last; n++) {
        const char *w[STRIP], *lowest = (const char *)m->weight + n * STRIP * K;
        for (int64_t j = 0; j < STRIP; j++) w[j] = lowest + (n * STRIP + j < N ? j : 0) * K;
        __m128i sums[M];
        const char *ahead = (last - n) * STRIP * K > FURTHER ? lowest + FURTHER : 0;
        for (int64_t i = 0; i < M; i += most, ahead = 0) {
            const int8_t *its = rows + i * apart;
            switch (M - i < most ? M - i : most) {
            case 1: strip_of_bytes(its, apart, w, sums + i, K, ahead, 1); break;
            case 2: strip_of_bytes(its, apart, w, sums + i, K, ahead, 2); break;
            case 3: strip_of_bytes(its, apart, w, sums + i, K, ahead, 3); break;
            case 4: strip_of_bytes(its, apart, w, sums + i, K, ahead, 4); break;
            case 5: strip_of_bytes(its, apart, w, sums + i, K, ahead, 5); break;
            default: strip_of_bytes(its, apart, w, sums + i, K, ahead, 6); break;
            }
        }
        const int64_t at = n * STRIP, many = N - at < STRIP ? N - at : STRIP;
        const __mmask8 those = (1 << many) - 1;
        const __m128 scale = _mm_maskz_loadu_ps(those, m->scale + at);
        const __m128 bias = m->bias ? _mm_maskz_loadu_ps(those, m->bias + at) : _mm_setzero_ps();
        for (int64_t i = 0; i < M; i++) {
            float *out = y + i * N + at;
            const __m128 whole = _mm_cvtepi32_ps(_mm_sub_epi32(sums[i], _mm_set1_epi32(raised[i])));
            __m128 sum = _mm_fmadd_ps(whole, _mm_mul_ps(_mm_set1_ps(one[i]), scale), bias);
            if (add) sum = _mm_add_ps(sum, _mm_maskz_loadu_ps(those, out));
            _mm_mask_storeu_ps(out, those, sum);
        }
    }
}
#endif
#endif
#endif
