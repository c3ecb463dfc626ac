/* A strip of rows of an int8 weight times a few rows of x that are rounded to eight bits as well, for drafts. Sums are exact, so AVX2
 * and AVX512 VNNI find the same bits. */
#ifndef BYTES_H
#define BYTES_H
#include "lanes.h"

#ifdef ROWS_HERE
/* Whether INT8 weights of K columns meet rows of x that are rounded to eight bits too, row by row: AVX512 VNNI then takes a quarter of
 * the instructions and less, AVX2 half of them. AVX512 without VNNI has neither. */
int rows_rounded(int64_t K);

/* Columns of a weight that is multiplied so; of one step; how many bytes further on what is fetched lies: a strip takes less time than
 * the memory's answer. */
enum { LONGEST = 1 << 14, STEP = 4 * LANES, FURTHER = 8192 };

#ifdef ROWS512
#define BYTES __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")))
typedef __m512i Numbers;
#define NOTHING _mm512_setzero_si512()
#define INTEGERS(V) _mm512_cvtps_epi32(V)
#define PLUS _mm512_add_epi32
#define SIZE(V) _mm512_abs_ps(V)
#else
#define BYTES AVX2
typedef __m256i Numbers;
#define NOTHING _mm256_setzero_si256()
#define INTEGERS(V) _mm256_cvtps_epi32(V)
#define PLUS _mm256_add_epi32
#define SIZE(V) _mm256_andnot_ps(SAME(-0.0f), V)
#endif

/* The sum of all integers. */
static inline __attribute__((always_inline)) BYTES int32_t integers_sum(Numbers v)
{
    int32_t all[LANES], sum = 0;
    __builtin_memcpy(all, &v, sizeof v);
    for (int i = 0; i < LANES; i++) sum += all[i];
    return sum;
}

/* Integers as bytes; those that do not fit are cut. */
static inline __attribute__((always_inline)) BYTES void store_bytes(int8_t *to, Numbers n)
{
#ifdef ROWS512
    _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(n));
#else
    const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(pairs, pairs));
#endif
}

/* A row of x rounded so that its largest number becomes ±127, zeros up to a whole step behind it. Returns what 1 stands for, NaN
 * where a number is not finite; sum: of the rounded numbers. */
static BYTES float rounded_row(const float *x, int8_t *to, int64_t K, int32_t *sum)
{
    Lanes most = ZERO, odd = ZERO;
    for (int64_t k = 0; k < K; k += LANES) {
        const Lanes v = load(x, k, K - k, FP32);
        most = LARGER(most, SIZE(v)), odd = FMA(v, ZERO, odd);
    }
    const float largest = most_of(most), not_finite = total_of(odd);
    const Lanes by = SAME(largest > 1e-30f ? 127.0f / largest : 0.0f);
    Numbers all = NOTHING;
    for (int64_t k = 0; k < (K + STEP - 1) / STEP * STEP; k += LANES) {
        const Numbers n = k < K ? INTEGERS(TIMES(load(x, k, K - k, FP32), by)) : NOTHING;
        store_bytes(to + k, n);
        all = PLUS(all, n);
    }
    *sum = integers_sum(all);
    return largest / 127.0f + not_finite;
}

#ifdef ROWS512
/* SUM += P · R by fours of bytes, those of P without a sign. Around the intrinsic GCC 12 copies sums to memory and back: a quarter of
 * the time. */
#define DOT(SUM, P, R) __asm__("vpdpbusd %2, %1, %0" : "+v"(SUM) : "v"(P), "v"(R))
/* The instruction takes one side without a sign, so W is raised by so much. */
#define RAISED 128

/* sums[i] (STRIP): m rounded rows, `apart` from each other, times a strip. ahead: as many bytes as a strip has, which are fetched;
 * 0 = none. m is a constant wherever this is called. */
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
#else
/* SUM += the products by fours of bytes, of P without its sign and of R with it; the sum of two is at most 2 · 128 · 127 and fits sixteen
 * bits. Not by intrinsics, as above. */
#define DOT(SUM, P, R, ONES)                                                                                           \
    do {                                                                                                               \
        __m256i pairs;                                                                                                 \
        __asm__("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"                                  \
                : "+x"(SUM), "=&x"(pairs)                                                                              \
                : "x"(P), "x"(R), "x"(ONES));                                                                          \
    } while (0)
