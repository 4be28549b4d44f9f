#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "comm/agreed_failure.hpp"
#include "dispatch/path.hpp"

namespace crossdock {

/// What all ranks must agree on before a call moves anything.
struct CallTerms {
  const char* operation;
  const Plan* plan = nullptr;  // null: the call makes one, or has none
  std::string text{};          // must be identical on every rank
  uint64_t subject = 0;        // without a plan: see Proposal

  uint64_t subject_id() const { return plan != nullptr && plan->valid() ? plan->id() : subject; }
};

/// One collective call with tensors in host memory: prepare, agree, move, in this order. GpuCall is
/// the same on a GPU.
class HostCall {
 public:
  /// Throws if the group has failed: peers may still use memory of the failed call.
  HostCall(const PathContext& context, CallTerms terms);

  /// Checks input and takes memory. An exception is this rank's refusal, which agree turns into the
  /// same error on every rank; the group stays usable.
  template <typename Body>
  void prepare(const Body& body) {
    refusal_ = refusal_of([&] {
      if (terms_.plan != nullptr) check_plan(context_, *terms_.plan);
      body();
    });
  }

  /// Agrees with the other ranks; throws the same error on all of them if a rank refuses, is
  /// configured differently or makes another call. Returns the number of the agreement.
  uint64_t agree();

  /// Moves rows; `num_bytes` is the payload, for the recorder. An exception poisons the group,
  /// because peers may be waiting for this rank's rows.
  template <typename Body>
  void move(int64_t num_bytes, const Body& body) {
    Group& group = context_.group;
    const EventRecorder::Scope recorded(group.recorder(), terms_.operation, sequence_, num_bytes);
    run_agreed(group, body);
  }

 private:
  const PathContext& context_;
  CallTerms terms_;
  std::optional<Error> refusal_;
  uint64_t sequence_ = 0;  // of the agreement
};

/// The agreement at the end of a dispatch with on_chunk: an exception from the last on_chunk
/// becomes every rank's error. It uses the arrival deadline, as on_chunk may take longer than
/// moving data.
void agree_on_chunks(Group& group, const Plan& plan);

}  // namespace crossdock
