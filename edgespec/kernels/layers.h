/* Some layers of a model over the rows of some requests, in one call: what model.layers does layer
 * by layer, by the same functions in the same order, so to the same bits. */

#define FOLDED 16 /* rows that go into a state at a time */

/* See LayerForm. Gains are float, NULL: none; `angles`, `runs`: which of the pass, -1: none. A layer
 * that convolves has `taps`, and weights for them (see row_convolved); one that keeps a state a
 * `mixer` between two products, and is number `folded` of those that do, whose rows see the slots of
 * `every`. Of `heads` 0 or `inner` 0 it has nothing that goes with them; a `mixture` is in the place
 * of an MLP. `ways`: see `turn`. */
typedef struct {
    Product qkv, out, gate_up, down, entering, leaving;
    const float *enter, *attended, *middle, *left, *query_gain, *key_gain, *tap_weights, *tap_bias;
    const float *sinks;
    const Mixer *mixer;
    const Mixture *mixture;
    double eps, share, mlp_share, state_share, scaling, softcap;
    int64_t hidden, inner, heads, kv_heads, head_dim, taps, activation, angles, runs, folded, every;
    int64_t gated, centred, ways;
} Layer;

/* Rows `first` to `end` of a request read a state at a boundary: see state_steps.py. */
typedef struct {
    int64_t first, end, boundary, state, source, begin;
} Step;

/* Rows of one request. Its slots lie in pieces, of which the last one has room for the rows. */
typedef struct {
    const int64_t (*memory)[2]; /* [layers, pieces]: the address of a piece's rows [parts, heads,
                                   slots, width], and its slots */
    int64_t pieces, begin, rows; /* of the last piece `begin` slots are in use */
    const int64_t *places;       /* [rows]: their positions; this and all below for states alone */
    const Slots *slots;          /* [layers with states]: where their rows are */
    float *const *states;        /* [layers with states, count] */
    int64_t count;
    const Step *steps;
    int64_t of_steps, held_as; /* see state_rows */
} Request;

typedef struct {
    const float *cosines, *sines, *scales; /* [rows, half], and [rows] or NULL */
    int64_t half;
} Angles;

typedef struct {
    const int64_t *firsts; /* see row_runs */
    const int32_t *ends;
} Seen;

typedef struct {
    int (*multiply)(const void *matrix, const void *x, void *y, int64_t rows, int dtype, int threads);
    const Request *requests;
    const Angles *angles;
    const Seen *seen;
    int64_t count, dtype, held_as, threads; /* `count`: of requests; `held_as`: see attention */
} Pass;

/* What a layer writes between its rows and the next ones, and where what it holds of them lies. */
typedef struct {
    char *normed, *mixed, *qkv, *gate_up, *gated, *added;
    int64_t rows, *part_rows, *part_pieces;
    Piece *pieces;
} Between;

static int times(const Pass *pass, const Product *by, const char *x, int64_t rows, char *y,
                 char *aside)
{
    const int dtype = pass->dtype, threads = pass->threads;
    if (!by->matrices[1])
        return pass->multiply(by->matrices[0], x, y, rows, dtype, threads);
    int64_t size = item_size(dtype), width = 0;
    for (int i = 0; i < 4; i++)
        width += size * by->outs[i];
    for (int i = 0; i < 4 && by->matrices[i]; i++) {
        int64_t own = by->outs[i] * size;
        if (pass->multiply(by->matrices[i], x, aside, rows, dtype, threads))
            return 1;
        for (int64_t row = 0; row < rows; row++)
            memcpy(y + row * width, aside + row * own, own);
        y += own;
    }
    return 0;
}

static void convert(int dtype, const char *from, int64_t n, int other, char *to)
{
    float x[n];
    if (dtype == other) {
        memcpy(to, from, n * item_size(dtype));
        return;
    }
    for (int64_t i = 0; dtype == FLOAT64 && i < n; i++)
        x[i] = (float)((const double *)from)[i];
    if (dtype != FLOAT64)
        load_float(dtype, from, n, x);
    store_float(other, x, n, to);
}

