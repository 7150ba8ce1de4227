// HP_CONV_STATE  p0 x [tokens, i0], p1 weight f32 [i0, i1], p2 bias f32[i0] or NULL, p3 pool, p4 y [tokens, i0] (may be p0);
//                i0 channels, i1 kernel (2 .. 16), i2 activation (0 none, 1 silu), i3 cache group, i4 dtype of the pool
//                (enum hp_dtype: F32, F16, BF16), i5 x stride, i6 y stride, i7 elements between pages
//                (0: page_tokens * (i1 - 1) * i0).
// The contract is conv_state. A request's state is its last i1 - 1 inputs [i1 - 1, i0], oldest first.
#include "state.h"

HP_BEGIN

namespace {

constexpr int64_t kWidth = 64, kTaps = 16;  // channels worked on at once; most taps

// Channels [first, first + width) of one request.
struct Slice {
  const hp_op &op;
  const Pool &pool;
  int64_t first, width;
  float taps[kTaps][kWidth], window[kTaps][kWidth], bias[kWidth];  // window: the last inputs, a ring

  void load_weights() {
    const int64_t kernel = op.i[1];
    const float *weight = (const float *)op.p[1] + first * kernel, *given = (const float *)op.p[2];
    for (int64_t tap = 0; tap < kernel; tap++)
      for (int64_t c = 0; c < kWidth; c++) taps[tap][c] = c < width ? weight[c * kernel + tap] : 0.f;
    for (int64_t c = 0; c < kWidth; c++) bias[c] = given && c < width ? given[first + c] : 0.f;
  }

  void token(const float *x, float *y, int64_t newest) {
    const int64_t kernel = op.i[1];
    float out[kWidth];
    std::memset(window[newest], 0, sizeof window[newest]);
    std::memcpy(window[newest], x + first, width * sizeof(float));
    for (int64_t c = 0; c < kWidth; c += W) {
      vf sum = {};
      for (int64_t tap = 0; tap < kernel; tap++)
        sum += load(window[(newest + 1 + tap) % kernel] + c) * load(taps[tap] + c);
      sum += load(bias + c);
      if (op.i[2]) sum /= splat(1.f) + vexp(vf{} - sum);
      store(out + c, sum);
    }
    std::memcpy(y + first, out, width * sizeof(float));
    pool.round(window[newest], kWidth);
  }

  void run(const Request &request) {
    const int64_t channels = op.i[0], kernel = op.i[1];
    std::memset(window, 0, sizeof window);
    for (int64_t k = 0; k + 1 < kernel && !request.starts; k++)
      pool.read(pool.at(request.page, k * channels + first), width, window[k]);
    int64_t newest = kernel - 1;  // the ring's place for the next input: the oldest one's
    for (int64_t t = request.begin; t < request.end; t++, newest = (newest + 1) % kernel)
      token((const float *)op.p[0] + t * op.i[5], (float *)op.p[4] + t * op.i[6], newest);
    for (int64_t k = 0; k + 1 < kernel; k++)
      pool.write(window[(newest + 1 + k) % kernel], width, pool.at(request.page, k * channels + first));
  }
};

void conv_state(const hp_op &op, int64_t rows, const hp_batch *batch, const Worker &worker) {
  const int64_t channels = op.i[0], slices = (channels + kWidth - 1) / kWidth;
  const int64_t stride = op.i[7] ? op.i[7] : batch->page_tokens * (op.i[1] - 1) * channels;
  const Pool pool{(char *)op.p[3], op.i[4], stride};
  for (int64_t item = worker.next_work(); item < batch->num_requests * slices; item = worker.next_work()) {
    const Request request(*batch, item / slices, op.i[3]);
    if (request.begin == request.end) continue;
    const int64_t first = item % slices * kWidth;
    Slice slice{op, pool, first, state_min(kWidth, channels - first), {}, {}, {}};
    slice.load_weights();
    slice.run(request);
  }
  clear_padding((float *)op.p[4], rows, op.i[6], channels, *batch, worker);
}

}  // namespace

void add_state(KernelTable &table) {
  table.run[HP_CONV_STATE] = conv_state;
  add_lora(table);
  add_ssm_scan(table);
  add_gated_delta(table);
}

HP_END
