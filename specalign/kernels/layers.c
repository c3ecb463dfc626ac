/* The layers of a decoder over a few rows in one call: norm, queries keys values, rotary positions, attention over a cache,
 * output, norm, gated feed-forward; x and all sums in fp32, weights in fp32, bf16 or int8 (where rounded rows meet them: bytes.h).
 *
 * A round of small operators for each of these takes longer than their arithmetic. Here the threads stay in one parallel
 * region for all layers. Whatever is computed of a row is computed in the same order whatever other rows come with it, and
 * keys are cut into parts at fixed places, so that a token gives the same numbers alone, in a chain of drafts and in a batch.
 * (In a tree its keys lie at other places: equal but for rounding.)
 */
#include "rows.h"
#include <math.h>
#include <string.h>

/* Two taps, a row and the one before it in its block, around a sublayer: out[c] = in[c] + (offset[0, c] + delta[0, g])·in[c] +
 * (offset[1, c] + delta[1, g])·before[c], by groups g of channels, once for what it reads and once for what it gives. */
typedef struct {
    Matrix delta;        /* (2 · 2 · groups, width), of what the sublayer reads */
    const float *offset; /* (2, 2, width); 0 = no convolution */
} Convolution;

typedef struct {
    Matrix q, k, v, o, gate, up, down;
    const float *before_attention, *before_mlp, *q_norm, *k_norm; /* norms; the last two may be 0 */
    Convolution attention_conv, mlp_conv;
} Layer;

typedef struct {
    int64_t layers, width, inner, heads, kv_heads, head_width;
    int64_t block, groups; /* of convolutions: rows of a block, groups of channels; 0 = there are none */
    float scale, eps, head_eps;
    const Layer *layer;
    const float *last_norm; /* may be 0 */
    Matrix state;           /* (width, width); with its norm: what every row is given of a state, where there is one */
    const float *state_norm;
} Stack;

/* One request: its rows follow `past` positions that its cache holds. */
typedef struct {
    float *const *keys, *const *values; /* by layer, (kv_heads, capacity, head_width) */
    float *columns;                     /* the keys again, (layers, kv_heads, capacity / TILE rounded up, head_width, TILE) */
    int64_t stride, columns_stride;     /* numbers from one head to the next */
    int64_t turned;                     /* how many of the first keys stand in `columns` */
    int64_t past, rows;
    const uint8_t *see; /* (rows, rows), which of the new rows each one sees; 0 = those up to itself */
    int64_t apart;      /* whether its rows' keys and values stay out of the cache, of which only `columns` is then written */
} Request;

/* The sizes of these, by which a caller sees whether it was written for them. */
int64_t layers_layout(void) { return sizeof(Stack) << 40 | sizeof(Layer) << 20 | sizeof(Request); }

#ifdef ROWS_HERE
#include <omp.h>

#ifdef ROWS512
#define TOGETHER 6
#else
#define TOGETHER 3
#endif
/* Keys of a part; keys that stand side by side in `columns`; TOGETHER: queries at a time. */
enum { PART = 256, TILE = 16 };

/* How many tiles hold so many keys. */
#define TILES(KEYS) (((KEYS) + TILE - 1) / TILE)

/* y = x / rms(x) · weight */
static AVX2 void rms_norm(const float *x, const float *weight, float *y, int64_t size, float eps)
{
    __m256 squares = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        squares = _mm256_fmadd_ps(v, v, squares);
    }
    float sum = total(squares);
    for (; i < size; i++) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / (float)size + eps);
    for (i = 0; i < size; i++) y[i] = weight[i] * (x[i] * scale);
}

/* silu(x) · y */
static inline AVX2 __m256 gated(__m256 x, __m256 y)
{
    const __m256 e = exp8(_mm256_sub_ps(_mm256_setzero_ps(), x));
    return _mm256_mul_ps(_mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e)), y);
}

