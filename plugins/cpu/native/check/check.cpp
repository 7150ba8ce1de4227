// Runs the kernels of every variant that this processor (or emulator) has, against plain loops. One line per variant and
// kernel; ends with 1 if any differs. Needs nothing but the library: for processors other than the developer's.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <map>
#include <string>

#include "plain.h"

namespace {

using plain::Kind;
using plain::kKinds;
using plain::Random;
using plain::Weight;

constexpr double kUlp = 1.0 / (1 << 24);

// The worst that one kernel did, as a multiple of what rounding explains.
struct Verdict {
  const char *variant, *kernel;
  double worst = 0;
  int64_t numbers = 0, wrong = 0;
  std::string where = "";

  void see(double ours, double theirs, double bound, const std::string &what) {
    numbers++;
    const double error = std::fabs(ours - theirs) / bound;
    if (error <= 1.0) {
      worst = std::max(worst, error);
      return;
    }
    if (!wrong++) where = what + ": " + std::to_string(ours) + " instead of " + std::to_string(theirs);
  }
  bool say() const {
    std::printf("%-12s %-10s %8" PRId64 " numbers, worst %.3f of the bound  %s\n", variant, kernel, numbers, worst,
                wrong ? "WRONG" : "ok");
    if (wrong) std::printf("             %" PRId64 " wrong, first at %s\n", wrong, where.c_str());
    std::fflush(stdout);
    return wrong == 0;
  }
};

hp_op fixed(int32_t code, int64_t rows) {
  hp_op op{};
  op.code = code;
  op.rows_of = HP_ROWS_FIXED;
  op.rows = rows;
  return op;
}

bool play(hp_pool *pool, const hp_op &op, const hp_batch *batch = nullptr) {
  if (hp_run(pool, &op, 1, batch) == 0) return true;
  std::printf("no kernel takes op %d\n", op.code);
  return false;
}

constexpr int64_t kMost = 33;  // rows of activations

// `held`: rows that int8 with a scale per 16 (or 32) columns holds exactly: the first of every 16 is the largest. Otherwise
// numbers whose sums round, so that another order of adding up shows.
std::vector<float> activations(int64_t columns, int64_t stride, bool held, Random &random) {
  std::vector<float> x((std::size_t)(kMost * stride), NAN);
  for (int64_t r = 0; r < kMost; r++)
    for (int64_t k = 0; k < columns; k++) {
      const int64_t code = k % 16 ? random.below(255) - 127 : random.below(2) ? 127 : -127;
      x[r * stride + k] = held ? (float)code / (float)(16 << r % 3) : random.fine();
    }
  return x;
}

// What every product gave, by its name.
using Results = std::map<std::string, std::vector<float>>;

struct Product {
  hp_pool *pool;
  hp_weight *packed;
  int64_t n, k, x_stride, out_stride;
  std::vector<float> bias, residual;