/* Of a layer that convolves, all that it does of this is to one head, of which there is one part. */
static int64_t key_heads(const Layer *layer) { return layer->taps ? 1 : layer->kv_heads; }
static int64_t width_of(const Layer *layer) { return layer->taps ? layer->hidden : layer->head_dim; }
static int64_t in_front(const Layer *layer) { return layer->taps ? 2 : layer->heads; }

/* Numbers of a row before it is mixed with others: queries, keys and values, or gates and inputs. */
static int64_t mixed_width(const Layer *layer)
{
    return layer->taps ? 3 * layer->hidden : (layer->heads + 2 * layer->kv_heads) * layer->head_dim;
}

/* Write what the layer of that number holds of the rows into its slots: the keys and values behind
 * the queries, or the inputs behind the gates. Tell where all of it are. */
static void hold(const Pass *pass, const Layer *layer, int64_t number, Between *between)
{
    int64_t kv_heads = key_heads(layer), dim = width_of(layer), width = held_width(pass->held_as, dim);
    int64_t head = width * item_size(pass->held_as);
    int64_t own = dim * item_size(pass->dtype), stride = mixed_width(layer) * item_size(pass->dtype);
    const char *from = between->qkv + in_front(layer) * own;
    Piece *piece = between->pieces;
    for (int64_t part = 0; part < pass->count; part++) {
        const Request *request = pass->requests + part;
        const int64_t (*memory)[2] = request->memory + number * request->pieces;
        for (int64_t i = 0; i < request->pieces; i++, piece++) {
            int64_t slots = memory[i][1];
            const char *keys = (const char *)memory[i][0], *values = keys + kv_heads * slots * head;
            *piece = (Piece){keys, values, slots * width, width, slots};
        }
        char *keys = (char *)piece[-1].keys, *values = (char *)piece[-1].values;
        int64_t slots = piece[-1].rows, slot = request->begin;
        piece[-1].rows = request->begin + request->rows;
        for (; slot < piece[-1].rows; slot++, from += stride)
            for (int64_t h = 0; h < kv_heads; h++) {
                int64_t to = (h * slots + slot) * head;
                convert(pass->dtype, from + h * own, dim, pass->held_as, keys + to);
                if (!layer->taps)
                    convert(pass->dtype, from + (kv_heads + h) * own, dim, pass->held_as, values + to);
            }
    }
}

/* Queries that have a gate each, behind them, to those alone, and the gates into the first half of
 * rows of `gates`. */
static void part_gates(const Layer *layer, int64_t rows, int64_t size, char *qkv, char *gates)
{
    int64_t head = layer->head_dim * size, width = layer->heads * head;
    int64_t kv = 2 * layer->kv_heads * head;
    for (int64_t row = 0; row < rows; row++) {
        char *from = qkv + row * (2 * width + kv), *to = qkv + row * (width + kv);
        for (int64_t h = 0; h < layer->heads; h++) {
            memcpy(gates + 2 * row * width + h * head, from + (2 * h + 1) * head, head);
            memmove(to + h * head, from + 2 * h * head, head);
        }
        memmove(to + width, from + 2 * width, kv);
    }
}