/* h = silu(h) · u over `size` numbers. */
static AVX2 void gate(float *h, const float *u, int64_t size)
{
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) _mm256_storeu_ps(h + i, gated(_mm256_loadu_ps(h + i), _mm256_loadu_ps(u + i)));
    if (i == size) return;
    float a[8] = {0}, b[8] = {0};
    memcpy(a, h + i, (size - i) * sizeof(float));
    memcpy(b, u + i, (size - i) * sizeof(float));
    _mm256_storeu_ps(a, gated(_mm256_loadu_ps(a), _mm256_loadu_ps(b)));
    memcpy(h + i, a, (size - i) * sizeof(float));
}

/* Both taps of row r of `in` (R, D): into y (D), or added to it where it is `kept`. */
static AVX2 void two_taps(
    const Stack *s, const Convolution *c, const float *in, const float *deltas, int64_t r, int which, float *y, int kept)
{
    const int64_t D = s->width, G = s->groups, size = D / G;
    const float *row = in + r * D, *before = r % s->block ? row - D : 0;
    const float *offset = c->offset + 2 * which * D, *delta = deltas + (2 * r + which) * 2 * G;
    for (int64_t g = 0; g < G; g++)
        for (int64_t i = g * size; i < (g + 1) * size; i++) {
            float sum = row[i] + (offset[i] + delta[g]) * row[i];
            if (before) sum += (offset[D + i] + delta[G + g]) * before[i];
            y[i] = kept ? y[i] + sum : sum;
        }
}

/* What a sublayer reads: normed rows, convolved into `room` (R, D) where it has a convolution. All threads call it after a barrier. */
static AVX2 const float *convolved(
    const Stack *s, const Convolution *c, const float *normed, float *deltas, float *room, int64_t R, int t, int T)
{
    if (!c->offset) return normed;
    int64_t from, to;
    share(STRIPS(4 * s->groups), t, T, &from, &to);
    product(&c->delta, normed, deltas, R, s->width, 4 * s->groups, from, to, 0);
#pragma omp barrier
    share(R, t, T, &from, &to);
    for (int64_t r = from; r < to; r++) two_taps(s, c, normed, deltas, r, 0, room + r * s->width, 0);
#pragma omp barrier
    return room;
}

/* Rotary positions, half-split, in place; the norm of the head before, where it has one. */
static AVX2 void rotate(float *x, const float *norm, float eps, const float *cosine, const float *sine, int64_t width)
{
    if (norm) rms_norm(x, norm, x, width, eps);
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i + half] + a * sine[i + half];
    }
}

/* A key (width) becomes column `place` of tiles (…, width, TILE). */
static inline void turn(const float *key, float *tiles, int64_t place, int64_t width)
{
    tiles += place / TILE * TILE * width + place % TILE;
    for (int64_t i = 0; i < width; i++) tiles[i * TILE] = key[i];
}

/* Fetches the tiles that the new keys of a request will be written to, a line for every number of them. head: of all layers'. */
static inline void fetch_tiles(const Request *r, int64_t head, int64_t width)
{
    const float *columns = r->columns + head * r->columns_stride + r->turned / TILE * TILE * width;
    const int64_t tiles = TILES(r->past + (r->apart ? 0 : r->rows)) - r->turned / TILE;
    for (int64_t i = 0; i < tiles * width && i < 4 * width; i++) __builtin_prefetch(columns + i * TILE, 1);
}

/* Numbers of the part that comes next, fetched while this one is looked at: of so many lines of the cache as are read here, the `share`
 * of `all` that these queries are of those that look at it, so that the memory is never idle and never waited for. */
typedef struct {
    const char *at, *end;
    int64_t share, all;
} Soon;

static inline __attribute__((always_inline)) void fetch_soon(Soon *soon, int64_t lines, const int m)
{
    const int64_t step = (lines * soon->share + soon->all - 1) / soon->all;
    if (soon->at >= soon->end) return;
    for (int64_t i = 0; i < step; i++) FETCH(soon->at + 64 * i, m);
    soon->at += 64 * step;
}

/* The keys k and values v (rows, kv_heads · width) of one head of a request, at their rotary positions, into its cache, or, where they
 * stay apart, into `own` and `own_values`; as columns the keys that the cache has had since, too. */
