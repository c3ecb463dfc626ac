/* A block drafter's drafts in one call, from its hidden states: the head's logits, the Markov head's bias after each token, and then
 * the tree of the most probable paths, best first, or a chain of drawn tokens. Sums in fp32, paths and draws in fp64.
 *
 * Columns are cut into blocks at fixed places and looked at block by block, so that neither the numbers nor the choice depend
 * on the number of threads, and logits with their bias are never stored whole.
 */
#include "choice.h"
#include <math.h>
#include <string.h>

typedef struct {
    int64_t width, columns, rank; /* rank 0 = no Markov head */
    Matrix head;                  /* (columns, width) */
    Matrix hidden, previous;      /* (rank, width) */
    Matrix basis;                 /* (columns, rank) */
    Matrix embedding;             /* (tokens, width) */
    const int64_t *ids;           /* the columns' tokens, 0 = their own numbers */
    int64_t kind;                 /* of the Markov head: what is between it and the basis */
} Head;

enum { SILU, TANH, LINEAR }; /* silu or tanh of hidden·h + previous·e(x); previous·e(x) alone */

#ifdef ROWS_HERE
#include <omp.h>

enum { BLOCK = 512 };

/* One of a row's most probable columns. */
typedef struct {
    float logit;
    int32_t column;
} Top;

/* A node that may join the tree. */
typedef struct {
    double log_q;
    int64_t level, token, parent; /* parent: its place in the tree of the level before, −1 = the root */
} Node;

typedef struct {
    float *logits, *inputs;      /* of all levels: (K, columns), (K, rank) */
    float *embedded, *mixed;     /* of a level's parents: (P, width), (P, rank) */
    float *largest, *sums;       /* by parent and block, the largest logit and the sum of exp(logit − it) */
    float *biases;               /* by thread, (P, BLOCK) */
    Top *tops;                   /* by thread and parent, `nodes` of them, best first */
    Node *tree, *found;          /* (nodes) and (nodes + nodes²) */
    int64_t *parents;            /* (nodes): places in the tree */
} Room;

static int64_t lay_out(const Head *h, int64_t levels, int64_t nodes, int T, char *at, Room *room)
{
    const int64_t blocks = (h->columns + BLOCK - 1) / BLOCK;
    const char *begin = at;
#define TAKE(FIELD, COUNT) (room->FIELD = (void *)at, at += ((COUNT) * sizeof *room->FIELD + 63) / 64 * 64)
    TAKE(logits, levels * h->columns);
    TAKE(inputs, levels * h->rank);
    TAKE(embedded, nodes * h->width);
    TAKE(mixed, nodes * h->rank);
    TAKE(largest, nodes * blocks);
    TAKE(sums, nodes * blocks);
    TAKE(biases, T * nodes * BLOCK);
    TAKE(tops, T * nodes * nodes);
    TAKE(tree, nodes);
    TAKE(found, nodes + nodes * nodes);
    TAKE(parents, nodes);
#undef TAKE
    return at - begin;
}

/* Put a logit among a row's best, the lower column first among equals. */
static inline void insert(Top *tops, int64_t most, float logit, int32_t column)
{
    int64_t i = most - 1;
    for (; i > 0 && (logit > tops[i - 1].logit || tops[i - 1].column < 0); i--) tops[i] = tops[i - 1];
    tops[i] = (Top){logit, column};
}

