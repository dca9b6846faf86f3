// Mixture of experts: choosing experts, ordering (token, expert) pairs by expert, and adding the experts' results up.
#pragma once
#include "ops_math.h"
#include "program.h"

namespace hfp {
namespace HFP_ISA {

// probabilities[i] = softmax(logits)[i] in fp32. The array has room for whole vectors.
template <class T>
inline void softmax(const T* logits, int n, float* probabilities) {
  float largest = -__builtin_inff();
  for_each16(n, [&](int i, auto count) {
    store16(probabilities + i, load_upto16(logits + i, count));
    for (int j = i; j < i + count; j++) largest = probabilities[j] > largest ? probabilities[j] : largest;
  });
  Vec16 sums = zero16();
  for_each16(n, [&](int i, auto count) {
    Vec16 term = exp16(load16(probabilities + i) - splat16(largest));
    store16(probabilities + i, term);
    sums = sums + load_upto16(probabilities + i, count);
  });
  Vec16 total = splat16(sum16(sums));
  for_each16(n, [&](int i, auto) { store16(probabilities + i, load16(probabilities + i) / total); });
}

// The `chosen` most probable experts in ascending order of expert, the order in which their results are added.
inline void choose_experts(float* probabilities, int n, int chosen, int32_t* experts, float* weights) {
  for (int c = 0; c < chosen; c++) {
    int best = 0;
    for (int i = 1; i < n; i++)
      if (probabilities[i] > probabilities[best]) best = i;
    int place = c;
    for (; place > 0 && experts[place - 1] > best; place--) {
      experts[place] = experts[place - 1];
      weights[place] = weights[place - 1];
    }
    experts[place] = best;
    weights[place] = probabilities[best];
    probabilities[best] = -1.f;
  }
}

template <class T>
inline void route_row(const T* logits, const RouteOp& op, int32_t* experts, float* weights) {
  alignas(64) float probabilities[kMaxExperts + kLanes];
  softmax(logits, op.experts, probabilities);
  choose_experts(probabilities, op.experts, op.chosen, experts, weights);
  float sum = 0.f;
  for (int c = 0; c < op.chosen; c++) sum += weights[c];
  for (int c = 0; c < op.chosen; c++) {
    if (op.normalize) weights[c] /= sum;
    if (op.round_weights) weights[c] = rounded<T>(weights[c]);
  }
}

// Counting sort of the pairs by expert; pairs of one expert stay in the order of their rows.
inline void order_pairs(const Routing& routing, const OrderPairsOp& op, int64_t rows) {
  int32_t* first = routing.first_pair;
  for (int e = 0; e <= op.experts; e++) first[e] = 0;
  int64_t pairs = rows * op.chosen;
  for (int64_t i = 0; i < pairs; i++) first[routing.experts[i] + 1]++;
  for (int e = 0; e < op.experts; e++) first[e + 1] += first[e];
  int32_t next[kMaxExperts];
  for (int e = 0; e < op.experts; e++) next[e] = first[e];
  for (int64_t i = 0; i < pairs; i++) {
    int32_t place = next[routing.experts[i]]++;
    routing.place[i] = place;
    routing.row[place] = static_cast<int32_t>(i / op.chosen);
    routing.pair_weight[place] = routing.weights[i];
  }
}

}  // namespace HFP_ISA
}  // namespace hfp