static AVX2 void place_keys(
    const Stack *s, int64_t l, const Request *r, int64_t head, float *k, const float *v, const float *cosine, const float *sine,
    float *own, float *own_values)
{
    const int64_t w = s->head_width, KV = s->kv_heads * w, rows = r->rows;
    float *columns = r->columns + (l * s->kv_heads + head) * r->columns_stride;
    float *keys = r->keys[l] + head * r->stride, *values = r->values[l] + head * r->stride + r->past * w;
    for (int64_t place = r->turned; place < r->past; place++) turn(keys + place * w, columns, place, w);
    if (r->apart) columns = own + head * TILES(rows) * TILE * w, values = own_values + head * rows * w;
    for (int64_t at = 0; at < rows; at++) {
        float *key = k + at * KV + head * w;
        rotate(key, s->layer[l].k_norm, s->head_eps, cosine + at * w, sine + at * w, w);
        turn(key, columns, (r->apart ? 0 : r->past) + at, w);
        if (!r->apart) memcpy(keys + (r->past + at) * w, key, w * sizeof(float));
        memcpy(values + at * w, v + at * KV + head * w, w * sizeof(float));
    }
}

/* scores[i][at …]: of m queries with `many` times LANES keys of tiles from key `at` on; m and many are constants wherever this is called.
 * However many, a score is summed in the same order. */
static inline __attribute__((always_inline)) WIDE void scores_at(
    const float *const *q, const float *columns, float (*scores)[PART], int64_t at, int64_t width, Soon *soon, const int m,
    const int many)
{
    const float *of[8];
    Lanes sums[TOGETHER][8];
#pragma GCC unroll 8
    for (int c = 0; c < many; c++) {
        const int64_t key = at + c * LANES;
        of[c] = columns + key / TILE * TILE * width + key % TILE;
    }
#pragma GCC unroll 6
    for (int n = 0; n < m; n++)
#pragma GCC unroll 8
        for (int c = 0; c < many; c++) sums[n][c] = ZERO;
    for (int64_t i = 0; i < width; i++) {
        fetch_soon(soon, (many * LANES + 15) / 16, m);
        Lanes y[8];
#pragma GCC unroll 8
        for (int c = 0; c < many; c++) y[c] = load(of[c], i * TILE, LANES, FP32);
#pragma GCC unroll 6
        for (int n = 0; n < m; n++) {
            const Lanes x = SAME(q[n][i]);
#pragma GCC unroll 8
            for (int c = 0; c < many; c++) sums[n][c] = FMA(x, y[c], sums[n][c]);
        }
    }
#pragma GCC unroll 6
    for (int n = 0; n < m; n++)
#pragma GCC unroll 8
        for (int c = 0; c < many; c++) STORE(scores[n] + at + c * LANES, sums[n][c]);
}

/* Scores of m queries with all keys of a part: scores[i] (count), and numbers without meaning up to the next whole register. */
static inline __attribute__((always_inline)) WIDE void scores_of(
    const float *const *q, const float *columns, float (*scores)[PART], int64_t count, int64_t width, Soon *soon, const int m)
{
    const int most = m == 1 ? 8 : m <= 3 ? 4 : 2; /* so many sums are on their way as multiplying takes time */
    int64_t at = 0;
    for (; at + most * LANES <= count; at += most * LANES) scores_at(q, columns, scores, at, width, soon, m, most);
    for (; at < count; at += LANES) scores_at(q, columns, scores, at, width, soon, m, 1);
}

/* out[i] (four · LANES) = Σ weights[i] · values for m queries, the keys in their order; m and four are constants wherever this is
 * called. */
static inline __attribute__((always_inline)) WIDE void mixed_columns(
    float (*weights)[PART], const float *values, float *const *out, int64_t at, int64_t count, int64_t width, const int m,
    Soon *soon, const int four)
{
    Lanes sums[TOGETHER][4];
#pragma GCC unroll 6
    for (int n = 0; n < m; n++)
#pragma GCC unroll 4
        for (int c = 0; c < four; c++) sums[n][c] = ZERO;
    for (int64_t j = 0; j < count; j++) {
        fetch_soon(soon, (width + 15) / 16, m);
        Lanes v[4];
#pragma GCC unroll 4
        for (int c = 0; c < four; c++) v[c] = load(values + j * width + at, c * LANES, LANES, FP32);
#pragma GCC unroll 6
        for (int n = 0; n < m; n++) {
            const Lanes w = SAME(weights[n][j]);
#pragma GCC unroll 4
            for (int c = 0; c < four; c++) sums[n][c] = FMA(w, v[c], sums[n][c]);
        }
    }
#pragma GCC unroll 6
    for (int n = 0; n < m; n++)
#pragma GCC unroll 4
        for (int c = 0; c < four; c++) STORE(out[n] + at + c * LANES, sums[n][c]);
}

