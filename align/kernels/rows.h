/* A strip of rows of a weight times a few rows of x: what rows.c, layers.c and tree.c multiply with.
 *
 * The time of such a product is the time to read W once. A strip of W, two rows (four with ROWS512, which takes AVX512's
 * registers: twice as wide and twice as many), is streamed past up to six rows of x at a time, whose sums stay in registers; the
 * arithmetic hides behind the reading. Wide rows are cut into blocks of columns, so that those of x stay in the nearest cache for
 * several strips. Every output is the sum over k in the same order however many rows there are, so a row's result does not depend
 * on its company, to the bit.
 */
#ifndef ROWS_H
#define ROWS_H
#include <stdint.h>

typedef struct {
    const void *weight; /* (out, in) */
    const float *bias;  /* (out), or 0 */
    const float *scale; /* (out), what each row of an INT8 weight is multiplied by; else 0 */
    int64_t kind;       /* of the weight's numbers */
} Matrix;

enum { FP32, BF16, INT8 };

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma")))
#define ROWS_HERE 1
#ifdef ROWS512
#define WIDE __attribute__((target("avx512f,avx2,fma")))
#define LANES 16
#define STRIP 4
typedef __m512 Lanes;
#define NEAR 16384
#define ZERO _mm512_setzero_ps()
#define FMA _mm512_fmadd_ps
#define SAME _mm512_set1_ps
#define STORE _mm512_storeu_ps
#else
#define WIDE AVX2
#define LANES 8
#define STRIP 2
typedef __m256 Lanes;
#define NEAR INT64_MAX
#define ZERO _mm256_setzero_ps()
#define FMA _mm256_fmadd_ps
#define SAME _mm256_set1_ps
#define STORE _mm256_storeu_ps
#endif
/* Strips of more bytes than NEAR are cut into blocks of at most COLUMNS columns where they meet more than FEW rows: with the next one
 * and the rows they would not stay in the nearest cache. In fp32, from twice as many bytes on and up to a GROUP of rows, it is faster
 * to fetch not the next strip but what lies AHEAD bytes further on in the same rows. */
enum { GROUP = 6, MOST = 32, STRIPS_A_BLOCK = 8, COLUMNS = 640, FEW = 2, AHEAD = 1280 };

/* Whether weights that meet more than FEW rows are fetched into the second cache alone: on Zen 4, where fetching into the nearest waits
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

/* The sums over the lanes of four vectors, each in the same order. */
static inline __attribute__((always_inline)) WIDE __m128 four_totals(const Lanes *v)
{
#ifdef ROWS512
    __m256 s[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) s[j] = halves(v[j]);
#else
    const __m256 *s = v;
#endif
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

/* The sums over the lanes of a strip's vectors, each in the same order. */
static inline __attribute__((always_inline)) WIDE void totals(const Lanes *v, float *sums)
{
#ifdef ROWS512
    _mm_storeu_ps(sums, four_totals(v));
#else
    sums[0] = total(v[0]), sums[1] = total(v[1]);
#endif
}

/* What is fetched while sums are made, so that the memory is never idle: a block of columns of the strip that comes next, `step`
 * bytes at a time, `width` of each row. */
typedef struct {
    const char *at, *end;
    int64_t step, width, row;
} Fetch;

static inline __attribute__((always_inline)) void fetch(Fetch *f, const int lines, const int m)
{
#pragma GCC unroll 4
    for (int i = 0; i < lines; i++) FETCH(f->at + 64 * i, m);
    f->at += f->step;
    if (f->at >= f->end) f->at += f->row - f->width, f->end += f->row;
}

/* m rows of x times columns `from` to `to` of a strip of W, added to `kept` (m, STRIP), which begins at 0. soon: it fetches what
 * lies AHEAD in the same rows, and `next` at their end alone. m, kind, soon and lines, those of the cache that a step fetches, are
 * constants wherever this is called. */
static inline __attribute__((always_inline)) WIDE void strip(
    const float *x, const char *const *w, Lanes *kept, int64_t K, int64_t from, int64_t to, const int m, const int kind,
    const int soon, const int lines, Fetch *next)
{
    Lanes sums[GROUP][STRIP];
#pragma GCC unroll 6
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int j = 0; j < STRIP; j++) sums[i][j] = from ? kept[i * STRIP + j] : ZERO;
#define ADD(MANY)                                                                                                      \
    do {                                                                                                               \
        Lanes p[STRIP];                                                                                                \
        _Pragma("GCC unroll 4") for (int j = 0; j < STRIP; j++) p[j] = load(w[j], k, MANY, kind);                      \
        _Pragma("GCC unroll 6") for (int i = 0; i < m; i++)                                                            \
        {                                                                                                              \
            const Lanes r = load(x + i * K, k, MANY, FP32);                                                            \
            _Pragma("GCC unroll 4") for (int j = 0; j < STRIP; j++) sums[i][j] = FMA(r, p[j], sums[i][j]);             \
        }                                                                                                              \
    } while (0)
    int64_t k = from;
    for (; soon && k < to - AHEAD / size_of(kind); k += LANES) {
#pragma GCC unroll 4
        for (int j = 0; j < STRIP; j++) FETCH(w[j] + k * size_of(kind) + AHEAD, m);
        ADD(LANES);
    }
    for (; k + LANES <= to; k += LANES) {
        fetch(next, lines, m);
        ADD(LANES);
    }
    if (k < to) ADD(to - k);
#undef ADD
#pragma GCC unroll 6
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int j = 0; j < STRIP; j++) kept[i * STRIP + j] = sums[i][j];
}

