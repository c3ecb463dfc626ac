/* What the kernels are written in: matrices, and lanes of numbers in the registers of AVX2 or, with ROWS512, of AVX512. */
#ifndef LANES_H
#define LANES_H
#include <stdint.h>

typedef struct {
    const void *weight; /* (out, in) */
    const float *bias;  /* (out), or 0 */
    const float *scale; /* (out), what each row of an INT8 weight is multiplied by; else 0 */
    int64_t kind;       /* of the weight's numbers */
} Matrix;

enum { FP32, BF16, INT8 };

/* Row i of a weight of FP32 or BF16, `inputs` numbers in fp32. */
static inline void take_row(const Matrix *w, int64_t i, int64_t inputs, float *out)
{
    if (w->kind == FP32) {
        __builtin_memcpy(out, (const float *)w->weight + i * inputs, inputs * sizeof(float));
        return;
    }
    const uint16_t *row = (const uint16_t *)w->weight + i * inputs;
    for (int64_t k = 0; k < inputs; k++) {
        const uint32_t bits = (uint32_t)row[k] << 16; /* a BF16's are the upper half of an fp32's */
        __builtin_memcpy(out + k, &bits, sizeof bits);
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma")))
#define ROWS_HERE 1
#ifdef ROWS512
#define WIDE __attribute__((target("avx512f,avx2,fma")))
#define LANES 16
#define STRIP 4
typedef __m512 Lanes;
#define ZERO _mm512_setzero_ps()
#define FMA _mm512_fmadd_ps
#define SAME _mm512_set1_ps
#define STORE _mm512_storeu_ps
#define LARGER _mm512_max_ps
#define TIMES _mm512_mul_ps
#else
#define WIDE AVX2
#define LANES 8
#define STRIP 2
typedef __m256 Lanes;
#define ZERO _mm256_setzero_ps()
#define FMA _mm256_fmadd_ps
#define SAME _mm256_set1_ps
#define STORE _mm256_storeu_ps
#define LARGER _mm256_max_ps
#define TIMES _mm256_mul_ps
#endif
/* Rows of x: whose sums stay in registers, of one call at most, and so few that fetching does not wait (below). */
enum { GROUP = 6, MOST = 32, FEW = 2 };

/* Whether what meets more than FEW rows is fetched into the second cache alone: on Zen 4, where fetching into the nearest waits
 * for the memory and does not hide behind the arithmetic (six rows through SmolLM2 26.8 ms, 15.4 so). On Zen 5 it costs up to a fifth. */
extern int second_cache;
#define FETCH(AT, M) ((M) > FEW && second_cache ? _mm_prefetch(AT, _MM_HINT_T1) : _mm_prefetch(AT, _MM_HINT_T0))

/* How many strips hold N rows of a weight. */
#define STRIPS(N) (((N) + STRIP - 1) / STRIP)

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

/* Bytes of a number of a weight. */
static inline __attribute__((always_inline)) int64_t size_of(const int kind) { return kind == FP32 ? 4 : kind == BF16 ? 2 : 1; }

/* `LANES` numbers from column k on, `many` where fewer are left, the rest 0; the bits of a BF16 are the upper half of an fp32's. */
static inline __attribute__((always_inline)) WIDE Lanes load(const void *row, int64_t k, int64_t many, const int kind)
{
    const void *from = (const char *)row + k * size_of(kind);
    float few[LANES] = {0};
    if (many < LANES) from = __builtin_memcpy(few, from, many * size_of(kind));
#ifdef ROWS512
    if (kind == FP32) return _mm512_loadu_ps(from);
    if (kind == INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
#else
    if (kind == FP32) return _mm256_loadu_ps(from);
    if (kind == INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16));
#endif
}

#ifdef ROWS512
static inline __attribute__((always_inline)) WIDE __m256 halves(__m512 v)
{
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
}
#endif

/* The sums over the lanes of a strip's vectors, each in the same order. */
static inline __attribute__((always_inline)) WIDE void totals(const Lanes *v, float *sums)
{
#ifdef ROWS512
    __m256 s[STRIP];
#pragma GCC unroll 4
    for (int j = 0; j < STRIP; j++) s[j] = halves(v[j]);
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    sums[0] = total(v[0]), sums[1] = total(v[1]);
#endif
}

/* The share of thread t of T in `count` pieces. */
static inline void share(int64_t count, int t, int T, int64_t *from, int64_t *to)
{
    *from = count * t / T;
    *to = count * (t + 1) / T;
}

/* exp of X (registers of W bits) is Y · 2^N: Cephes' polynomial, to 2 units in the last place. X is cut to −87 … 88; NaN stays NaN: of a
 * number and NaN, min and max give their second operand. */
#define ROUNDED256(X) _mm256_round_ps(X, 8)
#define ROUNDED512(X) _mm512_roundscale_ps(X, 8)
#define EXP(W, X, N, Y)                                                                                                \
    do {                                                                                                               \
        X = _mm##W##_min_ps(_mm##W##_set1_ps(88.0f), _mm##W##_max_ps(_mm##W##_set1_ps(-87.0f), X));                    \
        N = ROUNDED##W(_mm##W##_mul_ps(X, _mm##W##_set1_ps(1.44269504088896341f)));                                    \
        X = _mm##W##_fnmadd_ps(N, _mm##W##_set1_ps(0.693359375f), X);                                                  \
        X = _mm##W##_fnmadd_ps(N, _mm##W##_set1_ps(-2.12194440e-4f), X);                                               \
        Y = _mm##W##_set1_ps(1.9875691500e-4f);                                                                        \
        Y = _mm##W##_fmadd_ps(Y, X, _mm##W##_set1_ps(1.3981999507e-3f));                                               \
        Y = _mm##W##_fmadd_ps(Y, X, _mm##W##_set1_ps(8.3334519073e-3f));                                               \
        Y = _mm##W##_fmadd_ps(Y, X, _mm##W##_set1_ps(4.1665795894e-2f));                                               \
        Y = _mm##W##_fmadd_ps(Y, X, _mm##W##_set1_ps(1.6666665459e-1f));                                               \
        Y = _mm##W##_fmadd_ps(Y, X, _mm##W##_set1_ps(5.0000001201e-1f));                                               \
        Y = _mm##W##_add_ps(_mm##W##_fmadd_ps(Y, _mm##W##_mul_ps(X, X), X), _mm##W##_set1_ps(1.0f));                   \
    } while (0)

/* exp of eight numbers ≤ 88; below −87 it is 0. */
static inline AVX2 __m256 exp8(__m256 x)
{
    const __m256 gone = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ);
    __m256 n, y;
    EXP(256, x, n, y);
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(gone, _mm256_mul_ps(y, _mm256_castsi256_ps(power)));
}

/* The same of lanes, to the bit. */
static inline __attribute__((always_inline)) WIDE Lanes exp_of(Lanes x)
{
#ifdef ROWS512
    const __mmask16 there = _mm512_cmp_ps_mask(x, SAME(-87.0f), _CMP_NLT_UQ);
    __m512 n, y;
    EXP(512, x, n, y);
    return _mm512_maskz_scalef_ps(there, y, n);
#else
    return exp8(x);
#endif
}

/* The sum of all lanes, and the largest. */
static inline __attribute__((always_inline)) WIDE float total_of(Lanes v)
{
#ifdef ROWS512
    return total(halves(v));
#else
    return total(v);
#endif
}

static inline __attribute__((always_inline)) WIDE float most_of(Lanes v)
{
#ifdef ROWS512
    return largest_of(_mm256_max_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1))));
#else
    return largest_of(v);
#endif
}
#endif
#endif