static inline __attribute__((always_inline)) WIDE void mixed(
    float (*weights)[PART], const float *values, float *const *out, int64_t count, int64_t width, Soon *soon, const int m)
{
    int64_t i = 0;
    while (i + LANES <= width) {
        const int64_t columns = (width - i) / LANES;
        switch (columns) {
        case 1: mixed_columns(weights, values, out, i, count, width, m, soon, 1); break;
        case 2: mixed_columns(weights, values, out, i, count, width, m, soon, 2); break;
        case 3: mixed_columns(weights, values, out, i, count, width, m, soon, 3); break;
        default: mixed_columns(weights, values, out, i, count, width, m, soon, 4); break;
        }
        i += (columns < 4 ? columns : 4) * LANES;
    }
    for (; i < width; i += 8) /* half a register is left */
        for (int n = 0; n < m; n++) {
            __m256 sum = _mm256_setzero_ps();
            for (int64_t j = 0; j < count; j++)
                sum = _mm256_fmadd_ps(_mm256_broadcast_ss(weights[n] + j), _mm256_loadu_ps(values + j * width + i), sum);
            _mm256_storeu_ps(out[n] + i, sum);
        }
}

/* Scores become exp(score − the largest); returns the largest, −∞ where nothing is seen, and their sum. see: of the keys from
 * `fresh` on, 0 = all up to `row` of them. */
static WIDE float softmax_part(
    float *scores, int64_t count, float scale, int64_t fresh, int64_t row, const uint8_t *see, float *sum)
{
    const int64_t old = fresh < count ? (fresh > 0 ? fresh : 0) : count;
    for (int64_t j = old; j < count; j++)
        if (see ? !see[j - fresh] : j - fresh > row) scores[j] = -INFINITY;
    for (int64_t j = count; j < (count + LANES - 1) / LANES * LANES; j++) scores[j] = -INFINITY;
    Lanes top = SAME(-INFINITY), all = ZERO;
    for (int64_t j = 0; j < count; j += LANES) {
        const Lanes s = load(scores, j, LANES, FP32) * SAME(scale);
        STORE(scores + j, s);
        top = LARGER(top, s);
    }
    const float most = most_of(top);
    *sum = 0.0f;
    if (most == -INFINITY) { /* nothing seen, or NaN that max has passed over; beside a number exp keeps NaN */
        for (int64_t j = 0; j < count; j++)
            if (scores[j] != scores[j]) return *sum = NAN;
        return most;
    }
    for (int64_t j = 0; j < count; j += LANES) {
        const Lanes e = exp_of(load(scores, j, LANES, FP32) - SAME(most));
        STORE(scores + j, e);
        all = all + e;
    }
    *sum = total_of(all);
    return most;
}

/* One part of the keys, as columns, and of the values of one head, where those lie that come next, and how many queries look at it. */
typedef struct {
    const float *columns, *values, *next_columns, *next_values;
    int64_t first, count, queries;
} Part;

/* m queries of one head over one part of its keys; of each (partial): the largest score, the sum of exp(score − it), and the
 * values mixed by them. rows: which row of the request a query is of. done: how many queries came before. */