  // The first `rows` rows of x: [kMost, out_stride], 7 where nothing was written. Empty where no kernel takes it.
  std::vector<float> of(const std::vector<float> &x, int64_t rows) const {
    std::vector<float> out((std::size_t)(kMost * out_stride), 7.f);
    hp_op op = fixed(HP_LINEAR, rows);
    void *const p[] = {(void *)x.data(), packed, (void *)bias.data(), out.data(), (void *)residual.data()};
    std::copy(p, p + 5, op.p);
    op.i[0] = k, op.i[1] = n, op.i[2] = x_stride, op.i[3] = out_stride, op.i[4] = n;
    if (!play(pool, op)) out.clear();
    return out;
  }
};

// One row's results against plain loops.
void compare(const Product &product, const Weight &weight, const float *x, int64_t row, const float *out,
             const std::string &what, Verdict &verdict) {
  for (int64_t j = 0; j < product.n; j++) {
    const double b = product.bias[j], added = product.residual[row * product.n + j];
    double sum = b + added, size = std::fabs(b) + std::fabs(added);
    for (int64_t c = 0; c < product.k; c++) {
      const double a = x[c], code = weight.codes[j * product.k + c], offset = weight.offsets[j * product.k + c];
      sum += a * (code + offset);
      size += std::fabs(a) * (std::fabs(code) + std::fabs(offset));
    }
    verdict.see(out[j], sum, size * 8 * kUlp + 1e-30, what);
  }
}

bool linear_of(hp_pool *pool, const Kind &kind, int64_t n, int64_t k, bool exact, Random &random, Verdict &verdict,
               Results &results) {
  const Weight weight(kind, n, k, random);
  hp_weight *packed = hp_weight_new(pool, &weight.matrix, exact);
  const std::string what = std::string(kind.name) + (exact ? " exact " : " ") + std::to_string(n) + " x " + std::to_string(k);
  if (!packed) {
    std::printf("%s: no kernel takes it\n", what.c_str());
    return false;
  }
  Product product{pool, packed, n, k, k + 3, n + 2, std::vector<float>((std::size_t)n), {}};
  product.residual.resize((std::size_t)(kMost * n));
  for (float &b : product.bias) b = random.coarse();
  for (float &r : product.residual) r = random.coarse();
  bool played = true;
  for (bool held : {true, false}) {
    const std::vector<float> x = activations(k, product.x_stride, held, random);
    std::vector<float> whole;
    for (int64_t rows : {kMost, (int64_t)1, (int64_t)2, (int64_t)3, (int64_t)4, (int64_t)5, (int64_t)6, (int64_t)7, (int64_t)8,
                         (int64_t)9, (int64_t)16}) {
      if (!held && n < kMost) break;
      const std::string name = what + (held ? ", " : ", rounding, ") + std::to_string(rows) + " rows";
      const std::vector<float> &out = results[name] = product.of(x, rows);
      if (out.empty()) played = false;
      if (!played) break;
      if (rows == kMost) whole = out;
      for (int64_t r = 0; r < rows; r++) {
        const float *row = &out[r * product.out_stride];
        if (held && rows == kMost) compare(product, weight, &x[r * product.x_stride], r, row, name, verdict);
        for (int64_t j = n; j < product.out_stride; j++) verdict.see(row[j], 7, 1e-9, name + ": behind a row");
        // Alone or among others, a row has the same bits.
        if (std::memcmp(row, &whole[r * product.out_stride], (std::size_t)n * 4))
          verdict.see(1, 0, 1e-9, name + ": other bits than among " + std::to_string(kMost));
      }
    }
  }
  hp_weight_free(packed);
  return played;
}

bool linear(hp_pool *pool, const char *variant, Results &results) {
  Random random{1};
  Verdict verdict{variant, "linear"};
  bool played = true;
  for (const Kind &kind : kKinds)
    for (int64_t n : {1, 5, 16, 33})
      for (int64_t k : {1, 3, 32, 34, 97, 192}) {
        const int64_t step = kind.group * (kind.super_group ? kind.super_group : 1);
        if (kind.packing && (step ? k % step : kind.packing == 2 && k % 2)) continue;
        for (bool exact : {false, true}) played = played && linear_of(pool, kind, n, k, exact, random, verdict, results);
      }
  return verdict.say() && played;
}

// Whether two variants give the same bits in every product.
bool same(const char *variant, const char *kernel, const Results &ours, const Results &theirs) {
  Verdict verdict{variant, kernel};
  for (const auto &[name, out] : ours) {
    const auto other = theirs.find(name);
    const bool lacks = other == theirs.end() || other->second.size() != out.size();
    for (std::size_t k = 0; k < out.size(); k++)
      verdict.see(lacks || std::memcmp(&out[k], &other->second[k], 4) != 0, 0, 0.5, name + ": 1 for other bits");
  }
  return verdict.say();
}

bool norm(hp_pool *pool, const char *variant) {
  Random random{2};
  Verdict verdict{variant, "norm"};
  const double eps = (double)1e-5f;
  for (int kind = 0; kind < 4; kind++)
    for (int64_t n : {1, 5, 8, 63, 130}) {
      constexpr int64_t rows = 3;
      std::vector<float> x((std::size_t)(rows * n)), weight((std::size_t)n), bias((std::size_t)n), out(x.size());
      for (auto *part : {&x, &weight, &bias})
        for (float &v : *part) v = random.fine() * 3;
      hp_op op = fixed(HP_NORM, rows);
      op.p[0] = x.data(), op.p[1] = weight.data(), op.p[2] = bias.data(), op.p[3] = out.data();
      op.i[0] = n, op.i[1] = kind, op.i[2] = 1, op.i[3] = op.i[5] = n;
      op.f[0] = 1e-5f;
      if (!play(pool, op)) return false;
      for (int64_t r = 0; r < rows; r++) {
        double mean = 0, square = 0;
        for (int64_t k = 0; k < n && kind == 2; k++) mean += (double)x[r * n + k] / (double)n;
        for (int64_t k = 0; k < n; k++) square += std::pow((double)x[r * n + k] - mean, 2);
        const double factor = 1 / std::sqrt((kind == 3 ? square : square / (double)n) + eps);
        for (int64_t k = 0; k < n; k++) {
          const double scaled = ((double)x[r * n + k] - mean) * factor * ((double)weight[k] + (kind == 1));
          // Where the row is constant, the mean's own rounding is all there is.
          const double size = std::fabs(scaled) + std::fabs(bias[k]) + std::fabs(mean) * factor * 4;
          verdict.see(out[r * n + k], scaled + (double)bias[k], size * 16 * kUlp, "width " + std::to_string(n));
        }
      }
    }
  return verdict.say();
}

bool rope(hp_pool *pool, const char *variant) {
  Random random{3};
  Verdict verdict{variant, "rope"};
  for (int form = 0; form < 4; form++)
    for (int64_t rotary : {2, 6, 16, 22}) {
      const bool pairs = form & 1, tail = form & 2;
      constexpr int64_t rows = 3, size = 24, places = 11;
      const int64_t heads = 3, kv_heads = 2, start = tail ? size - rotary : 0, half = rotary / 2;
      std::vector<float> q(rows * heads * size), k(rows * kv_heads * size), table((std::size_t)(places * rotary));
      for (auto *part : {&q, &k, &table})
        for (float &v : *part) v = random.fine();
      std::vector<float> q_out(q.size()), k_out(k.size());
      int64_t positions[rows] = {4, 0, 10};
      hp_op op = fixed(HP_ROPE, rows);
      void *const p[] = {q.data(), k.data(), positions, table.data(), q_out.data(), k_out.data()};
      std::copy(p, p + 6, op.p);
      const int64_t q_row = heads * size, k_row = kv_heads * size;
      const int64_t i[] = {heads, kv_heads, rotary, size, pairs, tail, q_row, k_row, q_row, k_row};
      std::copy(i, i + 10, op.i);
      if (!play(pool, op)) return false;
      const auto compare = [&](const std::vector<float> &in, const std::vector<float> &out, int64_t count) {
        for (int64_t item = 0; item < rows * count; item++) {
          const float *x = &in[item * size], *cos = &table[positions[item / count] * rotary], *sin = cos + half;
          std::vector<double> want(x, x + size);
          for (int64_t f = 0; f < half; f++) {
            const int64_t a = start + (pairs ? 2 * f : f), b = start + (pairs ? 2 * f + 1 : f + half);
            want[a] = (double)x[a] * (double)cos[f] - (double)x[b] * (double)sin[f];
            want[b] = (double)x[b] * (double)cos[f] + (double)x[a] * (double)sin[f];
          }
          const std::string what = "rotary " + std::to_string(rotary);
          for (int64_t c = 0; c < size; c++) verdict.see(out[item * size + c], want[c], 8 * kUlp, what);
        }
      };
      compare(q, q_out, heads);
      compare(k, k_out, kv_heads);
    }
  return verdict.say();
}

// Two requests of several steps on shuffled pages; keys and values of all steps are kept here to compare with.
struct Story {
  hp_pool *pool;
  int32_t dtype;
  int64_t width, value_width, window;
  float softcap;
  static constexpr int64_t heads = 4, kv_heads = 2, page = 4, pages = 40, stride = 16;

