#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/check.hpp"
#include "crossdock/group.hpp"

namespace crossdock::comm {

/// The operation of a rank that has found out, after agreeing, that the ranks' calls differ or that
/// one was refused, and that waits for the others to find this too.
inline constexpr const char* kStopOperation = "stop";
/// Whether an agreement failed because another rank is at kStopOperation. The same on all ranks.
bool is_stop(const Error& error);

/// Sent by every rank to every other at the beginning of a collective call, as laid out in memory:
/// the ranks of a group run the same build.
struct RendezvousHeader {
  static constexpr uint32_t kMagic = 0x31524443;  // "CDR1": Crossdock rendezvous, version 1
  static constexpr size_t kMaxOperation = 23;

  uint32_t magic = kMagic;
  uint32_t refusal = 0;  // 0: agrees; else 1 + the ErrorCode of the refusal
  uint64_t sequence = 0;
  uint64_t subject = 0;
  uint64_t config_hash = 0;
  int64_t config_bytes = 0;
  int64_t body_bytes = 0;  // if the rank refuses: the size of its message
  char operation[kMaxOperation + 1] = {};
  int32_t events_process = -1;  // location of this rank's events; see EventRing
  int32_t events_descriptor = -1;

  bool refuses() const { return refusal != 0; }
  ErrorCode refusal_code() const { return static_cast<ErrorCode>(refusal - 1); }
};

RendezvousHeader make_header(const Proposal& proposal, uint64_t sequence);

/// Ranks that do not agree with the others. The larger side is presumed right; if sides are equally
/// large, the side of the lowest rank.
struct Disagreement {
  int culprit = 0;    // lowest rank on the wrong side
  int reference = 0;  // lowest rank on the right side
  int num_wrong = 0;
};

/// Finds ranks with a different operation, subject or sequence.
std::optional<Disagreement> find_other_call(std::span<const RendezvousHeader> headers);

/// Finds ranks with a different configuration.
std::optional<Disagreement> find_other_config(std::span<const RendezvousHeader> headers);

/// The lowest rank at kStopOperation, or -1.
int find_stopped(std::span<const RendezvousHeader> headers);

/// The lowest rank that refuses, or -1.
int find_refusal(std::span<const RendezvousHeader> headers);

/// "rank 1 is at combine of plan 11 while the others are at dispatch of plan 11 (call 12); ..."
std::string describe_other_call(std::span<const RendezvousHeader> headers, const Disagreement& odd);

/// "rank 3 has top_k=4 where rank 0 has top_k=8; ..."
std::string describe_other_config(const Disagreement& odd, std::string_view culprit_config,
                                  std::string_view reference_config);

/// Why the ranks do not agree on a call, if they do not: the same on every rank. `context` has no
/// culprit yet. refusal_of(rank) returns a rank's message, and configs_of(odd) the configurations
/// of the culprit and the reference; they may be collective, and are called alike on all ranks.
template <typename RefusalOf, typename ConfigsOf>
std::optional<Error> find_disagreement(std::span<const RendezvousHeader> headers,
                                       const RefusalOf& refusal_of, const ConfigsOf& configs_of,
                                       ErrorContext context) {
  if (const auto odd = find_other_call(headers)) {
    context.culprit = odd->culprit;
    if (find_stopped(headers) >= 0) context.operation = kStopOperation;
    return Error(ErrorCode::kMismatch, describe_other_call(headers, *odd), context);
  }
  if (const int refusing = find_refusal(headers); refusing >= 0) {
    context.culprit = refusing;
    return Error(headers[static_cast<size_t>(refusing)].refusal_code(),
                 concat("rank ", refusing, ": ", refusal_of(refusing)), context);
  }
  if (const auto odd = find_other_config(headers)) {
    context.culprit = odd->culprit;
    const auto [culprits, reference] = configs_of(*odd);
    return Error(ErrorCode::kMismatch, describe_other_config(*odd, culprits, reference), context);
  }
  return std::nullopt;
}

}  // namespace crossdock::comm