/* Rows of queries, keys and values to what they attend to; 0, or 1 if memory ran out. */
static int attend(const Pass *pass, const Layer *layer, int64_t number, Between *between, char *out)
{
    const int dtype = pass->dtype;
    int64_t heads = layer->heads, kv_heads = layer->kv_heads, dim = layer->head_dim;
    int64_t width = heads * dim * item_size(dtype);
    if (layer->gated)
        part_gates(layer, between->rows, item_size(dtype), between->qkv, between->gate_up);
    if (layer->angles >= 0 || layer->query_gain) {
        Angles none = {0}, by = layer->angles < 0 ? none : pass->angles[layer->angles];
        row_turn(dtype, between->rows, mixed_width(layer), heads, kv_heads, dim, by.half, layer->ways,
                 between->qkv, by.cosines, by.sines, by.scales, layer->query_gain, layer->key_gain,
                 layer->eps);
    }
    hold(pass, layer, number, between);
    const Seen *seen = pass->seen + layer->runs;
    int failed = row_attention(
        dtype, pass->held_as, pass->count, between->part_rows, between->part_pieces, between->pieces,
        seen->firsts, seen->ends, heads, kv_heads, dim, layer->scaling, layer->softcap, layer->sinks,
        between->qkv, mixed_width(layer), out, pass->threads);
    if (!layer->gated || failed)
        return failed;
    for (int64_t row = 0; row < between->rows; row++)
        memcpy(between->gate_up + (2 * row + 1) * width, out + row * width, width);
    row_gated(dtype, between->rows, heads * dim, SIGMOID, 0, 0, between->gate_up, out);
    return 0;
}

/* Rows of gates and inputs to their convolution with those before them. */
static void convolve(const Pass *pass, const Layer *layer, int64_t number, Between *between, char *out)
{
    row_scaled(pass->dtype, between->rows, layer->hidden, between->qkv);
    hold(pass, layer, number, between);
    const Seen *seen = pass->seen + layer->runs;
    row_convolved(pass->dtype, pass->held_as, pass->count, between->part_rows, between->part_pieces,
                  between->pieces, seen->firsts, seen->ends, layer->hidden, layer->taps,
                  layer->tap_weights, layer->tap_bias, between->qkv, out);
}

/* Numbers of a row before it meets a state, and behind that. */
static int64_t entering_width(const Mixer *of)
{
    int64_t inner = of->heads * of->value;
    return 2 * inner + 2 * of->groups * of->key + (1 + of->delta) * of->heads;
}

static int64_t leaving_width(const Mixer *of) { return of->heads * of->value; }

/* Rows of projections to what they read of states, which are made where they are not there; 0, or 1
 * if memory ran out. */
static int recall(const Pass *pass, const Layer *layer, Between *between, char *out)
{
    const Mixer *mixer = layer->mixer;
    const Seen *seen = pass->seen + layer->every;
    int64_t size = item_size(pass->dtype), bytes = mixer->heads * mixer->key * mixer->value * 4;
    int64_t wide = entering_width(mixer) * size, narrow = leaving_width(mixer) * size;
    for (int64_t part = 0; part < pass->count; part++) {
        const Request *request = pass->requests + part;
        const Slots *slots = request->slots + layer->folded;
        float *const *states = request->states + layer->folded * request->count;
        for (const Step *step = request->steps; step < request->steps + request->of_steps; step++) {
            float *state = states[step->state];
            if (step->source < 0)
                memset(state, 0, bytes);
            else if (step->source != step->state)
                memcpy(state, states[step->source], bytes);
            for (int64_t slot = step->begin; slot < step->boundary; slot += FOLDED)
                state_fold(FLOAT32, mixer, request->held_as, slots, slot, FOLDED, state,
                           pass->threads);
            int64_t row = between->part_rows[part] + step->first;
            if (state_rows(pass->dtype, mixer, step->end - step->first, between->qkv + row * wide,
                           seen->firsts + row, seen->ends, request->places + step->first,
                           step->boundary, request->held_as, slots, state, out + row * narrow,
                           pass->threads))
                return 1;
        }
    }
    return 0;
}

static int64_t larger(int64_t one, int64_t other) { return one > other ? one : other; }

/* Rows [rows, hidden] to what their experts, and the MLP beside them, make of them, in the order of
 * these; 0, or 1 if memory ran out. One that no row chose is not touched. */
