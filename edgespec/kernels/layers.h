/* Some layers of a model over the rows of some requests, in one call: what model.layers does layer
 * by layer, by the same functions in the same order, so to the same bits. */

/* Matrices of products.c with one input, their results side by side; NULL: no more. */
typedef struct {
    const void *matrices[3];
    int64_t outs[3];
} Product;

/* See LayerForm. Gains are float, NULL: none; `angles`, `runs`: which of the pass, -1: none. */
typedef struct {
    Product qkv, out, gate_up, down;
    const float *enter, *attended, *middle, *left, *query_gain, *key_gain;
    double eps, share, scaling, softcap;
    int64_t hidden, inner, heads, kv_heads, head_dim, activation, angles, runs;
} Layer;

/* Rows of one request. Its slots lie in pieces, of which the last one has room for the rows. */
typedef struct {
    const int64_t (*memory)[2]; /* [layers, pieces]: the address of a piece's keys and values [2,
                                   kv_heads, slots, head_dim], and its slots */
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

/* What a layer writes between its rows and the next ones, and where its keys and values lie. */
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

/* Write the rows' keys and values into the slots of layer `number`, and tell where all of it are. */
static void hold(const Pass *pass, const Layer *layer, int64_t number, Between *between)
{
    int64_t kv_heads = layer->kv_heads, dim = layer->head_dim, head = dim * item_size(pass->held_as);
    int64_t own = dim * item_size(pass->dtype), stride = (layer->heads + 2 * kv_heads) * own;
    const char *from = between->qkv + layer->heads * own;
    Piece *piece = between->pieces;
    for (int64_t part = 0; part < pass->count; part++) {
        const Request *request = pass->requests + part;
        const int64_t (*memory)[2] = request->memory + number * request->pieces;
        for (int64_t i = 0; i < request->pieces; i++, piece++) {
            int64_t slots = memory[i][1];
            const char *keys = (const char *)memory[i][0], *values = keys + kv_heads * slots * head;
            *piece = (Piece){keys, values, slots * dim, dim, slots};
        }
        char *keys = (char *)piece[-1].keys, *values = (char *)piece[-1].values;
        int64_t slots = piece[-1].rows, slot = request->begin;
        piece[-1].rows = request->begin + request->rows;
        for (; slot < piece[-1].rows; slot++, from += stride)
            for (int64_t h = 0; h < kv_heads; h++) {
                int64_t to = (h * slots + slot) * head;
                convert(pass->dtype, from + h * own, dim, pass->held_as, keys + to);
                convert(pass->dtype, from + (kv_heads + h) * own, dim, pass->held_as, values + to);
            }
    }
}

/* Rows `in` to rows `out`, which may be the same; 0, or 1 if memory ran out. */
static int run_layer(const Pass *pass, const Layer *layer, int64_t number, Between *between,
                     const char *in, char *out)
{
    const int dtype = pass->dtype, threads = pass->threads;
    int64_t rows = between->rows, heads = layer->heads, kv_heads = layer->kv_heads;
    int64_t hidden = layer->hidden, dim = layer->head_dim, stride = (heads + 2 * kv_heads) * dim;
    char *normed = between->normed, *qkv = between->qkv, *added = between->added;
    row_norm(dtype, rows, hidden, in, NULL, 1, NULL, layer->enter, layer->eps, NULL, normed);
    if (times(pass, &layer->qkv, normed, rows, qkv, between->gate_up))
        return 1;
    if (layer->angles >= 0 || layer->query_gain) {
        Angles none = {NULL, NULL, 0}, by = layer->angles < 0 ? none : pass->angles[layer->angles];
        row_turn(dtype, rows, stride, heads, kv_heads, dim, by.half, qkv, by.cosines, by.sines,
                 layer->query_gain, layer->key_gain, layer->eps);
    }
    hold(pass, layer, number, between);
    const Seen *seen = pass->seen + layer->runs;
    if (row_attention(dtype, pass->held_as, pass->count, between->part_rows, between->part_pieces, between->pieces,
                      seen->firsts, seen->ends, heads, kv_heads, dim, layer->scaling,
                      layer->softcap, NULL, qkv, stride, normed, threads)
        || times(pass, &layer->out, normed, rows, added, NULL))
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
 * angles and softcaps. Returns 0, or 1 if memory ran out. */
int run_layers(const Layer *layers, int64_t first, int64_t end, const Pass *pass, const void *in,
               void *out)
{
    const Layer *like = layers + first;
    int64_t count = pass->count, rows = 0, pieces = 0, size = item_size(pass->dtype);
    int64_t heads = like->heads * like->head_dim, qkv = heads + 2 * like->kv_heads * like->head_dim;
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
