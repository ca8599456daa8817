/* Some layers of a model over the rows of some requests, in one call: what model.layers does layer
 * by layer, by the same functions in the same order, so to the same bits. */

/* Matrices of products.c with one input, their results side by side; NULL: no more. */
typedef struct {
    const void *matrices[3];
    int64_t outs[3];
} Product;

/* See LayerForm. Gains are float, NULL: none; `angles`, `runs`: which of the pass, -1: none. A layer
 * that convolves has `taps`, and weights for them (see row_convolved). */
typedef struct {
    Product qkv, out, gate_up, down;
    const float *enter, *attended, *middle, *left, *query_gain, *key_gain, *tap_weights, *tap_bias;
    double eps, share, scaling, softcap;
    int64_t hidden, inner, heads, kv_heads, head_dim, taps, activation, angles, runs;
} Layer;

/* Rows of one request. Its slots lie in pieces, of which the last one has room for the rows. */
typedef struct {
    const int64_t (*memory)[2]; /* [layers, pieces]: the address of a piece's rows [parts, heads,
                                   slots, width], and its slots */
    int64_t pieces, begin, rows; /* of the last piece `begin` slots are in use */
} Request;

typedef struct {
    const float *cosines, *sines; /* [rows, half] */
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
    char *normed, *qkv, *gate_up, *gated, *added;
    int64_t rows, *part_rows, *part_pieces;
    Piece *pieces;
} Between;

static int times(const Pass *pass, const Product *by, const char *x, int64_t rows, char *y,
                 char *aside)
{
    const int dtype = pass->dtype, threads = pass->threads;
    if (!by->matrices[1])
        return pass->multiply(by->matrices[0], x, y, rows, dtype, threads);
    int64_t size = item_size(dtype), width = size * (by->outs[0] + by->outs[1] + by->outs[2]);
    for (int i = 0; i < 3 && by->matrices[i]; i++) {
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

/* Rows of queries, keys and values to what they attend to; 0, or 1 if memory ran out. */
static int attend(const Pass *pass, const Layer *layer, int64_t number, Between *between, char *out)
{
    const int dtype = pass->dtype;
    int64_t heads = layer->heads, kv_heads = layer->kv_heads, dim = layer->head_dim;
    if (layer->angles >= 0 || layer->query_gain) {
        Angles none = {NULL, NULL, 0}, by = layer->angles < 0 ? none : pass->angles[layer->angles];
        row_turn(dtype, between->rows, mixed_width(layer), heads, kv_heads, dim, by.half, between->qkv,
                 by.cosines, by.sines, layer->query_gain, layer->key_gain, layer->eps);
    }
    hold(pass, layer, number, between);
    const Seen *seen = pass->seen + layer->runs;
    return row_attention(dtype, pass->held_as, pass->count, between->part_rows, between->part_pieces,
                         between->pieces, seen->firsts, seen->ends, heads, kv_heads, dim,
                         layer->scaling, layer->softcap, NULL, between->qkv, mixed_width(layer), out,
                         pass->threads);
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

/* Rows `in` to rows `out`, which may be the same; 0, or 1 if memory ran out. */
static int run_layer(const Pass *pass, const Layer *layer, int64_t number, Between *between,
                     const char *in, char *out)
{
    const int dtype = pass->dtype, threads = pass->threads;
    int64_t rows = between->rows, hidden = layer->hidden;
    char *normed = between->normed, *qkv = between->qkv, *added = between->added;
    row_norm(dtype, rows, hidden, in, NULL, 1, NULL, layer->enter, layer->eps, NULL, normed);
    if (times(pass, &layer->qkv, normed, rows, qkv, between->gate_up))
        return 1;
    if (layer->taps)
        convolve(pass, layer, number, between, normed);
    else if (attend(pass, layer, number, between, normed))
        return 1;
    if (times(pass, &layer->out, normed, rows, added, NULL))
        return 1;
    row_norm(dtype, rows, hidden, in, added, layer->share, layer->attended, layer->middle,
             layer->eps, out, normed);
    if (times(pass, &layer->gate_up, normed, rows, between->gate_up, between->gated))
        return 1;
    row_gated(dtype, rows, layer->inner, layer->activation, between->gate_up, between->gated);
    if (times(pass, &layer->down, between->gated, rows, added, NULL))
        return 1;
    row_norm(dtype, rows, hidden, out, added, layer->share, layer->left, NULL, layer->eps, out, NULL);
    return 0;
}

/* Rows [R, hidden] after layers `first` to `end` into `out`: all of one form but for windows,
 * angles and softcaps, and whether they attend or convolve. Returns 0, or 1 if memory ran out. */
int run_layers(const Layer *layers, int64_t first, int64_t end, const Pass *pass, const void *in,
               void *out)
{
    const Layer *like = layers + first;
    int64_t count = pass->count, rows = 0, pieces = 0, size = item_size(pass->dtype);
    int64_t heads = like->heads * like->head_dim, qkv = 0;
    for (const Layer *layer = like; layer < layers + end; layer++)
        qkv = mixed_width(layer) > qkv ? mixed_width(layer) : qkv;
    int64_t wide = heads > like->hidden ? heads : like->hidden;
    int64_t inner = 2 * like->inner > qkv ? 2 * like->inner : qkv; /* see `times` */
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
    char *memory = malloc(rows * (wide + qkv + inner + like->inner + like->hidden) * size);
    int failed = !places || !memory;
    char *gate_up = memory + rows * (wide + qkv) * size, *gated = gate_up + rows * inner * size;
    Between between = {memory, memory + rows * wide * size, gate_up, gated,
                       gated + rows * like->inner * size, rows, ends, ends + count + 1, places};
    for (int64_t number = first; number < end && !failed; number++) {
        failed = run_layer(pass, layers + number, number, &between, in, out);
        in = out;
    }
    free(memory);
    free(places);
    free(ends);
    return failed;
}
