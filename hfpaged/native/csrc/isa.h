// Choice among the variants of an instruction-set-specific source (*.isa.cpp).
//
// Such a source is compiled once per variant, each time with HFP_ISA defined to the variant's name, and puts everything
// into `namespace hfp { namespace HFP_ISA {`. It must emit no inline function of a shared header (the linker would keep
// one copy, perhaps the one compiled for AVX-512, for all variants): keep the standard library out of it.
//
// A baseline source declares the variants of a function and calls the active one like this:
//   HFP_DECLARE_VARIANTS(uint64_t hash_segment(const void* data, size_t bytes))
//   auto hash = HFP_PICK_VARIANT(hash_segment);
#pragma once

namespace hfp {

enum class Isa : int { plain = 0, avx2 = 1, avx512 = 2, avx512bf16 = 3 };

// The variant in use: the best one this CPU runs, unless hfp_use_isa() lowered it.
Isa active_isa();

}  // namespace hfp

#if defined(HFP_X86)
#define HFP_DECLARE_VARIANTS(...)            \
  namespace hfp {                            \
  namespace plain { __VA_ARGS__; }           \
  namespace avx2 { __VA_ARGS__; }            \
  namespace avx512 { __VA_ARGS__; }          \
  namespace avx512bf16 { __VA_ARGS__; }      \
  }
#define HFP_PICK_VARIANT(name)                                      \
  (::hfp::active_isa() == ::hfp::Isa::avx512bf16 ? ::hfp::avx512bf16::name \
   : ::hfp::active_isa() == ::hfp::Isa::avx512   ? ::hfp::avx512::name     \
   : ::hfp::active_isa() == ::hfp::Isa::avx2     ? ::hfp::avx2::name       \
                                                 : ::hfp::plain::name)
#else
#define HFP_DECLARE_VARIANTS(...) \
  namespace hfp {                 \
  namespace plain { __VA_ARGS__; } \
  }
#define HFP_PICK_VARIANT(name) (::hfp::plain::name)
#endif
