// What the check program compares with: numbers, weights and ops in plain scalar loops, in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "hp.h"

namespace plain {

// SplitMix64 (Steele, Lea, Flood 2014).
inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

struct Random {
  uint64_t state;
  uint64_t next() { return mix(state += 0x9E3779B97F4A7C15u); }
  int64_t below(int64_t n) { return (int64_t)(next() % (uint64_t)n); }
  // Multiples of 1/16 between -2 and 2: fp16 and bf16 hold them exactly.
  float coarse() { return (float)(below(65) - 32) / 16.f; }
  float fine() { return (float)((double)(next() >> 11) * 0x1p-52 - 1.0); }
};

// Exact for the numbers used here: normal, and few bits.
inline uint16_t half_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x == 0.f) return (uint16_t)(bits >> 16);
  return (uint16_t)((bits >> 16 & 0x8000) | (((bits & 0x7fffffff) >> 13) - (112 << 10)));
}
inline uint16_t brain_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (uint16_t)(bits >> 16);
}

// Numbers in a type of hp_dtype, and what they are worth.
struct Numbers {
  std::vector<uint8_t> bytes;
  std::vector<double> worth;
  int32_t dtype = HP_F32;

  void add(double value) {
    worth.push_back(value);
    const float x = (float)value;
    const uint16_t narrow = dtype == HP_F16 ? half_bits(x) : brain_bits(x);
    const int8_t byte = (int8_t)(uint8_t)(int)value;
    const std::size_t size = dtype == HP_F32 ? 4 : dtype == HP_F16 || dtype == HP_BF16 ? 2 : 1;
    const void *from = size == 4 ? (const void *)&x : size == 2 ? (const void *)&narrow : &byte;
    bytes.insert(bytes.end(), (const uint8_t *)from, (const uint8_t *)from + size);
  }
  const void *data() const { return bytes.empty() ? nullptr : bytes.data(); }
};

// How a matrix is made. Codes go from `low` to `high`.
struct Kind {
  const char *name;
  int packing;  // 0 plain, 1 int8, 2 uint4
  int32_t values;
  int64_t group, super_group;  // group 0: the whole row
  int low, high;
  int32_t scales;
  enum { kNone, kOwn, kZero } offsets;  // kZero: -8 * scale
  int codebook;  // its largest entry, 0: none
};

inline const Kind kKinds[] = {
    {"f32", 0, HP_F32, 0, 0, 0, 0, 0, Kind::kNone, 0},
    {"f16", 0, HP_F16, 0, 0, 0, 0, 0, Kind::kNone, 0},
    {"bf16", 0, HP_BF16, 0, 0, 0, 0, 0, Kind::kNone, 0},
    {"u4 by 32", 2, 0, 32, 0, 0, 15, HP_F16, Kind::kNone, 0},
    {"u4 by 32, offsets", 2, 0, 32, 0, 0, 15, HP_F16, Kind::kOwn, 0},
    {"u4 by 32, zero point", 2, 0, 32, 0, 0, 15, HP_BF16, Kind::kZero, 0},
    {"u4 by 16, offsets", 2, 0, 16, 0, 0, 15, HP_F32, Kind::kOwn, 0},
    {"u4 by 64", 2, 0, 64, 0, 0, 15, HP_F16, Kind::kNone, 0},
    {"u4 in two levels", 2, 0, 32, 2, 0, 15, HP_U8, Kind::kOwn, 0},
    {"u4 codebook", 2, 0, 32, 0, 0, 15, HP_F16, Kind::kNone, 127},
    {"u4 small codebook", 2, 0, 32, 0, 0, 15, HP_F16, Kind::kNone, 32},
    {"u4 by row", 2, 0, 0, 0, 0, 15, HP_F16, Kind::kOwn, 0},
    {"u5 by 32", 1, 0, 32, 0, -16, 15, HP_F16, Kind::kNone, 0},
    {"u5 by 32, offsets", 1, 0, 32, 0, 0, 31, HP_F16, Kind::kOwn, 0},
    {"u5 by 16 in two levels", 1, 0, 16, 4, -16, 15, HP_I8, Kind::kNone, 0},
    {"u6 by 32", 1, 0, 32, 0, -32, 31, HP_F16, Kind::kNone, 0},
    {"u6 by 16 in two levels", 1, 0, 16, 4, -32, 31, HP_I8, Kind::kNone, 0},
    {"u6 by row, offsets", 1, 0, 0, 0, -32, 31, HP_F32, Kind::kOwn, 0},
    {"u6 by 16, offsets", 1, 0, 16, 0, -32, 31, HP_F16, Kind::kOwn, 0},
    {"i8 by 32", 1, 0, 32, 0, -128, 127, HP_F16, Kind::kNone, 0},
    {"i8 by 32, offsets", 1, 0, 32, 0, -128, 127, HP_BF16, Kind::kOwn, 0},
    {"i8 by row", 1, 0, 0, 0, -128, 127, HP_F32, Kind::kNone, 0},
    {"i8 by 16, offsets", 1, 0, 16, 0, -128, 127, HP_F16, Kind::kOwn, 0},
    {"i8 codebook", 1, 0, 32, 0, -128, 127, HP_F16, Kind::kNone, 127},
};

