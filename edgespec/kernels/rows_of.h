/* The functions of rows.c that reckon in REAL, which is float or double: included once for each. */

#define LANES 16
#define BLOCK 64 /* slots whose keys are held turned at a time */
#define WIDEST 64 /* numbers of a value whose sums are held at a time */

static void NAME(load)(int dtype, const void *from, int64_t n, REAL *to)
{
    const uint16_t *halves = from;
    if (dtype == FLOAT16) {
        int64_t i = 0;
#ifdef __F16C__
        for (; !WIDE && i + 8 <= n; i += 8)
            _mm256_storeu_ps((float *)to + i,
                             _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
#endif
        for (; i < n; i++)
            to[i] = half_to_float(halves[i]);
    } else if (dtype == BFLOAT16)
        for (int64_t i = 0; i < n; i++)
            to[i] = brain_to_float(halves[i]);
    else if (dtype == CODED) {
        const int8_t *codes = from;
        float scale;
        memcpy(&scale, codes + scale_at(n), sizeof scale);
        for (int64_t i = 0; i < n; i++)
            to[i] = (float)codes[i] * scale;
    } else
        memcpy(to, from, n * sizeof(REAL));
}

static void NAME(store)(int dtype, const REAL *from, int64_t n, void *to)
{
    uint16_t *halves = to;
    if (dtype == FLOAT16)
        for (int64_t i = 0; i < n; i++)
            halves[i] = float_to_half((float)from[i]);
    else if (dtype == BFLOAT16)
        for (int64_t i = 0; i < n; i++)
            halves[i] = float_to_brain((float)from[i]);
    else if (dtype == CODED) {
        int8_t *codes = to;
        float greatest = 0; /* or NaN */
        for (int64_t i = 0; i < n; i++) {
            float size = fabsf((float)from[i]);
            greatest = size > greatest || size != size ? size : greatest;
        }
        float scale = greatest < 1e-30f ? 0 : greatest / 127;
        for (int64_t i = 0; i < n; i++)
            codes[i] = scale > 0 && scale < INFINITY ? (int8_t)rintf((float)from[i] / scale) : 0;
        memset(codes + n, 0, scale_at(n) - n);
        memcpy(codes + scale_at(n), &scale, sizeof scale);
    } else
        memcpy(to, from, n * sizeof(REAL));
}

typedef REAL NAME(Four) __attribute__((vector_size(4 * sizeof(REAL))));

/* Each lane sums every LANES-th number, and then the lanes are summed in pairs. */
static REAL NAME(lanes_sum)(REAL *lanes)
{
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++)
            lanes[l] += lanes[l + width];
    return lanes[0];
}

static REAL NAME(sum)(const REAL *x, int64_t n)
{
    REAL lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++)
            lanes[l] += x[i + l];
    for (int l = 0; i + l < n; l++)
        lanes[l] += x[i + l];
    return NAME(lanes_sum)(lanes);
}

static REAL NAME(squares)(const REAL *x, int64_t n)
{
    REAL lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++)
            lanes[l] = FMA(x[i + l], x[i + l], lanes[l]);
    for (int l = 0; i + l < n; l++)
        lanes[l] = FMA(x[i + l], x[i + l], lanes[l]);
    return NAME(lanes_sum)(lanes);
}

static REAL NAME(largest)(const REAL *x, int64_t n)
{
    REAL lanes[LANES];
    int64_t i = 0;
    for (int l = 0; l < LANES; l++)
        lanes[l] = x[0];
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++)
            lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
    for (int l = 0; i + l < n; l++)
        lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
    for (int l = 1; l < LANES; l++)
        lanes[0] = lanes[l] > lanes[0] ? lanes[l] : lanes[0];
    return lanes[0];
}

static void NAME(scale_to_gain)(REAL *x, int64_t n, const REAL *gain, double eps, int centred)
{
    REAL mean = centred ? NAME(sum)(x, n) / n : 0;
    for (int64_t i = 0; centred && i < n; i++)
        x[i] -= mean;
    REAL scale = 1 / SQRT(NAME(squares)(x, n) / n + (REAL)eps);
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] * scale * gain[i];
}

