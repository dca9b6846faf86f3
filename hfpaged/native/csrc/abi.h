// What every C entry point of the library shares: export marker, status codes, element types.
#pragma once
#include <stdint.h>

// Raised with every change of an exported signature or struct; native/library.py expects the same number.
#define HFP_ABI_VERSION 8

// Sources of several instruction sets include these headers: a function that is not inlined would exist once for all.
#define HFP_ALWAYS_INLINE __attribute__((always_inline))

#define HFP_API extern "C" __attribute__((visibility("default")))

// Returned by entry points that check their arguments. hfp_status_message() says each in words.
enum HfpStatus : int {
  HFP_OK = 0,
  HFP_NULL_POINTER,
  HFP_BAD_DTYPE,
  HFP_BAD_HEADS,
  HFP_BAD_DIMENSION,
  HFP_BAD_BLOCK_SIZE,
  HFP_BAD_LENGTHS,
  HFP_BAD_TABLE,
  HFP_BAD_SLOT,
  HFP_BAD_OPTION,
  HFP_OUT_OF_MEMORY,
  HFP_STATUS_COUNT,
};

enum HfpDtype : int32_t { HFP_FP32 = 0, HFP_BF16 = 1, HFP_FP16 = 2 };
