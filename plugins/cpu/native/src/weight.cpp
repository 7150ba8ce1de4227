#include "weight.h"

#include <cstdio>
#include <cstdlib>
#include <new>

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

bool allocate(hp_weight &weight) {
  Level *const levels[] = {&weight.scales, &weight.offsets, &weight.super_scales, &weight.super_offsets};
  const int64_t code_bytes = padded(weight.panels * weight.units * unit_bytes(weight.codes));
  int64_t bytes = code_bytes;
  for (const Level *level : levels) bytes += level_bytes(weight, *level);
  const int64_t align = bytes >= kHuge ? kHuge : kAlign;
  void *memory = nullptr;
  if (posix_memalign(&memory, static_cast<std::size_t>(align), static_cast<std::size_t>(bytes))) return false;
  weight.memory = static_cast<char *>(memory);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  // Large pages where the system gives them, for the part that fills them: a token reads every weight once, and each
  // page walk costs a cache line or two. Best effort.
  if (align == kHuge) (void)madvise(memory, static_cast<std::size_t>(bytes / kHuge * kHuge), MADV_HUGEPAGE);
#endif
  weight.bytes = bytes;
  weight.code_data = weight.memory;
  char *next = weight.memory + code_bytes;
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
  std::free(weight->memory);
  delete weight;
}

int64_t hp_weight_bytes(const hp_weight *weight) { return weight->bytes; }

const char *hp_weight_layout(const hp_weight *weight) { return weight->layout; }

}  // extern "C"