/* RMSNorm of `hidden` [rows, n] with `gain` [n] into `normed`. If there is `added` [rows, n], it is
 * added first, `share` times and normed itself if there is `added_gain`; the rounded sum goes into
 * `sum`, and is normed only if there is `gain`. If `centred`, rows are less their mean first. */
static void NAME(norm)(int dtype, int64_t rows, int64_t n, const char *hidden, const char *added,
                       double share, const REAL *added_gain, const REAL *gain, double eps,
                       int centred, char *sum, char *normed)
{
    REAL x[n], more[added ? n : 1];
    int64_t bytes = n * item_size(dtype);
    for (int64_t row = 0; row < rows; row++) {
        NAME(load)(dtype, hidden + row * bytes, n, x);
        if (added) {
            NAME(load)(dtype, added + row * bytes, n, more);
            if (added_gain)
                NAME(scale_to_gain)(more, n, added_gain, eps, centred);
            for (int64_t i = 0; i < n; i++)
                x[i] = FMA((REAL)share, more[i], x[i]);
            NAME(store)(dtype, x, n, sum + row * bytes);
            if (!gain)
                continue;
            NAME(load)(dtype, sum + row * bytes, n, x);
        }
        NAME(scale_to_gain)(x, n, gain, eps, centred);
        NAME(store)(dtype, x, n, normed + row * bytes);
    }
}

/* Turn `half` pairs of numbers, `apart` numbers apart, each pair `step` behind the one before. */
INLINE void NAME(turn_pairs)(REAL *x, int64_t half, const int64_t step, const int64_t apart,
                             const REAL *cosines, const REAL *sines)
{
    for (int64_t i = 0; i < half; i++) {
        REAL one = x[i * step], other = x[i * step + apart];
        x[i * step] = FMA(one, cosines[i], -(other * sines[i]));
        x[i * step + apart] = FMA(other, cosines[i], one * sines[i]);
    }
}

/* Norm the queries' and keys' heads of `qkv`, rows that lie `stride` numbers apart, if there are
 * gains, turn the first 2 * half numbers of each by angles [rows, half], if there are, and multiply
 * queries by `scales` [rows], if there are. `ways`: gains [head_dim] are of a head, or WHOLE ones of
 * all queries and all keys; norms are LAST; what is turned together are neighbours (PAIRED). */
static void NAME(turn)(int dtype, int64_t rows, int64_t stride, int64_t heads, int64_t kv_heads,
                       int64_t head_dim, int64_t half, int ways, char *qkv, const REAL *cosines,
                       const REAL *sines, const REAL *scales, const REAL *query_gain,
                       const REAL *key_gain, double eps)
{
    int64_t size = item_size(dtype), most = ways & WHOLE ? heads + kv_heads : 1, some = 1;
    REAL x[most * head_dim];
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads + kv_heads; head += some) {
            const REAL *gain = head < heads ? query_gain : key_gain;
            if (ways & WHOLE)
                some = head < heads ? heads : kv_heads;
            int64_t n = some * head_dim;
            char *place = qkv + (row * stride + head * head_dim) * size;
            NAME(load)(dtype, place, n, x);
            if (gain && !(ways & LAST))
                NAME(scale_to_gain)(x, n, gain, eps, 0);
            for (REAL *own = x; cosines && own < x + n; own += head_dim)
                if (ways & PAIRED)
                    NAME(turn_pairs)(own, half, 2, 1, cosines + row * half, sines + row * half);
                else
                    NAME(turn_pairs)(own, half, 1, half, cosines + row * half, sines + row * half);
            if (gain && ways & LAST)
                NAME(scale_to_gain)(x, n, gain, eps, 0);
            for (int64_t i = 0; scales && head < heads && i < n; i++)
                x[i] *= scales[row];
            NAME(store)(dtype, x, n, place);
        }
}

