/* The products of products.c in one type: REAL, of which a vector has WIDTH. */

#define VECTOR FN(Vector)
#define FLOATS FN(Floats)
#define WORDS FN(Words)
#define INTS FN(Ints)
#define HALVES FN(Halves)
typedef REAL VECTOR __attribute__((vector_size(sizeof(REAL) * WIDTH)));
typedef float FLOATS __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t WORDS __attribute__((vector_size(4 * WIDTH)));
typedef int32_t INTS __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t HALVES __attribute__((vector_size(2 * WIDTH)));
typedef int16_t FN(Shorts) __attribute__((vector_size(2 * WIDTH)));
typedef uint8_t FN(Bytes) __attribute__((vector_size(WIDTH)));
typedef int8_t FN(Codes) __attribute__((vector_size(WIDTH)));

#undef PARTS
#undef STRIPS
#define PARTS (LANES / WIDTH)     /* vectors of an output's lanes */
#define STRIPS (TILE / 2 / WIDTH) /* of a tile: a strip is WIDTH bytes of each column */

/* --- numbers of other types --- */

/* WIDTH whole numbers, wider. By name: GCC 12 does not find the one instruction by itself, and one
 * row by 4-bit tiles took four times as long. */
INLINE WORDS FN(wide_bytes)(const void *from)
{
#if WIDTH == 16
    return (WORDS)_mm512_cvtepu8_epi32(_mm_loadu_si128(from));
#elif WIDTH == 8
    return (WORDS)_mm256_cvtepu8_epi32(_mm_loadl_epi64(from));
#elif WIDTH == 4 && defined(__SSE4_1__)
    return (WORDS)_mm_cvtepu8_epi32(_mm_cvtsi32_si128(LOAD(int32_t, from)));
#elif WIDTH == 4 && defined(__aarch64__)
    return (WORDS)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(LOAD(uint32_t, from)))));
#else
    return __builtin_convertvector(__builtin_convertvector(LOAD(FN(Bytes), from), HALVES), WORDS);
#endif
}

INLINE INTS FN(wide_codes)(const void *from)
{
#if WIDTH == 16
    return (INTS)_mm512_cvtepi8_epi32(_mm_loadu_si128(from));
#elif WIDTH == 8
    return (INTS)_mm256_cvtepi8_epi32(_mm_loadl_epi64(from));
#elif WIDTH == 4 && defined(__SSE4_1__)
    return (INTS)_mm_cvtepi8_epi32(_mm_cvtsi32_si128(LOAD(int32_t, from)));
#elif WIDTH == 4 && defined(__aarch64__)
    return (INTS)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(LOAD(uint32_t, from)))));
#else
    return __builtin_convertvector(
        __builtin_convertvector(LOAD(FN(Codes), from), FN(Shorts)), INTS);
#endif
}

INLINE WORDS FN(wide_halves)(const void *from)
{
    return __builtin_convertvector(LOAD(HALVES, from), WORDS);
}

INLINE FLOATS FN(widened_brain)(WORDS low)
{
    return (FLOATS)(low << 16);
}

/* half_to_float of words whose high half is 0. */
INLINE FLOATS FN(widened_half)(WORDS low)
{
#if WIDTH == 16
    return (FLOATS)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)low));
#elif WIDTH == 8 && defined(__F16C__)
    __m128i few = _mm256_castsi256_si128((__m256i)low);
    return (FLOATS)_mm256_cvtph_ps(
        _mm_packus_epi32(few, _mm256_extracti128_si256((__m256i)low, 1)));
#else
    WORDS magnitude = (low & 0x7fff) << 13;
    FLOATS value = (FLOATS)magnitude * 0x1p112f;
    WORDS infinite = (WORDS)(magnitude >= 0x0f800000);
    WORDS bits = ((WORDS)value & ~infinite) | ((magnitude | 0x7f800000) & infinite);
    return (FLOATS)(bits | (low & 0x8000) << 16);
#endif
}

INLINE REAL FN(number)(const void *from, int64_t at, int kind)
{
    switch (kind) {
    case FLOAT64: return ((const double *)from)[at];
    case FLOAT16: return half_to_float(((const uint16_t *)from)[at]);
    case BFLOAT16: return brain_to_float(((const uint16_t *)from)[at]);
    default: return ((const float *)from)[at];
    }
}

INLINE VECTOR FN(wide)(FLOATS narrow)
{
    return __builtin_convertvector(narrow, VECTOR);
}

INLINE VECTOR FN(numbers)(const void *from, int64_t at, int kind)
{
    switch (kind) {
#ifdef DOUBLE
    case FLOAT64: return LOAD(VECTOR, (const double *)from + at);
#endif
    case FLOAT16: return FN(wide)(FN(widened_half)(FN(wide_halves)((const uint16_t *)from + at)));
    case BFLOAT16: return FN(wide)(FN(widened_brain)(FN(wide_halves)((const uint16_t *)from + at)));
    default: return FN(wide)(LOAD(FLOATS, (const float *)from + at));
    }
}