struct Weight {
  int64_t rows, columns;
  std::vector<double> codes, offsets;  // [rows, columns]: a weight is codes + offsets, each with the scale in it
  std::vector<uint8_t> stored;
  Numbers values, scales, mins, super_scales, super_mins;
  std::vector<float> codebook;
  hp_matrix matrix;

  Weight(const Kind &kind, int64_t rows, int64_t columns, Random &random)
      : rows(rows), columns(columns), codes(rows * columns), offsets(rows * columns) {
    matrix = hp_matrix{};
    matrix.rows = rows;
    matrix.columns = columns;
    matrix.packing = kind.packing;
    kind.packing ? integers(kind, random) : numbers(kind, random);
  }

 private:
  void numbers(const Kind &kind, Random &random) {
    values.dtype = matrix.values_dtype = kind.values;
    for (double &code : codes) values.add(code = random.coarse());
    matrix.values = values.data();
  }

  void integers(const Kind &kind, Random &random) {
    const int64_t group = kind.group ? kind.group : columns, groups = columns / group;
    const int64_t supers = kind.super_group ? (groups + kind.super_group - 1) / kind.super_group : 0;
    stored.assign((std::size_t)(rows * (kind.packing == 2 ? (columns + 1) / 2 : columns)), 0);
    if (kind.codebook)
      for (int k = 0; k < 256; k++) codebook.push_back((float)(random.below(2 * kind.codebook + 1) - kind.codebook));
    scales.dtype = mins.dtype = kind.scales;
    super_scales.dtype = super_mins.dtype = HP_F16;
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t s = 0; s < supers; s++) {
        super_scales.add((16.0 + (double)random.below(16)) / 1024);
        super_mins.add(-(16.0 + (double)random.below(16)) / 512);
      }
      for (int64_t g = 0; g < groups; g++) {
        const bool whole = kind.scales == HP_U8 || kind.scales == HP_I8;
        scales.add(whole ? (double)random.below(60) : (16.0 + (double)random.below(16)) / 256);
        const double own = whole ? (double)random.below(60) : -(16.0 + (double)random.below(16)) / 32;
        if (kind.offsets) mins.add(kind.offsets == Kind::kZero ? -8 * scales.worth.back() : own);
        const int64_t s = supers ? r * supers + g / kind.super_group : 0;
        const double scale = scales.worth.back() * (supers ? super_scales.worth[s] : 1.0);
        const double offset = kind.offsets ? mins.worth.back() * (supers ? super_mins.worth[s] : 1.0) : 0.0;
        for (int64_t k = g * group; k < (g + 1) * group; k++) put(kind, r, k, random, scale, offset);
      }
    }
    matrix.group = group;
    matrix.super_group = kind.super_group;
    matrix.values = stored.data();
    matrix.scales = scales.data(), matrix.scales_dtype = scales.dtype;
    matrix.offsets = mins.data(), matrix.offsets_dtype = mins.dtype;
    matrix.super_scales = super_scales.data(), matrix.super_scales_dtype = HP_F16;
    if (kind.offsets) matrix.super_offsets = super_mins.data(), matrix.super_offsets_dtype = HP_F16;
    matrix.codebook = codebook.empty() ? nullptr : codebook.data();
  }

  void put(const Kind &kind, int64_t r, int64_t k, Random &random, double scale, double offset) {
    const int code = kind.low + (int)random.below(kind.high - kind.low + 1);
    if (kind.packing == 2) stored[r * ((columns + 1) / 2) + k / 2] |= (uint8_t)(code << 4 * (k & 1));
    else stored[r * columns + k] = (uint8_t)code;
    const double value = codebook.empty() ? code : codebook[kind.packing == 2 ? code : code + 128];
    codes[r * columns + k] = value * scale;
    offsets[r * columns + k] = offset;
  }
};

