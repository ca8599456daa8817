/* The functions of rows.c that reckon states in REAL: included once for float, once for double.
 *
 * A state [heads, key, value] is what the tokens before a boundary have left. A row reads it, then
 * what its own ancestors from the boundary on add, in the order of their positions, then itself:
 * with k, d and a of a row, state = a state + k d. So its bits follow from its path alone. */

#define LANES 16
#define WIDEST 64
#define NEXT 16 /* vectors: those are asked for while these are read */

/* What the row in a slot keeps: keys [groups, key], what they stand for [heads, value], decays
 * [heads], and behind them, `held_as` numbers of that type, the inputs [conv] of its convolution;
 * in as many lines of 64 bytes as it takes. */
static REAL *NAME(kept)(const Mixer *mixer, int held_as, const Slots *slots, int64_t slot)
{
    int64_t keys = mixer->groups * mixer->key, inner = mixer->heads * mixer->value;
    int64_t bytes = (keys + inner + mixer->heads) * sizeof(REAL);
    bytes += (2 * keys + inner) * item_size(held_as);
    for (; slot >= (*slots)[1]; slots++)
        slot -= (*slots)[1];
    return (REAL *)((*slots)[0] + slot * ((bytes + 63) / 64 * 64));
}

static REAL NAME(dot)(const REAL *x, const REAL *y, int64_t n)
{
    REAL lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++)
            lanes[l] = FMA(x[i + l], y[i + l], lanes[l]);
    for (int l = 0; i + l < n; l++)
        lanes[l] = FMA(x[i + l], y[i + l], lanes[l]);
    return NAME(lanes_sum)(lanes);
}

static REAL NAME(softplus)(REAL x)
{
    return x > 20 ? x : LOG1P(EXP(x));
}

/* The sum of `count` vectors [n], each times its weight, each number in their order. */
static void NAME(spread)(const REAL *weights, const REAL *const *vectors, int64_t count, int64_t n,
                         REAL *sums)
{
    int64_t i = 0;
    for (; i + WIDEST <= n; i += WIDEST) {
        REAL own[WIDEST] = {0};
        for (int64_t k = 0; k < count; k++) {
            const REAL *v = vectors[k] + i;
            for (int l = 0; k + NEXT < count && l < WIDEST; l += 64 / (int)sizeof(REAL))
                __builtin_prefetch(vectors[k + NEXT] + i + l);
            for (int l = 0; l < WIDEST; l++)
                own[l] = FMA(weights[k], v[l], own[l]);
        }
        memcpy(sums + i, own, sizeof own);
    }
    for (; i < n; i++) {
        REAL own = 0;
        for (int64_t k = 0; k < count; k++)
            own = FMA(weights[k], vectors[k][i], own);
        sums[i] = own;
    }
}

/* What a row has of its projection [inner + conv + heads, or two times heads] goes into what it
 * keeps, the last of `kept`, behind its ancestors'; queries, keys and values behind the convolution
 * into `mixed` [conv]; how much of a row a delta layer takes into `shares` [heads]. */
static void NAME(enter)(int dtype, const Mixer *mixer, const char *projected, int held_as,
                        REAL *const *kept, int64_t before, REAL *mixed, REAL *shares)
{
    int64_t heads = mixer->heads, keys = mixer->groups * mixer->key, inner = heads * mixer->value;
    int64_t conv = 2 * keys + inner, kernel = mixer->kernel, terms = keys + inner + heads;
    REAL *own = kept[before], *adds = own + keys, *decays = adds + inner;
    const REAL *taps = mixer->taps, *scale = mixer->scale, *step_bias = mixer->step_bias;
    const REAL *decay = mixer->decay, *bias = mixer->bias;
    REAL near[conv], steps[2 * heads];
    NAME(load)(dtype, projected + inner * item_size(dtype), conv, near);
    for (int64_t c = 0; scale && c < conv; c++)
        near[c] *= scale[inner + c];
    NAME(store)(held_as, near, conv, own + terms);
    for (int64_t c = 0; c < conv; c++)
        mixed[c] = bias ? bias[c] : 0;
    for (int64_t t = 0; t < kernel; t++) {
        int64_t at = before - (kernel - 1 - t);
        if (at < 0)
            continue;
        NAME(load)(held_as, kept[at] + terms, conv, near);
        for (int64_t c = 0; c < conv; c++)
            mixed[c] = FMA(taps[t * conv + c], near[c], mixed[c]);
    }
    for (int64_t c = 0; c < conv; c++)
        mixed[c] = mixed[c] / (1 + EXP(-mixed[c]));

    NAME(load)(dtype, projected + (inner + conv) * item_size(dtype), (1 + mixer->delta) * heads,
               steps);
    for (int64_t h = 0; h < heads; h++) {
        REAL raw = steps[mixer->delta * heads + h];
        REAL step = NAME(softplus)((scale ? raw * scale[inner + conv + h] : raw) + step_bias[h]);
        if (!mixer->delta) {
            step = step < (REAL)mixer->step_low ? (REAL)mixer->step_low : step;
            step = step > (REAL)mixer->step_high ? (REAL)mixer->step_high : step;
            for (int64_t v = h * mixer->value; v < (h + 1) * mixer->value; v++)
                adds[v] = step * mixed[v];
        }
        decays[h] = EXP(decay[h] * step);
        shares[h] = mixer->delta ? 1 / (1 + EXP(-steps[h])) : 0;
    }
    if (!mixer->delta) {
        memcpy(own, mixed + inner, keys * sizeof(REAL));
        return;
    }
    for (int64_t g = 0; g < 2 * mixer->groups; g++) { /* queries, then keys */
        REAL *one = mixed + g * mixer->key;
        REAL length = SQRT(NAME(squares)(one, mixer->key) + (REAL)1e-6);
        if (g < mixer->groups)
            length *= SQRT((REAL)mixer->key);
        for (int64_t k = 0; k < mixer->key; k++)
            one[k] /= length;
    }
    memcpy(own, mixed + keys, keys * sizeof(REAL));
}