INLINE VECTOR FN(all)(REAL value)
{
    return value - (VECTOR){0};
}

/* Sums of outputs from `first` on, with the bias, rounded to row `row` of y. */
INLINE void FN(store)(
    const Matrix *m, void *y, int64_t row, int64_t first, int count, int kind, const REAL *sums)
{
    REAL with[TILE];
    const REAL *bias = (const REAL *)m->bias;
    int64_t at = row * m->out + first;
    if (bias) {
        for (int i = 0; i < count; i++)
            with[i] = sums[i] + bias[first + i];
        sums = with;
    }
#ifdef DOUBLE
    memcpy((double *)y + at, sums, count * sizeof *sums);
#else
    if (kind == FLOAT16)
        for (int i = 0; i < count; i++)
            ((uint16_t *)y)[at + i] = float_to_half(sums[i]);
    else if (kind == BFLOAT16)
        for (int i = 0; i < count; i++)
            ((uint16_t *)y)[at + i] = float_to_brain(sums[i]);
    else
        memcpy((float *)y + at, sums, count * sizeof *sums);
#endif
}

/* Row r of x as REAL, in the order of the matrix' columns. */
static void FN(row)(REAL *to, int64_t step, const Matrix *m, const void *x, int64_t r, int kind)
{
    int64_t first = r * m->columns;
#define COPY(number) \
    if (m->order) \
        for (int64_t k = 0; k < m->columns; k++) { int64_t at = first + m->order[k]; to[k * step] = number; } \
    else \
        for (int64_t k = 0; k < m->columns; k++) { int64_t at = first + k; to[k * step] = number; }
    switch (kind) {
    case FLOAT64: COPY(((const double *)x)[at]) break;
    case FLOAT16: COPY(half_to_float(((const uint16_t *)x)[at])) break;
    case BFLOAT16: COPY(brain_to_float(((const uint16_t *)x)[at])) break;
    default: COPY(((const float *)x)[at])
    }
#undef COPY
}

/* --- tiles: of 64 outputs, all codes of one column side by side --- */

/* Codes less `middle` of one strip: of WIDTH outputs the low nibbles of these bytes, of WIDTH the
 * high. */