int row_mixture(const Mixture *of, const Pass *pass, int64_t rows, const char *x, char *out)
{
    const int dtype = pass->dtype;
    int64_t hidden = of->hidden, active = of->active, inner = larger(of->inner, of->beside);
    int64_t bytes = hidden * item_size(dtype), room = rows * 8; /* of the widest numbers */
    char *memory = malloc(room * (3 * hidden + 3 * inner + of->experts + 2 * active + 2));
    if (!memory)
        return 1;
    char *sums = memory, *taken = sums + room * hidden, *made = taken + room * hidden;
    char *gate_up = made + room * hidden, *gated = gate_up + 2 * room * inner;
    char *scores = gated + room * inner;
    int32_t *chosen = (int32_t *)(scores + room * of->experts), *at = chosen + 2 * rows * active;
    float *shares = (float *)(at + 2 * rows), *own = shares + rows * active;
    Pass routing = *pass;
    if (of->wide) {
        routing.dtype = FLOAT32;
        for (int64_t row = 0; row < rows; row++)
            convert(dtype, x + row * bytes, hidden, FLOAT32, taken + row * hidden * 4);
    }
    int failed = times(&routing, &of->router, of->wide ? taken : x, rows, scores, NULL);
    if (routing.dtype == FLOAT64)
        route_double(FLOAT64, of, rows, scores, chosen, shares);
    else
        route_float(routing.dtype, of, rows, scores, chosen, shares);
    int64_t real = dtype == FLOAT64 ? 8 : 4;
    memset(sums, 0, rows * hidden * real);
    for (int64_t number = 0; number < of->experts + (of->beside > 0) && !failed; number++) {
        const Expert *expert = of->each + number;
        int64_t count = 0, width = of->inner;
        const char *given = taken;
        for (int64_t i = 0; number < of->experts && i < rows * active; i++)
            if (chosen[i] == number) {
                memcpy(taken + count * bytes, x + i / active * bytes, bytes);
                at[count] = (int32_t)(i / active);
                own[count++] = shares[i];
            }
        if (number == of->experts) {
            given = x;
            width = of->beside;
            for (; count < rows; count++) {
                at[count] = (int32_t)count;
                own[count] = 1;
            }
            if (of->share.matrices[0]) {
                failed = times(pass, &of->share, x, rows, scores, NULL);
                BOTH(sigmoids, dtype, scores, rows, own);
            }
        }
        if (!count || failed)
            continue;
        failed = times(pass, &expert->gate_up, given, count, gate_up, gated);
        row_gated(dtype, count, width, of->activation, of->slope, of->limit, gate_up, gated);
        failed |= times(pass, &expert->down, gated, count, made, NULL);
        BOTH(add_shares, dtype, count, hidden, made, own, at, (void *)sums);
    }
    for (int64_t row = 0; row < rows && !failed; row++)
        BOTH(store, dtype, (void *)(sums + row * hidden * real), hidden, out + row * bytes);
    free(memory);
    return failed;
}

