// Vectors of float32 through the compiler's own vector types, so that one source serves every variant.
// Include only from files compiled per variant.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // in GCC 12's own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "kernels.h"

HP_BEGIN

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));

static inline vf load(const float *p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, vf v) { std::memcpy(p, &v, sizeof v); }
static inline vf splat(float x) { return x - vf{}; }  // x + 0 would be computed, for the sake of -0
static inline vi splat_int(int32_t x) { return vi{} + x; }
static inline vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
// One instruction each; where either is not a number, the result is b.
static inline vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
  return select(a > b, a, b);
#endif
}
static inline vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (vf)_mm_min_ps((__m128)a, (__m128)b);
#else
  return select(a < b, a, b);
#endif
}
// The first n < W numbers, zeros behind them; nothing past p + n is touched.
static inline vf load_part(const float *p, int n) {
  vf v{};
  std::memcpy(&v, p, sizeof(float) * (std::size_t)n);
  return v;
}
static inline void store_part(float *p, vf v, int n) { std::memcpy(p, &v, sizeof(float) * (std::size_t)n); }

// a * b + c in one rounding where the variant has it. The order of sums is the source's: no reassociation.
static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The lanes' sum, pairwise: ((0+4)+(2+6))+((1+5)+(3+7)) and its kin. The lanes' maximum.
#if defined(__AVX2__)
static inline __m256 low_and_high(vf v, __m256 (*join)(__m256, __m256)) {
#if defined(__AVX512F__)
  return join(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
  (void)join;
  return (__m256)v;
#endif
}
static inline float sum(vf v) {
  const __m256 eight = low_and_high(v, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float max_lane(vf v) {
  const __m256 eight = low_and_high(v, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
static inline float sum(vf v) {
  float lanes[W];
  store(lanes, v);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}
static inline float max_lane(vf v) {
  float lanes[W];
  store(lanes, v);
  float best = lanes[0];
  for (int i = 1; i < W; i++) best = lanes[i] > best ? lanes[i] : best;
  return best;
}
#endif

static inline vi round_to_int(vf x) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
  return (vi)_mm_cvtps_epi32((__m128)x);
#elif defined(__ARM_NEON)
  return (vi)vcvtnq_s32_f32((float32x4_t)x);
#else
  vi out;
  for (int k = 0; k < W; k++) out[k] = (int32_t)std::nearbyintf(x[k]);
  return out;
#endif
}
static inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }

// e^x, relative error below 2^-22 (Cephes polynomial); 0 below -87, finite above 88, NaN for NaN.
static inline vf vexp(vf x) {
  const vi tiny = x < splat(-87.f);
  x = vmin(splat(88.f), vmax(splat(-87.f), x));
  const vi n = round_to_int(x * splat(1.44269504f));
  const vf nf = to_float(n);
  vf r = fma(nf, splat(-0.693359375f), x);
  r = fma(nf, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.f));
  const vf scaled = p * (vf)((n + splat_int(127)) << 23);
  return select(tiny, vf{}, scaled);
}
static inline float exp1(float x) { return vexp(splat(x))[0]; }

static inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16;
  uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
  if (exponent == 31) bits = sign | 0x7f800000 | (mantissa << 13);
  else if (exponent) bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  else {
    float value = (float)mantissa * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
#endif
}
static inline uint16_t float_to_half(float x) {
#if defined(__F16C__)
  return (uint16_t)_cvtss_sh(x, 0);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x47800000) return sign | 0x7c00;
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  if (bits < 0x38800000) return sign | (uint16_t)std::nearbyintf(magnitude * 16777216.f);
  const uint32_t odd = (bits >> 13) & 1;
  return sign | (uint16_t)((bits + 0xfff + odd - 0x38000000) >> 13);
#endif
}
static inline float bf16_to_float(uint16_t h) {
  const uint32_t bits = (uint32_t)h << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
static inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 64);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// W numbers of a cache or weight row as float32, and back. Half: round to nearest even.
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));

static inline vf load_half(const uint16_t *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  vh h;
  std::memcpy(&h, p, sizeof h);
  const vu wide = __builtin_convertvector(h, vu);
  const vf magnitude = (vf)((wide & 0x7fff) << 13) * splat(5.192296858534828e33f);  // 2^112 moves the exponent
  const vu special = (vu)((wide & 0x7c00) == 0x7c00) & 0x7f800000;                   // infinity, NaN
  return (vf)((vu)magnitude | special | ((wide & 0x8000) << 16));
#endif
}
static inline void store_half(uint16_t *p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, 0));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, 0));
#elif defined(__aarch64__)
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#else
  for (int k = 0; k < W; k++) p[k] = float_to_half(v[k]);
#endif
}
static inline vf load_bf16(const uint16_t *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
  vh h;
  std::memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
static inline void store_bf16(uint16_t *p, vf v) {
  const vu bits = (vu)v;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vu nan = (bits >> 16) | 64;
  const vh h = __builtin_convertvector((vu)select(v != v, (vf)nan, (vf)rounded), vh);
  std::memcpy(p, &h, sizeof h);
}
static inline vf load_int8(const int8_t *p) {
#if defined(__AVX512F__)
  return to_float((vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
  return to_float((vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  typedef int8_t vb __attribute__((vector_size(W)));
  vb b;
  std::memcpy(&b, p, sizeof b);
  return to_float(__builtin_convertvector(b, vi));
#endif
}

HP_END