/* As `strip`, for any number of rows. */
static inline __attribute__((always_inline)) WIDE void strip_of(
    const float *x, const char *const *w, Lanes *kept, int64_t M, int64_t K, int64_t from, int64_t to, const int kind,
    const int soon, const int lines, Fetch *next)
{
    const int64_t groups = (M + GROUP - 1) / GROUP, most = (M + groups - 1) / groups; /* of equal size, nearly */
    for (int64_t i = 0; i < M; i += most, x += most * K, kept += most * STRIP) {
        switch (M - i < most ? M - i : most) {
        case 1: strip(x, w, kept, K, from, to, 1, kind, soon, lines, next); break;
        case 2: strip(x, w, kept, K, from, to, 2, kind, soon, lines, next); break;
        case 3: strip(x, w, kept, K, from, to, 3, kind, soon, lines, next); break;
        case 4: strip(x, w, kept, K, from, to, 4, kind, soon, lines, next); break;
        case 5: strip(x, w, kept, K, from, to, 5, kind, soon, lines, next); break;
        default: strip(x, w, kept, K, from, to, 6, kind, soon, lines, next); break;
        }
    }
}

/* The same with all that is constant, by the number of groups of rows. ahead: these columns of the strip that comes next; soon: whether
 * it is fetched at the end alone. */
static inline __attribute__((always_inline)) WIDE void strip_ahead(
    const float *x, const char *const *w, Lanes *kept, int64_t M, int64_t K, int64_t from, int64_t to, const char *ahead,
    const int soon, const int kind)
{
    enum { NUMBERS = STRIP * LANES }; /* of a step */
    const int64_t size = size_of(kind), groups = (M + GROUP - 1) / GROUP, width = soon ? AHEAD : (to - from) * size;
    Fetch next = {ahead, ahead + width, NUMBERS * size / groups, width, K * size};
    if (groups == 1)
        strip_of(x, w, kept, M, K, from, to, kind, soon, (NUMBERS * size_of(kind) + 63) / 64, &next);
    else
        strip_of(x, w, kept, M, K, from, to, kind, 0, (NUMBERS * size_of(kind) / 2 + 63) / 64, &next);
}

static WIDE void strip_fp32(
    const float *x, const char *const *w, Lanes *kept, int64_t M, int64_t K, int64_t from, int64_t to, const char *ahead)
{
    strip_ahead(x, w, kept, M, K, from, to, ahead, 0, FP32);
}

static WIDE void strip_wide(
    const float *x, const char *const *w, Lanes *kept, int64_t M, int64_t K, int64_t from, int64_t to, const char *ahead)
{
    strip_ahead(x, w, kept, M, K, from, to, ahead, 1, FP32);
}

static WIDE void strip_bf16(
    const float *x, const char *const *w, Lanes *kept, int64_t M, int64_t K, int64_t from, int64_t to, const char *ahead)
{
    strip_ahead(x, w, kept, M, K, from, to, ahead, 0, BF16);
}

static WIDE void strip_int8(
    const float *x, const char *const *w, Lanes *kept, int64_t M, int64_t K, int64_t from, int64_t to, const char *ahead)
{
    strip_ahead(x, w, kept, M, K, from, to, ahead, 0, INT8);
}

/* Whether INT8 weights meet rows of x that are rounded to eight bits too, row by row: where the processor multiplies such numbers
 * (AVX512 VNNI), which takes a quarter of the instructions and less. */
extern int eight_bits;

