// What this machine can do at most with this variant's instructions: streaming reads, float32 and int8 products. These
// are the ceilings that `hardpoint bench kernels` holds the kernels against; no model calls them.
//
//   i[0] kind, i[1] bytes of p[0], i[2] passes
//   p[0] memory; p[1] double [threads], what each thread has done: bytes, or multiply-adds; p[2] float [threads], sums
//        that nobody wants, without which a compiler would leave the work out
#include <algorithm>

#include "../simd.h"
#include "gemm_dot.h"

HP_BEGIN
namespace {

enum Kind { kFill = 0, kRead = 1, kFloat = 2, kInteger = 3 };

constexpr int kStreams = 8;                 // vectors that are read before any is needed
constexpr int64_t kLine = kStreams * W * 4;  // bytes of them

// Written by the threads that read it: pages that were never written are one page of zeros, in cache.
double fill(char *memory, int64_t begin, int64_t end) {
  std::memset(memory + begin, 1, (std::size_t)(end - begin));
  return (double)(end - begin);
}

double read(const char *memory, int64_t begin, int64_t end, int64_t passes, float &sink) {
  vi sums[kStreams] = {};
  for (int64_t pass = 0; pass < passes; pass++)
    for (int64_t at = begin; at + kLine <= end; at += kLine)
      for (int k = 0; k < kStreams; k++) {
        vi v;
        std::memcpy(&v, memory + at + k * W * 4, sizeof v);
        sums[k] ^= v;
      }
  for (int k = 1; k < kStreams; k++) sums[0] ^= sums[k];
  sink += sum(to_float(sums[0]));
  return (double)((end - begin) / kLine * kLine * passes);
}

// A tile of sums in registers, as a product of matrices has it, on operands in the first cache.
double multiply_floats(int64_t passes, float &sink) {
#if defined(__AVX512F__) || defined(__aarch64__)
  constexpr int kColumns = 6;
#else
  constexpr int kColumns = 4;
#endif
  constexpr int kVectorsWide = 3, kDepth = 64;
  alignas(64) float rows[kDepth * kVectorsWide * W], columns[kDepth * kColumns];
  for (float &x : rows) x = 1e-3f;
  for (float &x : columns) x = 1e-3f;
  vf sums[kColumns][kVectorsWide] = {};
  for (int64_t pass = 0; pass < passes; pass++)
    for (int depth = 0; depth < kDepth; depth++) {
      vf row[kVectorsWide];
      for (int v = 0; v < kVectorsWide; v++) row[v] = load(rows + (depth * kVectorsWide + v) * W);
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; c++) {
        const vf column = splat(columns[depth * kColumns + c]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectorsWide; v++) sums[c][v] = fma(row[v], column, sums[c][v]);
      }
    }
  for (auto &column : sums)
    for (vf v : column) sink += sum(v);
  return (double)(passes * kDepth * kColumns * kVectorsWide * W);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Two rows by two tokens, as the quantized products of two and more tokens have them (gemm_matrix.h).
double multiply_integers(int64_t passes, float &sink) {
  constexpr int kSide = 4, kDepth = 64, kBytes = 16;
  alignas(64) int8_t rows[kDepth * kSide * kBytes], tokens[kDepth * kSide * kBytes];
  std::memset(rows, 1, sizeof rows);
  std::memset(tokens, 1, sizeof tokens);
  int32x4_t total = vdupq_n_s32(0);
  for (int64_t pass = 0; pass < passes; pass++) {
    int32x4_t sums[kSide][kSide] = {};
    for (int depth = 0; depth < kDepth; depth++) {
#pragma GCC unroll 4
      for (int c = 0; c < kSide; c++) {
        const int8x16_t token = vld1q_s8(tokens + (depth * kSide + c) * kBytes);
#pragma GCC unroll 4
        for (int r = 0; r < kSide; r++)
          sums[c][r] = vmmlaq_s32(sums[c][r], vld1q_s8(rows + (depth * kSide + r) * kBytes), token);
      }
    }
    for (const auto &column : sums)
      for (const int32x4_t &s : column) total = vaddq_s32(total, s);
  }
  sink += (float)vaddvq_s32(total);
  return (double)(passes * kDepth * kSide * kSide * 2 * kBytes);
}

#else

// Slices by quads as the quantized products have them, without unpacking and scales. Codes and activations are ones, so
// that the 16-bit sums of some variants stay below their limit between two `clear`s.
double multiply_integers(int64_t passes, float &sink) {
#if defined(__AVX512F__)
  constexpr int kPanels = 2;  // as many sums again: one panel's do not hide how long an instruction takes
#else
  constexpr int kPanels = 1;
#endif
  constexpr int kDepth = 64, kBytes = 64;
  alignas(64) uint8_t codes[kDepth * kPanels * kBytes];
  alignas(64) int8_t quads[kDepth * kTile * 4];
  std::memset(codes, 1, sizeof codes);
  std::memset(quads, 1, sizeof quads);
  vf total{};
  for (int64_t pass = 0; pass < passes; pass++) {
    Small sums[kPanels][kTile];
    for (auto &panel : sums)
      for (Small &s : panel) clear(s);
    for (int depth = 0; depth < kDepth; depth++) {
      Slice slice[kPanels];
      for (int p = 0; p < kPanels; p++) slice[p] = load_slice(codes + (depth * kPanels + p) * kBytes);
#pragma GCC unroll 8
      for (int c = 0; c < kTile; c++) {
        const Quad quad = load_quad(quads + (depth * kTile + c) * 4);
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; p++) add(sums[p][c], slice[p], quad);
      }
    }
    for (auto &panel : sums)
      for (Small &s : panel) {
        vf wide[kVectors];
        widen(s, wide);
        for (vf v : wide) total += v;
      }
  }
  sink += sum(total);
  return (double)(passes * kDepth * kPanels * kTile * kBytes);
}

#endif

void ceiling(const hp_op &op, int64_t, const hp_batch *, const Worker &w) {
  char *memory = (char *)op.p[0];
  int64_t begin, end;
  share(op.i[1], kLine, w, begin, end);
  const int64_t passes = op.i[2];
  float sink = 0;
  double done = 0;
  if (op.i[0] == kFill) done = fill(memory, begin, end);
  if (op.i[0] == kRead) done = read(memory, begin, end, passes, sink);
  if (op.i[0] == kFloat) done = multiply_floats(passes, sink);
  if (op.i[0] == kInteger) done = multiply_integers(passes, sink);
  ((double *)op.p[1])[w.thread] = done;
  ((float *)op.p[2])[w.thread] = sink;
}

}  // namespace

void add_ceiling(KernelTable &table) { table.run[HP_CEILING] = ceiling; }

HP_END
