/* Types of numbers; those of 16 bits as floats, and back: exactly, or to the nearest, of two to the
 * even one. CODED ones are those of model.row_codes. */
#include <stdint.h>
#include <string.h>

enum { FLOAT32, FLOAT16, BFLOAT16, FLOAT64, CODED };

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Subnormal numbers too. */
INLINE float half_to_float(uint16_t half)
{
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    uint32_t bits = bits_of(float_of(magnitude) * 0x1p112f);
    bits |= magnitude >= 0x0f800000 ? 0x7f800000 : 0; /* infinity and NaN keep their meaning */
    return float_of(bits | (uint32_t)(half & 0x8000) << 16);
}

INLINE float brain_to_float(uint16_t brain)
{
    return float_of((uint32_t)brain << 16);
}

INLINE uint16_t float_to_half(float value)
{
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    uint32_t usual = (bits + 0xc8000fff + (bits >> 13 & 1)) >> 13;
    uint32_t small = bits_of(float_of(bits) + 0.5f) - 0x3f000000; /* rounds at the last place */
    uint32_t large = bits > 0x7f800000 ? 0x7e00 : 0x7c00; /* from 65536 on; 65520 carries */
    return (uint16_t)(sign | (bits < 0x38800000 ? small : bits >= 0x47800000 ? large : usual));
}

INLINE uint16_t float_to_brain(float value)
{
    uint32_t bits = bits_of(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
