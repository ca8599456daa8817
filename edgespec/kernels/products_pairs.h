/* Rows of bfloat16, two columns at a time, for CPUs that have products of bfloat16.
 *
 * A code of 4 or 8 bits is a bfloat16 number too, so nothing is rounded before the sum; sums are of
 * float.
 */

/* Decided by the processor, the matrix and the type of the rows alone: for all rows or none. Those
 * of Intel have one such unit for two of float: codes took half as long again. */
#define PAIRED(m, kind) \
    ((kind) == BFLOAT16 && (m)->kind == INT4 && (m)->group % 2 == 0 && !__builtin_cpu_is("intel"))

/* Pairs of columns of some rows, [columns / 2, rows], and the sums of each group, [groups, rows]. */
static void pairs_of(const Matrix *m, const uint16_t *x, int64_t rows, uint32_t *to, float *sums)
{
    for (int64_t k = 0; k < m->columns; k += 2, to += rows) {
        float *sum = sums + k / m->group * rows;
        int64_t even = m->order ? m->order[k] : k, odd = m->order ? m->order[k + 1] : k + 1;
        for (int64_t r = 0; r < rows; r++)
            to[r] = x[r * m->columns + even] | (uint32_t)x[r * m->columns + odd] << 16;
        for (int64_t r = 0; r < rows; r++) {
            sum[r] += brain_to_float((uint16_t)to[r]);
            sum[r] += brain_to_float(to[r] >> 16);
        }
    }
}

/* Codes less `middle` as bfloat16, twice: what is looked up by has a fifth bit of no meaning. */
static __m512i code_table(int middle)
{
    uint16_t values[32];
    for (int code = 0; code < 32; code++)
        values[code] = float_to_brain((code & 15) - middle);
    return _mm512_loadu_si512(values);
}

#define FOUR(i) i, i, i + 32, i + 32
static const uint8_t places[64] = {
    FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7),
    FOUR(8), FOUR(9), FOUR(10), FOUR(11), FOUR(12), FOUR(13), FOUR(14), FOUR(15)};
#undef FOUR

/* group_float for pairs, from strip `first` on: x [columns / 2, step]. */
INLINE void group_pairs(
    const int first, const int strips, const int rows, const uint8_t *codes, int64_t columns,
    const uint32_t *x, int64_t step, const float *sums, const FLOATS *scale, const FLOATS *zero,
    __m512i table, float *totals)
{
    FLOATS sum[MOST];
    __m512i place[2]; /* brings an output's codes of both columns side by side */
    for (int s = 0; s < strips; s++)
        place[s] = _mm512_add_epi8(_mm512_loadu_si512(places), _mm512_set1_epi8((first + s) * LANES));
    UNROLL
    for (int i = 0; i < 2 * strips * rows; i++)
        sum[i] = (FLOATS){0};
    for (int64_t k = 0; k < columns / 2; k++) {
        __m512i both = _mm512_loadu_si512(codes + k * TILE);
        UNROLL
        for (int s = 0; s < strips; s++) {
            __m512i words = _mm512_permutexvar_epi8(place[s], both);
            __m512i low = _mm512_permutexvar_epi16(words, table);
            __m512i high = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
            UNROLL
            for (int r = 0; r < rows; r++) {
                __m512bh value = (__m512bh)_mm512_set1_epi32(x[k * step + r]);
                FLOATS *at = sum + (s * rows + r) * 2;
                at[0] = (FLOATS)_mm512_dpbf16_ps((__m512)at[0], (__m512bh)low, value);
                at[1] = (FLOATS)_mm512_dpbf16_ps((__m512)at[1], (__m512bh)high, value);
            }
        }
    }
    add_float(strips, rows, sum, sums, scale + 2 * first, zero + 2 * first, totals + LANES * first);
}

#define GROUP_PAIRS(first, strips, rows) \
    group_pairs(first, strips, rows, codes, m->group, x, step, sums, scale, zero, table, totals)

/* See some_float. */
static int some_pairs(
    const Matrix *m, int rows, const uint8_t *codes, const uint32_t *x, int64_t step,
    const float *sums, const FLOATS *scale, const FLOATS *zero, __m512i table, float *totals)
{
    if (rows >= 8) {
        GROUP_PAIRS(0, 1, 8);
        GROUP_PAIRS(1, 1, 8);
        return 8;
    }
    if (rows >= 4) {
        GROUP_PAIRS(0, 2, 4);
        return 4;
    }
    if (rows >= 2) {
        GROUP_PAIRS(0, 2, 2);
        return 2;
    }
    GROUP_PAIRS(0, 2, 1);
    return 1;
}

/* --- rows of outputs --- */

