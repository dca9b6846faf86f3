#include "panel_memory.h"

#include <cstdlib>
#include <memory>

namespace hfp {
namespace {

constexpr int64_t kCacheLine = 64;

struct Free {
  void operator()(uint32_t* words) const { std::free(words); }
};

struct Panel {
  std::unique_ptr<uint32_t, Free> words;
  int64_t count = 0;
};

}  // namespace

uint32_t* panel_memory(int64_t words) {
  static thread_local Panel panel;
  if (words <= panel.count) return panel.words.get();
  void* memory = nullptr;
  panel.words.reset();
  panel.count = 0;
  if (posix_memalign(&memory, kCacheLine, words * sizeof(uint32_t))) return nullptr;
  panel.words.reset(static_cast<uint32_t*>(memory));
  panel.count = words;
  return panel.words.get();
}

}  // namespace hfp