// Attention of one query over keys [count][width] and values [count][value width], the query at place `at`.
struct Scores {
  double scale, softcap;
  int64_t window;  // 0: all
};
inline void attend(const float *q, const std::vector<const float *> &keys, const std::vector<const float *> &values,
                   int64_t at, int64_t width, int64_t value_width, const Scores &rule, double *out) {
  std::vector<double> weight((std::size_t)at + 1, 0.0);
  const int64_t first = rule.window && at + 1 > rule.window ? at + 1 - rule.window : 0;
  double most = -INFINITY, total = 0;
  for (int64_t t = first; t <= at; t++) {
    double dot = 0;
    for (int64_t i = 0; i < width; i++) dot += (double)q[i] * (double)keys[t][i];
    dot *= rule.scale;
    if (rule.softcap > 0) dot = rule.softcap * std::tanh(dot / rule.softcap);
    weight[t] = dot;
    most = dot > most ? dot : most;
  }
  for (int64_t t = first; t <= at; t++) total += weight[t] = std::exp(weight[t] - most);
  for (int64_t i = 0; i < value_width; i++) {
    out[i] = 0;
    for (int64_t t = first; t <= at; t++) out[i] += weight[t] / total * (double)values[t][i];
  }
}

// The draw of HP_SAMPLE for one row: filters in their order, then the first token at which the sum exceeds u * total.
struct Rule {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
};
inline int64_t draw(const float *x, int64_t vocab, const Rule &rule, int64_t seed, int64_t position) {
  int64_t best = 0;
  for (int64_t k = 1; k < vocab; k++)
    if (x[k] > x[best]) best = k;
  if (!(rule.temperature > 0)) return best;
  std::vector<double> weight((std::size_t)vocab);
  for (int64_t k = 0; k < vocab; k++) {
    weight[k] = std::exp(((double)x[k] - (double)x[best]) / rule.temperature);
    if (weight[k] < rule.min_p) weight[k] = 0;
  }
  // Logits are all different here, so that the order by size is clear.
  const auto cut = [&](bool by_count, double most) {
    std::vector<bool> kept((std::size_t)vocab, false);
    for (double held = 0; held < most;) {
      int64_t next = -1;
      for (int64_t k = 0; k < vocab; k++)
        if (!kept[k] && weight[k] > 0 && (next < 0 || weight[k] > weight[next])) next = k;
      if (next < 0) break;
      kept[next] = true;
      held += by_count ? 1.0 : weight[next];
    }
    for (int64_t k = 0; k < vocab; k++)
      if (!kept[k]) weight[k] = 0;
  };
  const auto sum = [&] {
    double total = 0;
    for (double w : weight) total += w;
    return total;
  };
  if (rule.top_k) cut(true, (double)rule.top_k);
  if (rule.top_p < 1.0) cut(false, rule.top_p * sum());
  const uint64_t step = 0x9E3779B97F4A7C15u;
  const uint64_t bits = mix(mix((uint64_t)seed + step) + ((uint64_t)position + 1) * step);
  const double target = (double)(int64_t)(bits >> 16) * 0x1p-48 * sum();
  double running = 0;
  int64_t found = 0;
  for (int64_t k = 0; k < vocab; k++) {
    if (!(weight[k] > 0)) continue;
    running += weight[k];
    found = k;
    if (running > target) break;
  }
  return found;
}

}  // namespace plain
