#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "crossdock/group.hpp"
#include "crossdock/moe_layer.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// The tokens with which a rank takes part in a forward.
struct LocalTokens {
  ConstTensorView x{};     // [T, D], in host memory to be sampled or hashed
  ConstTensorView mask{};  // [T] bool, optional: true = padding, which is ignored
  int64_t first = 0;       // of a slice of replicated tokens: slices differ by their place
};

/// A hash of a few rows, to keep its cost independent of T and D: up to 16 tokens, spread evenly,
/// and up to 512 bytes of each. Equal tokens have equal samples. 0 if there are no tokens.
uint64_t sample_tokens(const LocalTokens& tokens);

/// The same for refuse_equal_tokens: also 0 for fewer than 8 tokens, which may be equal by chance.
uint64_t sample_to_compare(const LocalTokens& tokens);

/// A hash of all tokens. 0 if there are none.
uint64_t hash_tokens(const LocalTokens& tokens);

/// Throws Error(kInvalidArgument), the same on all ranks, if two ranks of the group have
/// bit-identical tokens. `samples` [P], by sample_to_compare, are known to all ranks; only if two
/// of them are equal do the ranks compare all tokens, with one more agreement. Collective.
void refuse_equal_tokens(Group& group, std::span<const uint64_t> samples,
                         const LocalTokens& tokens);

/// Copies of GPU tokens in host memory.
class HostTokens {
 public:
  /// Waits for the stream.
  HostTokens(const LocalTokens& on_gpu, Stream stream);

  const LocalTokens& tokens() const { return tokens_; }

 private:
  std::vector<std::byte> x_;
  std::vector<std::byte> mask_;
  LocalTokens tokens_;
};

/// The groups over which a layer counts. Null: see MoeLayerOptions. All must outlive the layer.
struct CountingGroups {
  Group* counting = nullptr;    // MoeLayerOptions::counting_group
  Group* sequences = nullptr;   // MoeLayerOptions::sequence_group
  Group* replicated = nullptr;  // MoeLayerOptions::replicated_over
};

/// A forward for the ranks to agree on.
struct ForwardCall {
  const MoeForwardArgs& args;  // of this rank's tokens
  LocalTokens tokens;          // to compare with those of the other ranks
  std::string config_text;     // must be identical on every rank of the layer's group
};

/// Sums routes, tokens and sequences over the ranks, for the losses and the load of a layer, and
/// refuses tokens that several ranks hold.
///
/// The losses may count over groups other than the layer's. Some ranks of these groups then belong
/// to other layers' groups, and each forward agrees in all of them.
class RouteCounts {
 public:
  /// `config` must outlive this object.
  RouteCounts(Group& group, const CountingGroups& groups, const MoeLayerConfig& config)
      : group_(group), groups_(groups), config_(config) {}

  /// Agrees on a forward with the other ranks, exchanges `decision.router->statistics` and sets the
  /// counts of the decision. Collective; throws the refusal of any rank on all.
  void agree(const ForwardCall& call, const std::optional<Error>& refusal, MoeDecision& decision);

  /// The losses' groups other than the layer's, in the order in which ranks agree in them.
  std::vector<Group*> other_groups() const;
  /// The group over which routes and tokens are counted.
  Group* batch_group() const { return groups_.counting != nullptr ? groups_.counting : &group_; }
  /// The group that shares sequences; null: each rank has its own, or they are not counted.
  Group* sequence_group() const;

  /// Must be identical on the ranks of a group that count together.
  std::string counts_text(const Group& group, const MoeForwardArgs& args) const;
  /// Passes a refusal of the layer's group to the ranks of the other groups, which wait for this
  /// rank's counts.
  void refuse_in_other_groups(const MoeForwardArgs& args, const Error& refusal) const;
  /// Throws Error(kUnsupported) for tokens on GPUs whose losses need a number of sequences that
  /// only hosts count.
  void check_on_gpu(const MoeForwardArgs& args) const;

 private:
  // Counts of every rank of a group, and samples of their tokens.
  struct RankCounts {
    std::vector<RouterStatistics> statistics;  // [P]
    std::vector<uint64_t> samples;             // [P]
  };

  bool counts(BalanceScope scope) const { return config_.router.counts(scope); }
  // Whether that group is `replicated`, because no other was given.
  bool sequences_are_replicated() const;

  std::vector<int64_t> pack(const ForwardCall& call, const MoeDecision& decision) const;
  RankCounts exchange(Group& group, const ForwardCall& call, const MoeDecision& decision,
                      const std::optional<Error>& refusal) const;
  std::map<Group*, RankCounts> exchange_in_other_groups(const ForwardCall& call,
                                                        MoeDecision& decision) const;
  void set_counts(const ForwardCall& call, const std::map<Group*, RankCounts>& of_group,
                  MoeDecision& decision) const;
  RouterStatistics count_sequences(const std::map<Group*, RankCounts>& of_group,
                                   MoeDecision& decision) const;

  Group& group_;
  CountingGroups groups_;
  const MoeLayerConfig& config_;
};

/// Throws Error(kInvalidArgument) if `earlier` is given and cannot be added to the counts of a
/// router with this configuration, for tokens on `device` (see MoeForwardArgs::earlier).
void check_earlier(const RouterConfig& config, const RouterStatistics* earlier, Device device);

}  // namespace crossdock