/* Of each row of `gate_up` [rows, 2 * n] the activation of its first half times the second half; of
 * [rows, n] squares of what is above 0, which gate nothing. CLAMPED: gpt-oss' swish of a `slope`,
 * which both halves enter within a `limit`, and the second one more by 1. */
static void NAME(gated)(int dtype, int64_t rows, int64_t n, int kind, double slope, double limit,
                        const char *gate_up, char *out)
{
    const REAL steep = (REAL)slope, most = (REAL)limit;
    REAL gate[n], up[n];
    int64_t bytes = n * item_size(dtype);
    for (int64_t row = 0; kind == RELU_SQUARED && row < rows; row++) {
        NAME(load)(dtype, gate_up + row * bytes, n, gate);
        for (int64_t i = 0; i < n; i++)
            gate[i] = gate[i] < 0 ? 0 : gate[i] * gate[i]; /* of NaN that, too */
        NAME(store)(dtype, gate, n, out + row * bytes);
    }
    for (int64_t row = 0; kind != RELU_SQUARED && row < rows; row++) {
        NAME(load)(dtype, gate_up + 2 * row * bytes, n, gate);
        NAME(load)(dtype, gate_up + (2 * row + 1) * bytes, n, up);
        if (kind == SILU)
            for (int64_t i = 0; i < n; i++)
                gate[i] = gate[i] / (1 + EXP(-gate[i]));
        else if (kind == SIGMOID)
            for (int64_t i = 0; i < n; i++)
                gate[i] = 1 / (1 + EXP(-gate[i]));
        else if (kind == GELU_TANH) /* (1 + tanh(u)) / 2 is 1 / (1 + e^-2u) */
            for (int64_t i = 0; i < n; i++) {
                REAL cubed = gate[i] * gate[i] * gate[i];
                REAL u = (REAL)0.79788456080286535588 * FMA((REAL)0.044715, cubed, gate[i]);
                gate[i] = gate[i] / (1 + EXP(-2 * u));
            }
        else if (kind == CLAMPED)
            for (int64_t i = 0; i < n; i++) {
                gate[i] = gate[i] > most ? most : gate[i];
                gate[i] = gate[i] / (1 + EXP(-steep * gate[i]));
                up[i] = 1 + (up[i] > most ? most : up[i] < -most ? -most : up[i]);
            }
        else
            for (int64_t i = 0; i < n; i++)
                gate[i] = gate[i] * (REAL)0.5 * (1 + ERF(gate[i] * (REAL)0.70710678118654752440));
        for (int64_t i = 0; i < n; i++)
            gate[i] *= up[i];
        NAME(store)(dtype, gate, n, out + row * bytes);
    }
}

/* Some rows of one request, and what they see: of row r the runs firsts[r] to firsts[r + 1]. */
typedef struct {
    int64_t begin, end;        /* of all rows */
    int64_t first, last;       /* slots that some of them see: from, and before */
    const Piece *pieces;
} NAME(Tile);

/* Slots are taken in growing order. */
typedef struct {
    const Piece *piece;
    int64_t before; /* slots before the piece */
    const char *next; /* where the slot after those that were taken last is, if its piece is the same */
} NAME(Walk);

/* Where the keys or values [head_dim] of `count` slots from `slot` on are as REAL, one behind the
 * other: where they lie, or in `copy`. */
static const REAL *NAME(near)(NAME(Walk) *walk, int dtype, int of_values, int64_t slot,
                              int64_t count, int64_t kv_head, int64_t head_dim, REAL *copy)
{
    REAL *to = copy;
    for (int64_t end = slot + count, some; slot < end; slot += some, to += some * head_dim) {
        while (slot >= walk->before + walk->piece->rows)
            walk->before += (walk->piece++)->rows;
        const Piece *piece = walk->piece;
        int64_t at = slot - walk->before, left = piece->rows - at, step = piece->row_stride;
        some = left < end - slot ? left : end - slot;
        const char *from = of_values ? piece->values : piece->keys;
        from += (kv_head * piece->head_stride + at * step) * item_size(dtype);
        walk->next = from + some * step * item_size(dtype);
        if (step == head_dim && some == count && dtype == (WIDE ? FLOAT64 : FLOAT32))
            return (const REAL *)from;
        if (step == head_dim)
            NAME(load)(dtype, from, some * head_dim, to);
        else
            for (int64_t i = 0; i < some; i++)
                NAME(load)(dtype, from + i * step * item_size(dtype), head_dim, to + i * head_dim);
    }
    return copy;
}

