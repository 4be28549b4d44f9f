#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "crossdock/error.hpp"
#include "crossdock/extend/communicator.hpp"
#include "crossdock/recorder.hpp"
#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock {

namespace comm {
struct GroupInternals;
}  // namespace comm

/// How much a group says of its choices.
enum class LogLevel : uint8_t {
  kNone,
  kInfo,   // choices that all ranks share, on rank 0: ranks, strategy, how GPUs reach each other
  kDebug,  // also those of each rank, on all of them
};

/// Receives one line per choice: what was chosen, and why. The library itself prints nothing.
/// Exceptions are ignored. Must not use the group.
using OnLog = std::function<void(LogLevel level, const std::string& line)>;

struct GroupOptions {
  /// Maximum time for a peer to arrive at an operation. Default: CROSSDOCK_ARRIVAL_DEADLINE
  /// (seconds), else 600 s.
  std::optional<std::chrono::nanoseconds> arrival_deadline{};
  /// Maximum time without progress once data is moving. Default: CROSSDOCK_PROGRESS_DEADLINE
  /// (seconds), else 30 s.
  std::optional<std::chrono::nanoseconds> progress_deadline{};
  /// Number of recent events to keep (see EventRecorder); 0 turns the recorder off.
  int64_t recorded_events = 256;
  /// File that receives the recent events when the group fails: each rank appends one line of JSON.
  /// A failed rank's line is written by another rank on its node if it cannot write it itself.
  /// Default: CROSSDOCK_REPORT, else no report.
  std::string report_file{};
  /// Limit on the memory for rows in transit between nodes, separately for sending and receiving.
  /// Independent of the number of tokens, but always enough for one token of every rank. Also
  /// limited by Communicator::max_bytes_in_flight. Must be identical on every rank.
  int64_t staging_bytes = int64_t{64} << 20;
  /// Thread pool that moves and sums rows. Default: the process-wide pool if ranks are threads,
  /// which share it; a pool with this rank's share of the node's cores if they are processes.
  std::shared_ptr<ThreadPool> threads{};
  /// (optional) Called once in a call that has waited for other ranks for `notice_after` without
  /// progress. May be called by several threads at once if the ranks are threads.
  OnWait on_wait{};
  std::chrono::nanoseconds notice_after = std::chrono::seconds(10);
  /// (optional) Called with lines of at most `log_level`. May be called by several threads at once.
  OnLog on_log{};
  LogLevel log_level = LogLevel::kInfo;
};

/// One rank's input to Group::agree.
struct Proposal {
  const char* operation = "";  // a string literal of at most 23 characters: "plan", "dispatch", ...
  uint64_t subject = 0;        // id of the plan that the operation uses; 0 if none
  /// Settings that must be identical on every rank, as "key=value;key=value". A difference becomes
  /// an error that names the key, both values and the rank.
  std::string config{};
  /// Bytes for the other ranks, delivered if all ranks agree; any size.
  std::span<const std::byte> body{};
  /// True if all ranks are known to be inside the operation already: the progress deadline then
  /// applies instead of the arrival deadline.
  bool under_way = false;
  /// If set, this rank refuses: every rank throws this error, prefixed with this rank's number.
  const Error* refusal = nullptr;
};

/// The result of Group::agree: the bodies of all ranks.
struct CROSSDOCK_API Agreement {
  uint64_t sequence = 0;         // number of this call to agree; identical on every rank
  Buffer bytes;                  // the bodies, by rank, contiguous
  std::vector<int64_t> offsets;  // [P + 1]

  std::span<const std::byte> body(int rank) const;
};

/// Memory that one rank's group holds, in use or kept for reuse, in bytes.
struct GroupMemory {
  int64_t pool_bytes = 0;
  int64_t window_bytes = 0;  // reachable by the other ranks on its node
};

/// The P ranks that exchange rows, seen from one of them: a communicator with agreement and failure
/// handling.
///
/// Every collective call begins with agree(). If an input is invalid, configurations differ or a
/// rank makes a different call, all ranks throw the same error before anything has moved, and the
/// group stays usable. If a rank fails, leaves or does not arrive, the others throw an error that
/// names it, and the group is poisoned: every later call throws that error. The survivors can
/// continue with subgroup().
///
/// May be used by any thread, but by only one at a time. The destructor is not collective: it tells
/// the peers that this rank has left and does not wait for them.
class CROSSDOCK_API Group {
 public:
  explicit Group(std::unique_ptr<Communicator> communicator, GroupOptions options = {});
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const;
  int size() const;
  const Topology& topology() const;
  Communicator& communicator();
  const GroupOptions& options() const;  // with defaults filled in

  EventRecorder& recorder();
  BufferPool& pool();
  const std::shared_ptr<ThreadPool>& threads() const;
  GroupMemory memory() const;

  /// Passes a line to GroupOptions::on_log, after this rank's number: kInfo on rank 0 only.
  void log(LogLevel level, const std::string& line) const noexcept;

  /// Throws the error that poisoned this group, if any.
  void check() const;
  bool is_poisoned() const;

  /// Compares the proposals of all ranks and exchanges their bodies. Collective. Throws the same
  /// Error on every rank if a rank refuses (with its error), has a different configuration or makes
  /// a different call (kMismatch); the group stays usable.
  Agreement agree(const Proposal& proposal);

  /// The wait context for an exchange that belongs to the agreement `sequence`.
  WaitContext wait_context(const char* operation, uint64_t sequence) const;

  /// The communicator's exchanges. They are recorded, and a failure poisons the group.
  void all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                    std::span<const int64_t> recv_offsets, const WaitContext& wait);
  void all_to_all_v(const SharedBytes& send, std::span<const int64_t> send_offsets,
                    const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                    const WaitContext& wait);

  /// Sums `tensors` over the ranks, in place: afterwards every rank has the sums. Each element is
  /// added in rank order, in fp32 for fp32, bf16 and fp16 tensors (rounded once at the end), else
  /// in the tensor's own dtype, fp64 or int64. The bits are identical on every rank and do not
  /// depend on the communicator. Host memory only; empty tensors are valid. Staging memory is
  /// bounded by GroupOptions::staging_bytes. Collective: if a tensor is refused on one rank, or the
  /// number, dtypes or shapes differ between ranks, every rank throws the same error and the
  /// tensors are unchanged.
  void all_reduce(std::span<const TensorView> tensors);
  void all_reduce(const TensorView& tensor) { all_reduce(std::span(&tensor, 1)); }

  /// Sums `input`, which has the same shape on every rank, and gives each rank its part of the sum.
  /// The parts are contiguous and in rank order. Their sizes are those of the ranks' `out`, which
  /// may differ or be 0; together they must cover the input. `out` must not overlap the input.
  /// Otherwise as all_reduce.
  void reduce_scatter(const ConstTensorView& input, const TensorView& out);

  /// Poisons the group and tells the peers. For failures after an agreement, when peers may already
  /// be waiting for this rank's data. If `cause` names no operation, the operation of the last
  /// agreement is used; if it names no culprit either, the culprit is this rank. Does nothing if
  /// the group is already poisoned.
  void fail(const Error& cause) noexcept;

  /// Tells the peers that this rank makes no further calls, and why. The destructor does so if
  /// leave has not been called.
  void leave(std::string_view reason) noexcept;

  /// A group of `members` (ranks of this group, ascending, including this rank) with the same
  /// options. Called by the members only; also works on a poisoned group.
  std::unique_ptr<Group> subgroup(std::span<const int> members);

 private:
  friend struct comm::GroupInternals;

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace crossdock