  bool tell(Verdict &verdict) {
    Random random{4};
    const std::size_t slots = pages * page * kv_heads;
    const int64_t bytes = dtype == HP_F32 ? 4 : dtype == HP_I8 ? 1 : 2;
    std::vector<uint8_t> key_pool(slots * (std::size_t)(width * bytes));
    std::vector<uint8_t> value_pool(slots * (std::size_t)(value_width * bytes));
    std::vector<float> key_scales(slots), value_scales(slots);
    std::vector<std::vector<float>> keys[2], values[2];
    std::vector<int32_t> table(2 * stride);
    for (int64_t k = 0; k < 2 * stride; k++) table[k] = (int32_t)((k * 7 + 3) % pages);
    const int64_t steps[][2] = {{36, 5}, {1, 19}, {3, 1}};
    for (const auto &step : steps) {
      const int64_t tokens = step[0] + step[1], total = tokens + 1;  // one of padding
      std::vector<float> q(total * heads * width), k(total * kv_heads * width), v(total * kv_heads * value_width);
      for (auto *part : {&q, &k, &v})
        for (float &x : *part) x = random.coarse();
      std::vector<float> out(total * heads * value_width, 7.f);
      const int32_t start[] = {0, (int32_t)step[0], (int32_t)tokens};
      const int64_t before[] = {(int64_t)keys[0].size(), (int64_t)keys[1].size()};
      const int32_t lengths[] = {(int32_t)(before[0] + step[0]), (int32_t)(before[1] + step[1])};
      std::vector<int32_t> slot(total, 0);
      for (int r = 0; r < 2; r++)
        for (int64_t t = 0; t < step[r]; t++) {
          const int64_t row = start[r] + t, at = before[r] + t;
          slot[row] = (int32_t)(table[r * stride + at / page] * page + at % page);
          keys[r].emplace_back(&k[row * kv_heads * width], &k[row * kv_heads * width] + kv_heads * width);
          values[r].emplace_back(&v[row * kv_heads * value_width], &v[row * kv_heads * value_width] + kv_heads * value_width);
        }
      const hp_group group{table.data(), stride, slot.data()};
      const hp_batch batch{total, 2, 2, page, start, lengths, &group, 1};
      hp_op op = fixed(HP_ATTENTION, 0);
      op.rows_of = HP_ROWS_TOKENS;
      void *const p[] = {q.data(), k.data(), v.data(), key_pool.data(), value_pool.data(), out.data(), nullptr, nullptr,
                         dtype == HP_I8 ? key_scales.data() : nullptr, dtype == HP_I8 ? value_scales.data() : nullptr};
      std::copy(p, p + 10, op.p);
      const int64_t i[] = {heads, kv_heads, width, value_width, 0, window, heads * width, kv_heads * width,
                           kv_heads * value_width, heads * value_width, dtype};
      std::copy(i, i + 11, op.i);
      op.f[0] = 0.25f, op.f[1] = softcap;
      if (!play(pool, op, &batch)) return false;
      for (int r = 0; r < 2; r++)
        for (int64_t t = 0; t < step[r]; t++) {
          const int64_t row = start[r] + t;
          compare(r, before[r] + t, &q[row * heads * width], keys[r], values[r], &out[row * heads * value_width], verdict);
        }
      for (int64_t k = tokens * heads * value_width; k < (int64_t)out.size(); k++) verdict.see(out[k], 0, 1e-9, "padding");
    }
    return true;
  }

