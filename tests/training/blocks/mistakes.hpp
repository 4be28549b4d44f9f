#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace train {

/// Common mistakes in parallel training, each of which this program can make on purpose (--mistake)
/// to show that the comparison with one rank finds it. Without a mistake, none of this code runs.
enum class Mistake : uint8_t {
  kNone,
  /// Places local token i of rank r at global token r * T + i, as if ranks held contiguous ranges.
  kNaivePlacement,
  /// Divides summed gradients by the number of ranks, although the loss is already the mean over
  /// the tokens of all ranks.
  kAveragedGradients,
  /// Does not tell the layer that tokens are replicated over tp. The layer refuses them.
  kUntoldReplicas,
  /// The same, with the layer's check turned off: tokens count once per tp rank.
  kAllowedReplicas,
  /// Skips the gradients of a rank's experts if none of them received a row.
  kSkippedEmptyExperts
};

inline constexpr std::array<std::string_view, 6> kMistakeNames = {"none",
                                                                  "naive_placement",
                                                                  "averaged_gradients",
                                                                  "untold_replicas",
                                                                  "allowed_replicas",
                                                                  "skipped_empty_experts"};

}  // namespace train