static inline __attribute__((always_inline)) WIDE void attend_part(
    const float *const *q, const int64_t *rows, float *const *partial, const Request *r, const Part *part, int64_t done,
    float scale, int64_t width, const int m)
{
    const int64_t from = PART * done / part->queries * width, to = PART * (done + m) / part->queries * width;
    Soon keys = {(const char *)(part->next_columns + from), (const char *)(part->next_columns + to), m, part->queries};
    Soon values = {(const char *)(part->next_values + from), (const char *)(part->next_values + to), m, part->queries};
    float scores[TOGETHER][PART], *out[TOGETHER] = {0};
    const int64_t first = part->first, count = part->count;
    scores_of(q, part->columns, scores, count, width, &keys, m);
    for (int n = 0; n < m; n++) {
        const uint8_t *see = r->see ? r->see + rows[n] * r->rows : 0;
        partial[n][0] = softmax_part(scores[n], count, scale, r->past - first, rows[n], see, partial[n] + 1);
        if (partial[n][0] == -INFINITY) memset(scores[n], 0, sizeof scores[n]);
        out[n] = partial[n] + 2;
    }
    mixed(scores, part->values, out, count, width, &values, m);
}

/* As `attend_part` for any m ≤ TOGETHER. */
static WIDE void attend(
    const float *const *q, const int64_t *rows, float *const *partial, const Request *r, const Part *part, int64_t done,
    float scale, int64_t width, int m)
{
#define QUERIES(M) attend_part(q, rows, partial, r, part, done, scale, width, M)
    switch (m) {
    case 1: QUERIES(1); break;
    case 2: QUERIES(2); break;
#ifdef ROWS512
    case 3: QUERIES(3); break;
    case 4: QUERIES(4); break;
    case 5: QUERIES(5); break;
#endif
    default: QUERIES(TOGETHER); break;
    }
#undef QUERIES
}

/* The parts of one query's attention, `size` numbers each, put together. */
static AVX2 void join_parts(const float *partial, int64_t parts, int64_t size, float *out, int64_t width)
{
    float most = -INFINITY, sum = 0.0f;
    for (int64_t p = 0; p < parts; p++)
        if (partial[p * size] > most) most = partial[p * size];
    for (int64_t i = 0; i < width; i++) out[i] = 0.0f;
    for (int64_t p = 0; p < parts; p++, partial += size) {
        if (partial[0] == -INFINITY) continue;
        const float weight = expf(partial[0] - most);
        sum += weight * partial[1];
        for (int64_t i = 0; i < width; i++) out[i] += weight * partial[2 + i];
    }
    for (int64_t i = 0; i < width; i++) out[i] /= sum;
}

/* The parts that a request's keys are cut into; rows that stay apart are one of their own. */
static int64_t parts_of(const Request *r)
{
    return r->apart ? (r->past + PART - 1) / PART + 1 : (r->past + r->rows + PART - 1) / PART;
}

/* Room that `layers_forward` needs, in floats. */
int64_t layers_scratch(const Stack *s, const Request *requests, int64_t count)
{
    int64_t rows = 0, parts = 0, own = 0;
    for (int64_t i = 0; i < count; i++) {
        rows += requests[i].rows;
        own += TILES(requests[i].rows) * TILE;
        parts += requests[i].rows * parts_of(requests + i);
    }
    const int64_t q = s->heads * s->head_width, kv = s->kv_heads * s->head_width;
    const int64_t around = s->groups ? s->width + 4 * s->groups : 0; /* of a row, for convolutions */
    return rows * (s->width + q + 3 * kv + q + 2 * s->inner + around) + own * kv + parts * s->heads * (s->head_width + 2) + 2 * s->width;
}

/* x (R, D): the rows of all requests, one after the other, in; their last hidden states out. state (D): every row is given
 * stack.state · norm(state) first; 0 = nothing. cosine, sine: (R, head_width).
 * taps: by layer, where its output goes, (R, D), or 0; 0 = nowhere. Writes the rows' keys and values behind each request's past,
 * unless they stay apart, and the columns of the keys before. Requests are of different caches. R is at most 32. */