INLINE void FN(strip)(const uint8_t *bytes, int middle, VECTOR *low, VECTOR *high)
{
    WORDS codes = FN(wide_bytes)(bytes);
#if WIDTH == 16
    static const float each[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    VECTOR table = LOAD(VECTOR, each) - FN(all)(middle);
    *low = (VECTOR)_mm512_permutexvar_ps((__m512i)codes, (__m512)table); /* by the low 4 bits */
    *high = (VECTOR)_mm512_permutexvar_ps((__m512i)(codes >> 4), (__m512)table);
#else
    *low = __builtin_convertvector((INTS)(codes & 15) - middle, VECTOR);
    *high = __builtin_convertvector((INTS)(codes >> 4) - middle, VECTOR);
#endif
}

/* Adds a group's sums of x * code, times the scale, and of x, times the zero, to the totals. */
INLINE void FN(add)(
    const int strips, const int rows, const VECTOR *sum, const REAL *sums, const VECTOR *scale,
    const VECTOR *zero, REAL *totals)
{
    UNROLL
    for (int s = 0; s < strips; s++) {
        UNROLL
        for (int r = 0; r < rows; r++) {
            UNROLL
            for (int half = 0; half < 2; half++) {
                REAL *at = totals + r * TILE + s * WIDTH + half * (TILE / 2);
                VECTOR total = LOAD(VECTOR, at);
                total += zero[s * 2 + half] * sums[r];
                total += scale[s * 2 + half] * sum[(s * rows + r) * 2 + half];
                memcpy(at, &total, sizeof total);
            }
        }
    }
}

/* Adds the sums over one group of columns of x * code, times the scale, and of x, times the zero.
 *
 * Of `rows` rows and `strips` strips, both constants where this is called. x [columns, step] and
 * `sums` [rows]: of these rows; `totals` [rows, 64]: of the first strip's first output on. `ready`:
 * all codes of the columns as `unpacked_tile` writes them, from that strip on; or NULL.
 */
INLINE void FN(group)(
    const int strips, const int rows, const uint8_t *codes, const REAL *ready, int64_t columns,
    const REAL *x, int64_t step, const REAL *sums, const VECTOR *scale, const VECTOR *zero,
    int middle, REAL *totals)
{
    VECTOR sum[MOST];
    UNROLL
    for (int i = 0; i < 2 * strips * rows; i++)
        sum[i] = FN(all)(0);
    for (int64_t k = 0; k < columns; k++) {
        UNROLL
        for (int s = 0; s < strips; s++) {
            VECTOR low, high;
            if (ready) {
                low = LOAD(VECTOR, ready + k * TILE + 2 * s * WIDTH);
                high = LOAD(VECTOR, ready + k * TILE + (2 * s + 1) * WIDTH);
            } else
                FN(strip)(codes + k * (TILE / 2) + s * WIDTH, middle, &low, &high);
            UNROLL
            for (int r = 0; r < rows; r++) {
                VECTOR value = FN(all)(x[k * step + r]);
                sum[(s * rows + r) * 2] += low * value;
                sum[(s * rows + r) * 2 + 1] += high * value;
            }
        }
    }
    FN(add)(strips, rows, sum, sums, scale, zero, totals);
}

/* The same by all strips, at a time as many as there are registers for. */
#define GROUP(rows) \
    for (int s = 0; s < STRIPS; s += STRIPS_OF(rows)) \
        FN(group)(STRIPS_OF(rows), rows, codes + s * WIDTH, ready ? ready + 2 * s * WIDTH : NULL, \
                  m->group, x, step, sums, scale + 2 * s, zero + 2 * s, m->middle, totals + s * WIDTH)
#define STRIPS_OF(rows) (MOST / (2 * rows) < STRIPS ? MOST / (2 * rows) : STRIPS)

/* Codes less `middle` of some columns of a tile [columns, TILE], each strip's low nibbles before its
 * high ones. */
static void FN(unpacked_tile)(const uint8_t *codes, int64_t columns, int middle, REAL *to)
{
    for (int64_t i = 0; i < columns * STRIPS; i++) {
        VECTOR both[2];
        FN(strip)(codes + i * WIDTH, middle, both, both + 1);
        memcpy(to + 2 * i * WIDTH, both, sizeof both);
    }
}

/* The same for some of up to `rows` rows. How many it did: 8, 4, 2 or 1. */
INLINE int FN(some)(
    const Matrix *m, int rows, const uint8_t *codes, const REAL *ready, const REAL *x, int64_t step,
    const REAL *sums, const VECTOR *scale, const VECTOR *zero, REAL *totals)
{
#if MOST >= 16
    if (rows >= 8) {
        GROUP(8);
        return 8;
    }
#endif
    if (rows >= 4) {
        GROUP(4);
        return 4;
    }
    if (rows >= 2) {
        GROUP(2);
        return 2;
    }
    GROUP(1);
    return 1;
}

#if defined(PAIRS) && !defined(DOUBLE)
#include "products_pairs.h"
#else
#define PAIRED(m, kind) 0
#endif

/* Scales and zeros of the 64 outputs from `at` on, in the order of strips. */
INLINE void FN(pairs)(const Matrix *m, int64_t at, VECTOR *scale, VECTOR *zero)
{
    for (int i = 0; i < 2 * STRIPS; i++) {
        int64_t first = 2 * (at + i / 2 * WIDTH + i % 2 * (TILE / 2));
        if (m->scale_kind == FLOAT16 || m->scale_kind == BFLOAT16) {
            WORDS both = LOAD(WORDS, (const uint16_t *)m->scales + first);
            if (m->scale_kind == FLOAT16) {
                scale[i] = FN(wide)(FN(widened_half)(both & 0xffff));
                zero[i] = FN(wide)(FN(widened_half)(both >> 16));
            } else {
                scale[i] = FN(wide)(FN(widened_brain)(both));
                zero[i] = FN(wide)((FLOATS)(both & 0xffff0000));
            }
        } else {
            for (int lane = 0; lane < WIDTH; lane++) {
                scale[i][lane] = FN(number)(m->scales, first + 2 * lane, m->scale_kind);
                zero[i][lane] = FN(number)(m->scales, first + 2 * lane + 1, m->scale_kind);
            }
        }
    }
}

/* Bytes of so many columns. */
INLINE int FN(bytes)(int kind, int64_t columns)
{
    switch (kind) {
    case FLOAT64: return columns * 8;
    case FLOAT32: return columns * 4;
    case FLOAT16: case BFLOAT16: return columns * 2;
    case NF4: return columns / 2;
    default: return columns;
    }
}

/* Some rows by one tile. */
static void FN(tile)(
    const Matrix *m, int64_t tile, const REAL *x, const REAL *sums, void *y, int64_t first, int rows,
    int kind)
{
    const int once = rows >= FEW && m->group <= LONGEST;
    REAL totals[CHUNK * TILE] __attribute__((aligned(64)));
    REAL ready[(once ? m->group : 1) * TILE] __attribute__((aligned(64)));
    VECTOR scale[2 * STRIPS], zero[2 * STRIPS];
    int64_t groups = m->columns / m->group, tiles = (m->out + TILE - 1) / TILE;
    const uint8_t *codes = (const uint8_t *)m->weight + tile * m->columns * (TILE / 2);
#if defined(PAIRS) && !defined(DOUBLE)
    __m512i table = code_table(m->middle);
#endif
    memset(totals, 0, rows * TILE * sizeof(REAL));
    const int64_t part = m->group * (TILE / 2);
    const int64_t bytes = 2 * TILE * FN(bytes)(m->scale_kind, 1);
    for (int64_t g = 0; g < groups; g++) {
        FN(pairs)(m, (g * tiles + tile) * TILE, scale, zero);
        /* The scales of a tile lie far apart: no processor guesses where the next ones are. */
        int64_t next = (g + AHEAD) / groups + tile, of = (g + AHEAD) % groups;
        if (next < tiles)
            for (int64_t i = 0; i < bytes; i += 64)
                __builtin_prefetch((const char *)m->scales + (of * tiles + next) * bytes + i);
        for (int64_t i = 0; i < part; i += 64)
            __builtin_prefetch(codes + (g + 2) * part + i);
#if defined(PAIRS) && !defined(DOUBLE)
        if (PAIRED(m, kind)) {
            for (int r = 0; r < rows;)
                r += some_pairs(m, rows - r, codes + g * m->group * (TILE / 2),
                                (const uint32_t *)x + g * m->group / 2 * rows + r, rows,
                                sums + g * rows + r, scale, zero, table, totals + r * TILE);
            continue;
        }
#endif
        const uint8_t *own = codes + g * part;
        if (once)
            FN(unpacked_tile)(own, m->group, m->middle, ready);
        for (int r = 0; r < rows;) {
            const REAL *of = x + g * m->group * rows + r, *sum = sums + g * rows + r;
            REAL *at = totals + r * TILE;
            r += once ? FN(some)(m, rows - r, own, ready, of, rows, sum, scale, zero, at)
                      : FN(some)(m, rows - r, own, NULL, of, rows, sum, scale, zero, at);
        }
    }
    int64_t left = m->out - tile * TILE, width = left < TILE ? left : TILE;
    for (int r = 0; r < rows; r++)
        FN(store)(m, y, first + r, tile * TILE, width, kind, totals + r * TILE);
}

static int FN(by_tiles)(
    const Matrix *m, const void *x, void *y, int64_t rows, int kind, int threads)
{
    int64_t groups = m->columns / m->group, tiles = (m->out + TILE - 1) / TILE;
    REAL *turned = room(rows * (m->columns + groups) * sizeof(REAL));
    if (!turned)
        return 1;
    REAL *sums = turned + rows * m->columns;
    /* In chunks of rows; of each all rows of a column are side by side. */
    for (int64_t first = 0; first < rows; first += CHUNK) {
        int64_t count = rows - first < CHUNK ? rows - first : CHUNK;
        REAL *to = turned + first * m->columns, *sum = sums + first * groups;
        memset(sum, 0, count * groups * sizeof(REAL));
#if defined(PAIRS) && !defined(DOUBLE)
        if (PAIRED(m, kind)) {
            pairs_of(m, (const uint16_t *)x + first * m->columns, count, (uint32_t *)to, sum);
            continue;
        }
#endif
        for (int64_t r = 0; r < count; r++)
            FN(row)(to + r, count, m, x, first + r, kind);
        for (int64_t g = 0; g < groups; g++)
            for (int64_t k = g * m->group; k < (g + 1) * m->group; k++)
                for (int64_t r = 0; r < count; r++)
                    sum[g * count + r] += to[k * count + r];
    }
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t t = 0; t < tiles; t++)
        for (int64_t first = 0; first < rows; first += CHUNK) {
            int64_t count = rows - first < CHUNK ? rows - first : CHUNK;
            FN(tile)(m, t, turned + first * m->columns, sums + first * groups, y, first, count, kind);
        }
    free(turned);
    return 0;
}

