// Compiled once per variant: the variant's kernel table.
#include "kernels.h"

HP_BEGIN

KernelTable make_table() {
  KernelTable table;
#define HP_TEXT2(x) #x
#define HP_TEXT(x) HP_TEXT2(x)
  table.variant = HP_TEXT(HP_VARIANT);
  add_pointwise(table);
  add_gemm(table);
  add_attention(table);
  add_sampling(table);
  add_state(table);
  add_ceiling(table);
  return table;
}

HP_END
