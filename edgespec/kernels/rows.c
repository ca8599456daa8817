/* What a decoder layer does beside its products, on rows in one of four dtypes.
 *
 * Each number of a result is one sum in one order, which follows from the row alone: not from the
 * rows beside it, where its keys lie, nor how the work is shared out. Wherever a product is added,
 * that is one fused operation, by name, so that no compiler may choose to round between them in
 * one loop and not in another. Everything is reckoned in float32 and rounded once; in float64 all
 * is float64.
 */

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include <math.h>
#include <stdlib.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#include "numbers.h"

enum { SILU, GELU, GELU_TANH, SIGMOID, RELU_SQUARED, CLAMPED };
enum { WHOLE = 1, LAST = 2, PAIRED = 4 }; /* see `turn` */

/* How attention is shared out, which no result depends on. */
#define TILE_ROWS 16
#define TILE_SCORES (1 << 18)
#ifdef __AVX512F__
#define TOGETHER 2 /* queries whose sums fit the registers */
#else
#define TOGETHER 1
#endif
#define FEW (1 << 20) /* numbers: less than that is not worth a second thread */

/* A run of rows' keys and values in memory: elements between heads, and between rows. */
typedef struct {
    const char *keys, *values;
    int64_t head_stride, row_stride, rows;
} Piece;

/* Slots of rows in memory that lie one behind the other: their address, and how many they are. */
typedef int64_t Slots[2];

/* A layer that keeps a state, after its projection: of Mamba2 or, if `delta`, the gated delta rule.
 *
 * `kernel` taps [kernel, conv] and maybe `bias` [conv] of the convolution over queries', keys' and
 * values' inputs; by head `step_bias`, `decay` (the logarithm of a step's) and maybe `skip`; maybe
 * a `gain` [heads * value] of norms over `normed` numbers, `gate_last`: before the gate; maybe a
 * `scale` of the whole projection. Steps lie between two bounds. Heads of a group's keys are
 * neighbours, or if `tiled` as many places apart as there are groups. */
typedef struct {
    const void *taps, *bias, *step_bias, *decay, *skip, *gain, *scale;
    double eps, step_low, step_high;
    int64_t delta, heads, groups, key, value, kernel, normed, gate_last, tiled;
} Mixer;

/* Matrices of products.c with one input, their results side by side; NULL: no more. */
typedef struct {
    const void *matrices[4];
    int64_t outs[4];
} Product;

typedef struct {
    Product gate_up, down;
} Expert;

/* Experts, and how a row's are chosen: see MixtureForm. Behind `each` of them there may be an MLP
 * that is `beside` wide, of which a row takes the share that `share` makes, or all where that has no
 * matrix. `bias`: float, or double where rows and router are. */
typedef struct {
    Product router, share;
    const Expert *each;
    const void *bias;
    double scaling, least, floor, slope, limit;
    int64_t hidden, inner, experts, active, groups, kept_groups, best, softmax, normed, wide;
    int64_t activation, beside;
} Mixture;

/* Of two vectors of four the numbers at these places. */
#ifdef __clang__
#define MIXED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIXED(a, b, ...) __builtin_shuffle(a, b, (PLACES){__VA_ARGS__})
#endif
typedef int32_t Places4 __attribute__((vector_size(16)));
typedef int64_t Places8 __attribute__((vector_size(32)));

/* Bytes that are needed next: a core that reads nothing while it reckons waits for each of them. */
typedef struct {
    const char *at;
    int64_t left, share; /* lines of 64 bytes: that are still to be asked for, and at a time */
} Ahead;

static inline void ask(Ahead *ahead)
{
    for (int64_t i = 0; i < ahead->share && ahead->left > 0; i++, ahead->left--, ahead->at += 64)
        __builtin_prefetch(ahead->at);
}

static inline Ahead ahead_of(const char *at, int64_t bytes, int64_t steps)
{
    int64_t lines = bytes / 64;
    return (Ahead){at, lines, steps > 0 ? (lines + steps - 1) / steps : 0};
}

