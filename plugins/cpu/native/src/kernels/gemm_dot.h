// The integer dot product of a slice (16 rows x 4 columns of codes) with 4 activations, in each variant's instructions.
//
//   Slice    64 codes of a panel: byte row * 4 + column
//   Signed   a slice made ready to be multiplied as signed numbers
//   Quad     4 activations, for every row
//   Small    sums of 4 slices for unsigned codes below 16, or below 65 that stand for codes up to 32 in size
//   Wide     sums of 4 slices for signed codes
//
// All sums are exact, so that how they are grouped changes nothing. Codes stored less a base start their sums with base * sum
// of the activations. Where sums are 16-bit they wrap around on the way and still end right: a lane adds up 8 products, and
// 8 * 32 * 127 fits 16 bits, as do the two products, 2 * 64 * 127, that an instruction adds up with saturation.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "../simd.h"
#include "../weight.h"

// GCC moves all products ahead of the sums and then spills; naming each sum as changed keeps them in order.
#if defined(__x86_64__)
#define HP_KEEP(v) asm("" : "+x"(v))
#endif

HP_BEGIN

constexpr int kVectors = kRows / W;  // float vectors that hold a number of each row
// How far loops over slices, columns and vectors are unrolled.
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int kUnroll = 8;
#else
constexpr int kUnroll = 2;
#endif

#if defined(__AVX512F__)

constexpr int kTile = 8;  // columns of activations that one pass over a panel serves
struct Slice { __m512i v; };
struct Signed { __m512i size; __m512i v; __mmask64 negative; };
struct Quad { __m512i v; };
struct Small { __m512i v; };
struct Wide { __m512i v; };

