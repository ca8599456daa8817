/* Products of rows by matrices, x Wt + bias, each row with the same sums whatever is beside it.
 *
 * A result is one sum in one order, in float (double for rows of float64), rounded once to the type
 * of the rows. How many rows there are, where a row stands among them and how many threads work
 * decides which loop runs, never what is added to what: every loop does the same multiplications
 * and additions for a row. docs/arithmetic.md says in which order. Compiled without -ffast-math, so
 * the compiler may not choose another.
 */
#include <stdlib.h>
#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "numbers.h"

/* Bytes of this CPU's vectors, and how many of them it holds: GCC keeps wider ones in memory. No
 * result depends on either. */
#if defined(__AVX512F__)
#define NATIVE 64
#elif defined(__AVX2__)
#define NATIVE 32
#else
#define NATIVE 16
#endif
#if defined(__AVX512F__) || !defined(__x86_64__)
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define PAIRS /* products of two bfloat16 columns at a time: twice as many as of float */
#endif

#define LANES 16 /* columns of an output that are summed side by side: part of the order of sums */
#define TILE 64  /* outputs of a tile; a column of it is 32 bytes */
#define AHEAD 6  /* groups of a tile whose scales are on their way */
#define MANY (NATIVE > 32 ? 12 : 8) /* rows for which it pays to unpack weights once */
#define FEW 12 /* rows of a tile for which it pays */
#define LONGEST 256 /* columns of a group that are unpacked: more do not stay near */
#define CHUNK 32 /* rows that are multiplied by a tile at a time */
#define MOST (REGISTERS / 2) /* vectors of sums at a time: the others hold what is added */
#define UNROLL _Pragma("GCC unroll 32")

enum { INT8 = CODED, NF4, INT4, FP8 }; /* kinds of matrices beside those of numbers */

typedef struct {
    const void *weight;    /* [out, columns]; NF4: [out, columns / 2]; INT4: [tiles, columns, 32] */
    const void *scales;    /* [out, groups]; INT4: [groups, tiles * 64, 2], with zeros; NULL: none */
    const void *zeros;     /* [out, groups] or NULL */
    const int32_t *order;  /* [columns]: which column of a row each stored one is for; or NULL */
    const void *bias;      /* [out], float, or double for rows of float64; or NULL */
    const float *levels;   /* NF4: the 16 values of its codes, or of any others of 4 bits */
    int64_t out, columns, group;
    int32_t kind, scale_kind, middle; /* INT4: a code less `middle` is what is scaled */
} Matrix;

/* A vector from any address. */
#define LOAD(type, from) ({ type loaded_; memcpy(&loaded_, (from), sizeof loaded_); loaded_; })

static void *room(size_t size)
{
    return aligned_alloc(64, (size + 63) & ~(size_t)63);
}

#define REAL float
#define WIDTH (NATIVE / 4)
#define FN(name) name##_float
#include "products_body.h"
#undef REAL
#undef WIDTH
#undef FN

#define REAL double
#define WIDTH (NATIVE / 8)
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

/* The same of `count` matrices of one shape, each for rows of its own: y [count, rows, out], x [count,
 * rows, columns]. */
int multiply_each(const Matrix *const *matrices, int64_t count, const char *x, char *y, int64_t rows,
                  int kind, int threads)
{
    int64_t size = kind == FLOAT64 ? 8 : kind == FLOAT32 ? 4 : 2;
    int64_t in = rows * matrices[0]->columns * size, out = rows * matrices[0]->out * size;
    int failed = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
    for (int64_t i = 0; i < count; i++)
        failed |= multiply(matrices[i], x + i * in, y + i * out, rows, kind, 1);
    return failed;
}