  void compare(int request, int64_t at, const float *q, const std::vector<std::vector<float>> &keys,
               const std::vector<std::vector<float>> &values, const float *out, Verdict &verdict) const {
    std::vector<double> want((std::size_t)value_width);
    const std::string what = "dtype " + std::to_string(dtype) + ", width " + std::to_string(width) + ", request " +
                             std::to_string(request) + ", place " + std::to_string(at);
    for (int64_t h = 0; h < heads; h++) {
      std::vector<const float *> own_keys, own_values;
      for (const auto &key : keys) own_keys.push_back(&key[h / (heads / kv_heads) * width]);
      for (const auto &value : values) own_values.push_back(&value[h / (heads / kv_heads) * value_width]);
      const plain::Scores rule{0.25, (double)softcap, window};
      plain::attend(q + h * width, own_keys, own_values, at, width, value_width, rule, want.data());
      // Scores reach some tens; an int8 key is off by up to 1/127 of its largest, 2.
      const double bound = dtype == HP_I8 ? 0.25 : 400 * kUlp;
      for (int64_t k = 0; k < value_width; k++) verdict.see(out[h * value_width + k], want[k], bound, what);
    }
  }
};

bool attention(hp_pool *pool, const char *variant) {
  Verdict verdict{variant, "attention"};
  bool played = true;
  for (int32_t dtype : {HP_F32, HP_F16, HP_BF16, HP_I8})
    for (int64_t width : {20, 64})
      for (int64_t window : {0, 8})
        for (float cap : {0.f, 20.f})
          played = played && Story{pool, dtype, width, width == 20 ? 12 : 64, window, cap}.tell(verdict);
  return verdict.say() && played;
}

bool sample(hp_pool *pool, const char *variant) {
  Random random{5};
  Verdict verdict{variant, "sample"}, greedy{variant, "argmax"};
  const plain::Rule rules[] = {{0, 0, 1, 0},     {1, 0, 1, 0},    {0.5, 5, 1, 0},
                               {1.5, 0, 0.5, 0}, {1, 0, 1, 0.25}, {0.75, 40, 0.75, 0.03125}};
  constexpr int64_t rows = 6;
  for (int64_t vocab : {1, 7, 130, 5000}) {
    std::vector<float> logits((std::size_t)(rows * vocab));
    for (float &x : logits) x = random.fine() * 6;
    std::vector<int64_t> ids(rows, -1), top_k(rows), seeds(rows), positions(rows);
    std::vector<uint8_t> finite(rows, 9);
    hp_op op = fixed(HP_ARGMAX, rows);
    op.p[0] = logits.data(), op.p[1] = ids.data(), op.p[2] = finite.data();
    op.i[0] = op.i[1] = vocab;
    if (!play(pool, op)) return false;
    for (int64_t r = 0; r < rows; r++) {
      const float *x = &logits[r * vocab];
      greedy.see((double)ids[r], (double)(std::max_element(x, x + vocab) - x), 0.5, "vocabulary " + std::to_string(vocab));
      greedy.see(finite[r], 1, 0.5, "finite");
    }
    std::vector<float> temperature(rows), top_p(rows), min_p(rows);
    for (int64_t r = 0; r < rows; r++) {
      temperature[r] = (float)rules[r].temperature, top_k[r] = rules[r].top_k;
      top_p[r] = (float)rules[r].top_p, min_p[r] = (float)rules[r].min_p;
    }
    for (int64_t seed = 0; seed < 8; seed++) {
      for (int64_t r = 0; r < rows; r++) seeds[r] = seed * 1000 - r, positions[r] = seed + r;
      std::vector<float> copy = logits;
      op = fixed(HP_SAMPLE, rows);
      void *const p[] = {copy.data(), temperature.data(), top_k.data(), top_p.data(), min_p.data(), seeds.data(),
                         positions.data(), ids.data(), finite.data()};
      std::copy(p, p + 9, op.p);
      op.i[0] = op.i[1] = vocab;
      if (!play(pool, op)) return false;
      for (int64_t r = 0; r < rows; r++)
        verdict.see((double)ids[r], (double)plain::draw(&logits[r * vocab], vocab, rules[r], seeds[r], positions[r]), 0.5,
                    "vocabulary " + std::to_string(vocab) + ", rule " + std::to_string(r));
    }
  }
  const bool good = greedy.say();
  return verdict.say() && good;
}

}  // namespace

