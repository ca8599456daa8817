/* Products of rows by matrices, x Wt + bias, each row with the same sums whatever is beside it.
 *
 * A result is one sum in one order, in float (double for rows of float64), rounded once to the type
 * of the rows. How many rows there are, where a row stands among them and how many threads work
 * decides which loop runs, never what is added to what: every loop does the same multiplications
 * and additions for a row. docs/arithmetic.md says in which order. Compiled without -ffast-math, so
 * the compiler may not choose another.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define PAIRS /* products of two bfloat16 columns at a time: twice as many as of float */
#endif

#define LANES 16 /* of every vector here, whatever the CPU has: it is part of the order of sums */
#define TILE 64  /* outputs of a tile; a column of it is 32 bytes */
#define AHEAD 6  /* groups of a tile whose scales are on their way */
#define CHUNK 32 /* rows that are multiplied by a tile at a time */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT8, NF4, INT4 };

typedef struct {
    const void *weight;    /* [out, columns]; NF4: [out, columns / 2]; INT4: [tiles, columns, 32] */
    const void *scales;    /* [out, groups]; INT4: [groups, tiles * 64, 2], with zeros; NULL: none */
    const void *zeros;     /* [out, groups] or NULL */
    const int32_t *order;  /* [columns]: which column of a row each stored one is for; or NULL */
    const void *bias;      /* [out], float, or double for rows of float64; or NULL */
    const float *levels;   /* NF4: its 16 values */
    int64_t out, columns, group;
    int32_t kind, scale_kind, middle; /* INT4: a code less `middle` is what is scaled */
} Matrix;

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef double Doubles __attribute__((vector_size(8 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t Codes __attribute__((vector_size(LANES)));
typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

/* A vector from any address. */
#define LOAD(type, from) ({ type loaded_; memcpy(&loaded_, (from), sizeof loaded_); loaded_; })

/* Wider whole numbers. In one instruction, which GCC 12 does not find by itself: one row by 4-bit
 * tiles took four times as long. */
INLINE Words wide_bytes(const void *from)
{
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(from));
#else
    return __builtin_convertvector(__builtin_convertvector(LOAD(Bytes, from), Halves), Words);
#endif
}

INLINE Ints wide_codes(const void *from)
{
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(from));
#else
    return __builtin_convertvector(__builtin_convertvector(LOAD(Codes, from), Shorts), Ints);
#endif
}

INLINE Words wide_halves(const void *from)
{
    return __builtin_convertvector(LOAD(Halves, from), Words);
}

static void *room(size_t size)
{
    return aligned_alloc(64, (size + 63) & ~(size_t)63);
}

INLINE Floats widened_brain(Words low)
{
    return (Floats)(low << 16);
}

/* float16 in the low half of each word; exact, subnormal numbers too. */
INLINE Floats widened_half(Words low)
{
    Words magnitude = (low & 0x7fff) << 13;
    Floats value = (Floats)magnitude * 0x1p112f;
    Words infinite = (Words)(magnitude >= 0x0f800000); /* infinity and NaN keep their meaning */
    Words bits = ((Words)value & ~infinite) | ((magnitude | 0x7f800000) & infinite);
    return (Floats)(bits | (low & 0x8000) << 16);
}

INLINE float half_to_float(uint16_t half)
{
    Words low = {half};
    return widened_half(low)[0];
}

INLINE float brain_to_float(uint16_t brain)
{
    uint32_t bits = (uint32_t)brain << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* To the nearest, ties to even. */
INLINE uint16_t float_to_brain(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value)
        return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE Halves floats_to_brains(Floats values)
{
    Words bits = (Words)values, strange = (Words)(values != values);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector((bits & ~strange) | (strange & 0x7fc0), Halves);
}

INLINE uint16_t float_to_half(float value)
{
    uint32_t bits, sign;
    memcpy(&bits, &value, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000)
        return sign | 0x7e00;
    if (bits >= 0x47800000) /* 65536 and more; what is between it and the greatest carries below */
        return sign | 0x7c00;
    if (bits < 0x38800000) { /* subnormal: adding 0.5 leaves the rounded bits at the end */
        float small;
        memcpy(&small, &bits, 4);
        small += 0.5f;
        memcpy(&bits, &small, 4);
        return sign | (bits - 0x3f000000);
    }
    return sign | ((bits + 0xc8000fff + (bits >> 13 & 1)) >> 13);
}

#define REAL float
#define VECTOR Floats
#define FN(name) name##_float
#include "products_body.h"
#undef REAL
#undef VECTOR
#undef FN

#define REAL double
#define VECTOR Doubles
#define FN(name) name##_double
#define DOUBLE
#include "products_body.h"

/* y [rows, out] = x [rows, columns] Wt + bias, both of `kind`. 0, or 1 if memory ran out. */
int multiply(const Matrix *matrix, const void *x, void *y, int64_t rows, int kind, int threads)
{
    if (kind == FLOAT64)
        return multiply_double(matrix, x, y, rows, kind, threads);
    return multiply_float(matrix, x, y, rows, kind, threads);
}
