// Rows of activations to int8: scale = largest of 16 / 127, codes rounded to even. A NaN or an infinity makes a scale that is
// not a number, so that the row's results are none either.
#include "gemm.h"

HP_BEGIN

namespace {

constexpr int kParts = kBlock / 2 / W;  // vectors of half a block

static inline int32_t add_lanes(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__AVX2__)
  __m128i t = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
#else
  int32_t total = 0;
  for (int k = 0; k < W; k++) total += v[k];
  return total;
#endif
}

static inline int32_t largest_lane(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(__AVX2__)
  __m128i t = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
#else
  int32_t most = v[0];
  for (int k = 1; k < W; k++) most = v[k] > most ? v[k] : most;
  return most;
#endif
}

static inline void store_codes(const vi *codes, int8_t *out) {
#if defined(__AVX512F__)
  for (int p = 0; p < 2 * kParts; p++) _mm_storeu_si128((__m128i *)(out + p * W), _mm512_cvtsepi32_epi8((__m512i)codes[p]));
#elif defined(__AVX2__)
  const __m256i a = _mm256_packs_epi32((__m256i)codes[0], (__m256i)codes[1]);
  const __m256i b = _mm256_packs_epi32((__m256i)codes[2], (__m256i)codes[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i *)out, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order));
#else
  for (int p = 0; p < 2 * kParts; p++)
    for (int k = 0; k < W; k++) out[p * W + k] = (int8_t)codes[p][k];
#endif
}

// Half a block: 16 codes in `codes`; returns the sum of codes, and the scale in `scale`.
static inline float quantize_half(const float *x, vi *codes, float &scale) {
  constexpr int32_t infinity = 0x7f800000;
  vf part[kParts];
  vi most = {};  // sizes as integers: ordered alike, and NaN is the largest
  for (int p = 0; p < kParts; p++) {
    part[p] = load(x + p * W);
    const vi size = (vi)part[p] & splat_int(0x7fffffff);
    most = size > most ? size : most;
  }
  const int32_t bits = largest_lane(most);
  float big;
  std::memcpy(&big, &bits, 4);
  const bool usable = big > 1e-30f && bits < infinity;
  scale = usable ? big * (1.f / 127) : bits < infinity ? 0.f : __builtin_nanf("");
  const vf inverse = splat(127.f / (usable ? big : 1e30f));
  vi sum = {};
  for (int p = 0; p < kParts; p++) {
    codes[p] = round_to_int(part[p] * inverse);
    sum = sum + codes[p];
  }
  return (float)add_lanes(sum);
}

// One block: codes to `out`; both scales, then scale * sum of both halves (added up unless `Halves`), then (`Based`) where
// sums start, to s[0], s[width] ...
template <bool Halves, bool Based>
static inline void quantize_block(const float *x, int32_t base, int8_t *out, float *s, int64_t width) {
  vi codes[2 * kParts];
  float low, high;
  const float low_sum = quantize_half(x, codes, low), high_sum = quantize_half(x + kBlock / 2, codes + kParts, high);
  store_codes(codes, out);
  s[0] = low;
  s[width] = high;
  if (Halves) {
    s[2 * width] = low * low_sum;
    s[3 * width] = high * high_sum;
  } else {
    s[2 * width] = low * low_sum + high * high_sum;
  }
  if (Based)
    for (int half = 0; half < 2; half++) {
      const int32_t from = start_of(out + half * kBlock / 2, base);
      std::memcpy(s + ((Halves ? 4 : 3) + half) * width, &from, sizeof from);
    }
}

template <bool Halves, bool Based>
void quantize(const hp_weight &w, const float *x, float factor, int64_t width, int8_t *q, float *s) {
  const int64_t code_step = width * kBlock, scale_step = width * scales_per_block(Halves, Based);
  int64_t b = 0;
  if (factor == 1.f)
    for (const int64_t whole = w.columns / kBlock; b < whole; b++, q += code_step, s += scale_step)
      quantize_block<Halves, Based>(x + b * kBlock, w.base, q, s, width);
  for (; b < w.units; b++, q += code_step, s += scale_step) {
    float copy[kBlock];
    for (int64_t k = 0; k < kBlock; k++) copy[k] = b * kBlock + k < w.columns ? x[b * kBlock + k] * factor : 0.f;
    quantize_block<Halves, Based>(copy, w.base, q, s, width);
  }
}

}  // namespace

void quantize_row(const hp_weight &w, const float *x, float factor, int64_t row, int64_t count, int8_t *codes, float *scales) {
  const int64_t first = row / kTile * kTile, column = row - first;
  const int64_t width = count - first < kTile ? count - first : kTile;
  int8_t *q = codes + first * row_codes(w) + column * kBlock;
  float *s = scales + first * row_scales(w) + column;
  const auto put = is_based(w.codes) ? (w.halves ? quantize<true, true> : quantize<false, true>)
                                     : (w.halves ? quantize<true, false> : quantize<false, false>);
  put(w, x, factor, width, q, s);
}

HP_END
