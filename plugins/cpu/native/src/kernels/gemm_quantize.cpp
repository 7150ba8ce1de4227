// Rows of activations to int8: scale = largest of 32 / 127, codes rounded to even. A block with a NaN or an infinity gets a
// scale that is not finite, so that the row's results are not either.
#include "gemm.h"

HP_BEGIN

namespace {

constexpr int kParts = kBlock / W;

struct Block {
  float scale;
  int32_t low, high;  // sums of the codes of columns 0..15 and 16..31
};

static inline int32_t sum_int(vi v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m128i t = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  t = _mm_hadd_epi32(t, t);
  t = _mm_hadd_epi32(t, t);
  return _mm_cvtsi128_si32(t);
#else
  int32_t total = 0;
  for (int k = 0; k < W; k++) total += v[k];
  return total;
#endif
}

static inline float largest(vf v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m128 t = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
#else
  return max_lane(v);
#endif
}

static inline void store_codes(const vi *codes, int8_t *out) {
#if defined(__AVX512F__)
  for (int p = 0; p < kParts; p++) _mm_storeu_si128((__m128i *)(out + p * W), _mm512_cvtsepi32_epi8((__m512i)codes[p]));
#elif defined(__AVX2__)
  const __m256i a = _mm256_packs_epi32((__m256i)codes[0], (__m256i)codes[1]);
  const __m256i b = _mm256_packs_epi32((__m256i)codes[2], (__m256i)codes[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i *)out, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order));
#else
  for (int p = 0; p < kParts; p++)
    for (int k = 0; k < W; k++) out[p * W + k] = (int8_t)codes[p][k];
#endif
}

static inline Block quantize_block(const float *x, int8_t *out) {
  vf part[kParts], most = {}, spoilt = {};
  for (int p = 0; p < kParts; p++) {
    part[p] = load(x + p * W);
    const vf size = select(part[p] < vf{}, -part[p], part[p]);
    most = vmax(most, size);
    spoilt = spoilt + size * vf{};  // 0, or NaN
  }
  const float big = largest(most);
  const bool tiny = !(big > 1e-30f);
  const vf inverse = splat(tiny ? 0.f : 127.f / big);
  vi codes[kParts];
  vi low = {}, high = {};
  for (int p = 0; p < kParts; p++) {
    codes[p] = round_to_int(part[p] * inverse);
    if (p < kParts / 2) low = low + codes[p];
    else high = high + codes[p];
  }
  float scale = tiny ? 0.f : big / 127.f;
  const vi bad = spoilt != spoilt;
  if (__builtin_expect(sum_int(bad) != 0, 0)) {
    scale = __builtin_nanf("");
    for (vi &part_codes : codes) part_codes = vi{};
    low = high = vi{};
  }
  store_codes(codes, out);
  return {scale, sum_int(low), sum_int(high)};
}

}  // namespace

void quantize_row(const hp_weight &w, const float *x, float factor, int64_t row, int64_t count, int8_t *codes, float *scales) {
  const int64_t first = row / kTile * kTile, column = row - first;
  const int64_t width = count - first < kTile ? count - first : kTile;
  const int64_t which = w.halves ? 3 : 2;
  int8_t *q = codes + first * row_codes(w) + column * kBlock;
  float *s = scales + first * row_scales(w) + column;
  for (int64_t b = 0; b < w.units; b++, q += width * kBlock, s += width * which) {
    const int64_t left = w.columns - b * kBlock;
    float copy[kBlock];
    const float *source = x + b * kBlock;
    if (left < kBlock || factor != 1.f) {
      for (int k = 0; k < kBlock; k++) copy[k] = k < left ? source[k] * factor : 0.f;
      source = copy;
    }
    const Block block = quantize_block(source, q);
    s[0] = block.scale;
    if (w.halves) {
      s[width] = block.scale * (float)block.low;
      s[2 * width] = block.scale * (float)block.high;
    } else {
      s[width] = block.scale * (float)(block.low + block.high);
    }
  }
}

HP_END