static inline int64_t item_size(int dtype)
{
    return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : dtype == CODED ? 1 : 2;
}

/* Where the scale of `n` codes is behind the first of them. */
static inline int64_t scale_at(int64_t n)
{
    return (n + 3) / 4 * 4;
}

/* Elements of what is held of `n` numbers. */
static inline int64_t held_width(int dtype, int64_t n)
{
    return dtype == CODED ? scale_at(n) + 4 : n;
}

/* e^x to a unit in the last place or two; 0 where it is below the normal numbers. */
static inline float exp_float(float x)
{
    x = x > 88.0f ? 88.0f : x;
    float low = x < -87.0f ? -87.0f : x;
    float turns = fmaf(low, 1.44269504f, 12582912.0f) - 12582912.0f; /* the nearest integer */
    float rest = fmaf(turns, -0.693145751953125f, low);              /* its ln 2 in two parts */
    rest = fmaf(turns, -1.42860682e-06f, rest);
    float sum = 1.0f / 5040.0f;
    sum = fmaf(sum, rest, 1.0f / 720.0f);
    sum = fmaf(sum, rest, 1.0f / 120.0f);
    sum = fmaf(sum, rest, 1.0f / 24.0f);
    sum = fmaf(sum, rest, 1.0f / 6.0f);
    sum = fmaf(sum, rest, 0.5f);
    sum = fmaf(sum, rest, 1.0f);
    sum = fmaf(sum, rest, 1.0f);
    float power = sum * float_of((uint32_t)((int32_t)turns + 127) << 23);
    return x < -87.0f ? 0.0f : power;
}

#define REAL float
#define NAME(name) name##_float
#define FMA fmaf
#define EXP exp_float
#define TANH tanhf
#define ERF erff
#define SQRT sqrtf
#define LOG1P log1pf
#define WIDE 0
#define PLACES Places4
#include "rows_of.h"
#include "states_of.h"
#undef REAL
#undef NAME
#undef FMA
#undef EXP
#undef TANH
#undef ERF
#undef SQRT
#undef LOG1P
#undef WIDE
#undef PLACES

#define REAL double
#define NAME(name) name##_double
#define FMA fma
#define EXP exp
#define TANH tanh
#define ERF erf
#define SQRT sqrt
#define LOG1P log1p
#define WIDE 1
#define PLACES Places8
#include "rows_of.h"
#include "states_of.h"

#define BOTH(name, ...) \
    (dtype == FLOAT64 ? name##_double(__VA_ARGS__) : name##_float(__VA_ARGS__))

/* The runs of slots that each of `rows` rows sees, by a mask [rows, slots]: pairs of a first slot
 * and one past the last into `runs`, which has room for `room` pairs; where each row's begin into
 * `firsts` [rows + 1]. With a window above 0 a row sees itself and the window - 1 positions before
 * its own alone. Returns how many there are; if that is more than `room`, `runs` is not whole. */
int64_t row_runs(const uint8_t *mask, int64_t rows, int64_t slots, int64_t window,
                 const int64_t *row_places, const int64_t *slot_places, int32_t *runs, int64_t room,
                 int64_t *firsts)
{
    int64_t found = 0;
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *sees = mask + row * slots;
        int64_t after = window ? row_places[row] - window : 0, first = -1;
        firsts[row] = found;
        for (int64_t slot = 0; slot <= slots; slot++) {
            int seen = slot < slots && sees[slot] && (!window || slot_places[slot] > after);
            if (seen && first < 0)
                first = slot;
            if (seen || first < 0)
                continue;
            if (found < room) {
                runs[2 * found] = (int32_t)first;
                runs[2 * found + 1] = (int32_t)slot;
            }
            found++;
            first = -1;
        }
    }
    firsts[rows] = found;
    return found;
}

