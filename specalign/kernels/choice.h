/* Draws from weights ≥ 0, with a number u in [0, 1): token i for u·total in [Σ_{j<i} w_j, Σ_{j≤i} w_j). A weight of 0 is never drawn. */
#ifndef CHOICE_H
#define CHOICE_H
#include "rows.h"
#ifdef ROWS_HERE
#include <math.h>

enum { WEIGHTS = 512 }; /* summed as one */

/* The sum of up to WEIGHTS of `count` weights. */
static AVX2 double sum_of(const float *w, int64_t count)
{
    const int64_t many = count < WEIGHTS ? count : WEIGHTS;
    __m256d a = _mm256_setzero_pd(), b = a;
    int64_t i = 0;
    for (; i + 8 <= many; i += 8) {
        a = _mm256_add_pd(a, _mm256_cvtps_pd(_mm_loadu_ps(w + i)));
        b = _mm256_add_pd(b, _mm256_cvtps_pd(_mm_loadu_ps(w + i + 4)));
    }
    double four[4], rest = 0.0;
    _mm256_storeu_pd(four, _mm256_add_pd(a, b));
    for (; i < many; i++) rest += w[i];
    return (four[0] + four[1]) + (four[2] + four[3]) + rest;
}

/* u · total, below total. */
static inline double within(double u, double total)
{
    const double at = u * total, most = nextafter(total, 0.0);
    return at < most ? at : most;
}

/* The index that u draws among `count` weights. */
static AVX2 int64_t draw_of(const float *w, int64_t count, double u)
{
    double total = 0.0, before = 0.0;
    for (int64_t b = 0; b < count; b += WEIGHTS) total += sum_of(w + b, count - b);
    const double at = within(u, total);
    int64_t last = 0; /* of those with a weight */
    for (int64_t b = 0; b < count; b += WEIGHTS) {
        const double sum = sum_of(w + b, count - b);
        if (!(before + sum > at)) {
            before += sum;
            continue;
        }
        double running = before;
        for (int64_t i = b; i < count && i < b + WEIGHTS; i++) {
            if (!(w[i] > 0.0f)) continue;
            last = i;
            if ((running += w[i]) > at) return i;
        }
        return last; /* by rounding */
    }
    return last;
}
#endif
#endif