/* The group whose keys a head has. */
static int64_t NAME(group)(const Mixer *mixer, int64_t head)
{
    return mixer->tiled ? head % mixer->groups : head / (mixer->heads / mixer->groups);
}

/* What one head of a row gives [value]. `kept`: of its ancestors, and its own behind them; `dots`: of
 * its query with their keys, and in a delta layer `key_dots` of its key. */
static void NAME(read)(const Mixer *mixer, int64_t head, int64_t before, const REAL *state,
                       REAL *const *kept, const REAL *mixed, REAL share, const REAL *dots,
                       const REAL *key_dots, REAL *out)
{
    int64_t key = mixer->key, value = mixer->value, keys = mixer->groups * key, n = key + before;
    int64_t inner = mixer->heads * value, group = NAME(group)(mixer, head);
    int64_t of_head = keys + head * value, of_decay = keys + inner + head;
    const REAL *skip = mixer->skip, *vectors[n + 2];
    REAL weights[n + 2], *own = kept[before], decay = own[of_decay];
    const REAL *query = mixed + (mixer->delta ? 0 : inner + keys) + group * key;
    for (int64_t k = 0; k < key; k++)
        vectors[k] = state + (head * key + k) * value;
    for (int64_t j = 0; j <= before; j++)
        vectors[key + j] = kept[j] + of_head;
    vectors[n + 1] = mixed + head * value;
    for (int of_query = !mixer->delta; of_query < 2; of_query++) {
        const REAL *by = of_query ? query : own + group * key, *near = of_query ? dots : key_dots;
        REAL left = of_query ? decay : 1; /* of what came before */
        for (int64_t j = before - 1; j >= 0; j--) {
            weights[key + j] = left * near[j];
            left *= kept[j][of_decay];
        }
        for (int64_t k = 0; k < key; k++)
            weights[k] = left * by[k];
        weights[n] = dots[before];
        weights[n + 1] = skip ? skip[head] : 0;
        NAME(spread)(weights, vectors, n + (of_query ? 1 + (skip != NULL) : 0), value, out);
        for (int64_t v = 0; !of_query && v < value; v++)
            own[of_head + v] = share * FMA(-decay, out[v], mixed[2 * keys + head * value + v]);
    }
}

/* Gate and norm what a row read, [inner], into `out`. */
static void NAME(leave)(int dtype, const Mixer *mixer, const char *projected, REAL *read, char *out)
{
    int64_t inner = mixer->heads * mixer->value;
    const REAL *gain = mixer->gain, *scale = mixer->scale;
    REAL gate[inner];
    NAME(load)(dtype, projected, inner, gate);
    for (int64_t i = 0; i < inner; i++) {
        gate[i] *= scale ? scale[i] : 1;
        gate[i] = gate[i] / (1 + EXP(-gate[i]));
    }
    for (int64_t i = 0; !mixer->gate_last && i < inner; i++)
        read[i] *= gate[i];
    for (int64_t i = 0; gain && i < inner; i += mixer->normed)
        NAME(scale_to_gain)(read + i, mixer->normed, gain + i, mixer->eps, 0);
    for (int64_t i = 0; mixer->gate_last && i < inner; i++)
        read[i] *= gate[i];
    NAME(store)(dtype, read, inner, out);
}

