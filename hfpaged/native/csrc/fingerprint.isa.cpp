// Hash of one segment: the accumulation loop of XXH3 (Yann Collet, xxHash), which multiplies 32-bit halves and so runs
// at the speed of memory. Words are summed into lanes with a key that depends on their position; the sums are
// scrambled once per kilobyte.
#include "fingerprint.h"

#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hfp {
namespace HFP_ISA {
namespace {

constexpr int kLanes = 8;            // 64-bit words hashed side by side
constexpr int kStripe = 8 * kLanes;  // bytes
constexpr int kStripesPerBlock = 16;
constexpr uint32_t kPrime = 0x9E3779B1u;

uint64_t mix(uint64_t x) {  // finalizer of SplitMix64 (Steele, Lea, Flood 2014)
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// One key per stripe of a block and lane; the last row is for scrambling.
struct Keys {
  alignas(64) uint64_t word[kStripesPerBlock + 1][kLanes];
};

void make_keys(Keys& keys) {
  uint64_t state = 0;
  for (auto& row : keys.word)
    for (uint64_t& word : row) word = mix(state += 0x9E3779B97F4A7C15ull);
}

#if defined(__AVX512F__)

struct Lanes {
  __m512i v;
};
inline Lanes load(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store(uint64_t* p, Lanes a) { _mm512_storeu_si512(p, a.v); }
inline Lanes accumulate(Lanes sum, Lanes data, Lanes key) {
  __m512i keyed = _mm512_xor_si512(data.v, key.v);
  __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
  __m512i swapped = _mm512_shuffle_epi32(data.v, _MM_PERM_BADC);
  return {_mm512_add_epi64(_mm512_add_epi64(sum.v, swapped), product)};
}
inline Lanes scramble(Lanes sum, Lanes key) {
  __m512i x = _mm512_xor_si512(_mm512_xor_si512(sum.v, _mm512_srli_epi64(sum.v, 47)), key.v);
  __m512i prime = _mm512_set1_epi32(int(kPrime));
  __m512i low = _mm512_mul_epu32(x, prime);
  __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime);
  return {_mm512_add_epi64(low, _mm512_slli_epi64(high, 32))};
}

#elif defined(__AVX2__)

struct Lanes {
  __m256i half[2];
};
inline Lanes load(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {{_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)}};
}
inline void store(uint64_t* p, Lanes a) {
  for (int i = 0; i < 2; i++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + i, a.half[i]);
}
inline Lanes accumulate(Lanes sum, Lanes data, Lanes key) {
  for (int i = 0; i < 2; i++) {
    __m256i keyed = _mm256_xor_si256(data.half[i], key.half[i]);
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    __m256i swapped = _mm256_shuffle_epi32(data.half[i], 0x4e);
    sum.half[i] = _mm256_add_epi64(_mm256_add_epi64(sum.half[i], swapped), product);
  }
  return sum;
}
inline Lanes scramble(Lanes sum, Lanes key) {
  __m256i prime = _mm256_set1_epi32(int(kPrime));
  for (int i = 0; i < 2; i++) {
    __m256i x = _mm256_xor_si256(_mm256_xor_si256(sum.half[i], _mm256_srli_epi64(sum.half[i], 47)), key.half[i]);
    __m256i low = _mm256_mul_epu32(x, prime);
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
    sum.half[i] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
  }
  return sum;
}

#else

struct Lanes {
  uint64_t word[kLanes];
};
inline Lanes load(const void* p) {
  Lanes a;
  memcpy(&a, p, sizeof a);
  return a;
}
inline void store(uint64_t* p, Lanes a) { memcpy(p, &a, sizeof a); }
inline Lanes accumulate(Lanes sum, Lanes data, Lanes key) {
  for (int i = 0; i < kLanes; i++) {
    uint64_t keyed = data.word[i] ^ key.word[i];
    sum.word[i] += data.word[i ^ 1] + (keyed & 0xffffffffu) * (keyed >> 32);
  }
  return sum;
}
inline Lanes scramble(Lanes sum, Lanes key) {
  for (int i = 0; i < kLanes; i++) sum.word[i] = (sum.word[i] ^ (sum.word[i] >> 47) ^ key.word[i]) * kPrime;
  return sum;
}

#endif

}  // namespace

uint64_t hash_segment(const void* data, size_t bytes) {
  Keys keys;
  make_keys(keys);
  const unsigned char* p = static_cast<const unsigned char*>(data);
  Lanes sum = load(keys.word[0]);
  size_t stripes = bytes / kStripe;
  for (size_t i = 0; i < stripes; i++) {
    int row = int(i % kStripesPerBlock);
    sum = accumulate(sum, load(p + i * kStripe), load(keys.word[row]));
    if (row == kStripesPerBlock - 1) sum = scramble(sum, load(keys.word[kStripesPerBlock]));
  }
  unsigned char tail[kStripe] = {};
  if (bytes % kStripe) memcpy(tail, p + stripes * kStripe, bytes % kStripe);
  sum = scramble(sum, load(keys.word[0]));
  sum = accumulate(sum, load(tail), load(keys.word[1]));
  uint64_t words[kLanes], hash = mix(bytes);
  store(words, sum);
  for (uint64_t word : words) hash = mix(hash ^ word) + 0x9E3779B97F4A7C15ull;
  return hash;
}

}  // namespace HFP_ISA
}  // namespace hfp