/* A block of logits of one row: divided by `scale`, their largest, the sum of exp(logit − it), and the best of them. */
static AVX2 void look_at(
    float *line, int64_t count, int64_t first, float scale, float *largest, float *sum, Top *tops, int64_t most)
{
    const int64_t whole = (count + 7) / 8 * 8;
    for (int64_t j = count; j < whole; j++) line[j] = -INFINITY;
    if (scale != 1.0f)
        for (int64_t j = 0; j < count; j++) line[j] /= scale;
    __m256 top = _mm256_set1_ps(-INFINITY);
    for (int64_t j = 0; j < whole; j += 8) top = _mm256_max_ps(top, _mm256_loadu_ps(line + j));
    *largest = largest_of(top);
    const __m256 best = _mm256_set1_ps(*largest);
    __m256 all = _mm256_setzero_ps();
    for (int64_t j = 0; j < whole; j += 8) all = _mm256_add_ps(all, exp8(_mm256_sub_ps(_mm256_loadu_ps(line + j), best)));
    *sum = total(all);
    for (int64_t j = 0; j < whole; j += 8) {
        const Top last = tops[most - 1];
        const __m256 least = _mm256_set1_ps(last.column < 0 ? -INFINITY : last.logit);
        if (!_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(line + j), least, _CMP_GT_OQ))) continue;
        for (int64_t i = j; i < j + 8 && i < count; i++)
            if (tops[most - 1].column < 0 ? line[i] > -INFINITY : line[i] > tops[most - 1].logit)
                insert(tops, most, line[i], (int32_t)(first + i));
    }
}

/* The children of the parents join those found so far; the `nodes` best of all stay, which are the tree. Returns how many. */
static int64_t grow(
    const Head *h, const Room *room, int64_t level, int64_t parents, int64_t had, int64_t nodes, int64_t most, int T)
{
    const int64_t blocks = (h->columns + BLOCK - 1) / BLOCK, rows = h->rank ? parents : 1;
    Node *found = room->found;
    memcpy(found, room->tree, had * sizeof *found);
    int64_t count = had;
    for (int64_t p = 0; p < parents; p++) {
        const int64_t row = p < rows ? p : 0, parent = level ? room->parents[p] : -1;
        const float *largest = room->largest + row * blocks, *sums = room->sums + row * blocks;
        const double above = parent < 0 ? 0.0 : room->tree[parent].log_q;
        float best = largest[0], sum = 0.0f;
        for (int64_t b = 1; b < blocks; b++) best = largest[b] > best ? largest[b] : best;
        for (int64_t b = 0; b < blocks; b++) sum += sums[b] * expf(largest[b] - best);
        const float log_sum = logf(sum);
        int64_t next[T];
        memset(next, 0, sizeof next);
        for (int64_t n = 0; n < most; n++) { /* threads have ascending columns: the first among equals is the lowest */
            int from = -1;
            Top chosen = {0, -1};
            for (int t = 0; t < T; t++) {
                if (next[t] == most) continue;
                const Top top = room->tops[(t * nodes + row) * nodes + next[t]];
                if (top.column >= 0 && (from < 0 || top.logit > chosen.logit)) chosen = top, from = t;
            }
            if (from < 0) break;
            next[from]++;
            const int64_t token = h->ids ? h->ids[chosen.column] : chosen.column;
            found[count++] = (Node){above + (double)(chosen.logit - best - log_sum), level, token, parent};
        }
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) { /* stable: the lower level first among equals */
        const Node node = found[i];
        int64_t j = kept < nodes ? kept++ : nodes;
        if (j == nodes && !(node.log_q > found[--j].log_q)) continue;
        for (; j > 0 && node.log_q > found[j - 1].log_q; j--) found[j] = found[j - 1];
        found[j] = node;
    }
    return kept;
}

/* Where the nodes of the old tree lie in the new one; then the new one takes its place. */
static void settle(const Room *room, int64_t had, int64_t count, int64_t level)
{
    Node *found = room->found;
    int64_t place[had + 1], old = 0;
    for (int64_t i = 0; i < count; i++)
        if (found[i].level < level) place[old++] = i; /* those of the old tree keep their order */
    for (int64_t i = 0; i < count; i++)
        if (found[i].parent >= 0) found[i].parent = place[found[i].parent];
    memcpy(room->tree, found, count * sizeof *found);
}

/* Room that `draft_tree` needs, in bytes; `draw_chain`: with one node. */
int64_t tree_scratch(const Head *h, int64_t levels, int64_t nodes)
{
    Room room;
    return lay_out(h, levels, nodes, omp_get_max_threads(), 0, &room);
}

