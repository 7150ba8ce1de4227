#include "weight.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr int64_t kAlign = 64;
constexpr int64_t kHuge = int64_t{2} << 20;

int64_t padded(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

int64_t level_bytes(const hp_weight &weight, const hp::Level &level) {
  return padded(weight.panels * level.count * hp::kRows * hp::number_bytes(level.dtype));
}

const char *number_name(int32_t dtype) {
  static const char *const names[] = {"f32", "f16", "bf16", "i8", "u8"};
  return names[dtype];
}

}  // namespace

namespace hp {

// Freed with its last holder: a weight in it, or the WeightMemory that still gives from it.
struct WeightBlock {
  char *start;
  int64_t used;
  std::atomic<int64_t> holders;

  // In large pages where the system gives them: a token reads every weight once, and each page walk costs a cache line or
  // two. NULL where memory is lacking.
  static WeightBlock *of(int64_t bytes) {
    const int64_t align = bytes >= kHuge ? kHuge : kAlign;
    void *memory = nullptr;
    if (posix_memalign(&memory, static_cast<std::size_t>(align), static_cast<std::size_t>(bytes))) return nullptr;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (align == kHuge) (void)madvise(memory, static_cast<std::size_t>(bytes / kHuge * kHuge), MADV_HUGEPAGE);
#endif
    return new WeightBlock{static_cast<char *>(memory), 0, {1}};
  }

  void let_go() {
    if (holders.fetch_sub(1) > 1) return;
    std::free(start);
    delete this;
  }
};

WeightMemory::~WeightMemory() {
  if (open_) open_->let_go();
}

char *WeightMemory::take(int64_t bytes, WeightBlock *&block) {
  if (bytes > kShared) {
    block = WeightBlock::of(bytes);
    return block ? block->start : nullptr;
  }
  if (!open_ || open_->used + bytes > kBlockBytes) {
    if (open_) open_->let_go();
    open_ = WeightBlock::of(kBlockBytes);
    if (!open_) return nullptr;
  }
  block = open_;
  block->holders.fetch_add(1);
  block->used += bytes;
  return block->start + block->used - bytes;
}

bool allocate(hp_weight &weight, WeightMemory &from) {
  Level *const levels[] = {&weight.scales, &weight.offsets, &weight.super_scales, &weight.super_offsets};
  const int64_t code_bytes = padded(weight.panels * weight.units * unit_bytes(weight.codes));
  int64_t bytes = code_bytes;
  for (const Level *level : levels) bytes += level_bytes(weight, *level);
  weight.code_data = from.take(bytes, weight.block);
  if (!weight.code_data) return false;
  weight.bytes = bytes;
  char *next = weight.code_data + code_bytes;
  for (Level *level : levels) {
    level->data = level->count ? next : nullptr;
    next += level_bytes(weight, *level);
  }
  return true;
}

void name_layout(hp_weight &weight) {
  static const char *const names[] = {"u4", "table4", "table4", "u5", "u6", "bytes6", "i8", "f32", "f16", "bf16"};
  const char *codes = names[static_cast<int>(weight.codes)];
  if (is_float(weight.codes)) {
    std::snprintf(weight.layout, sizeof weight.layout, "%s x16", codes);
    return;
  }
  const long long group = weight.halves ? kBlock / 2 : weight.blocks_per_scale * kBlock;
  char offsets[32] = "";
  if (weight.offsets.count) std::snprintf(offsets, sizeof offsets, ", offsets %s", number_name(weight.offsets.dtype));
  else if (weight.offset) std::snprintf(offsets, sizeof offsets, ", zero %g", static_cast<double>(weight.zero));
  std::snprintf(weight.layout, sizeof weight.layout, "%s x16 group %lld, scales %s%s%s", codes, group,
                number_name(weight.scales.dtype), weight.super_group ? " in two levels" : "", offsets);
}

}  // namespace hp

extern "C" {

void hp_weight_free(hp_weight *weight) {
  if (!weight) return;
  if (weight->block) weight->block->let_go();
  delete weight;
}

int64_t hp_weight_bytes(const hp_weight *weight) { return weight->bytes; }

const char *hp_weight_layout(const hp_weight *weight) { return weight->layout; }

}  // extern "C"