/* Rows `in` to rows `out`, which may be the same; 0, or 1 if memory ran out. */
static int run_layer(const Pass *pass, const Layer *layer, int64_t number, Between *between,
                     const char *in, char *out)
{
    const int dtype = pass->dtype;
    int64_t rows = between->rows, hidden = layer->hidden;
    char *normed = between->normed, *mixed = between->mixed, *qkv = between->qkv;
    char *added = between->added;
    const char *before = in; /* what is added to */
    const char *entering = in;
    double share = layer->share;
    const float *first = layer->enter || layer->heads ? layer->enter : layer->middle;
    if (first) {
        row_norm(dtype, rows, hidden, in, NULL, 1, NULL, first, layer->eps, layer->centred, NULL,
                 normed);
        entering = normed;
    }
    if (layer->heads) {
        if (times(pass, &layer->qkv, entering, rows, qkv, between->gate_up))
            return 1;
        if (layer->taps)
            convolve(pass, layer, number, between, mixed);
        else if (attend(pass, layer, number, between, mixed))
            return 1;
        if (times(pass, &layer->out, mixed, rows, added, NULL))
            return 1;
    }
    if (layer->mixer) {
        if (layer->heads) {
            row_norm(dtype, rows, hidden, in, added, share, layer->attended, NULL, layer->eps, 0, out,
                     NULL);
            before = out;
        }
        if (times(pass, &layer->entering, entering, rows, qkv, between->gate_up) ||
            recall(pass, layer, between, mixed) ||
            times(pass, &layer->leaving, mixed, rows, added, NULL))
            return 1;
        share = layer->state_share;
    }
    if (layer->heads || layer->mixer) {
        row_norm(dtype, rows, hidden, before, added, share, layer->attended, layer->middle,
                 layer->eps, 0, out, normed);
        before = out;
        /* Of a layer that norms what enters it alone, the MLP is given that, too. */
        entering = layer->middle ? normed : layer->enter ? entering : out;
    }
    if (layer->mixture) {
        if (row_mixture(layer->mixture, pass, rows, entering, added))
            return 1;
    } else if (layer->inner) {
        if (times(pass, &layer->gate_up, entering, rows, between->gate_up, between->gated))
            return 1;
        row_gated(dtype, rows, layer->inner, layer->activation, 0, 0, between->gate_up,
                  between->gated);
        if (times(pass, &layer->down, between->gated, rows, added, NULL))
            return 1;
    } else
        return 0;
    row_norm(dtype, rows, hidden, before, added, layer->mlp_share, layer->left, NULL, layer->eps, 0,
             out, NULL);
    return 0;
}

/* Rows [R, hidden] after layers `first` to `end` into `out`. Returns 0, or 1 if memory ran out. */
int run_layers(const Layer *layers, int64_t first, int64_t end, const Pass *pass, const void *in,
               void *out)
{
    int64_t count = pass->count, rows = 0, pieces = 0, size = item_size(pass->dtype);
    int64_t hidden = layers[first].hidden, inner = 0, mixed = hidden, qkv = 0;
    for (const Layer *layer = layers + first; layer < layers + end; layer++) {
        inner = larger(inner, layer->mixture ? 0 : layer->inner);
        if (layer->heads) {
            int64_t gates = layer->gated ? layer->heads * layer->head_dim : 0;
            qkv = larger(qkv, mixed_width(layer) + gates);
            mixed = larger(mixed, layer->heads * layer->head_dim);
        }
        if (layer->mixer) {
            qkv = larger(qkv, entering_width(layer->mixer));
            mixed = larger(mixed, leaving_width(layer->mixer));
        }
    }
    int64_t both = larger(2 * inner, qkv); /* see `times` */
    int64_t *ends = malloc(2 * (count + 1) * sizeof *ends);
    if (!ends)
        return 1;
    for (int64_t part = 0; part <= count; part++) {
        ends[part] = rows;
        ends[count + 1 + part] = pieces;
        rows += part < count ? pass->requests[part].rows : 0;
        pieces += part < count ? pass->requests[part].pieces : 0;
    }
    Piece *places = malloc(pieces * sizeof *places);
    char *memory = malloc(rows * (2 * hidden + mixed + qkv + both + inner) * size);
    int failed = !places || !memory;
    Between between = {.normed = memory, .rows = rows, .part_rows = ends,
                       .part_pieces = ends + count + 1, .pieces = places};
    between.added = between.normed + rows * hidden * size;
    between.mixed = between.added + rows * hidden * size;
    between.qkv = between.mixed + rows * mixed * size;
    between.gate_up = between.qkv + rows * qkv * size;
    between.gated = between.gate_up + rows * both * size;
    for (int64_t number = first; number < end && !failed; number++) {
        failed = run_layer(pass, layers + number, number, &between, in, out);
        in = out;
    }
    free(memory);
    free(places);
    free(ends);
    return failed;
}
