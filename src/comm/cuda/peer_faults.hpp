#pragma once

#include <cuda_runtime.h>

#include <cstdint>

// What kernels that wait for other ranks report to their host: plain data.

namespace crossdock::cuda {

/// Why a wait or an exchange failed.
enum class FaultCode : uint32_t {
  kNone = 0,
  kTimeout,          // `culprit` did not arrive
  kPeerFailed,       // `culprit` had failed already
  kTooManyRoutes,    // more set bits in a token of a dense map than slots
  kExpertRange,      // an expert id outside [0, E) that is not -1
  kExpertRepeated,   // the same expert twice in a token
  kWeightNotFinite,  // a weight that is not finite
  kTooManyRows,      // more rows at `culprit` than max_rows
  kOtherCall,        // ranks have queued different calls, or one has refused its own
  kStopped,          // a peer has stopped, or is at another kind of call
};

/// A failure on the device. `code` is written last.
struct Fault {
  uint32_t code = 0;       // FaultCode
  int32_t culprit = 0;     // rank
  uint32_t operation = 0;  // Operation
  uint32_t epoch = 0;      // number of the wait in its channel
  int64_t route = 0;       // pack_route at the culprit; the rows needed (kTooManyRows); the number
                           // of this rank's call (kOtherCall)
  int64_t value = 0;       // the expert id, the bits of the weight, or the number of set bits
};

/// A token and a slot of it, or for kTooManyRoutes its number of slots.
inline constexpr int kSlotBits = 16;
__host__ __device__ inline int64_t pack_route(int64_t token, int32_t slot) {
  return token << kSlotBits | slot;
}
__host__ __device__ inline int64_t token_of(const Fault& fault) {
  return fault.route >> kSlotBits;
}
__host__ __device__ inline int64_t slot_of(const Fault& fault) {
  return fault.route & ((1 << kSlotBits) - 1);
}

/// Whether a fault ends its channel; other faults end one step.
__host__ __device__ inline bool is_fatal(const Fault& fault) {
  return fault.code == static_cast<uint32_t>(FaultCode::kTimeout) ||
         fault.code == static_cast<uint32_t>(FaultCode::kPeerFailed);
}

/// Faults that a rank's device reports to its host, in host memory: the first of each kind since
/// the host took the last one. Each kind has its own slot, so none is lost.
struct FaultBoard {
  Fault refused;  // ends one step
  Fault halted;   // ends all steps until the hosts have met
  Fault fatal;
  uint32_t abandon = 0;  // written by the host: end all waits. kAbandon, or kGone + the peer's rank

  static constexpr uint32_t kAbandon = 1;  // no peer will arrive
  static constexpr uint32_t kGone = 2;     // one peer's process has ended
};

}  // namespace crossdock::cuda
