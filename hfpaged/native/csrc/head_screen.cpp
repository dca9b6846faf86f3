// Entry point that fills the screen of a head: the parallel region and the choice of instruction set.
#include "head_screen.h"

#include "isa.h"

HFP_DECLARE_VARIANTS(void fill_screen(const HeadScreen& screen, const PackedWeight& weight, HfpDtype type,
                                      int64_t panel))
HFP_DECLARE_VARIANTS(int64_t screen_rows())

// Most sampled rows of a step for which a screen is used.
HFP_API int64_t hfp_screen_rows() { return HFP_PICK_VARIANT(screen_rows)(); }

// Writes the codes of a packed weight of `dtype`, an HfpDtype, and what bounds their products, to the memory of `screen`.
HFP_API void hfp_screen_fill(const hfp::HeadScreen* screen, const hfp::PackedWeight* weight, int32_t dtype,
                             int32_t threads) {
  auto fill_screen = HFP_PICK_VARIANT(fill_screen);
  int64_t panels = weight->panel_count();
#pragma omp parallel for num_threads(threads)
  for (int64_t panel = 0; panel < panels; panel++) fill_screen(*screen, *weight, HfpDtype(dtype), panel);
}