/* --- rows of outputs: all columns of one output side by side --- */

/* The levels of the low 4 bits of each code. */
INLINE FLOATS FN(looked_up)(const float *levels, WORDS codes)
{
#if WIDTH == 16
    return (FLOATS)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(levels));
#elif WIDTH == 8
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels), (__m256i)codes);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels + 8), (__m256i)codes);
    return (FLOATS)_mm256_blendv_ps(low, high, (__m256)(codes << 28)); /* by the fourth bit */
#else
    FLOATS found;
    for (int lane = 0; lane < WIDTH; lane++)
        found[lane] = levels[codes[lane] & 15];
    return found;
#endif
}

/* WIDTH weights of one output before they are scaled, from column k on; NF4: of so many bytes the
 * even columns and the odd ones. */
INLINE void FN(weights)(const void *weight, int64_t k, int kind, const float *levels, VECTOR *to)
{
    if (kind == INT8)
        to[0] = __builtin_convertvector(FN(wide_codes)((const int8_t *)weight + k), VECTOR);
    else if (kind == NF4) {
        WORDS codes = FN(wide_bytes)((const uint8_t *)weight + k);
        to[0] = FN(wide)(FN(looked_up)(levels, codes >> 4));
        to[1] = FN(wide)(FN(looked_up)(levels, codes));
    } else if (kind == FP8) { /* E4M3: the bits of a half 2^8 times as small */
        WORDS codes = FN(wide_bytes)((const uint8_t *)weight + k);
        to[0] = FN(wide)(FN(widened_half)((codes & 0x7f) << 7 | (codes & 0x80) << 8) * 256);
    } else
        to[0] = FN(numbers)(weight, k, kind);
}

