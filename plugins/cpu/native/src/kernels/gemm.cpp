// HP_LINEAR: out = x weight^T (+ bias) (+ residual).
#include "gemm.h"

HP_BEGIN

namespace {

// A thread quantizes all rows for itself up to this many numbers: cheaper than meeting the others.
constexpr int64_t kAlone = 12288;

// Panels in pieces: for each thread one of its own, the rest in pieces that shrink towards the end, handed out to whoever is
// free. All threads count the same pieces.
class Pieces {
 public:
  Pieces(int64_t panels, const Worker &worker)
      : worker_(worker), panels_(panels), own_(worker.threads == 1 ? panels : panels * kOwnShare / (kOwnOf * worker.threads)) {
    end_ = own_ * worker.threads;
  }

  bool next(int64_t &begin, int64_t &end) {
    if (!started_ && own_) {
      started_ = true;
      begin = own_ * worker_.thread;
      end = begin + own_;
      return true;
    }
    if (end_ >= panels_) return false;
    for (const int64_t mine = worker_.next_work(); counted_ <= mine; counted_++) {
      if (end_ >= panels_) return false;
      const int64_t left = panels_ - end_, size = left / (2 * worker_.threads);
      begin_ = end_;
      end_ += size < 1 ? 1 : size;
    }
    begin = begin_;
    end = end_;
    return true;
  }

 private:
  static constexpr int64_t kOwnShare = 3, kOwnOf = 4;  // of an even share

  const Worker &worker_;
  const int64_t panels_, own_;
  int64_t counted_ = 0, begin_ = 0, end_ = 0;
  bool started_ = false;
};

static inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

void multiply(const hp_weight &w, int64_t begin, int64_t end, int64_t following, const Rows &rows, const Result &result,
              char *scratch) {
  if (is_float(w.codes)) multiply_float(w, begin, end, rows, result);
  else multiply_integer(w, begin, end, following, rows, result, scratch);
}

// p0 x, p1 hp_weight*, p2 bias or NULL, p3 out, p4 residual or NULL; i0 in, i1 out features, i2 x stride, i3 out stride,
// i4 residual stride (0: the out stride).
void linear(const hp_op &op, int64_t count, const hp_batch *, const Worker &worker) {
  if (count <= 0) return;
  const hp_weight &w = *(const hp_weight *)op.p[1];
  const float *x = (const float *)op.p[0];
  const int64_t stride = op.i[2];
  Rows rows{count, x, stride, nullptr, nullptr};
  const int64_t code_bytes = aligned(count * row_codes(w)), scale_bytes = aligned(count * row_scales(w) * 4);
  Pieces pieces(w.panels, worker);
  int64_t begin, end;
  bool more = pieces.next(begin, end);
  char *own;
  if (is_float(w.codes)) {
    own = nullptr;
  } else if (worker.threads == 1 || count * w.columns <= kAlone) {
    own = worker.scratch((std::size_t)(code_bytes + scale_bytes + multiply_bytes(w)));
    rows.codes = (const int8_t *)own;
    rows.scales = (const float *)(own + code_bytes);
    for (int64_t row = 0; row < count; row++)
      quantize_row(w, x + row * stride, 1.f, row, count, (int8_t *)own, (float *)(own + code_bytes));
    own += code_bytes + scale_bytes;
  } else {
    char *shared = worker.shared_scratch((std::size_t)(code_bytes + scale_bytes));
    own = worker.scratch((std::size_t)multiply_bytes(w));
    rows.codes = (const int8_t *)shared;
    rows.scales = (const float *)(shared + code_bytes);
    int64_t from, to;
    share(count, 1, worker, from, to);
    for (int64_t row = from; row < to; row++)
      quantize_row(w, x + row * stride, 1.f, row, count, (int8_t *)shared, (float *)(shared + code_bytes));
    worker.barrier();
  }
  const Result result{(float *)op.p[3], op.i[3], (const float *)op.p[2], (const float *)op.p[4], op.i[4] ? op.i[4] : op.i[3]};
  // The next piece is taken before the last panel of this one.
  while (more) {
    if (end - begin > 1) multiply(w, begin, end - 1, end - 1, rows, result, own);
    const int64_t last = end - 1;
    more = pieces.next(begin, end);
    multiply(w, last, last + 1, more ? begin : -1, rows, result, own);
  }
}

void add_gemm(KernelTable &table) {
  table.run[HP_LINEAR] = linear;
  table.run[HP_EXPERTS] = experts;
  table.weight_new = weight_new;
}

HP_END
