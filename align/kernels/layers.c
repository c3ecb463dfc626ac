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
    int64_t stride;                     /* numbers from one head to the next */
    int64_t past, rows;
    const uint8_t *see; /* (rows, rows), which of the new rows each one sees; 0 = those up to itself */
    int64_t apart;      /* whether its rows' keys and values stay out of the cache, which is then only read */
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
enum { PART = 256 }; /* keys a part; TOGETHER: queries at a time */

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

/* Scores of m queries with the next `many` keys, at most four: scores[i] (many). m and many are constants wherever this is called;
 * however many, a score is summed in the same order. */
static inline __attribute__((always_inline)) WIDE void scores_at(
    const float *const *q, const float *keys, float *const *scores, int64_t width, const int m, const int many)
{
    const int64_t whole = width / LANES * LANES;
    Lanes sums[TOGETHER][4];
#pragma GCC unroll 6
    for (int n = 0; n < m; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = ZERO;
#define ADD(AT, COUNT)                                                                                                 \
    do {                                                                                                               \
        Lanes y[4];                                                                                                    \
        _Pragma("GCC unroll 4") for (int c = 0; c < many; c++) y[c] = load(keys + c * width, AT, COUNT, FP32);         \
        _Pragma("GCC unroll 6") for (int n = 0; n < m; n++)                                                            \
        {                                                                                                              \
            const Lanes x = load(q[n], AT, COUNT, FP32);                                                               \
            _Pragma("GCC unroll 4") for (int c = 0; c < many; c++) sums[n][c] = FMA(x, y[c], sums[n][c]);              \
        }                                                                                                              \
    } while (0)
    for (int64_t i = 0; i < whole; i += LANES) ADD(i, LANES);
    if (whole < width) ADD(whole, width - whole);
#undef ADD
#pragma GCC unroll 6
    for (int n = 0; n < m; n++) {
        const __m128 found = four_totals(sums[n]);
        if (many == 4)
            _mm_storeu_ps(scores[n], found);
        else
            _mm_store_ss(scores[n], found);
    }
}

static inline __attribute__((always_inline)) void fetch_numbers(const float *from, int64_t count, const int m)
{
    for (int64_t i = 0; i < count; i += 16) FETCH((const char *)(from + i), m);
}

/* Scores of m queries with all keys, four keys at a time: scores[i] (count). ahead: where the numbers lie that are read next, as many
 * as the keys have; they are fetched meanwhile. 0 = nowhere. */
static inline __attribute__((always_inline)) WIDE void scores_of(
    const float *const *q, const float *keys, float (*scores)[PART], int64_t count, int64_t width, const float *ahead,
    const int m)
{
    float *at[TOGETHER];
    for (int64_t j = 0; j < count;) {
        for (int n = 0; n < m; n++) at[n] = scores[n] + j;
        const int64_t many = j + 4 <= count ? 4 : 1;
        if (ahead) fetch_numbers(ahead + j * width, many * width, m);
        if (many == 4)
            scores_at(q, keys, at, width, m, 4);
        else
            scores_at(q, keys, at, width, m, 1);
        j += many, keys += many * width;
    }
}

/* out[i] (four · LANES) = Σ weights[i] · values for m queries, the keys in their order; m and four are constants wherever this is
 * called. */
static inline __attribute__((always_inline)) WIDE void mixed_columns(
    float (*weights)[PART], const float *values, float *const *out, int64_t at, int64_t count, int64_t width, const int m,
    const float *ahead, const int four)
{
    Lanes sums[TOGETHER][4];
#pragma GCC unroll 6
    for (int n = 0; n < m; n++)
#pragma GCC unroll 4
        for (int c = 0; c < four; c++) sums[n][c] = ZERO;
    for (int64_t j = 0; j < count; j++) {
        if (ahead) fetch_numbers(ahead + j * width, width, m);
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
    float (*weights)[PART], const float *values, float *const *out, int64_t count, int64_t width,
    const float *ahead, const int m)
{
    int64_t i = 0;
    while (i + LANES <= width) {
        const int64_t columns = (width - i) / LANES;
        switch (columns) {
        case 1: mixed_columns(weights, values, out, i, count, width, m, ahead, 1); break;
        case 2: mixed_columns(weights, values, out, i, count, width, m, ahead, 2); break;
        case 3: mixed_columns(weights, values, out, i, count, width, m, ahead, 3); break;
        default: mixed_columns(weights, values, out, i, count, width, m, ahead, 4); break;
        }
        i += (columns < 4 ? columns : 4) * LANES, ahead = 0;
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
static AVX2 float softmax_part(
    float *scores, int64_t count, float scale, int64_t fresh, int64_t row, const uint8_t *see, float *sum)
{
    const int64_t old = fresh < count ? (fresh > 0 ? fresh : 0) : count;
    const __m256 factor = _mm256_set1_ps(scale), none = _mm256_set1_ps(-INFINITY);
    for (int64_t j = old; j < count; j++)
        if (see ? !see[j - fresh] : j - fresh > row) scores[j] = -INFINITY;
    for (int64_t j = count; j < (count + 7) / 8 * 8; j++) scores[j] = -INFINITY;
    __m256 top = none;
    for (int64_t j = 0; j < count; j += 8) {
        const __m256 s = _mm256_mul_ps(_mm256_loadu_ps(scores + j), factor);
        _mm256_storeu_ps(scores + j, s);
        top = _mm256_max_ps(top, s);
    }
    const float most = largest_of(top);
    *sum = 0.0f;
    if (most == -INFINITY) { /* nothing seen, or NaN that max has passed over; beside a number exp keeps NaN */
        for (int64_t j = 0; j < count; j++)
            if (scores[j] != scores[j]) return *sum = NAN;
        return most;
    }
    __m256 all = _mm256_setzero_ps();
    const __m256 best = _mm256_set1_ps(most);
    for (int64_t j = 0; j < count; j += 8) {
        const __m256 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(scores + j), best));
        _mm256_storeu_ps(scores + j, e);
        all = _mm256_add_ps(all, e);
    }
    *sum = total(all);
    return most;
}

/* One part of the keys and values of one head, and where the keys lie that come next; fresh: whether the part is not in a near cache
 * yet. */
typedef struct {
    const float *keys, *values, *next;
    int64_t first, count;
    int fresh;
} Part;

/* m queries of one head over one part of its keys; of each (partial): the largest score, the sum of exp(score − it), and the
 * values mixed by them. rows: which row of the request a query is of. */
static inline __attribute__((always_inline)) WIDE void attend_part(
    const float *const *q, const int64_t *rows, float *const *partial, const Request *r, const Part *part, float scale,
    int64_t width, const int m)
{
    float scores[TOGETHER][PART], *out[TOGETHER] = {0};
    const int64_t first = part->first, count = part->count;
    scores_of(q, part->keys, scores, count, width, part->fresh ? part->values : 0, m);
    for (int n = 0; n < m; n++) {
        const uint8_t *see = r->see ? r->see + rows[n] * r->rows : 0;
        partial[n][0] = softmax_part(scores[n], count, scale, r->past - first, rows[n], see, partial[n] + 1);
        if (partial[n][0] == -INFINITY) memset(scores[n], 0, sizeof scores[n]);
        out[n] = partial[n] + 2;
    }
    mixed(scores, part->values, out, count, width, part->fresh ? part->next : 0, m);
}

/* As `attend_part` for any m ≤ TOGETHER. */
static WIDE void attend(
    const float *const *q, const int64_t *rows, float *const *partial, const Request *r, const Part *part, float scale,
    int64_t width, int m)
{
#define QUERIES(M) attend_part(q, rows, partial, r, part, scale, width, M)
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
    int64_t rows = 0, parts = 0;
    for (int64_t i = 0; i < count; i++) {
        rows += requests[i].rows;
        parts += requests[i].rows * parts_of(requests + i);
    }
    const int64_t q = s->heads * s->head_width, kv = s->kv_heads * s->head_width;
    const int64_t around = s->groups ? s->width + 4 * s->groups : 0; /* of a row, for convolutions */
    return rows * (s->width + q + 4 * kv + q + 2 * s->inner + around) + parts * s->heads * (s->head_width + 2) + 2 * s->width;
}

/* x (R, D): the rows of all requests, one after the other, in; their last hidden states out. state (D): every row is given
 * stack.state · norm(state) first; 0 = nothing. cosine, sine: (R, head_width).
 * taps: by layer, where its output goes, (R, D), or 0; 0 = nowhere. Writes the rows' keys and values behind each request's past,
 * unless they stay apart. R is at most 32. */
AVX2 void layers_forward(
    const Stack *s, float *x, const float *state, const float *cosine, const float *sine, const Request *requests,
    int64_t count, float *const *taps, float *scratch)
{
    int64_t R = 0;
    for (int64_t i = 0; i < count; i++) R += requests[i].rows;
    const int64_t D = s->width, w = s->head_width, Q = s->heads * w, KV = s->kv_heads * w, F = s->inner;
    const int64_t groups = s->heads / s->kv_heads, size = w + 2;
    int64_t work = 0; /* of attention: pairs of a query and a key */
    for (int64_t i = 0; i < count; i++) work += requests[i].rows * s->heads * (requests[i].past + requests[i].rows);
    float *normed = scratch, *q = normed + R * D, *k = q + R * Q, *v = k + R * KV, *mix = v + R * KV;
    float *h = mix + R * Q, *u = h + R * F, *own = u + R * F, *given = own + 2 * R * KV, *room = given + 2 * D;
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
            share(STRIPS(Q), t, T, &from, &to);
            product(&layer->q, read, q, R, D, Q, from, to, 0);
            share(STRIPS(KV), t, T, &from, &to);
            product(&layer->k, read, k, R, D, KV, from, to, 0);
            product(&layer->v, read, v, R, D, KV, from, to, 0);
#pragma omp barrier
            /* rotary positions, and into the caches: a piece is one head of one row */
            const int64_t all = s->heads + s->kv_heads;
            share(R * all, t, T, &from, &to);
            for (int64_t piece = from; piece < to; piece++) {
                int64_t r = piece / all, head = piece % all, at = r;
                if (head < s->heads) {
                    rotate(q + r * Q + head * w, layer->q_norm, s->head_eps, cosine + r * w, sine + r * w, w);
                    continue;
                }
                head -= s->heads;
                const Request *request = requests;
                while (at >= request->rows) at -= (request++)->rows;
                float *key, *value;
                if (request->apart) {
                    key = own + 2 * (r - at) * KV + (head * request->rows + at) * w;
                    value = key + request->rows * KV;
                } else {
                    const int64_t place = head * request->stride + (request->past + at) * w;
                    key = request->keys[l] + place;
                    value = request->values[l] + place;
                }
                memcpy(key, k + r * KV + head * w, w * sizeof(float));
                memcpy(value, v + r * KV + head * w, w * sizeof(float));
                rotate(key, layer->k_norm, s->head_eps, cosine + r * w, sine + r * w, w);
            }
#pragma omp barrier
            /* attention: a piece is one part of the keys of one head, with a few of the queries that share them; a thread takes
             * neighbouring ones, as much work as any other */
            int64_t start = 0, before = 0;
            float *place = partial;
            for (int64_t n = 0; n < count; n++) {
                const Request *request = requests + n;
                const int64_t parts = parts_of(request), queries = request->rows * groups;
                const int64_t cached = request->past + (request->apart ? 0 : request->rows);
                for (int64_t head = 0; head < s->kv_heads; head++)
                    for (int64_t p = 0; p < parts; p++) {
                        const float *keys = request->keys[l] + head * request->stride;
                        const float *values = request->values[l] + head * request->stride;
                        const int64_t first = p * PART, left = cached - first;
                        Part part = {keys + first * w, values + first * w, keys + (first + PART) * w, first,
                                     left < PART ? left : PART, 1};
                        if (p == parts - 1) part.next = keys + (head + 1 < s->kv_heads ? request->stride : 0);
                        if (request->apart && p == parts - 1) {
                            part.keys = own + 2 * start * KV + head * request->rows * w;
                            part.values = part.keys + request->rows * KV;
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
                            attend(ours, of, found, request, &part, s->scale, w, m);
                            part.fresh = 0;
                        }
                    }
                start += request->rows;
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
