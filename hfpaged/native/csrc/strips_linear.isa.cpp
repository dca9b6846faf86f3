// The tiles of all products with packed 4-bit weights, and one linear layer with such a weight, called by itself.
#include "strips_kernel.h"

namespace hfp {
namespace HFP_ISA {

#define HFP_INSTANTIATE(T)                                                      \
  template void strip_tile<T, ScaleKind::kE4m3>(int, StripTileArgs<T>, Tile&); \
  template void strip_tile<T, ScaleKind::kE8m0>(int, StripTileArgs<T>, Tile&); \
  template void strip_tile<T, ScaleKind::kFp32>(int, StripTileArgs<T>, Tile&);
HFP_INSTANTIATE(float)
HFP_INSTANTIATE(bf16)
HFP_INSTANTIATE(fp16)
#undef HFP_INSTANTIATE
#if defined(__AVX512BF16__)
template void unpack_panel<bf16, ScaleKind::kE4m3>(const StripTileArgs<bf16>&, uint32_t*);
template void unpack_panel<bf16, ScaleKind::kE8m0>(const StripTileArgs<bf16>&, uint32_t*);
#endif

namespace {

template <class T>
void linear(const HfpStripsArgs& args, Share share) {
  InputRows<T> in = {static_cast<const T*>(args.input), args.input_stride, static_cast<int>(args.rows)};
  int panels = (args.columns + kPanelColumns - 1) / kPanelColumns;
  auto store = [&](int panel, int first_row, int rows, Tile& tile) {
    for (int r = 0; r < rows; r++) {
      T* row = static_cast<T*>(args.output) + (first_row + r) * args.output_stride;
      for (int v = 0; v < kPanelVectors; v++) {
        int column = panel * kPanelColumns + v * kLanes, left = args.columns - column;
        if (left <= 0) break;
        int count = left < kLanes ? left : kLanes;
        Vec16 value = tile[r][v];
        if (args.bias) value = value + load_upto16(args.bias + column, count);
        store_upto16(row + column, value, count);
      }
    }
  };
  int64_t units = strip_units_of<T>(in.count, args.weight, panels).count;
  multiply_strips<T>(in, args.weight, panels, share.begin(units), share.end(units), nullptr, store);
}

}  // namespace

void strips_linear(const HfpStripsArgs& args, int32_t index, int32_t count) {
  Share share = {index, count};
  if (args.dtype == HFP_FP32) linear<float>(args, share);
  else if (args.dtype == HFP_BF16) linear<bf16>(args, share);
  else linear<fp16>(args, share);
}

}  // namespace HFP_ISA
}  // namespace hfp