static inline Slice load_slice(const uint8_t *p) { return {_mm512_loadu_si512(p)}; }
static inline Slice low_nibbles(Slice s) { return {_mm512_and_si512(s.v, _mm512_set1_epi8(15))}; }
static inline Slice high_nibbles(Slice s) { return {_mm512_and_si512(_mm512_srli_epi16(s.v, 4), _mm512_set1_epi8(15))}; }
static inline Slice look_up(Slice s, const int8_t *table) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), s.v)};
}
// nibbles | bit `at` of `high`
static inline Slice join5(Slice nibbles, Slice high, int at) {
  const __m512i moved = at < 4 ? _mm512_slli_epi16(high.v, (unsigned)(4 - at)) : _mm512_srli_epi16(high.v, (unsigned)(at - 4));
  return {_mm512_or_si512(nibbles.v, _mm512_and_si512(moved, _mm512_set1_epi8(0x10)))};
}
// nibbles | two bits of `high` from bit 2 * at
static inline Slice join6(Slice nibbles, Slice high, int at) {
  const __m512i moved = at == 0   ? _mm512_slli_epi16(high.v, 4)
                        : at == 1 ? _mm512_slli_epi16(high.v, 2)
                        : at == 2 ? high.v
                                  : _mm512_srli_epi16(high.v, 2);
  return {_mm512_or_si512(nibbles.v, _mm512_and_si512(moved, _mm512_set1_epi8(0x30)))};
}
static inline void store_slice(uint8_t *p, Slice s) { _mm512_storeu_si512(p, s.v); }
static inline Signed as_signed(Slice s) { return {_mm512_abs_epi8(s.v), s.v, _mm512_movepi8_mask(s.v)}; }
static inline Quad load_quad(const int8_t *x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return {_mm512_set1_epi32(four)};
}
static inline void clear(Small &a) { a.v = _mm512_setzero_si512(); }
static inline void start(Small &a, const float *from) { a.v = load_quad((const int8_t *)from).v; }
static inline void clear(Wide &a) { a.v = _mm512_setzero_si512(); }
static inline __m512i signed_quad(Signed s, Quad x) {
  return _mm512_mask_sub_epi8(x.v, s.negative, _mm512_setzero_si512(), x.v);
}
#if defined(__AVX512VNNI__)
static inline void add(Small &a, Slice s, Quad x) { a.v = _mm512_dpbusd_epi32(a.v, s.v, x.v); }
static inline void add(Wide &a, Signed s, Quad x) { a.v = _mm512_dpbusd_epi32(a.v, s.size, signed_quad(s, x)); }
static inline void widen(Small a, vf *out) { out[0] = (vf)_mm512_cvtepi32_ps(a.v); }
#else
static inline void add(Small &a, Slice s, Quad x) {
  a.v = _mm512_add_epi16(a.v, _mm512_maddubs_epi16(s.v, x.v));
  HP_KEEP(a.v);
}
static inline void add(Wide &a, Signed s, Quad x) {
  const __m512i pairs = _mm512_maddubs_epi16(s.size, signed_quad(s, x));
  a.v = _mm512_add_epi32(a.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  HP_KEEP(a.v);
}
static inline void widen(Small a, vf *out) {
  out[0] = (vf)_mm512_cvtepi32_ps(_mm512_madd_epi16(a.v, _mm512_set1_epi16(1)));
}
#endif
static inline void widen(Wide a, vf *out) { out[0] = (vf)_mm512_cvtepi32_ps(a.v); }

#elif defined(__AVX2__)

constexpr int kTile = 4;
struct Slice { __m256i v[2]; };
struct Signed { __m256i size[2], v[2]; };
struct Quad { __m256i v; };
struct Small { __m256i v[2]; };  // 16-bit sums, two per row
struct Wide { __m256i v[2]; };   // 32-bit sums

static inline Slice load_slice(const uint8_t *p) {
  return {{_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))}};
}
static inline __m256i nibble_mask() { return _mm256_set1_epi8(15); }
static inline Slice low_nibbles(Slice s) {
  return {{_mm256_and_si256(s.v[0], nibble_mask()), _mm256_and_si256(s.v[1], nibble_mask())}};
}
static inline Slice high_nibbles(Slice s) {
  return {{_mm256_and_si256(_mm256_srli_epi16(s.v[0], 4), nibble_mask()),
           _mm256_and_si256(_mm256_srli_epi16(s.v[1], 4), nibble_mask())}};
}
static inline Slice look_up(Slice s, const int8_t *table) {
  const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
  return {{_mm256_shuffle_epi8(t, s.v[0]), _mm256_shuffle_epi8(t, s.v[1])}};
}
static inline __m256i join5_part(__m256i nibbles, __m256i high, int at) {
  const __m256i moved = at < 4 ? _mm256_slli_epi16(high, 4 - at) : _mm256_srli_epi16(high, at - 4);
  return _mm256_or_si256(nibbles, _mm256_and_si256(moved, _mm256_set1_epi8(0x10)));
}
static inline Slice join5(Slice nibbles, Slice high, int at) {
  return {{join5_part(nibbles.v[0], high.v[0], at), join5_part(nibbles.v[1], high.v[1], at)}};
}
static inline __m256i join6_part(__m256i nibbles, __m256i high, int at) {
  const __m256i moved = at == 0   ? _mm256_slli_epi16(high, 4)
                        : at == 1 ? _mm256_slli_epi16(high, 2)
                        : at == 2 ? high
                                  : _mm256_srli_epi16(high, 2);
  return _mm256_or_si256(nibbles, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
}
static inline Slice join6(Slice nibbles, Slice high, int at) {
  return {{join6_part(nibbles.v[0], high.v[0], at), join6_part(nibbles.v[1], high.v[1], at)}};
}
static inline void store_slice(uint8_t *p, Slice s) {
  _mm256_storeu_si256((__m256i *)p, s.v[0]);
  _mm256_storeu_si256((__m256i *)(p + 32), s.v[1]);
}
static inline Signed as_signed(Slice s) {
  return {{_mm256_abs_epi8(s.v[0]), _mm256_abs_epi8(s.v[1])}, {s.v[0], s.v[1]}};
}
static inline Quad load_quad(const int8_t *x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return {_mm256_set1_epi32(four)};
}
static inline void clear(Small &a) { a.v[0] = a.v[1] = _mm256_setzero_si256(); }
static inline void start(Small &a, const float *from) { a.v[0] = a.v[1] = load_quad((const int8_t *)from).v; }
static inline void clear(Wide &a) { a.v[0] = a.v[1] = _mm256_setzero_si256(); }
static inline void add(Small &a, Slice s, Quad x) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    a.v[h] = _mm256_add_epi16(a.v[h], _mm256_maddubs_epi16(s.v[h], x.v));
    HP_KEEP(a.v[h]);
  }
}
static inline void add(Wide &a, Signed s, Quad x) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    // |w| * (x with w's sign): 2 * 128 * 127 fits 16 bits
    const __m256i pairs = _mm256_maddubs_epi16(s.size[h], _mm256_sign_epi8(x.v, s.v[h]));
    a.v[h] = _mm256_add_epi32(a.v[h], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    HP_KEEP(a.v[h]);
  }
}
static inline void widen(Small a, vf *out) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) out[h] = (vf)_mm256_cvtepi32_ps(_mm256_madd_epi16(a.v[h], _mm256_set1_epi16(1)));
}
static inline void widen(Wide a, vf *out) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) out[h] = (vf)_mm256_cvtepi32_ps(a.v[h]);
}