/* What does not depend on drafted tokens: the head's logits and the Markov head's part of the hidden states, of all levels. */
static AVX2 void prepare(const Head *h, const Room *room, const float *hidden, int64_t levels, int t, int T)
{
    int64_t from, to;
    share(STRIPS(h->columns), t, T, &from, &to);
    product(&h->head, hidden, room->logits, levels, h->width, h->columns, from, to, 0);
    share(STRIPS(h->rank), t, T, &from, &to);
    if (h->kind != LINEAR) product(&h->hidden, hidden, room->inputs, levels, h->width, h->rank, from, to, 0);
}

/* Level k of the Markov head after the P tokens that are embedded. */
static AVX2 void mix(const Head *h, const Room *room, int64_t k, int64_t P, int t, int T)
{
    const int64_t r = h->rank;
    int64_t from, to;
    share(STRIPS(r), t, T, &from, &to);
    product(&h->previous, room->embedded, room->mixed, P, h->width, r, from, to, 0);
    for (int64_t p = 0; p < P && h->kind != LINEAR; p++)
        for (int64_t i = STRIP * from; i < STRIP * to && i < r; i++) {
            const float x = room->inputs[k * r + i] + room->mixed[p * r + i];
            room->mixed[p * r + i] = h->kind == TANH ? tanhf(x) : x / (1.0f + expf(-x));
        }
}

/* The Markov head's bias on the `many` columns from `first` on, after P tokens: (P, many). */
static AVX2 void bias_of(const Head *h, const Room *room, int64_t P, int64_t first, int64_t many, float *bias)
{
    Matrix part = h->basis;
    part.weight = (const char *)part.weight + first * h->rank * size_of((int)part.kind);
    if (part.scale) part.scale += first;
    product(&part, room->mixed, bias, P, h->rank, many, 0, STRIPS(many), 0);
}

/* The tree of the `nodes` most probable paths after the token `last`, at most `levels` long: tokens, their parents' places (−1 =
 * the root), ln q of the paths, the most probable first. hidden: (levels, width). Returns how many nodes it has. */
AVX2 int64_t draft_tree(
    const Head *h, const float *hidden, int64_t levels, int64_t last, int64_t nodes, float scale, int64_t *tokens,
    int64_t *parents, double *log_q, char *scratch)
{
    const int64_t D = h->width, V = h->columns, r = h->rank, blocks = (V + BLOCK - 1) / BLOCK;
    const int64_t most = nodes < V ? nodes : V;
    Room room;
    int64_t count = 0, level_parents = 1;
    lay_out(h, levels, nodes, omp_get_max_threads(), scratch, &room);
    if (r) take_row(&h->embedding, last, D, room.embedded);

#pragma omp parallel
    {
        const int t = omp_get_thread_num(), T = omp_get_num_threads();
        int64_t from, to;
        prepare(h, &room, hidden, levels, t, T);
#pragma omp barrier
        for (int64_t k = 0; k < levels && level_parents; k++) {
            const int64_t P = level_parents, rows = r ? P : 1;
            mix(h, &room, k, P, t, T);
            Top *tops = room.tops + t * nodes * nodes;
            for (int64_t i = 0; i < rows * nodes; i++) tops[i] = (Top){0.0f, -1};
#pragma omp barrier
            share(blocks, t, T, &from, &to);
            for (int64_t b = from; b < to; b++) {
                const int64_t first = b * BLOCK, many = V - first < BLOCK ? V - first : BLOCK;
                const float *logits = room.logits + k * V + first;
                float *bias = room.biases + t * nodes * BLOCK, line[BLOCK];
                if (r) bias_of(h, &room, P, first, many, bias);
                for (int64_t p = 0; p < rows; p++) {
                    for (int64_t j = 0; j < many; j++) line[j] = r ? logits[j] + bias[p * many + j] : logits[j];
                    look_at(line, many, first, scale, room.largest + p * blocks + b, room.sums + p * blocks + b,
                            tops + p * nodes, most);
                }
            }
#pragma omp barrier
#pragma omp master
            {
                const int64_t had = count;
                count = grow(h, &room, k, P, had, nodes, most, T);
                settle(&room, had, count, k);
                level_parents = 0;
                for (int64_t i = 0; i < count; i++)
                    if (room.tree[i].level == k) {
                        if (r) take_row(&h->embedding, room.tree[i].token, D, room.embedded + level_parents * D);
                        room.parents[level_parents++] = i;
                    }
            }
#pragma omp barrier
        }
    }
    for (int64_t i = 0; i < count; i++)
        tokens[i] = room.tree[i].token, parents[i] = room.tree[i].parent, log_q[i] = room.tree[i].log_q;
    return count;
}