/* The sum of the lanes, always as the same tree. */
INLINE REAL FN(sum)(VECTOR *lanes)
{
    UNROLL
    for (int parts = PARTS / 2; parts; parts /= 2)
        UNROLL
        for (int i = 0; i < parts; i++)
            lanes[i] += lanes[i + parts];
#if WIDTH == 16
    return _mm512_reduce_add_ps((__m512)lanes[0]); /* the same tree */
#else
    REAL of[WIDTH];
    memcpy(of, lanes, sizeof of);
    for (int width = WIDTH / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            of[i] += of[i + width];
    return of[0];
#endif
}

/* The sums of the lanes of outputs [outs, rows] to the rows of `result`. */
INLINE void FN(results)(
    const int outs, const int rows, VECTOR (*lanes)[PARTS], REAL *result, int64_t step)
{
    UNROLL
    for (int o = 0; o < outs; o++)
        UNROLL
        for (int r = 0; r < rows; r++)
            result[r * step + o] = FN(sum)(lanes[o * rows + r]);
}

/* Some outputs by some rows: the sums over all columns, LANES of them for each.
 *
 * `kind`, `outs` and `rows` are constants where this is called. Scales and zeros [outs, blocks]: of
 * each LANES columns (NF4: twice as many) where `blocked`, else of each column, [outs, padded].
 */
INLINE void FN(dots)(
    const int kind, const int outs, const int rows, const int scaled, const int blocked,
    const Matrix *m, int64_t first, const REAL *x, int64_t padded, const REAL *scale,
    const REAL *zero, REAL *result, int64_t result_step)
{
    const int pairs = kind == NF4 ? 2 : 1, width = pairs * LANES;
    const int64_t pitch = FN(bytes)(kind, m->columns);
    const int64_t whole = m->columns / width * width;
    const int64_t scale_step = blocked ? m->columns / m->group : padded;
    const char *weight = (const char *)m->weight + first * pitch;
    const int some = MOST / (outs * rows), together = some < PARTS ? some : PARTS;
    VECTOR lanes[MOST][PARTS];
    double rest[8][LANES]; /* of each output the last columns, as nothing behind them is read */
    if (whole < m->columns) {
        int64_t begin = FN(bytes)(kind, whole);
        memset(rest, 0, sizeof rest);
        for (int o = 0; o < outs; o++)
            memcpy(rest[o], weight + o * pitch + begin, pitch - begin);
    }
    /* Of narrow vectors some of the lanes after the others, each over all columns: so the sums of
     * many rows and outputs fit the registers, and the weights are in the cache the next time. */
    for (int part = 0; part < PARTS; part += together) {
        VECTOR sum[MOST];
        UNROLL
        for (int i = 0; i < outs * rows * together; i++)
            sum[i] = FN(all)(0);
        int64_t k = 0;
        /* By groups, so that a group's scales are looked up once. */
        for (int64_t group = 0; k < m->columns; group++) {
            int64_t end = blocked && scaled ? k + m->group : m->columns;
            VECTOR s[8], z[8];
            if (scaled && blocked) {
                UNROLL
                for (int o = 0; o < outs; o++) {
                    s[o] = FN(all)(scale[o * scale_step + group]);
                    z[o] = FN(all)(zero ? zero[o * scale_step + group] : 0);
                }
            }
            for (; k < end; k += width) {
                const char *from = k < whole ? weight + FN(bytes)(kind, k) : (const char *)rest;
                const int64_t apart = k < whole ? pitch : (int64_t)sizeof rest[0];
                /* Outputs are as many streams as are summed at a time: short ones nobody guesses. */
                if (part == 0 && FN(bytes)(kind, k) % 64 == 0)
                    for (int o = 0; o < outs; o++)
                        __builtin_prefetch(weight + (outs + o) * pitch + FN(bytes)(kind, k));
                UNROLL
                for (int j = 0; j < together; j++) {
                    const int64_t at = (part + j) * WIDTH;
                    VECTOR of[2 * 4];
                    UNROLL
                    for (int i = 0; i < pairs * rows; i++)
                        of[i] = LOAD(VECTOR, x + i / pairs * padded + k + i % pairs * LANES + at);
                    UNROLL
                    for (int o = 0; o < outs; o++) {
                        VECTOR w[2];
                        FN(weights)(from + o * apart, at, kind, m->levels, w);
                        UNROLL
                        for (int i = 0; i < pairs; i++) {
                            if (scaled && blocked)
                                w[i] *= s[o];
                            else if (scaled)
                                w[i] *= LOAD(VECTOR, scale + o * scale_step + k + at);
                            if (kind == NF4) /* a weight is a float, as bitsandbytes has it */
                                w[i] = FN(wide)(__builtin_convertvector(w[i], FLOATS));
                            if (zero && blocked)
                                w[i] += z[o];
                            else if (zero)
                                w[i] += LOAD(VECTOR, zero + o * scale_step + k + at);
                            UNROLL
                            for (int r = 0; r < rows; r++)
                                sum[(o * rows + r) * together + j] += w[i] * of[r * pairs + i];
                        }
                    }
                }
            }
        }
        UNROLL
        for (int i = 0; i < outs * rows; i++)
            UNROLL
            for (int j = 0; j < together; j++)
                lanes[i][part + j] = sum[i * together + j];
    }
    FN(results)(outs, rows, lanes, result, result_step);
}

#define DOTS(kind, outs, rows, scaled, blocked, with_zero) \
    FN(dots)(kind, outs, rows, scaled, blocked, m, first, x, padded, scale, \
             with_zero ? zero : NULL, result, step)

/* How many outputs are summed at a time, of so many rows: of one, as it waits for memory most, no
 * more than have all lanes in registers. */
#define ALONE (MOST >= 8 * PARTS ? 8 : MOST >= PARTS ? MOST / PARTS : 1)
#define OUTPUTS_OF(rows) ((rows) == 1 ? ALONE : MOST / (rows) < 4 ? MOST / (rows) : 4)

#undef SHAPES
#define SHAPES(kind, scaled, with_zero) \
    if (rows == 4) \
        DOTS(kind, OUTPUTS_OF(4), 4, scaled, 1, with_zero); \
    else if (rows == 2) \
        DOTS(kind, OUTPUTS_OF(2), 2, scaled, 1, with_zero); \
    else if (outs > 1) \
        DOTS(kind, OUTPUTS_OF(1), 1, scaled, 1, with_zero); \
    else \
        DOTS(kind, 1, 1, scaled, 1, with_zero);

static void FN(shaped)(
    const Matrix *m, int outs, int rows, int blocked, int64_t first, const REAL *x, int64_t padded,
    const REAL *scale, const REAL *zero, REAL *result, int64_t step)
{
    if (!blocked) { /* int8 alone has such groups */
        DOTS(INT8, 1, 1, 1, 0, 1);
        return;
    }
    switch (m->kind) {
    case FLOAT32: SHAPES(FLOAT32, 0, 0) break;
    case FLOAT16: SHAPES(FLOAT16, 0, 0) break;
    case BFLOAT16: SHAPES(BFLOAT16, 0, 0) break;
#ifdef DOUBLE
    case FLOAT64: SHAPES(FLOAT64, 0, 0) break;
#endif
    case NF4: SHAPES(NF4, 1, 0) break;
    case FP8: SHAPES(FP8, 1, 0) break;
    default:
        if (zero) {
            SHAPES(INT8, 1, 1)
        } else {
            SHAPES(INT8, 1, 0)
        }
    }
}

/* Scales or zeros of some outputs as REAL: of each group, or where groups are no whole vectors of
 * each column. */
static void FN(spread)(
    REAL *to, const Matrix *m, const void *from, int64_t first, int outs, int blocked,
    int64_t padded)
{
    int64_t groups = m->columns / m->group;
    if (blocked) {
        int64_t i = 0;
        for (; i + WIDTH <= outs * groups; i += WIDTH) {
            VECTOR some = FN(numbers)(from, first * groups + i, m->scale_kind);
            memcpy(to + i, &some, sizeof some);
        }
        for (; i < outs * groups; i++)
            to[i] = FN(number)(from, first * groups + i, m->scale_kind);
        return;
    }
    for (int o = 0; o < outs; o++)
        for (int64_t k = 0; k < padded; k++)
            to[o * padded + k] = k < m->columns
                ? FN(number)(from, (first + o) * groups + k / m->group, m->scale_kind) : 0;
}

/* The weights of `outs` outputs as REAL, [outs, padded], in the order in which columns are summed. */
INLINE void FN(unpack)(
    const int kind, const Matrix *m, int64_t first, int outs, const REAL *scale, const REAL *zero,
    REAL *to)
{
    const int pairs = kind == NF4 ? 2 : 1, width = pairs * LANES;
    const int64_t pitch = FN(bytes)(kind, m->columns), groups = m->columns / m->group;
    for (int64_t block = 0; block < outs * groups; block++) {
        const int64_t o = block / groups, group = block % groups;
        const VECTOR by = FN(all)(scale ? scale[block] : 1), more = FN(all)(zero ? zero[block] : 0);
        for (int64_t k = group * m->group; k < (group + 1) * m->group; k += width, to += width) {
            const char *from = (const char *)m->weight + (first + o) * pitch + FN(bytes)(kind, k);
            double rest[LANES]; /* nothing behind the last columns is read */
            if (FN(bytes)(kind, k) % 64 == 0)
                __builtin_prefetch(from + outs * pitch);
            if (k + width > m->columns) {
                memset(rest, 0, sizeof rest);
                from = memcpy(rest, from, FN(bytes)(kind, m->columns - k));
            }
            UNROLL
            for (int part = 0; part < PARTS; part++) {
                VECTOR w[2];
                FN(weights)(from, part * WIDTH, kind, m->levels, w);
                UNROLL
                for (int i = 0; i < pairs; i++) {
                    if (scale)
                        w[i] *= by;
                    if (kind == NF4)
                        w[i] = FN(wide)(__builtin_convertvector(w[i], FLOATS));
                    if (zero)
                        w[i] += more;
                    memcpy(to + i * LANES + part * WIDTH, w + i, sizeof w[i]);
                }
            }
        }
    }
}

static void FN(unpacked)(
    const Matrix *m, int64_t first, int outs, const REAL *scale, const REAL *zero, REAL *to)
{
#define UNPACK(kind, scale, zero) FN(unpack)(kind, m, first, outs, scale, zero, to)
    if (m->kind == FLOAT16)
        UNPACK(FLOAT16, NULL, NULL);
    else if (m->kind == BFLOAT16)
        UNPACK(BFLOAT16, NULL, NULL);
    else if (m->kind == NF4)
        UNPACK(NF4, scale, NULL);
    else if (m->kind == FP8)
        UNPACK(FP8, scale, NULL);
    else if (zero)
        UNPACK(INT8, scale, zero);
    else
        UNPACK(INT8, scale, NULL);
#undef UNPACK
}

/* dots of unpacked weights: [outs, padded]. */
INLINE void FN(crossed)(
    const int outs, const int rows, const REAL *weight, const REAL *x, int64_t padded, REAL *result,
    int64_t step)
{
    const int some = MOST / (outs * rows), together = some < PARTS ? some : PARTS;
    VECTOR lanes[MOST][PARTS];
    for (int part = 0; part < PARTS; part += together) {
        VECTOR sum[MOST];
        UNROLL
        for (int i = 0; i < outs * rows * together; i++)
            sum[i] = FN(all)(0);
        for (int64_t k = part * WIDTH; k < padded; k += LANES) {
            UNROLL
            for (int j = 0; j < together; j++) {
                VECTOR of[4];
                UNROLL
                for (int r = 0; r < rows; r++)
                    of[r] = LOAD(VECTOR, x + r * padded + k + j * WIDTH);
                UNROLL
                for (int o = 0; o < outs; o++) {
                    VECTOR w = LOAD(VECTOR, weight + o * padded + k + j * WIDTH);
                    UNROLL
                    for (int r = 0; r < rows; r++)
                        sum[(o * rows + r) * together + j] += w * of[r];
                }
            }
        }
        UNROLL
        for (int i = 0; i < outs * rows * together; i++)
            lanes[i / together][part + i % together] = sum[i];
    }
    FN(results)(outs, rows, lanes, result, step);
}

static void FN(crossing)(
    int rows, const REAL *weight, const REAL *x, int64_t padded, REAL *result, int64_t step)
{
    if (rows == 4)
        FN(crossed)(OUTPUTS_OF(4), 4, weight, x, padded, result, step);
    else if (rows == 2)
        FN(crossed)(OUTPUTS_OF(2), 2, weight, x, padded, result, step);
    else
        FN(crossed)(OUTPUTS_OF(1), 1, weight, x, padded, result, step);
}

/* 8 outputs, or 1, by some rows. `at`: how many scales an output has. */
static void FN(outputs)(
    const Matrix *m, int64_t first, int outs, const void *x, int64_t padded, const REAL *scale,
    const REAL *zero, int64_t at, int blocked, REAL *unpacked, void *y, int64_t first_row, int rows,
    int kind)
{
    /* Of many rows the weights are unpacked once, to the same numbers. */
    const int once = unpacked && outs == 8;
    if (once)
        FN(unpacked)(m, first, outs, scale, zero, unpacked);
    for (int r = 0; r < rows;) {
        REAL result[4 * 8];
        const REAL *from = (const REAL *)x + r * padded;
        const int count = outs == 1 ? 1 : rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
        const int wide = outs == 1 ? 1 : OUTPUTS_OF(count);
#if defined(PAIRS) && !defined(DOUBLE)
        if (pairs_by_rows(m, kind))
            for (int o = 0; o < outs; o += wide)
                shaped_pairs(m, wide, count, first + o, (const uint16_t *)x + r * padded, padded,
                             scale ? scale + o * at : NULL, result + o, outs);
        else
#endif
        for (int o = 0; o < outs; o += wide)
            if (once)
                FN(crossing)(count, unpacked + o * padded, from, padded, result + o, outs);
            else
                FN(shaped)(m, wide, count, blocked, first + o, from, padded,
                           scale ? scale + o * at : NULL, zero ? zero + o * at : NULL, result + o,
                           outs);
        for (int i = 0; i < count; i++)
            FN(store)(m, y, first_row + r + i, first, outs, kind, result + i * outs);
        r += count;
    }
}

static int FN(by_rows)(
    const Matrix *m, const void *x, void *y, int64_t rows, int kind, int threads)
{
#if defined(PAIRS) && !defined(DOUBLE)
    const int paired = pairs_by_rows(m, kind);
#else
    const int paired = 0;
#endif
    const int64_t width = m->kind == NF4 || paired ? 2 * LANES : LANES;
    const int64_t item = paired ? 2 : sizeof(REAL);
    const int64_t padded = (m->columns + width - 1) / width * width;
    const int64_t strips = (m->out + TILE - 1) / TILE;
    const int blocked = !m->scales || m->group % width == 0 || m->group == m->columns;
    const int64_t scales = blocked ? m->columns / m->group : padded;
    const int once = rows >= MANY && !paired && m->kind != FLOAT32 && m->kind != FLOAT64;
    REAL *all = room(rows * padded * sizeof(REAL));
    int failed = 0;
    if (!all)
        return 1;
    for (int64_t r = 0; r < rows; r++) {
        REAL *to = all + r * padded;
        if (paired) {
            uint16_t *brains = (uint16_t *)all + r * padded;
            const uint16_t *from = (const uint16_t *)x + r * m->columns;
            for (int64_t k = 0; k < m->columns; k++)
                brains[k] = from[m->order ? m->order[k] : k];
            memset(brains + m->columns, 0, (padded - m->columns) * 2);
            continue;
        }
        memset(to + m->columns, 0, (padded - m->columns) * sizeof(REAL));
        FN(row)(to, 1, m, x, r, kind);
        if (m->kind == NF4)
            for (int64_t k = 0; k < padded; k += width) {
                REAL odd[LANES];
                for (int lane = 0; lane < LANES; lane++) {
                    odd[lane] = to[k + 2 * lane + 1];
                    to[k + lane] = to[k + 2 * lane];
                }
                memcpy(to + k + LANES, odd, sizeof odd);
            }
    }
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t strip = 0; strip < strips; strip++) {
        int64_t first = strip * TILE, left = m->out - first, end = left < TILE ? m->out : first + TILE;
        REAL *memory = room(8 * (2 * scales + padded) * sizeof(REAL));
        if (!memory) {
            failed = 1;
            continue;
        }
        REAL *scale = m->scales ? memory : NULL, *zero = m->zeros ? memory + 8 * scales : NULL;
        REAL *unpacked = once ? memory + 16 * scales : NULL;
        for (int64_t row = 0; row < rows; row += CHUNK) {
            int count = rows - row < CHUNK ? rows - row : CHUNK;
            for (int64_t o = first; o < end;) {
                int outs = blocked && end - o >= 8 ? 8 : 1;
                if (scale)
                    FN(spread)(scale, m, m->scales, o, outs, blocked, padded);
                if (zero)
                    FN(spread)(zero, m, m->zeros, o, outs, blocked, padded);
                FN(outputs)(m, o, outs, (char *)all + row * padded * item, padded, scale, zero,
                            scales, blocked, unpacked, y, row, count, kind);
                o += outs;
            }
        }
        free(memory);
    }
    free(all);
    return failed;
}

static int FN(multiply)(
    const Matrix *m, const void *x, void *y, int64_t rows, int kind, int threads)
{
    if (m->kind == INT4)
        return FN(by_tiles)(m, x, y, rows, kind, threads);
    return FN(by_rows)(m, x, y, rows, kind, threads);
}
#undef PAIRED
#undef VECTOR
#undef FLOATS
#undef WORDS
#undef INTS
#undef HALVES
