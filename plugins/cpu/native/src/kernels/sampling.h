// What the kernels over rows of logits share: doubles in vectors, and one scan that leaves the maxima of blocks behind.
//
// A row is cut the same way whatever the batch and the threads, so that every sum has one order:
//
//     row     |------ segment: 8192, one piece of work ------|------ segment ... ------|
//     chunk   |-- 1024 --|-- 1024 --| ...                       one float64 sum each
//     block   |64|64|64| ...                                    one maximum each
//
// The maxima of blocks make filters cheap: a block whose maximum lies below a threshold is not read again, and the m-th
// largest maximum is a lower bound of the m-th largest logit.
#pragma once

#include <algorithm>
#include <cfloat>

#include "../simd.h"

HP_BEGIN

constexpr int64_t kBlock = 64, kChunk = 1024, kSegment = 8192;
constexpr int D = W / 2;  // doubles in a vector

typedef double vd __attribute__((vector_size(D * 8)));
typedef int64_t vl __attribute__((vector_size(D * 8)));
typedef uint64_t vul __attribute__((vector_size(D * 8)));

static inline vd widen(const float *p) {
#if defined(__AVX512F__)
  return (vd)_mm512_cvtps_pd(_mm256_loadu_ps(p));
#elif defined(__AVX2__)
  return (vd)_mm256_cvtps_pd(_mm_loadu_ps(p));
#else
  typedef float floats __attribute__((vector_size(D * 4)));
  floats some;
  std::memcpy(&some, p, sizeof some);
  return __builtin_convertvector(some, vd);
#endif
}
static inline vd splat_double(double x) { return x - vd{}; }
static inline vd select_double(vl mask, vd yes, vd no) { return (vd)((mask & (vl)yes) | (~mask & (vl)no)); }
static inline double sum_double(vd v) {
  double lanes[D];
  std::memcpy(lanes, &v, sizeof v);
  for (int half = D / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}
static inline vd fma_double(vd a, vd b, vd c) {
#if defined(__AVX512F__)
  return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  return (vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__ARM_NEON)
  return (vd)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return a * b + c;
#endif
}

// e^x within an ulp or so on [-708, 709], anything elsewhere. e^r = 1 + r + r^2 q(r) on |r| <= ln(2) / 2, q by Chebyshev fit.
static inline vd exp_within(vd x) {
  const vd magic = splat_double(6755399441055744.0);  // 1.5 * 2^52: the sum's low bits hold the rounded integer
  const vd shifted = fma_double(x, splat_double(1.4426950408889634), magic);
  const vd n = shifted - magic;
  vd r = fma_double(n, splat_double(-6.93147180369123816490e-01), x);
  r = fma_double(n, splat_double(-1.90821492927058770002e-10), r);
  vd q = splat_double(2.5100395159429243e-08);
  q = fma_double(q, r, splat_double(2.7620101012098e-07));
  q = fma_double(q, r, splat_double(2.7557268439678e-06));
  q = fma_double(q, r, splat_double(2.4801521269532122e-05));
  q = fma_double(q, r, splat_double(0.00019841269863066696));
  q = fma_double(q, r, splat_double(0.0013888888917230724));
  q = fma_double(q, r, splat_double(0.00833333333333006));
  q = fma_double(q, r, splat_double(0.041666666666624094));
  q = fma_double(q, r, splat_double(0.16666666666666669));
  q = fma_double(q, r, splat_double(0.5));
  const vd p = fma_double(q * r, r, r) + splat_double(1.0);
  return (vd)((vul)p + ((vul)shifted << 52));  // times 2^n, in the exponent's bits; wraps for what is not kept
}
// e^x; 0 below -708, finite above 709.
static inline vd exp_double(vd x) {
  const vl tiny = x < splat_double(-708.0);
  x = select_double(tiny, splat_double(-708.0), x);
  x = select_double(x > splat_double(709.0), splat_double(709.0), x);
  return (vd)(~tiny & (vl)exp_within(x));
}

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
static inline bool is_finite(float x) { return x - x == 0; }
static inline bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)mask) != 0;
#else
  int32_t lanes[W], all = 0;
  std::memcpy(lanes, &mask, sizeof mask);
  for (int i = 0; i < W; i++) all |= lanes[i];
  return all != 0;
#endif
}

// Floats as integers of the same order (-0 just below +0), and back.
static inline int32_t order_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
static inline float of_order(int32_t key) {
  key ^= (key >> 31) & 0x7fffffff;
  float x;
  std::memcpy(&x, &key, 4);
  return x;
}
static inline float next_up(float x) { return x == 0 ? FLT_TRUE_MIN : of_order(order_of(x) + 1); }
static inline float next_down(float x) { return x == 0 ? -FLT_TRUE_MIN : of_order(order_of(x) - 1); }

// The least float in [low, high] for which test holds; test(high) holds, and so does test of all that is larger.
template <class Test>
static inline float least(float low, float high, Test test) {
  int64_t below = (int64_t)order_of(low) - 1, holds = order_of(high);
  while (holds - below > 1) {
    const int64_t middle = below + (holds - below) / 2;
    if (test(of_order((int32_t)middle))) holds = middle;
    else below = middle;
  }
  return of_order((int32_t)holds);
}

struct Candidate {
  float x;
  int32_t id;
};
// Orders for std::sort and its kin. Types of this namespace make the library's templates the variant's own: an instance over
// plain types would be one for all variants, of whichever the linker takes.
struct Before {
  bool operator()(const Candidate &a, const Candidate &b) const { return a.x > b.x || (a.x == b.x && a.id < b.id); }
};
struct ById {
  bool operator()(const Candidate &a, const Candidate &b) const { return a.id < b.id; }
};

// What the scan leaves behind of all rows, in memory that the threads share.
struct Scan {
  int64_t rows, vocab, blocks, chunks, segments;
  float *block_max;    // [rows, blocks], NaN left out
  float *segment_max;  // [rows, segments]
  float *raw_max;      // [rows, segments], before the mask; NaN where a logit is
  double *sums;        // [rows, chunks], filled by whoever sums

  Scan(int64_t rows, int64_t vocab, const Worker &worker);
  // Scan one segment; `allowed` (NULL for none) holds a bit per token, and logits without it become -inf in place.
  void segment(float *x, const uint32_t *allowed, int64_t row, int64_t index) const;
  float max(int64_t row) const;      // after the mask
  float raw(int64_t row) const;      // before the mask; NaN if there is one
  const float *maxima(int64_t row) const { return block_max + row * blocks; }
  // The first of the largest logits, the first NaN if there is one.
  int64_t best(const float *x, int64_t row) const;
  // A value that at least m logits of the row reach, where that is cheap to say; else -inf. room for `blocks`.
  float reached_by(int64_t row, int64_t m, Candidate *room) const;
  // Logits >= low of a row, in order of their ids; room for vocab + 1. Returns how many.
  int64_t gather(const float *x, int64_t row, float low, Candidate *out) const;
};

void run_scan(const hp_op &op, const Scan &scan, const uint32_t *allowed, int64_t words, const Worker &worker);

// sampling_draw.cpp: HP_SAMPLE after the scan.
void sample_rows(const hp_op &op, const Scan &scan, const Worker &worker);

void add_logit_rules(KernelTable &);
void add_logprobs(KernelTable &);
void add_route(KernelTable &);

HP_END