/* Keys [count, head_dim] as columns, [head_dim, BLOCK]. */
static void NAME(turned)(const REAL *keys, int64_t count, int64_t head_dim, REAL *columns)
{
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) {
        const REAL *from = keys + k * head_dim;
        int64_t d = 0;
        for (; d + 4 <= head_dim; d += 4) {
            NAME(Four) a, b, c, e;
            memcpy(&a, from + d, sizeof a);
            memcpy(&b, from + d + head_dim, sizeof a);
            memcpy(&c, from + d + 2 * head_dim, sizeof a);
            memcpy(&e, from + d + 3 * head_dim, sizeof a);
            NAME(Four) ab = MIXED(a, b, 0, 4, 1, 5), ce = MIXED(c, e, 0, 4, 1, 5);
            NAME(Four) AB = MIXED(a, b, 2, 6, 3, 7), CE = MIXED(c, e, 2, 6, 3, 7);
            a = MIXED(ab, ce, 0, 1, 4, 5), b = MIXED(ab, ce, 2, 3, 6, 7);
            c = MIXED(AB, CE, 0, 1, 4, 5), e = MIXED(AB, CE, 2, 3, 6, 7);
            REAL *place = columns + d * BLOCK + k;
            memcpy(place, &a, sizeof a);
            memcpy(place + BLOCK, &b, sizeof a);
            memcpy(place + 2 * BLOCK, &c, sizeof a);
            memcpy(place + 3 * BLOCK, &e, sizeof a);
        }
        for (; d < head_dim; d++)
            for (int64_t i = 0; i < 4; i++)
                columns[d * BLOCK + k + i] = from[i * head_dim + d];
    }
    for (; k < count; k++)
        for (int64_t d = 0; d < head_dim; d++)
            columns[d * BLOCK + k] = keys[k * head_dim + d];
}

/* Scores of `some` queries [some, head_dim] and BLOCK keys, each its own sum in the order of the
 * dimensions; those of a query lie `width` numbers behind those of the one before. */
INLINE void NAME(score)(const int some, const REAL *queries, const REAL *turned, int64_t head_dim,
                        REAL *scores, int64_t width, Ahead *ahead)
{
    REAL sums[BLOCK] = {0}, more[BLOCK] = {0};
    const REAL *others = queries + (some - 1) * head_dim;
    for (int64_t d = 0; d < head_dim; d++) {
        const REAL *keys = turned + d * BLOCK;
        if (d % 4 == 0)
            ask(ahead);
        for (int k = 0; k < BLOCK; k++)
            sums[k] = FMA(queries[d], keys[k], sums[k]);
        for (int k = 0; some > 1 && k < BLOCK; k++)
            more[k] = FMA(others[d], keys[k], more[k]);
    }
    memcpy(scores, sums, sizeof sums);
    if (some > 1)
        memcpy(scores + width, more, sizeof more);
}

/* Add `count` values [head_dim] to `sums` [some, head_dim] by their weights, each number in the
 * order of the values; the weights of a query lie `width` numbers behind those of the one before. */