/* Cosines and sines [rows, half] of positions times frequencies, times a factor. */
void row_angles(int64_t rows, int64_t half, const int64_t *places, const float *frequencies,
                float factor, float *cosines, float *sines)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < half; i++) {
            float angle = (float)places[row] * frequencies[i];
            cosines[row * half + i] = cosf(angle) * factor;
            sines[row * half + i] = sinf(angle) * factor;
        }
}

/* See the functions of these names in rows_of.h. */

void row_norm(int dtype, int64_t rows, int64_t n, const void *hidden, const void *added,
              double share, const void *added_gain, const void *gain, double eps, int centred,
              void *sum, void *normed)
{
    BOTH(norm, dtype, rows, n, hidden, added, share, added_gain, gain, eps, centred, sum, normed);
}

void row_turn(int dtype, int64_t rows, int64_t stride, int64_t heads, int64_t kv_heads,
              int64_t head_dim, int64_t half, int ways, void *qkv, const void *cosines,
              const void *sines, const void *scales, const void *query_gain, const void *key_gain,
              double eps)
{
    BOTH(turn, dtype, rows, stride, heads, kv_heads, head_dim, half, ways, qkv, cosines, sines,
         scales, query_gain, key_gain, eps);
}

void row_gated(int dtype, int64_t rows, int64_t n, int kind, double slope, double limit,
               const void *gate_up, void *out)
{
    BOTH(gated, dtype, rows, n, kind, slope, limit, gate_up, out);
}

void row_scaled(int dtype, int64_t rows, int64_t n, void *mixed)
{
    BOTH(scaled, dtype, rows, n, mixed);
}

void row_convolved(int dtype, int held_as, int64_t parts, const int64_t *part_rows,
                   const int64_t *part_pieces, const Piece *pieces, const int64_t *firsts,
                   const int32_t *runs, int64_t n, int64_t taps, const void *weights,
                   const void *bias, const void *mixed, void *out)
{
    BOTH(convolved, dtype, held_as, parts, part_rows, part_pieces, pieces, firsts, runs, n, taps,
         weights, bias, mixed, out);
}

int row_attention(int dtype, int held_as, int64_t parts, const int64_t *part_rows,
                  const int64_t *part_pieces, const Piece *pieces, const int64_t *firsts,
                  const int32_t *runs, int64_t heads, int64_t kv_heads, int64_t head_dim,
                  double scaling, double softcap, const void *sinks, const void *query,
                  int64_t stride, void *out, int threads)
{
    return BOTH(attention, dtype, held_as, parts, part_rows, part_pieces, pieces, firsts, runs, heads,
                kv_heads, head_dim, scaling, softcap, sinks, query, stride, out, threads);
}

/* What a layer that keeps a state makes of rows of one request at one boundary: of their
 * projections [rows, heads * value + conv + heads or two times heads] `out` [rows, heads * value].
 * `firsts`, `ends`: runs of slots that each row sees, in the order of their positions, its own last
 * and none between `boundary` and its position `places` left out. What the rows keep goes into
 * their slots, inputs as `held_as`; `state` is that of the boundary. Returns 0, or 1 if memory ran
 * out. */
int state_rows(int dtype, const Mixer *mixer, int64_t rows, const void *projected,
               const int64_t *firsts, const int32_t *ends, const int64_t *places, int64_t boundary,
               int held_as, const Slots *slots, const void *state, void *out, int threads)
{
    return BOTH(states, dtype, mixer, rows, projected, firsts, ends, places, boundary, held_as,
                slots, state, out, threads);
}

/* Take the rows in `count` slots from `first` on, which are those of their positions, into the state
 * of the boundary before them, which becomes that behind them. */
void state_fold(int dtype, const Mixer *mixer, int held_as, const Slots *slots, int64_t first,
                int64_t count, void *state, int threads)
{
    BOTH(fold, mixer, held_as, slots, first, count, state, threads);
}

#include "layers.h"