#define RAISED 0

/* As above. The instruction takes one side without a sign, too: W's signs go over to x. One row of W at a time, as six rows' sums take 12
 * of 16 registers. */
static inline __attribute__((always_inline)) BYTES void strip_of_bytes(
    const int8_t *x, int64_t apart, const char *const *w, __m128i *sums, int64_t K, const char *ahead, const int m)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i all[GROUP][STRIP];
#pragma GCC unroll 6
    for (int i = 0; i < m; i++) all[i][0] = all[i][1] = NOTHING;
#define ADD(LOAD)                                                                                                      \
    do {                                                                                                               \
        _Pragma("GCC unroll 2") for (int j = 0; j < STRIP; j++)                                                        \
        {                                                                                                              \
            const __m256i p = LOAD, size = _mm256_abs_epi8(p);                                                         \
            _Pragma("GCC unroll 6") for (int i = 0; i < m; i++)                                                        \
            {                                                                                                          \
                const __m256i r = _mm256_sign_epi8(_mm256_loadu_si256((const __m256i *)(x + i * apart + k)), p);       \
                DOT(all[i][j], size, r, ones);                                                                         \
            }                                                                                                          \
        }                                                                                                              \
    } while (0)
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP) {
        if (ahead) FETCH(ahead + k * STRIP, m);
        ADD(_mm256_loadu_si256((const __m256i *)(w[j] + k)));
    }
    if (k < K) {
        int8_t rest[STRIP][STEP] = {0};
        for (int j = 0; j < STRIP; j++) __builtin_memcpy(rest[j], w[j] + k, K - k);
        ADD(_mm256_loadu_si256((const __m256i *)rest[j]));
    }
#undef ADD
#pragma GCC unroll 6
    for (int i = 0; i < m; i++) {
        const __m256i a = _mm256_hadd_epi32(all[i][0], all[i][1]), b = _mm256_hadd_epi32(a, a);
        sums[i] = _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    }
}
#endif

/* `many` numbers, STRIP at most. AVX2's own way with a mask takes some twenty instructions on AMD's processors. */
static inline __attribute__((always_inline)) BYTES __m128 some(const float *from, int64_t many)
{
#ifdef ROWS512
    return _mm_maskz_loadu_ps((1 << many) - 1, from);
#else
    return many == STRIP ? _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)from)) : _mm_load_ss(from);
#endif
}

static inline __attribute__((always_inline)) BYTES void store_some(float *to, int64_t many, __m128 v)
{
#ifdef ROWS512
    _mm_mask_storeu_ps(to, (1 << many) - 1, v);
#else
    if (many == STRIP)
        _mm_storel_epi64((__m128i *)to, _mm_castps_si128(v));
    else
        _mm_store_ss(to, v);
#endif
}

/* As `product`, of an INT8 weight and rows rounded to eight bits. Sums are exact, so their order does not matter. */
static __attribute__((unused)) BYTES void product_of_bytes(
    const Matrix *m, const float *x, float *y, int64_t M, int64_t K, int64_t N, int64_t first, int64_t last, int add)
{
    const int64_t apart = (K + STEP - 1) / STEP * STEP, groups = (M + GROUP - 1) / GROUP, most = (M + groups - 1) / groups;
    int8_t rows[M * apart];
    float one[M];
    int32_t raised[M];
    for (int64_t i = 0; i < M; i++) one[i] = rounded_row(x + i * K, rows + i * apart, K, raised + i), raised[i] *= RAISED;
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
        const __m128 scale = some(m->scale + at, many), bias = m->bias ? some(m->bias + at, many) : _mm_setzero_ps();
        for (int64_t i = 0; i < M; i++) {
            float *out = y + i * N + at;
            const __m128 whole = _mm_cvtepi32_ps(_mm_sub_epi32(sums[i], _mm_set1_epi32(raised[i])));
            __m128 sum = _mm_fmadd_ps(whole, _mm_mul_ps(_mm_set1_ps(one[i]), scale), bias);
            if (add) sum = _mm_add_ps(sum, some(out, many));
            store_some(out, many, sum);
        }
    }
}
#endif
#endif