/* See state_rows. */
static int NAME(states)(int dtype, const Mixer *mixer, int64_t rows, const char *projected,
                        const int64_t *firsts, const int32_t *ends, const int64_t *places,
                        int64_t boundary, int held_as, const Slots *slots, const REAL *state,
                        char *out, int threads)
{
    int64_t heads = mixer->heads, groups = mixer->groups, key = mixer->key, keys = groups * key;
    int64_t inner = heads * mixer->value, conv = 2 * keys + inner;
    int64_t of = 1 + mixer->delta, wide = (inner + conv + of * heads) * item_size(dtype), most = 0;
    for (int64_t row = 0; row < rows; row++)
        most = places[row] - boundary + 1 > most ? places[row] - boundary + 1 : most;
    REAL *memory = malloc(rows * (conv + inner + heads + of * groups * most) * sizeof(REAL));
    REAL **kept = malloc(rows * most * sizeof *kept);
    if (!memory || !kept) {
        free(memory);
        free(kept);
        return 1;
    }
    REAL *mixed = memory, *read = mixed + rows * conv, *shares = read + rows * inner;
    REAL *dots = shares + rows * heads; /* [rows, groups, of queries and of keys, most] */
    if (rows * inner * (key + most) < FEW)
        threads = 1;
    for (int64_t row = 0; row < rows; row++) { /* in order, as the next row's inputs are there then */
        int64_t before = places[row] - boundary, at = before + 1;
        for (int64_t run = firsts[row + 1] - 1; run >= firsts[row] && at; run--)
            for (int64_t slot = ends[2 * run + 1] - 1; slot >= ends[2 * run] && at; slot--)
                kept[row * most + --at] = NAME(kept)(mixer, held_as, slots, slot);
        NAME(enter)(dtype, mixer, projected + row * wide, held_as, kept + row * most, before,
                    mixed + row * conv, shares + row * heads);
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int64_t at = 0; at < rows * groups; at++) {
            int64_t row = at / groups, group = at % groups, before = places[row] - boundary;
            REAL *const *seen = kept + row * most;
            REAL *to = dots + at * of * most;
            const REAL *query = mixed + row * conv + (mixer->delta ? 0 : inner + keys) + group * key;
            for (int64_t j = 0; j <= before; j++) {
                to[j] = NAME(dot)(seen[j] + group * key, query, key);
                if (mixer->delta)
                    to[most + j] = NAME(dot)(seen[j] + group * key, seen[before] + group * key, key);
            }
        }
#pragma omp for
        for (int64_t head = 0; head < heads; head++)
            for (int64_t row = 0; row < rows; row++) {
                const REAL *near = dots + (row * groups + NAME(group)(mixer, head)) * of * most;
                NAME(read)(mixer, head, places[row] - boundary, state, kept + row * most,
                           mixed + row * conv, shares[row * heads + head], near, near + most,
                           read + row * inner + head * mixer->value);
            }
    }
    for (int64_t row = 0; row < rows; row++)
        NAME(leave)(dtype, mixer, projected + row * wide, read + row * inner,
                    out + row * inner * item_size(dtype));
    free(memory);
    free(kept);
    return 0;
}

/* See state_fold. */
static void NAME(fold)(const Mixer *mixer, int held_as, const Slots *slots, int64_t first,
                       int64_t count, REAL *state, int threads)
{
    int64_t heads = mixer->heads, key = mixer->key, value = mixer->value, keys = mixer->groups * key;
    int64_t inner = heads * value;
    const REAL *terms[count];
    for (int64_t row = 0; row < count; row++)
        terms[row] = NAME(kept)(mixer, held_as, slots, first + row);
    if (count * inner * key < FEW)
        threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t head = 0; head < heads; head++)
        for (int64_t v = 0, of = NAME(group)(mixer, head) * key; v < value; v += WIDEST)
            for (int64_t k = 0, keys_of; k < key; k += keys_of) {
                int64_t some = value - v < WIDEST ? value - v : WIDEST;
                keys_of = some == WIDEST && k + 1 < key ? 2 : 1; /* one's sums wait while other's run */
                REAL own[WIDEST] = {0}, next[WIDEST] = {0}, *to = state + (head * key + k) * value + v;
                memcpy(own, to, some * sizeof(REAL));
                memcpy(next, to + (keys_of - 1) * value, some * sizeof(REAL));
                for (int64_t row = 0; row < count; row++) {
                    const REAL *weights = terms[row] + of + k;
                    const REAL decay = terms[row][keys + inner + head];
                    const REAL *adds = terms[row] + keys + head * value + v;
                    if (keys_of == 2)
                        for (int l = 0; l < WIDEST; l++) {
                            own[l] = FMA(weights[0], adds[l], decay * own[l]);
                            next[l] = FMA(weights[1], adds[l], decay * next[l]);
                        }
                    else
                        for (int64_t l = 0; l < some; l++)
                            own[l] = FMA(weights[0], adds[l], decay * own[l]);
                }
                if (keys_of == 2)
                    memcpy(to + value, next, sizeof next);
                memcpy(to, own, some * sizeof(REAL));
            }
}

#undef LANES
#undef WIDEST
#undef NEXT