INLINE void NAME(weigh)(const int some, const REAL *weights, int64_t width, const REAL *values,
                        int64_t count, int64_t head_dim, REAL *sums, Ahead *ahead)
{
    const REAL *others = weights + (some - 1) * width;
    REAL *second = sums + (some - 1) * head_dim;
    int64_t d = 0;
    for (; d + WIDEST <= head_dim; d += WIDEST) {
        REAL own[WIDEST], more[WIDEST];
        memcpy(own, sums + d, sizeof own);
        memcpy(more, second + d, sizeof more);
        for (int64_t k = 0; k < count; k++) {
            const REAL *v = values + k * head_dim + d;
            if (k % 4 == 0)
                ask(ahead);
            for (int i = 0; i < WIDEST; i++)
                own[i] = FMA(weights[k], v[i], own[i]);
            for (int i = 0; some > 1 && i < WIDEST; i++)
                more[i] = FMA(others[k], v[i], more[i]);
        }
        memcpy(second + d, more, some > 1 ? sizeof more : 0);
        memcpy(sums + d, own, sizeof own);
    }
    for (int q = 0; q < some; q++)
        for (int64_t k = 0; k < count; k++)
            for (int64_t i = d; i < head_dim; i++)
                sums[q * head_dim + i] = FMA(weights[q * width + k], values[k * head_dim + i],
                                             sums[q * head_dim + i]);
}

/* Scores [n] to weights that are still to be divided by what is returned. */
static REAL NAME(soften)(REAL *scores, int64_t n, double scaling, double softcap, const REAL *sink)
{
    for (int64_t i = 0; i < n; i++)
        scores[i] *= (REAL)scaling;
    if (softcap > 0)
        for (int64_t i = 0; i < n; i++)
            scores[i] = (REAL)softcap * TANH(scores[i] / (REAL)softcap);
    REAL top = NAME(largest)(scores, n);
    if (sink && *sink > top)
        top = *sink;
    for (int64_t i = 0; i < n; i++)
        scores[i] = EXP(scores[i] - top);
    return NAME(sum)(scores, n) + (sink ? EXP(*sink - top) : 0);
}

/* Attention of a tile's rows, of the queries of `group` heads from `head` on, which share one key
 * head. Returns 0, or -1 without memory. */