#elif defined(__ARM_FEATURE_DOTPROD)

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kTile = 8;  // in pairs: gemm_matrix.h
#else
constexpr int kTile = 4;
#endif
struct Slice { int8x16_t v[4]; };
struct Signed { int8x16_t v[4]; };
struct Quad { int8x16_t v; };
struct Small { int32x4_t v[4]; };
struct Wide { int32x4_t v[4]; };

static inline Slice load_slice(const uint8_t *p) {
  Slice s;
  for (int q = 0; q < 4; q++) s.v[q] = vld1q_s8((const int8_t *)p + 16 * q);
  return s;
}
static inline Slice low_nibbles(Slice s) {
  for (int q = 0; q < 4; q++) s.v[q] = vandq_s8(s.v[q], vdupq_n_s8(15));
  return s;
}
static inline Slice high_nibbles(Slice s) {
  for (int q = 0; q < 4; q++) s.v[q] = vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(s.v[q]), 4));
  return s;
}
static inline Slice look_up(Slice s, const int8_t *table) {
  const int8x16_t t = vld1q_s8(table);
  for (int q = 0; q < 4; q++) s.v[q] = vqtbl1q_s8(t, vreinterpretq_u8_s8(s.v[q]));
  return s;
}
// nibbles | the bits of `mask` of `high`, moved by `by` first
static inline Slice join(Slice nibbles, Slice high, int by, int mask) {
  const int8x16_t shift = vdupq_n_s8((int8_t)by);
  for (int q = 0; q < 4; q++) {
    const uint8x16_t moved = vandq_u8(vshlq_u8(vreinterpretq_u8_s8(high.v[q]), shift), vdupq_n_u8((uint8_t)mask));
    nibbles.v[q] = vorrq_s8(nibbles.v[q], vreinterpretq_s8_u8(moved));
  }
  return nibbles;
}
static inline Slice join5(Slice nibbles, Slice high, int at) { return join(nibbles, high, 4 - at, 0x10); }
static inline Slice join6(Slice nibbles, Slice high, int at) { return join(nibbles, high, 4 - 2 * at, 0x30); }
static inline void store_slice(uint8_t *p, Slice s) {
  for (int q = 0; q < 4; q++) vst1q_s8((int8_t *)p + 16 * q, s.v[q]);
}
static inline Signed as_signed(Slice s) { return {{s.v[0], s.v[1], s.v[2], s.v[3]}}; }
static inline Quad load_quad(const int8_t *x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return {vreinterpretq_s8_s32(vdupq_n_s32(four))};
}
static inline void clear(Small &a) { for (int q = 0; q < 4; q++) a.v[q] = vdupq_n_s32(0); }
static inline void start(Small &a, const float *from) {
  const int32x4_t all = vreinterpretq_s32_s8(load_quad((const int8_t *)from).v);
  for (int q = 0; q < 4; q++) a.v[q] = all;
}
static inline void clear(Wide &a) { for (int q = 0; q < 4; q++) a.v[q] = vdupq_n_s32(0); }
static inline void add(Small &a, Slice s, Quad x) {
  for (int q = 0; q < 4; q++) a.v[q] = vdotq_s32(a.v[q], s.v[q], x.v);
}
static inline void add(Wide &a, Signed s, Quad x) {
  for (int q = 0; q < 4; q++) a.v[q] = vdotq_s32(a.v[q], s.v[q], x.v);
}
static inline void widen(Small a, vf *out) { for (int q = 0; q < 4; q++) out[q] = (vf)vcvtq_f32_s32(a.v[q]); }
static inline void widen(Wide a, vf *out) { for (int q = 0; q < 4; q++) out[q] = (vf)vcvtq_f32_s32(a.v[q]); }

#else

// Vectors of 16 bytes: four rows each.
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef uint8_t Unsigned __attribute__((vector_size(16)));
typedef int16_t Words __attribute__((vector_size(16)));
constexpr int kParts4 = 4;

