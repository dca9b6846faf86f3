// Which requests of a step read the same blocks first. For baseline sources only.
#pragma once
#include <vector>

#include "attention.h"

namespace hfp {

// Requests that are computed together.
struct PrefixGroup {
  int32_t first_member;   // in the list of members
  int32_t num_members;    // more than one: each has one token, and all see the shared ones
  int32_t shared_tokens;  // whole chunks in the same blocks; 0 for one member
};

// Finds requests of one token whose block tables start with the same blocks. All requests that have tokens become
// members of one group each, groups of one where nothing is shared. Linear in the requests, but for a sort of them by
// the blocks that they have in common. Both vectors are overwritten.
void group_by_prefix(const HfpAttentionArgs& args, std::vector<int32_t>& members, std::vector<PrefixGroup>& groups);

}  // namespace hfp
