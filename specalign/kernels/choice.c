/* Choices out of rows over a vocabulary, in one call each: the largest number of a row, a draw, and where the accepted part of a
 * chain of drafts ends. In single operators each of these takes longer than its arithmetic, as a target's weights have swept the
 * caches. Sums in fp64, in an order that does not depend on the number of threads.
 */
#include "choice.h"
#include <math.h>
#include <string.h>

/* A chain of drafts under block verification. */
typedef struct {
    const float *p;        /* (drafts + 1, vocabulary): the target's probabilities after 0, 1, … drafts */
    const float *q;        /* (drafts, columns): what each was drawn from */
    const int64_t *ids;    /* the columns' tokens, 0 = their own numbers */
    const int64_t *tokens; /* (drafts) */
    int64_t drafts, vocabulary, columns;
} Chain;

#ifdef ROWS_HERE
#include <omp.h>

/* The first column with the largest number of a row; NaN counts as the largest. */
static AVX2 int64_t largest_at(const float *row, int64_t count)
{
    __m256 top = _mm256_set1_ps(-INFINITY), odd = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256 x = _mm256_loadu_ps(row + i);
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        top = _mm256_max_ps(x, top);
    }
    float most = largest_of(top);
    int nan = _mm256_movemask_ps(odd);
    for (; i < count; i++) {
        nan |= row[i] != row[i];
        if (row[i] > most) most = row[i];
    }
    for (i = 0; i < count; i++)
        if (nan ? row[i] != row[i] : row[i] == most) break;
    return i < count ? i : 0;
}

/* at (R): of each of R rows the first column with the largest number. */
void largest_of_rows(const float *rows, int64_t R, int64_t count, int64_t *at)
{
#pragma omp parallel
    {
        int64_t from, to;
        share(R, omp_get_thread_num(), omp_get_num_threads(), &from, &to);
        for (int64_t r = from; r < to; r++) at[r] = largest_at(rows + r * count, count);
    }
}

/* rest (vocabulary) = (scale · p − q)₊ after i drafts, all of p where q is not to be tested; returns its sum. */
static AVX2 double rest_of(const Chain *c, int64_t i, int sound, float scale, float *rest)
{
    const float *p = c->p + i * c->vocabulary, *q = c->q + i * c->columns;
    if (!sound)
        memcpy(rest, p, c->vocabulary * sizeof *rest);
    else if (c->ids) {
        for (int64_t v = 0; v < c->vocabulary; v++) rest[v] = scale * p[v];
        for (int64_t s = 0; s < c->columns; s++) {
            const float left = rest[c->ids[s]] - q[s];
            rest[c->ids[s]] = left > 0.0f ? left : 0.0f;
        }
    } else
        for (int64_t v = 0; v < c->vocabulary; v++) {
            const float left = scale * p[v] - q[v];
            rest[v] = left > 0.0f ? left : 0.0f;
        }
    double sum = 0.0;
    for (int64_t b = 0; b < c->vocabulary; b += WEIGHTS) sum += sum_of(rest + b, c->vocabulary - b);
    return sum;
}

static AVX2 int all_below(const int64_t *tokens, int64_t count, int64_t limit)
{
    int outside = 0;
    for (int64_t i = 0; i < count; i++) outside |= tokens[i] < 0 || tokens[i] >= limit;
    return !outside;
}

/* The probability that a token is accepted, min(1, p/q); 0 where p = 0 or q is NaN. */
static double ratio(double p, double q)
{
    return p < q ? p / q : p > 0.0 && q >= 0.0;
}

/* Block verification (Sun et al., arXiv 2403.10444) as `block` in decode/speculation/rules.py computes it. stop (drafts + 1): the
 * probability that the accepted part ends after so many drafts; the end is drawn with u[0], the token after it from what is left of p
 * there with u[1]. chosen: both. rest: room for (drafts, vocabulary) numbers. Returns 0 where a token is outside the vocabulary. */
AVX2 int64_t verify_chain(const Chain *c, const double *u, double *stop, int64_t *chosen, float *rest)
{
    const int64_t K = c->drafts, V = c->vocabulary;
    if (!all_below(c->tokens, K, V) || (c->ids && !all_below(c->ids, c->columns, V))) return 0;
    double mass[K + 1], joint[K + 1], q_of[K + 1], p_of[K + 1];
    int sound[K + 1];
#pragma omp parallel
    {
        const int t = omp_get_thread_num(), T = omp_get_num_threads();
        for (int64_t i = t; i < K; i += T) {
            const float *q = c->q + i * c->columns;
            const int64_t token = c->tokens[i];
            double sum = 0.0;
            for (int64_t b = 0; b < c->columns; b += WEIGHTS) sum += sum_of(q + b, c->columns - b);
            sound[i] = isfinite((float)sum);
            p_of[i] = c->p[i * V + token];
            int64_t column = token;
            if (c->ids)
                for (column = 0; column < c->columns && c->ids[column] != token;) column++;
            q_of[i] = column < c->columns ? q[column] : 0.0;
        }
#pragma omp barrier
#pragma omp master
        {
            joint[0] = 1.0;
            for (int64_t i = 0; i < K; i++) joint[i + 1] = sound[i] ? ratio(joint[i] * p_of[i], q_of[i]) : 0.0;
        }
#pragma omp barrier
        for (int64_t i = t; i < K; i += T) mass[i] = rest_of(c, i, sound[i], (float)joint[i], rest + i * V);
    }
    double open = 1.0;
    for (int64_t i = K; i >= 0; i--) {
        double hold = joint[i];
        if (i < K && sound[i]) {
            const double below = mass[i] + (1.0 - joint[i]); /* so: + 1 first would lose a small mass */
            hold = below > 0.0 ? mass[i] / below : 1.0;      /* 0/0: accepted for certain, never reached */
        }
        if (i == 0) hold = 1.0;
        stop[i] = hold * open;
        open *= 1.0 - hold;
    }
    double total = 0.0, running = 0.0;
    for (int64_t i = 0; i <= K; i++) total += stop[i];
    const double at = within(u[0], total);
    int64_t end = 0;
    for (; end < K && !((running += stop[end]) > at);) end++;
    const float *p = c->p + end * V;
    chosen[0] = end;
    chosen[1] = draw_of(end < K && mass[end] > 0.0 ? rest + end * V : p, V, u[1]);
    return 1;
}
#else
void largest_of_rows(const float *rows, int64_t R, int64_t count, int64_t *at) {}
int64_t verify_chain(const Chain *c, const double *u, double *stop, int64_t *chosen, float *rest) { return 0; }
#endif