int main() {
  if (hp_abi() != HP_ABI) return std::printf("the library has interface %d, this program %d\n", hp_abi(), HP_ABI), 1;
  hp_pool *pool = hp_pool_new(2, nullptr);
  bool good = pool != nullptr;
  const std::string variants = hp_variants();
  std::map<std::string, Results> results;  // of each variant
  for (std::size_t at = 0; at < variants.size() && pool;) {
    const std::size_t space = variants.find(' ', at);
    const std::string name = variants.substr(at, space - at);
    const bool runs = variants[space + 1] == '1';
    at = space + 3;
    if (!runs) {
      std::printf("%-12s does not run here\n", name.c_str());
      continue;
    }
    if (!hp_use(name.c_str())) return std::printf("%s cannot be used\n", name.c_str()), 1;
    good = linear(pool, name.c_str(), results[name]) && good;
    for (auto *kernel : {norm, rope, attention, sample}) good = kernel(pool, name.c_str()) && good;
  }
  // The matrix instructions add up the same numbers in the same order.
  if (results.count("i8mm")) good = same("i8mm", "as dotprod", results["i8mm"], results["dotprod"]) && good;
  hp_pool_free(pool);
  std::puts(good ? "all of it agrees" : "FAILED");
  return good ? 0 : 1;
}
