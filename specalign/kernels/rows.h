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
#include "bytes.h"

#ifdef ROWS_HERE
/* Strips of more bytes than NEAR are cut into blocks of at most COLUMNS columns where they meet more than FEW rows: with the next one
 * and the rows they would not stay in the nearest cache. In fp32, from twice as many bytes on and up to a GROUP of rows, it is faster
 * to fetch not the next strip but what lies AHEAD bytes further on in the same rows. */
enum { STRIPS_A_BLOCK = 8, COLUMNS = 640, AHEAD = 1280 };
#ifdef ROWS512
#define NEAR 16384
#else
#define NEAR INT64_MAX
#endif

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

/* y (M, N) = x · Wᵀ, or added to y (M ≤ MOST): the strips `first` to `last`. */
static __attribute__((unused)) WIDE void product(
    const Matrix *m, const float *x, float *y, int64_t M, int64_t K, int64_t N, int64_t first, int64_t last, int add)
{
    if (m->kind == INT8 && rows_rounded(K)) {
        product_of_bytes(m, x, y, M, K, N, first, last, add);
        return;
    }
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
#endif
#endif