/* A chain after the token `last`: columns (levels), each drawn with its number of u (levels) from its row of q (levels, columns),
 * which is softmax(logits / scale) given those before it. hidden: (levels, width). */
AVX2 void draw_chain(
    const Head *h, const float *hidden, int64_t levels, int64_t last, float scale, const double *u, int64_t *columns,
    float *q, char *scratch)
{
    const int64_t D = h->width, V = h->columns, blocks = (V + BLOCK - 1) / BLOCK;
    Room room;
    lay_out(h, levels, 1, omp_get_max_threads(), scratch, &room);
    if (h->rank) take_row(&h->embedding, last, D, room.embedded);

#pragma omp parallel
    {
        const int t = omp_get_thread_num(), T = omp_get_num_threads();
        int64_t from, to;
        share(blocks, t, T, &from, &to);
        prepare(h, &room, hidden, levels, t, T);
#pragma omp barrier
        for (int64_t k = 0; k < levels; k++) {
            float *row = q + k * V, *bias = room.biases + t * BLOCK;
            mix(h, &room, k, 1, t, T);
#pragma omp barrier
            for (int64_t b = from; b < to; b++) {
                const int64_t first = b * BLOCK, many = V - first < BLOCK ? V - first : BLOCK;
                const float *logits = room.logits + k * V + first;
                float top = -INFINITY;
                if (h->rank) bias_of(h, &room, 1, first, many, bias);
                for (int64_t j = 0; j < many; j++) {
                    row[first + j] = (h->rank ? logits[j] + bias[j] : logits[j]) / scale;
                    top = row[first + j] > top ? row[first + j] : top;
                }
                room.largest[b] = top;
            }
#pragma omp barrier
            float best = room.largest[0];
            for (int64_t b = 1; b < blocks; b++) best = room.largest[b] > best ? room.largest[b] : best;
            for (int64_t b = from; b < to; b++) {
                const int64_t first = b * BLOCK, many = V - first < BLOCK ? V - first : BLOCK;
                float line[BLOCK];
                for (int64_t j = 0; j < many; j++) line[j] = row[first + j] - best;
                for (int64_t j = many; j < (many + 7) / 8 * 8; j++) line[j] = -INFINITY;
                for (int64_t j = 0; j < many; j += 8) _mm256_storeu_ps(line + j, exp8(_mm256_loadu_ps(line + j)));
                memcpy(row + first, line, many * sizeof *line);
                room.sums[b] = (float)sum_of(line, many);
            }
#pragma omp barrier
            double all = 0.0;
            for (int64_t b = 0; b < blocks; b++) all += room.sums[b];
            const float share_of_one = (float)(1.0 / all);
            const int64_t end = BLOCK * to < V ? BLOCK * to : V;
            for (int64_t j = BLOCK * from; j < end; j++) row[j] *= share_of_one;
#pragma omp barrier
#pragma omp master
            {
                columns[k] = draw_of(row, V, u[k]);
                const int64_t token = h->ids ? h->ids[columns[k]] : columns[k];
                if (h->rank) take_row(&h->embedding, token, D, room.embedded);
            }
#pragma omp barrier
        }
    }
}
#else
int64_t tree_scratch(const Head *h, int64_t levels, int64_t nodes) { return 0; }
int64_t draft_tree(
    const Head *h, const float *hidden, int64_t levels, int64_t last, int64_t nodes, float scale, int64_t *tokens,
    int64_t *parents, double *log_q, char *scratch)
{
    return 0;
}
void draw_chain(
    const Head *h, const float *hidden, int64_t levels, int64_t last, float scale, const double *u, int64_t *columns,
    float *q, char *scratch)
{
}
#endif
