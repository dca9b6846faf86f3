// Rounds a row of the head's input to the digits of a ScreenRow, and measures what that leaves out.
//
// A few numbers of a row are far larger than the others. One scale for all would leave large rests in the others, so the
// scale follows the mean, and what does not fit into 8 bits gets second digits of its own.
#pragma once
#include "gemm_codes.h"
#include "head_screen.h"
#include "ops_norm.h"

namespace hfp {
namespace HFP_ISA {

constexpr float kLargestDigit = 127.f;
constexpr float kOutlierUnit = 128.f;
constexpr float kFineSteps = 254.f;         // fine digits of one coarse digit, which rounds to half of that
constexpr float kLargestByMean = 6.f;       // largest number without a second digit, by the mean: more cost more rests
constexpr float kLeastLength = 1e-15f;      // squares of smaller numbers vanish

inline Vec16 absolute16(Vec16 x) { return max16(x, zero16() - x); }

inline Vec16 rounded_digit16(Vec16 x) {
  return max16(min16(round_to_int16(x), splat16(kLargestDigit)), splat16(-kLargestDigit));
}

inline void store_digits(int8_t* digits, Vec16 values) {
  alignas(64) float lanes[kLanes];
  store16(lanes, values);
  for (int lane = 0; lane < kLanes; lane++) digits[lane] = static_cast<int8_t>(static_cast<int32_t>(lanes[lane]));
}

template <class T>
class RowDigits {
 public:
  RowDigits(const T* x, int size, ScreenRow& row) : x_(x), size_(size), row_(row) {
    row_.length = sqrtf(sum_over(x_, size_, [](Vec16 v) { return v * v; }));
  }

  // Not for rows with numbers that are none, whose logits have to come out as such, nor for rows of zeros.
  bool can_bound() const { return row_.length > kLeastLength && row_.length < __builtin_inff(); }

  // Writes `size` digits each, and zeros up to a whole vector.
  void write(int8_t* coarse, int8_t* fine) {
    choose_scale();
    Vec16 rests[2] = {zero16(), zero16()}, sums[2] = {zero16(), zero16()};
    Vec16 scale = splat16(row_.scale), inverse = splat16(1.f / row_.scale);
    Vec16 fine_scale = splat16(row_.fine_scale), fine_inverse = splat16(1.f / row_.fine_scale);
    for_each16(size_, [&](int i, auto count) {
      Vec16 x = load_upto16(x_ + i, count), whole = round_to_int16(x * inverse), rest = x - whole * scale;
      Vec16 fine_digits = rounded_digit16(rest * fine_inverse), fine_rest = rest - fine_digits * fine_scale;
      Vec16 digits = fits(whole) ? whole : without_outliers(whole, i / 4);
      store_digits(coarse + i, digits);
      store_digits(fine + i, fine_digits);
      rests[0] = fma16(rest, rest, rests[0]);
      rests[1] = fma16(fine_rest, fine_rest, rests[1]);
      sums[0] = sums[0] + digits;
      sums[1] = sums[1] + fine_digits;
    });
    // Rests that fp32 rounded, and their lengths.
    const float more = 1.001f, rounding = row_.length * 0x1p-20f;
    row_.coarse_rest = sqrtf(sum16(rests[0])) * more + rounding;
    row_.fine_rest = sqrtf(sum16(rests[1])) * more + rounding;
    row_.coarse_offset = kCodeOffset * (whole_sum(sums[0]) + outlier_sum());
    row_.fine_offset = kCodeOffset * whole_sum(sums[1]);
  }

 private:
  static bool fits(Vec16 whole) { return !(largest16(absolute16(whole)) > kLargestDigit); }

  void choose_scale() {
    Vec16 largest = zero16(), sum = zero16();
    for_each16(size_, [&](int i, auto count) {
      Vec16 x = absolute16(load_upto16(x_ + i, count));
      largest = max16(largest, x);
      sum = sum + x;
    });
    float usual = sum16(sum) / static_cast<float>(size_) * (kLargestByMean / kLargestDigit);
    row_.scale = fmaxf(usual, largest16(largest) / (kOutlierUnit * (kLargestDigit - 1.f)));
    while (outliers() > kMostOutliers) row_.scale *= 1.5f;
    row_.fine_scale = row_.scale / kFineSteps;
  }

  int outliers() const {
    Vec16 inverse = splat16(1.f / row_.scale);
    int quads = 0;
    for_each16(size_, [&](int i, auto count) {
      if (!fits(round_to_int16(load_upto16(x_ + i, count) * inverse))) quads += kLanes / 4;
    });
    return quads;
  }

  // Moves what is beyond 8 bits, in some of the four quads from `quad` on, to outliers. Returns the rest.
  Vec16 without_outliers(Vec16 whole, int quad) {
    alignas(64) float lanes[kLanes];
    store16(lanes, whole);
    for (int first = 0; first < kLanes; first += 4, quad++) {
      int8_t digits[4] = {};
      bool has_any = false;
      for (int i = 0; i < 4; i++) {
        float& lane = lanes[first + i];
        if (!(fabsf(lane) > kLargestDigit)) continue;
        float high = nearbyintf(lane / kOutlierUnit);
        lane -= high * kOutlierUnit;
        digits[i] = static_cast<int8_t>(high);
        has_any = true;
      }
      if (!has_any) continue;
      std::memcpy(row_.digits[row_.outliers], digits, sizeof digits);
      row_.quads[row_.outliers++] = quad;
    }
    return load16(lanes);
  }

  // Lane by lane the sums are small enough to be exact.
  static int32_t whole_sum(Vec16 sums) {
    alignas(64) float lanes[kLanes];
    store16(lanes, sums);
    int32_t sum = 0;
    for (int lane = 0; lane < kLanes; lane++) sum += static_cast<int32_t>(lanes[lane]);
    return sum;
  }

  int32_t outlier_sum() const {
    int32_t sum = 0;
    for (int i = 0; i < row_.outliers; i++)
      for (int8_t digit : row_.digits[i]) sum += static_cast<int32_t>(kOutlierUnit) * digit;
    return sum;
  }

  const T* x_;
  int size_;
  ScreenRow& row_;
};

// Fills in a row of `size` elements and its digits; where there are no bounds, these stay what they are.
template <class T>
inline void write_screen_row(const T* x, int size, ScreenRow& row, int8_t* coarse, int8_t* fine) {
  row.outliers = 0;
  RowDigits<T> digits(x, size, row);
  if (digits.can_bound()) digits.write(coarse, fine);
  else row.length = __builtin_inff();
}

}  // namespace HFP_ISA
}  // namespace hfp