static int NAME(attend)(NAME(Tile) tile, int dtype, int held_as, int64_t kv_head, int64_t head,
                        int64_t group, int64_t head_dim, int64_t heads, double scaling, double softcap,
                        const REAL *sinks, const int64_t *firsts, const int32_t *runs,
                        const char *query, int64_t stride, char *out)
{
    int64_t rows = tile.end - tile.begin, count = rows * group, size = item_size(dtype);
    int64_t width = (tile.last - tile.first + BLOCK - 1) / BLOCK * BLOCK;
    REAL *memory =
        malloc((count * (width + 2 * head_dim + 1) + 2 * BLOCK * head_dim) * sizeof(REAL));
    if (!memory)
        return -1;
    REAL *scores = memory, *queries = scores + count * width, *sums = queries + count * head_dim;
    REAL *totals = sums + count * head_dim, *held = totals + count, *copy = held + BLOCK * head_dim;
    memset(sums, 0, count * head_dim * sizeof(REAL));
    memset(held, 0, BLOCK * head_dim * sizeof(REAL)); /* the last block may be filled in part */
    for (int64_t q = 0; q < count; q++) {
        int64_t at = (tile.begin + q / group) * stride + (head + q % group) * head_dim;
        NAME(load)(dtype, query + at * size, head_dim, queries + q * head_dim);
    }
    NAME(Walk) walk = {tile.pieces, 0, NULL};
    int64_t bytes = BLOCK * held_width(held_as, head_dim) * item_size(held_as);
    for (int64_t block = tile.first; block < tile.last; block += BLOCK) {
        int64_t some = tile.last - block < BLOCK ? tile.last - block : BLOCK;
        NAME(turned)(NAME(near)(&walk, held_as, 0, block, some, kv_head, head_dim, copy), some,
                     head_dim, held);
        int64_t more = block + BLOCK < tile.last;
        Ahead ahead = ahead_of(walk.next, more * bytes, count * (head_dim / 4));
        int64_t q = 0;
        REAL *to = scores + block - tile.first;
        for (; q + TOGETHER <= count; q += TOGETHER)
            NAME(score)(TOGETHER, queries + q * head_dim, held, head_dim, to + q * width, width,
                        &ahead);
        for (; q < count; q++)
            NAME(score)(1, queries + q * head_dim, held, head_dim, to + q * width, width, &ahead);
    }
    for (int64_t q = 0; q < count; q++) {
        int64_t row = tile.begin + q / group, n = 0;
        REAL *own = scores + q * width;
        for (int64_t run = firsts[row]; run < firsts[row + 1]; run++) {
            int64_t first = runs[2 * run], more = runs[2 * run + 1] - first;
            memmove(own + n, own + first - tile.first, more * sizeof(REAL));
            n += more;
        }
        const REAL *sink = sinks ? sinks + head + q % group : NULL;
        totals[q] = n ? NAME(soften)(own, n, scaling, softcap, sink) : 0;
    }
    walk = (NAME(Walk)){tile.pieces, 0, NULL};
    int64_t at[rows], run[rows]; /* how many slots a row had so far, and the run that is next */
    for (int64_t r = 0; r < rows; r++) {
        at[r] = 0;
        run[r] = firsts[tile.begin + r];
    }
    for (int64_t block = tile.first; block < tile.last; block += BLOCK) {
        int64_t end = block + BLOCK < tile.last ? block + BLOCK : tile.last;
        const REAL *values =
            NAME(near)(&walk, held_as, 1, block, end - block, kv_head, head_dim, copy);
        Ahead ahead = ahead_of(walk.next, end < tile.last ? bytes : 0, count * (BLOCK / 4));
        for (int64_t r = 0; r < rows; r++)
            for (; run[r] < firsts[tile.begin + r + 1]; run[r]++) {
                int64_t first = runs[2 * run[r]], last = runs[2 * run[r] + 1];
                int64_t from = first > block ? first : block, to = last < end ? last : end;
                const REAL *seen = values + (from - block) * head_dim;
                int64_t q = r * group, all = from < to ? q + group : q;
                for (; q + TOGETHER <= all; q += TOGETHER)
                    NAME(weigh)(TOGETHER, scores + q * width + at[r], width, seen, to - from,
                                head_dim, sums + q * head_dim, &ahead);
                for (; q < all; q++)
                    NAME(weigh)(1, scores + q * width + at[r], width, seen, to - from, head_dim,
                                sums + q * head_dim, &ahead);
                at[r] += from < to ? to - from : 0;
                if (last > end)
                    break; /* the rest of it lies in the next block */
            }
    }
    for (int64_t q = 0; q < count; q++) {
        REAL *own = sums + q * head_dim;
        int64_t place = (tile.begin + q / group) * heads + head + q % group;
        for (int64_t d = 0; d < head_dim && totals[q] != 0; d++)
            own[d] /= totals[q];
        NAME(store)(dtype, own, head_dim, out + place * head_dim * size);
    }
    free(memory);
    return 0;
}

/* Attention of all rows, of some requests one after the other: those of part p up to part_rows[p +
 * 1], over slots in the pieces up to part_pieces[p + 1], which are `held_as` numbers of that type (of
 * float64 if the rows are). `query`: rows of heads that lie `stride`
 * numbers apart; out [rows, heads, head_dim]. softcap 0: none; sinks [heads] or NULL. */