#ifdef ROWS512
#define BYTES __attribute__((target("avx512f,avx512bw,avx512vnni,avx2,fma")))
/* Columns of a weight that is multiplied so; of one step; how many bytes further on what is fetched lies: a strip takes less time than
 * the memory's answer. */
enum { LONGEST = 1 << 14, STEP = 64, FURTHER = 8192 };

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
            _Pragma("GCC unroll 4") for (int j = 0; j < STRIP; j++) all[i][j] = _mm512_dpbusd_epi32(all[i][j], p[j], r); \
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
        __m256i s[STRIP];
#pragma GCC unroll 4
        for (int j = 0; j < STRIP; j++)
            s[j] = _mm256_add_epi32(_mm512_castsi512_si256(all[i][j]), _mm512_extracti64x4_epi64(all[i][j], 1));
        const __m256i four = _mm256_hadd_epi32(_mm256_hadd_epi32(s[0], s[1]), _mm256_hadd_epi32(s[2], s[3]));
        sums[i] = _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
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
        for (int64_t i = 0; i < M; i++) {
            int32_t found[STRIP];
            float *out = y + i * N + n * STRIP;
            _mm_storeu_si128((__m128i *)found, sums[i]);
            for (int64_t j = 0; j < STRIP && n * STRIP + j < N; j++) {
                const float product = (float)(found[j] - raised[i]) * (one[i] * m->scale[n * STRIP + j]);
                const float sum = product + (m->bias ? m->bias[n * STRIP + j] : 0.0f);
                out[j] = add ? out[j] + sum : sum;
            }
        }
    }
}
#endif

/* y (M, N) = x · Wᵀ, or added to y (M ≤ MOST): the strips `first` to `last`. */
static __attribute__((unused)) WIDE void product(
    const Matrix *m, const float *x, float *y, int64_t M, int64_t K, int64_t N, int64_t first, int64_t last, int add)
{
#ifdef ROWS512
    if (m->kind == INT8 && eight_bits && K <= LONGEST) {
        product_of_bytes(m, x, y, M, K, N, first, last, add);
        return;
    }
#endif
    const int64_t size = size_of((int)m->kind), row = K * size;
    const int soon = m->kind == FP32 && STRIP * row / 2 >= NEAR && M > 1 && M <= GROUP;
    const int64_t blocks = M > FEW && STRIP * row > NEAR && !soon ? (K + COLUMNS - 1) / COLUMNS : 1;
    const int64_t columns = (K + blocks * LANES - 1) / (blocks * LANES) * LANES;
    Lanes kept[STRIPS_A_BLOCK * MOST * STRIP];
    const int64_t together = blocks == 1 ? 1 : STRIPS_A_BLOCK;
    for (int64_t begin = first; begin < last; begin += together) {
        const int64_t end = begin + together < last ? begin + together : last;
        const char *start = (const char *)m->weight + begin * STRIP * row;
        for (int64_t from = 0; from < K; from += columns) {
            const int64_t to = from + columns < K ? from + columns : K;
            for (int64_t n = begin; n < end; n++) {
                const char *w[STRIP], *lowest = start + (n - begin) * STRIP * row;
                /* the last strip may have fewer rows */
                for (int64_t j = 0; j < STRIP; j++) w[j] = lowest + (n * STRIP + j < N ? j : 0) * row;
                /* what comes next: these columns of the next strip, or others of the first one */
                const char *ahead = lowest;
                if (n + 1 == end && to < K)
                    ahead = start + to * size;
                else if (n + 1 < last)
                    ahead = lowest + STRIP * row + (n + 1 < end ? from : 0) * size;
                Lanes *its = kept + (n - begin) * M * STRIP;
                switch (m->kind) {
                case FP32: (soon ? strip_wide : strip_fp32)(x, w, its, M, K, from, to, ahead); break;
                case BF16: strip_bf16(x, w, its, M, K, from, to, ahead); break;
                default: strip_int8(x, w, its, M, K, from, to, ahead); break;
                }
            }
        }
        for (int64_t n = begin; n < end; n++)
            for (int64_t i = 0; i < M; i++) {
                float sums[STRIP], *out = y + i * N + n * STRIP;
                totals(kept + ((n - begin) * M + i) * STRIP, sums);
                for (int64_t j = 0; j < STRIP && n * STRIP + j < N; j++) {
                    const float product = m->scale ? sums[j] * m->scale[n * STRIP + j] : sums[j];
                    const float sum = product + (m->bias ? m->bias[n * STRIP + j] : 0.0f);
                    out[j] = add ? out[j] + sum : sum;
                }
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