constexpr int kTile = 4;
struct Slice { Bytes v[kParts4]; };
struct Signed { Words even[kParts4], odd[kParts4]; };  // columns 0 and 2, columns 1 and 3 of each row
struct Quad { Words even, odd; };
struct Small { vi v[kParts4]; };
struct Wide { vi v[kParts4]; };

static inline Slice load_slice(const uint8_t *p) { Slice s; std::memcpy(s.v, p, sizeof s.v); return s; }
static inline Slice low_nibbles(Slice s) {
  for (Bytes &v : s.v) v = v & 15;
  return s;
}
static inline Slice high_nibbles(Slice s) {
  for (Bytes &v : s.v) v = (Bytes)((Unsigned)v >> 4);
  return s;
}
// No vector instruction does this everywhere; called rather than unrolled, which would take compilers minutes.
__attribute__((noinline, unused)) static Slice look_up(Slice s, const int8_t *table) {
  int8_t codes[kSliceBytes];
  std::memcpy(codes, s.v, sizeof codes);
  for (int8_t &code : codes) code = table[code];
  std::memcpy(s.v, codes, sizeof codes);
  return s;
}
// nibbles | bits of `high` from bit `from`
static inline Slice join(Slice nibbles, Slice high, int from, int mask) {
  for (int q = 0; q < kParts4; q++)
    nibbles.v[q] = nibbles.v[q] | (Bytes)((((Unsigned)high.v[q] >> from) & (uint8_t)mask) << 4);
  return nibbles;
}
static inline Slice join5(Slice nibbles, Slice high, int at) { return join(nibbles, high, at, 1); }
static inline Slice join6(Slice nibbles, Slice high, int at) { return join(nibbles, high, 2 * at, 3); }
static inline void store_slice(uint8_t *p, Slice s) { std::memcpy(p, s.v, sizeof s.v); }
static inline Signed as_signed(Slice s) {
  Signed out;
  for (int q = 0; q < kParts4; q++) {
    out.even[q] = ((Words)s.v[q] << 8) >> 8;
    out.odd[q] = (Words)s.v[q] >> 8;
  }
  return out;
}
static inline Quad load_quad(const int8_t *x) {
  const vi even = splat_int((int32_t)((uint32_t)(uint16_t)x[0] | (uint32_t)(uint16_t)x[2] << 16));
  const vi odd = splat_int((int32_t)((uint32_t)(uint16_t)x[1] | (uint32_t)(uint16_t)x[3] << 16));
  return {(Words)even, (Words)odd};
}
static inline void clear(Small &a) { for (vi &v : a.v) v = vi{}; }
static inline void start(Small &a, const float *from) {
  int32_t sum;
  std::memcpy(&sum, from, 4);
  for (vi &v : a.v) v = splat_int(sum);
}
static inline void clear(Wide &a) { for (vi &v : a.v) v = vi{}; }
// Sums of neighbouring products.
static inline vi pairs(Words a, Words b) {
#if defined(__SSE2__)
  return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const vi low = (((vi)a << 16) >> 16) * (((vi)b << 16) >> 16);
  return low + ((vi)a >> 16) * ((vi)b >> 16);
#endif
}
static inline void add(vi *sums, const Signed &s, const Quad &x) {
  for (int q = 0; q < kParts4; q++) sums[q] = sums[q] + pairs(s.even[q], x.even) + pairs(s.odd[q], x.odd);
}
static inline void add(Wide &a, Signed s, Quad x) { add(a.v, s, x); }
static inline void add(Small &a, Slice s, Quad x) { add(a.v, as_signed(s), x); }
static inline void widen(Small a, vf *out) { for (int q = 0; q < kParts4; q++) out[q] = to_float(a.v[q]); }
static inline void widen(Wide a, vf *out) { for (int q = 0; q < kParts4; q++) out[q] = to_float(a.v[q]); }

#endif

// What sums of a half's 16 activations `x` with codes less `base` start from, as `start` reads it.
static inline int32_t start_of(const int8_t *x, int32_t base) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  // 16-bit: the first two columns of each slice, the last two
  __m128i sums = _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128((const __m128i *)x));
  sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0x4e));
  sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0xb1));
  return _mm_cvtsi128_si32(_mm_mullo_epi16(sums, _mm_set1_epi16((int16_t)base)));
#else
  int32_t sum = 0;
  for (int k = 0; k < kBlock / 2; k++) sum += x[k];
  return base * sum;
#endif
}

HP_END
