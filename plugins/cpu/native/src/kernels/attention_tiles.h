// The two products of attention, on tiles that stay in registers.
//
//     dots:  scores[r][k]  = q[r] . key[k]                lanes are columns; lanes are summed pairwise at the end
//     mix:   out[r][..]   += sum of p[r][k] * value[k]    keys in ascending order, one accumulator per column
//
// A score's or an output's operations and their order are the same in every tile shape, which makes results
// independent of which rows share a tile. Keys and values are found through pointers, one per key, so that pages and
// converted copies look alike. Widths are multiples of W: copies are padded with zeros.
#pragma once

#include <type_traits>

#include "../simd.h"

HP_BEGIN

// How numbers of a cache are read as float32: conversions are exact, so a copy gives the same results.
struct Float32 {
  using type = float;
  static vf at(const float *p) { return load(p); }
  static float one(float x) { return x; }
  static void put(float *p, vf v) { store(p, v); }
  static float put_one(float x) { return x; }
};
struct Float16 {
  using type = uint16_t;
  static vf at(const uint16_t *p) { return load_half(p); }
  static float one(uint16_t x) { return half_to_float(x); }
  static void put(uint16_t *p, vf v) { store_half(p, v); }
  static uint16_t put_one(float x) { return float_to_half(x); }
};
struct Brain16 {
  using type = uint16_t;
  static vf at(const uint16_t *p) { return load_bf16(p); }
  static float one(uint16_t x) { return bf16_to_float(x); }
  static void put(uint16_t *p, vf v) { store_bf16(p, v); }
  static uint16_t put_one(float x) { return float_to_bf16(x); }
};
struct Int8 {
  using type = int8_t;
  static vf at(const int8_t *p) { return load_int8(p); }
  static float one(int8_t x) { return (float)x; }
};

// Rows in one tile: 3 x 4 accumulators fill 16 registers, 4 x 4 half of 32.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 4;
#else
constexpr int kTileRows = 3;
#endif

static inline int64_t padded(int64_t width) { return (width + W - 1) / W * W; }

// out = the sums of the lanes of a, b, c and d, in the order of sum().
static inline void sum4(vf a, vf b, vf c, vf d, float *out) {
#if defined(__AVX2__)
  const auto add = [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); };
  const __m256 a8 = low_and_high(a, add), b8 = low_and_high(b, add), c8 = low_and_high(c, add),
               d8 = low_and_high(d, add);
  // Half of the shuffles are blends, which every port takes; a + b = b + a.
  // ac = a0 a1 a2 a3 | c0 c1 c2 c3, where a0 stands for lanes 0 + 4
  const __m256 ac = _mm256_add_ps(_mm256_blend_ps(a8, c8, 0xf0), _mm256_permute2f128_ps(a8, c8, 0x21));
  const __m256 bd = _mm256_add_ps(_mm256_blend_ps(b8, d8, 0xf0), _mm256_permute2f128_ps(b8, d8, 0x21));
  const __m256 two = _mm256_add_ps(_mm256_blend_ps(ac, bd, 0xcc), _mm256_shuffle_ps(ac, bd, 0x4e));
  const __m128 low = _mm256_castps256_ps128(two), high = _mm256_extractf128_ps(two, 1);
  _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(low, high, 0x88), _mm_shuffle_ps(low, high, 0xdd)));
#else
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}

// Loops over a tile are unrolled whole, or accumulators would live in memory.
#define HP_UNROLL _Pragma("GCC unroll 8")

// out[r * out_stride + k] = q[r] . keys[k] for R rows and N keys (a multiple of 4).
template <class Number, int R, int N>
__attribute__((always_inline)) static inline void dots(const float *q, int64_t q_stride,
                                                       const typename Number::type *const *keys, int64_t width,
                                                       float *out, int64_t out_stride) {
  vf total[R][N];
  HP_UNROLL for (int r = 0; r < R; r++) HP_UNROLL for (int k = 0; k < N; k++) total[r][k] = vf{};
  for (int64_t i = 0; i < width; i += W) {
    vf row[R];
    HP_UNROLL for (int r = 0; r < R; r++) row[r] = load(q + r * q_stride + i);
    HP_UNROLL for (int k = 0; k < N; k++) {
      const vf key = Number::at(keys[k] + i);
      HP_UNROLL for (int r = 0; r < R; r++) total[r][k] = fma(row[r], key, total[r][k]);
    }
  }
  HP_UNROLL for (int r = 0; r < R; r++) HP_UNROLL for (int k = 0; k < N; k += 4)
      sum4(total[r][k], total[r][k + 1], total[r][k + 2], total[r][k + 3], out + r * out_stride + k);
}

template <class Number, int R, int N>
__attribute__((always_inline)) static inline void mix_columns(const float *p, int64_t p_stride,
                                                              const typename Number::type *const *values, int begin,
                                                              int end, int64_t column, float *out, int64_t out_stride) {
  vf total[R][N];
  HP_UNROLL for (int r = 0; r < R; r++) HP_UNROLL for (int n = 0; n < N; n++)
      total[r][n] = load(out + r * out_stride + column + n * W);
  for (int k = begin; k < end; k++) {
    const typename Number::type *value = values[k] + column;
    vf share[R];
    HP_UNROLL for (int r = 0; r < R; r++) share[r] = splat(p[r * p_stride + k]);
    HP_UNROLL for (int n = 0; n < N; n++) {
      const vf v = Number::at(value + n * W);
      HP_UNROLL for (int r = 0; r < R; r++) total[r][n] = fma(share[r], v, total[r][n]);
    }
  }
  HP_UNROLL for (int r = 0; r < R; r++) HP_UNROLL for (int n = 0; n < N; n++)
      store(out + r * out_stride + column + n * W, total[r][n]);
}

// out[r] += sum over keys begin <= k < end of p[r * p_stride + k] * values[k], for R rows.
template <class Number, int R>
static inline void mix(const float *p, int64_t p_stride, const typename Number::type *const *values, int begin, int end,
                       int64_t width, float *out, int64_t out_stride) {
  constexpr int N = R == 1 ? 8 : 4;
  int64_t column = 0;
  for (; column + N * W <= width; column += N * W)
    mix_columns<Number, R, N>(p, p_stride, values, begin, end, column, out, out_stride);
  for (; column < width; column += W)
    mix_columns<Number, R, 1>(p, p_stride, values, begin, end, column, out, out_stride);
}

// body(R, row), R an integral constant: cut rows into tiles of at most kTileRows, four as two and two.
template <class Body>
static inline void for_tiles(int64_t rows, Body body) {
  for (int64_t row = 0; row < rows;) {
    const int64_t left = rows - row;
    if (left >= kTileRows && !(kTileRows == 3 && left == 4)) {
      body(std::integral_constant<int, kTileRows>{}, row);
      row += kTileRows;
    } else if (left >= 3 && kTileRows > 3) {
      body(std::integral_constant<int, 3>{}, row);
      row += 3;
    } else if (left >= 2) {
      body(std::integral_constant<int, 2>{}, row);
      row += 2;
    } else {
      body(std::integral_constant<int, 1>{}, row);
      row += 1;
    }
  }
}

// Copy `width` numbers as float32, zeros up to the next multiple of W.
template <class Number>
static inline void widen(const typename Number::type *x, int64_t width, float *out) {
  int64_t i = 0;
  for (; i + W <= width; i += W) store(out + i, Number::at(x + i));
  if (i == width) return;
  store(out + i, vf{});
  for (; i < width; i++) out[i] = Number::one(x[i]);
}

HP_END