/* Decided by the matrix and the type of the rows alone, too. */
static int pairs_by_rows(const Matrix *m, int kind)
{
    if (kind != BFLOAT16)
        return 0;
    return m->kind == BFLOAT16
        || (m->kind == INT8 && !m->zeros && (m->group % 32 == 0 || m->group == m->columns)
            && !__builtin_cpu_is("intel"));
}

/* dots_float for pairs: x [rows, padded] are bfloat16 numbers, a group's sum is scaled. */
INLINE void dots_pairs(
    const int kind, const int outs, const int rows, const Matrix *m, int64_t first,
    const uint16_t *x, int64_t padded, const float *scale, float *result, int64_t step)
{
    const int size = kind == INT8 ? 1 : 2;
    const int64_t whole = m->columns / 32 * 32, pitch = m->columns * size;
    const int64_t group = kind == INT8 ? m->group : m->columns, groups = m->columns / group;
    const char *weight = (const char *)m->weight + first * pitch;
    uint16_t rest[8][32]; /* of each output the last columns, as nothing behind them is read */
    __m512 total[16], sum[16];
    if (whole < m->columns) {
        memset(rest, 0, sizeof rest);
        for (int o = 0; o < outs; o++)
            memcpy(rest[o], weight + o * pitch + whole * size, pitch - whole * size);
    }
    UNROLL
    for (int i = 0; i < outs * rows; i++)
        total[i] = sum[i] = _mm512_setzero_ps();
    for (int64_t g = 0, k = 0; g < groups; g++) {
        if (kind == INT8) {
            UNROLL
            for (int i = 0; i < outs * rows; i++)
                sum[i] = _mm512_setzero_ps();
        }
        for (int64_t end = k + group; k < end; k += 32) {
            const char *from = k < whole ? weight + k * size : (const char *)rest;
            const int64_t apart = k < whole ? pitch : (int64_t)sizeof rest[0];
            __m512bh of[4];
            if (k * size % 64 == 0)
                for (int o = 0; o < outs; o++)
                    __builtin_prefetch(weight + (outs + o) * pitch + k * size);
            UNROLL
            for (int r = 0; r < rows; r++)
                of[r] = (__m512bh)_mm512_loadu_si512(x + r * padded + k);
            UNROLL
            for (int o = 0; o < outs; o++) {
                __m512bh w;
                if (kind == INT8) {
                    __m512 low = _mm512_cvtepi32_ps((__m512i)wide_codes_float(from + o * apart));
                    __m512 high = _mm512_cvtepi32_ps((__m512i)wide_codes_float(from + o * apart + LANES));
                    w = _mm512_cvtne2ps_pbh(high, low);
                } else
                    w = (__m512bh)_mm512_loadu_si512(from + o * apart);
                UNROLL
                for (int r = 0; r < rows; r++)
                    sum[o * rows + r] = _mm512_dpbf16_ps(sum[o * rows + r], w, of[r]);
            }
        }
        if (kind == INT8) {
            UNROLL
            for (int o = 0; o < outs; o++) {
                __m512 by = _mm512_set1_ps(scale[o * groups + g]);
                UNROLL
                for (int r = 0; r < rows; r++)
                    total[o * rows + r] = _mm512_fmadd_ps(by, sum[o * rows + r], total[o * rows + r]);
            }
        }
    }
    UNROLL
    for (int o = 0; o < outs; o++)
        UNROLL
        for (int r = 0; r < rows; r++)
            result[r * step + o] =
                _mm512_reduce_add_ps(kind == INT8 ? total[o * rows + r] : sum[o * rows + r]);
}

#define DOTS_PAIRS(kind, outs, rows) \
    dots_pairs(kind, outs, rows, m, first, x, padded, scale, result, step)

/* See shaped_float. */
static void shaped_pairs(
    const Matrix *m, int outs, int rows, int64_t first, const uint16_t *x, int64_t padded,
    const float *scale, float *result, int64_t step)
{
    if (m->kind == INT8) {
        if (rows == 4) { /* half of them, as a group's sums and the totals fill the registers */
            DOTS_PAIRS(INT8, 2, 4);
            first += 2, result += 2, scale += 2 * (m->columns / m->group);
            DOTS_PAIRS(INT8, 2, 4);
        } else if (rows == 2)
            DOTS_PAIRS(INT8, 4, 2);
        else if (outs == 8)
            DOTS_PAIRS(INT8, 8, 1);
        else
            DOTS_PAIRS(INT8, 1, 1);
    } else if (rows == 4)
        DOTS_PAIRS(BFLOAT16, 4, 4);
    else if (rows == 2)
        DOTS_PAIRS(BFLOAT16, 4, 2);
    else if (outs == 8)
        DOTS_PAIRS(BFLOAT16, 8, 1);
    else
        DOTS_PAIRS(BFLOAT16, 1, 1);
}