static int NAME(attention)(int dtype, int held_as, int64_t parts, const int64_t *part_rows,
                           const int64_t *part_pieces, const Piece *pieces, const int64_t *firsts,
                           const int32_t *runs, int64_t heads, int64_t kv_heads, int64_t head_dim,
                           double scaling, double softcap, const REAL *sinks, const char *query,
                           int64_t stride, char *out, int threads)
{
    int64_t rows = part_rows[parts], group = heads / kv_heads, found = 0, work = 0;
    NAME(Tile) *tiles = malloc((rows + 1) * sizeof *tiles);
    int failed = tiles == NULL;
    for (int64_t part = 0; !failed && part < parts; part++)
        for (int64_t row = part_rows[part]; row < part_rows[part + 1]; row++) {
            int sees = firsts[row] < firsts[row + 1];
            int64_t first = sees ? runs[2 * firsts[row]] : 0;
            int64_t last = sees ? runs[2 * firsts[row + 1] - 1] : 0;
            work += (last - first) * heads * head_dim;
            NAME(Tile) *tile = tiles + found - 1;
            if (row > part_rows[part] && row - tile->begin < TILE_ROWS) {
                int64_t low = first < tile->first ? first : tile->first;
                int64_t high = last > tile->last ? last : tile->last;
                if ((row + 1 - tile->begin) * group * (high - low) <= TILE_SCORES) {
                    *tile = (NAME(Tile)){tile->begin, row + 1, low, high, tile->pieces};
                    continue;
                }
            }
            tiles[found++] = (NAME(Tile)){row, row + 1, first, last, pieces + part_pieces[part]};
        }
    if (work < FEW)
        threads = 1;
    /* Where threads are left over, those queries are shared out that share a key head: of latents,
     * all share one. */
    int64_t whole = found * kv_heads, each = whole && whole < threads ? (threads + whole - 1) / whole : 1;
    int64_t share = (group + each - 1) / each, cuts = (group + share - 1) / share;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1) reduction(| : failed)
    for (int64_t task = 0; task < whole * cuts; task++) {
        int64_t kv_head = task / cuts % kv_heads, from = task % cuts * share;
        int64_t some = share < group - from ? share : group - from;
        failed |= NAME(attend)(tiles[task / cuts / kv_heads], dtype, held_as, kv_head,
                               kv_head * group + from, some, head_dim, heads, scaling, softcap, sinks,
                               firsts, runs, query, stride, out);
    }
    free(tiles);
    return failed;
}

/* Of rows [rows, 3 n], gates, gates and inputs, the inputs times the first gates, where they are. */
static void NAME(scaled)(int dtype, int64_t rows, int64_t n, char *mixed)
{
    REAL x[n], gate[n];
    int64_t bytes = n * item_size(dtype);
    for (; rows > 0; rows--, mixed += 3 * bytes) {
        NAME(load)(dtype, mixed, n, gate);
        NAME(load)(dtype, mixed + 2 * bytes, n, x);
        for (int64_t i = 0; i < n; i++)
            x[i] *= gate[i];
        NAME(store)(dtype, x, n, mixed + 2 * bytes);
    }
}

/* Sums over the slots that a row sees, at most `taps`, in their order: what is held there [n] times
 * the last of `weights` [taps, n]. These times the second gates of `mixed` [rows, 3 n]: out [rows,
 * n]. Rows of parts, pieces and runs as in attention; `bias` [n] or NULL. */
static void NAME(convolved)(int dtype, int held_as, int64_t parts, const int64_t *part_rows,
                            const int64_t *part_pieces, const Piece *pieces, const int64_t *firsts,
                            const int32_t *runs, int64_t n, int64_t taps, const REAL *weights,
                            const REAL *bias, const char *mixed, char *out)
{
    REAL sums[n], copy[n];
    int64_t bytes = n * item_size(dtype);
    for (int64_t part = 0; part < parts; part++)
        for (int64_t row = part_rows[part]; row < part_rows[part + 1]; row++) {
            NAME(Walk) walk = {pieces + part_pieces[part], 0, NULL};
            const REAL *own = weights + taps * n;
            for (int64_t run = firsts[row]; run < firsts[row + 1]; run++)
                own -= (runs[2 * run + 1] - runs[2 * run]) * n;
            for (int64_t i = 0; i < n; i++)
                sums[i] = bias ? bias[i] : 0;
            for (int64_t run = firsts[row]; run < firsts[row + 1]; run++)
                for (int64_t slot = runs[2 * run]; slot < runs[2 * run + 1]; slot++, own += n) {
                    const REAL *x = NAME(near)(&walk, held_as, 0, slot, 1, 0, n, copy);
                    for (int64_t i = 0; i < n; i++)
                        sums[i] = FMA(own[i], x[i], sums[i]);
                }
            NAME(load)(dtype, mixed + (3 * row + 1) * bytes, n, copy);
            for (int64_t i = 0; i < n; i++)
                sums[i] *= copy[i];
            NAME(store)(dtype, sums, n, out + row * bytes);
        }
}

