#include "fingerprint.h"

#include <algorithm>
#include <vector>

#include "isa.h"

HFP_DECLARE_VARIANTS(uint64_t hash_segment(const void* data, size_t bytes))

namespace {

constexpr uint64_t kMultiplier = 0xD6E8FEB86659FD93ull;
constexpr size_t kBytesPerThread = size_t(1) << 20;  // less is not worth waking a thread for

}  // namespace

uint64_t hfp_fingerprint(const void* data, size_t bytes, int num_threads) {
  auto hash_segment = HFP_PICK_VARIANT(hash_segment);
  const unsigned char* p = static_cast<const unsigned char*>(data);
  long segments = long((bytes + hfp::kFingerprintSegment - 1) / hfp::kFingerprintSegment);
  std::vector<uint64_t> hashes(segments);
  [[maybe_unused]] int threads = std::max(1, std::min(num_threads, int(bytes / kBytesPerThread)));
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long i = 0; i < segments; i++) {
    size_t first = size_t(i) * hfp::kFingerprintSegment;
    hashes[i] = hash_segment(p + first, std::min(hfp::kFingerprintSegment, bytes - first));
  }
  // In order, so that exchanged segments show.
  uint64_t hash = bytes;
  for (uint64_t segment : hashes) hash = (((hash << 23) | (hash >> 41)) ^ segment) * kMultiplier;
  return hash ^ (hash >> 32);
}