AVX2 void layers_forward(
    const Stack *s, float *x, const float *state, const float *cosine, const float *sine, const Request *requests,
    int64_t count, float *const *taps, float *scratch)
{
    int64_t R = 0, tiles = 0;
    for (int64_t i = 0; i < count; i++) R += requests[i].rows, tiles += TILES(requests[i].rows);
    const int64_t D = s->width, w = s->head_width, Q = s->heads * w, KV = s->kv_heads * w, F = s->inner;
    const int64_t groups = s->heads / s->kv_heads, size = w + 2;
    int64_t work = 0; /* of attention: pairs of a query and a key */
    for (int64_t i = 0; i < count; i++) work += requests[i].rows * s->heads * (requests[i].past + requests[i].rows);
    float *normed = scratch, *q = normed + R * D, *k = q + R * Q, *v = k + R * KV, *mix = v + R * KV;
    float *h = mix + R * Q, *u = h + R * F, *own = u + R * F, *own_values = own + tiles * TILE * KV;
    float *given = own_values + R * KV, *room = given + 2 * D;
    float *deltas = room + (s->groups ? R * D : 0), *partial = deltas + 4 * R * s->groups;

#pragma omp parallel
    {
        const int t = omp_get_thread_num(), T = omp_get_num_threads();
        int64_t from, to;
        if (state) {
#pragma omp single
            rms_norm(state, s->state_norm, given, D, s->eps);
            share(STRIPS(D), t, T, &from, &to);
            product(&s->state, given, given + D, 1, D, D, from, to, 0);
#pragma omp barrier
            share(R, t, T, &from, &to);
            for (int64_t r = from; r < to; r++)
                for (int64_t i = 0; i < D; i++) x[r * D + i] += given[D + i];
        }
        for (int64_t l = 0; l < s->layers; l++) {
            const Layer *layer = s->layer + l;
            share(R, t, T, &from, &to);
            for (int64_t r = from; r < to; r++) rms_norm(x + r * D, layer->before_attention, normed + r * D, D, s->eps);
#pragma omp barrier
            const float *read = convolved(s, &layer->attention_conv, normed, deltas, room, R, t, T);
            share(count * s->kv_heads, t, T, &from, &to);
            for (int64_t i = from; i < to; i++) fetch_tiles(requests + i / s->kv_heads, l * s->kv_heads + i % s->kv_heads, w);
            share(STRIPS(Q), t, T, &from, &to);
            product(&layer->q, read, q, R, D, Q, from, to, 0);
            share(STRIPS(KV), t, T, &from, &to);
            product(&layer->k, read, k, R, D, KV, from, to, 0);
            product(&layer->v, read, v, R, D, KV, from, to, 0);
#pragma omp barrier
            /* rotary positions: of queries, a piece is one head of one row; of keys, one head of a request, so that one thread writes to a
             * tile */
            share(R * s->heads, t, T, &from, &to);
            for (int64_t piece = from; piece < to; piece++) {
                const int64_t r = piece / s->heads, head = piece % s->heads;
                rotate(q + r * Q + head * w, layer->q_norm, s->head_eps, cosine + r * w, sine + r * w, w);
            }
            int64_t start = 0;
            float *of_own = own;
            share(count * s->kv_heads, t, T, &from, &to);
            for (int64_t n = 0; n < count; n++) {
                for (int64_t head = 0; head < s->kv_heads; head++)
                    if (n * s->kv_heads + head >= from && n * s->kv_heads + head < to)
                        place_keys(s, l, requests + n, head, k + start * KV, v + start * KV, cosine + start * w, sine + start * w,
                                   of_own, own_values + start * KV);
                start += requests[n].rows, of_own += TILES(requests[n].rows) * TILE * KV;
            }
#pragma omp barrier
            /* attention: a piece is one part of the keys of one head, with a few of the queries that share them; a thread takes
             * neighbouring ones, as much work as any other */
            int64_t before = 0;
            float *place = partial;
            start = 0, of_own = own;
            for (int64_t n = 0; n < count; n++) {
                const Request *request = requests + n;
                const int64_t parts = parts_of(request), queries = request->rows * groups;
                const int64_t cached = request->past + (request->apart ? 0 : request->rows);
                for (int64_t head = 0; head < s->kv_heads; head++)
                    for (int64_t p = 0; p < parts; p++) {
                        const float *columns = request->columns + (l * s->kv_heads + head) * request->columns_stride;
                        const float *values = request->values[l] + head * request->stride;
                        const int64_t first = p * PART, left = cached - first;
                        Part part = {columns + first * w, values + first * w, columns + (first + PART) * w,
                                     values + (first + PART) * w, first, left < PART ? left : PART, queries};
                        if (p == parts - 1 && head + 1 < s->kv_heads)
                            part.next_columns = columns + request->columns_stride, part.next_values = values + request->stride;
                        if (request->apart && p == parts - 1) {
                            part.columns = of_own + head * TILES(request->rows) * TILE * w;
                            part.values = own_values + (start * s->kv_heads + head * request->rows) * w;
                            part.first = request->past, part.count = request->rows;
                        }
                        for (int64_t i = 0; i < queries; i += TOGETHER) {
                            const int m = queries - i < TOGETHER ? (int)(queries - i) : TOGETHER;
                            const int64_t middle = 2 * before + m * part.count;
                            before += m * part.count;
                            if (middle * T / (2 * work) != t) continue;
                            const float *ours[TOGETHER];
                            float *found[TOGETHER];
                            int64_t of[TOGETHER];
                            for (int j = 0; j < m; j++) {
                                const int64_t at = (i + j) / groups, query = head * groups + (i + j) % groups;
                                of[j] = at;
                                ours[j] = q + (start + at) * Q + query * w;
                                found[j] = place + ((at * s->heads + query) * parts + p) * size;
                            }
                            attend(ours, of, found, request, &part, i, s->scale, w, m);
                        }
                    }
                start += request->rows, of_own += TILES(request->rows) * TILE * KV;
                place += request->rows * s->heads * parts * size;
            }
#pragma omp barrier
            share(R * s->heads, t, T, &from, &to);
            start = 0, place = partial;
            for (int64_t n = 0; n < count; n++) {
                const int64_t parts = parts_of(requests + n), its = requests[n].rows * s->heads;
                for (int64_t i = 0; i < its; i++)
                    if (start + i >= from && start + i < to)
                        join_parts(place + i * parts * size, parts, size, mix + (start + i) * w, w);
                start += its;
                place += its * parts * size;
            }
#pragma omp barrier
            share(STRIPS(D), t, T, &from, &to);
            const Convolution *around_attention = &layer->attention_conv, *around_mlp = &layer->mlp_conv;
            product(&layer->o, mix, around_attention->offset ? room : x, R, Q, D, from, to, !around_attention->offset);
#pragma omp barrier
            share(R, t, T, &from, &to);
            for (int64_t r = from; r < to; r++) {
                if (around_attention->offset) two_taps(s, around_attention, room, deltas, r, 1, x + r * D, 1);
                rms_norm(x + r * D, layer->before_mlp, normed + r * D, D, s->eps);
            }
#pragma omp barrier
            read = convolved(s, around_mlp, normed, deltas, room, R, t, T);
            share(STRIPS(F), t, T, &from, &to);
            product(&layer->gate, read, h, R, D, F, from, to, 0);
            product(&layer->up, read, u, R, D, F, from, to, 0);
            const int64_t begin = STRIP * from, end = STRIP * to < F ? STRIP * to : F;
            for (int64_t r = 0; r < R && begin < end; r++) gate(h + r * F + begin, u + r * F + begin, end - begin);
#pragma omp barrier
            share(STRIPS(D), t, T, &from, &to);
            product(&layer->down, h, around_mlp->offset ? room : x, R, F, D, from, to, !around_mlp->offset);
#pragma omp barrier
            share(R, t, T, &from, &to);
            for (int64_t r = from; r < to && around_mlp->offset; r++)
                two_taps(s, around_mlp, room, deltas, r, 1, x + r * D, 1);
            if (taps && taps[l]) memcpy(taps[l] + from * D, x + from * D, (to - from) * D * sizeof(float));
        }
        share(R, t, T, &from, &to);
        if (s->last_norm)
            for (int64_t r = from; r < to; r++) rms_norm(x + r * D, s->last_norm, x + r * D, D, s->eps);
    }
}
#else
int64_t layers_scratch(const Stack *s, const Request *requests, int64_t count) { return 0; }
void layers_forward(
    const Stack *s, float *x, const float *state, const float *cosine, const float *sine, const Request *requests,
    int64_t count, float *const *taps, float *scratch)
{
}
#endif