/* The largest of `x`, of equal ones the first, which is none of them any more; `at`: where it was. */
static REAL NAME(take_largest)(REAL *x, int64_t n, int32_t *at)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        best = x[i] > x[best] ? i : best;
    REAL largest = x[best];
    x[best] = -INFINITY;
    *at = (int32_t)best;
    return largest;
}

/* Of each row of `scores` [rows, experts] the `active` experts that it goes through into `chosen`, and
 * their `shares`: see MixtureForm. Of equal ones the first is chosen. */
static void NAME(route)(int dtype, const Mixture *of, int64_t rows, const char *scores,
                        int32_t *chosen, float *shares)
{
    int64_t experts = of->experts, each = experts / of->groups, bytes = experts * item_size(dtype);
    REAL weights[experts], by[experts], worth[of->groups];
    const REAL *bias = of->bias;
    for (int64_t row = 0; row < rows; row++, chosen += of->active, shares += of->active) {
        NAME(load)(dtype, scores + row * bytes, experts, weights);
        REAL total = of->softmax ? NAME(soften)(weights, experts, 1, 0, NULL) : 0, sum = 0;
        for (int64_t i = 0; i < experts; i++) {
            weights[i] = of->softmax ? weights[i] / total : 1 / (1 + EXP(-weights[i]));
            by[i] = weights[i] + (bias ? bias[i] : 0);
        }
        for (int64_t group = 0; of->groups > 1 && group < of->groups; group++) {
            REAL copy[each];
            int32_t at;
            memcpy(copy, by + group * each, sizeof copy);
            worth[group] = 0;
            for (int64_t i = 0; i < of->best; i++)
                worth[group] += NAME(take_largest)(copy, each, &at);
        }
        for (int64_t kept = 0; of->groups > 1 && kept < of->groups; kept++) {
            int32_t group;
            NAME(take_largest)(worth, of->groups, &group);
            for (int64_t i = group * each; kept >= of->kept_groups && i < (group + 1) * each; i++)
                by[i] = -INFINITY;
        }
        for (int64_t i = 0; i < of->active; i++) {
            NAME(take_largest)(by, experts, chosen + i);
            sum += weights[chosen[i]];
        }
        sum = !of->normed ? 1 : sum < of->floor ? (REAL)of->floor : sum + (REAL)of->least;
        for (int64_t i = 0; i < of->active; i++)
            shares[i] = (float)(weights[chosen[i]] / sum * (REAL)of->scaling);
    }
}

/* The sigmoid of each of `n` numbers. */
static void NAME(sigmoids)(int dtype, const char *from, int64_t n, float *to)
{
    for (int64_t i = 0; i < n; i++) {
        REAL x;
        NAME(load)(dtype, from + i * item_size(dtype), 1, &x);
        to[i] = (float)(1 / (1 + EXP(-x)));
    }
}

/* Add each of `rows` [rows, n], so many times as its `shares`, to the sums [n] of number `at`. */
static void NAME(add_shares)(int dtype, int64_t rows, int64_t n, const char *from,
                             const float *shares, const int32_t *at, REAL *sums)
{
    REAL x[n];
    for (int64_t row = 0; row < rows; row++) {
        NAME(load)(dtype, from + row * n * item_size(dtype), n, x);
        REAL *to = sums + at[row] * n, share = shares[row];
        for (int64_t i = 0; i < n; i++)
            to[i] = FMA(share, x[i], to[i]);
    }
}

#undef LANES
#undef BLOCK
#undef WIDEST
