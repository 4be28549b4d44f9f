#include "crossdock/group.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/agreement/flight_report.hpp"
#include "comm/agreement/rendezvous.hpp"
#include "comm/attachment.hpp"
#include "comm/failure.hpp"
#include "comm/memory/window.hpp"
#include "comm/waiting.hpp"
#include "core/check.hpp"
#include "core/threading.hpp"

namespace crossdock {
namespace {

using comm::Disagreement;
using comm::RendezvousHeader;

GroupOptions with_defaults(GroupOptions options) {
  if (!options.arrival_deadline) options.arrival_deadline = comm::default_arrival_deadline();
  if (!options.progress_deadline) options.progress_deadline = comm::default_progress_deadline();
  if (options.report_file.empty()) options.report_file = comm::default_report_file();
  CROSSDOCK_CHECK(options.arrival_deadline->count() > 0 && options.progress_deadline->count() > 0,
                  "deadlines must be positive, got ", options.arrival_deadline->count(), " ns and ",
                  options.progress_deadline->count(), " ns");
  CROSSDOCK_CHECK(options.staging_bytes > 0, "staging_bytes must be positive, got ",
                  options.staging_bytes);
  return options;
}

// Processes on one node share its cores, so that there are no more threads than cores.
std::shared_ptr<ThreadPool> default_threads(Communicator& communicator) {
  auto all = ThreadPool::process_wide();
  if (communicator.shares_address_space()) return all;
  const std::vector<int>& nodes = communicator.topology().node_of_rank;
  const auto ranks_here =
      std::count(nodes.begin(), nodes.end(), nodes[static_cast<size_t>(communicator.rank())]);
  if (ranks_here == 1) return all;
  const auto share = std::max<int64_t>(1, all->num_threads() / ranks_here);
  return std::make_shared<ThreadPool>(static_cast<int>(share));
}

EventPeers all_peers(const Communicator& communicator) {
  EventPeers peers;
  for (int rank = 0; rank < communicator.size(); ++rank) {
    if (rank != communicator.rank()) peers.add(rank);
  }
  return peers;
}

// The ranks that this rank sends to or receives from.
EventPeers peers_of(const Communicator& communicator, std::span<const int64_t> send_offsets,
                    std::span<const int64_t> recv_offsets) {
  EventPeers peers;
  for (int rank = 0; rank < communicator.size(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    const bool sends = send_offsets[r + 1] > send_offsets[r];
    const bool receives = recv_offsets[r + 1] > recv_offsets[r];
    if (rank != communicator.rank() && (sends || receives)) peers.add(rank);
  }
  return peers;
}

Buffer copy_into_pool(Group& group, std::span<const std::byte> bytes) {
  Buffer taken = group.pool().take_scratch(std::ssize(bytes));
  if (!bytes.empty()) std::memcpy(taken.data(), bytes.data(), bytes.size());
  return taken;
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

/// Runs an exchange. Any error in it leaves the peers waiting, so it fails the group.
template <typename Exchange>
void guard(Group& group, const WaitContext& wait, const Exchange& exchange) {
  group.check();
  const detail::PoolWait waiting;  // peers may need the pool that this thread works for
  try {
    exchange();
  } catch (const Error& error) {
    group.fail(error);
    throw;
  } catch (...) {
    const Error error = current_error();
    const Error cause(error.code(), error.what(), {group.rank(), wait.sequence, wait.operation});
    group.fail(cause);
    throw cause;
  }
}

/// Gathers the bytes of all ranks; offsets [P + 1] are identical on every rank.
Buffer gather(Group& group, std::span<const std::byte> bytes, std::span<const int64_t> offsets,
              const WaitContext& wait) {
  Buffer all;
  guard(group, wait, [&] {
    const Buffer send = copy_into_pool(group, bytes);
    all = group.pool().take_scratch(offsets.back());
    group.communicator().all_gather_v(shared_bytes(send), shared_bytes(all), offsets, wait);
  });
  return all;
}

/// Memory for the headers of every rendezvous. After a failed wait, requests may still refer to it,
/// but the group is then poisoned and has no further rendezvous.
struct HeaderMemory {
  static constexpr auto kHeaderBytes = static_cast<int64_t>(sizeof(RendezvousHeader));

  explicit HeaderMemory(int size) : own(kHeaderBytes), all(size * kHeaderBytes) {
    for (int rank = 0; rank <= size; ++rank) offsets.push_back(rank * kHeaderBytes);
  }

  Buffer own;
  Buffer all;
  std::vector<int64_t> offsets;  // [P + 1] into `all`
};

/// The headers of all ranks, [P], in `memory`.
std::span<const RendezvousHeader> gather_headers(Group& group, const HeaderMemory& memory,
                                                 const RendezvousHeader& own,
                                                 const Proposal& proposal) {
  WaitContext wait = group.wait_context(proposal.operation, own.sequence);
  if (!proposal.under_way) wait.arrival = *group.options().arrival_deadline;
  guard(group, wait, [&] {
    std::memcpy(memory.own.data(), &own, sizeof own);
    group.communicator().all_gather_v(shared_bytes(memory.own), shared_bytes(memory.all),
                                      memory.offsets, wait);
  });
  return {reinterpret_cast<const RendezvousHeader*>(memory.all.data()),
          static_cast<size_t>(group.size())};
}

/// Gathers a text from each rank, [P]; the sizes [P] are identical on every rank, 0 for no text.
std::vector<std::string> gather_texts(Group& group, std::string_view own,
                                      const std::vector<int64_t>& sizes, const WaitContext& wait) {
  std::vector<int64_t> offsets = {0};
  for (const int64_t size : sizes) offsets.push_back(offsets.back() + size);
  const Buffer all = gather(group, bytes_of(own), offsets, wait);
  std::vector<std::string> texts;
  for (size_t r = 0; r < sizes.size(); ++r) {
    texts.emplace_back(reinterpret_cast<const char*>(all.data()) + offsets[r],
                       static_cast<size_t>(sizes[r]));
  }
  return texts;
}

// The configurations of the culprit and of the reference, which only those ranks send.
std::pair<std::string, std::string> gather_configs(Group& group,
                                                   std::span<const RendezvousHeader> headers,
                                                   const Disagreement& odd,
                                                   const std::string& config,
                                                   const WaitContext& wait) {
  const bool speaks = group.rank() == odd.culprit || group.rank() == odd.reference;
  std::vector<int64_t> sizes(headers.size());
  for (const int rank : {odd.culprit, odd.reference}) {
    sizes[static_cast<size_t>(rank)] = headers[static_cast<size_t>(rank)].config_bytes;
  }
  const auto texts = gather_texts(group, speaks ? config : "", sizes, wait);
  return {texts[static_cast<size_t>(odd.culprit)], texts[static_cast<size_t>(odd.reference)]};
}

// Why a rank refuses, which only that rank sends.
std::string gather_refusal(Group& group, std::span<const RendezvousHeader> headers, int refusing,
                           const Error* own_refusal, const WaitContext& wait) {
  std::vector<int64_t> sizes(headers.size());
  const auto r = static_cast<size_t>(refusing);
  sizes[r] = headers[r].body_bytes;
  return gather_texts(group, group.rank() == refusing ? own_refusal->what() : "", sizes, wait)[r];
}

}  // namespace

std::span<const std::byte> Agreement::body(int rank) const {
  const auto r = static_cast<size_t>(rank);
  return {bytes.data() + offsets[r], static_cast<size_t>(offsets[r + 1] - offsets[r])};
}

struct Group::State {
  State(std::unique_ptr<Communicator> given, GroupOptions given_options)
      : communicator(std::move(given)),
        options(with_defaults(std::move(given_options))),
        recorder(options.recorded_events, /*is_shared=*/!options.report_file.empty()) {
    CROSSDOCK_CHECK(communicator != nullptr, "a group needs a communicator, got none");
    headers = std::make_unique<HeaderMemory>(communicator->size());
    if (const int64_t limit = communicator->max_bytes_in_flight(); limit > 0) {
      options.staging_bytes = std::min(options.staging_bytes, limit);
    }
    if (!options.threads) options.threads = default_threads(*communicator);
    windows = std::make_unique<comm::WindowPool>(*communicator, [this] { check(); });
    if (const std::string note = communicator->note(); !note.empty()) {
      const EventRecorder::Scope event(recorder, "connect", 0, 0,
                                       note.substr(0, note.find(':')).c_str());
    }
  }

  void check() const {
    if (poison) throw *poison;
  }

  std::unique_ptr<Communicator> communicator;
  GroupOptions options;
  EventRecorder recorder;
  BufferPool pool;
  std::unique_ptr<comm::WindowPool> windows;
  std::unique_ptr<const HeaderMemory> headers;
  comm::PeerEvents peer_events;
  std::weak_ptr<cuda::NcclCommunicator> nccl_communicator;
  std::weak_ptr<void> attachment;
  comm::GpuPretences gpu_pretences;
  uint64_t next_sequence = 1;
  const char* last_operation = "";  // of the last agreement, number next_sequence - 1
  std::optional<Error> poison;
};

struct comm::GroupInternals {
  static Group::State& state(Group& group) { return *group.state_; }
};

comm::PeerEvents& comm::peer_events_of(Group& group) {
  return GroupInternals::state(group).peer_events;
}

std::weak_ptr<cuda::NcclCommunicator>& comm::nccl_communicator_of(Group& group) {
  return GroupInternals::state(group).nccl_communicator;
}

std::weak_ptr<void>& comm::attachment_of(Group& group) {
  return GroupInternals::state(group).attachment;
}

comm::GpuPretences& comm::gpu_pretences_of(Group& group) {
  return GroupInternals::state(group).gpu_pretences;
}

comm::WindowPool& comm::windows_of(Group& group) {
  return *GroupInternals::state(group).windows;
}

Group::Group(std::unique_ptr<Communicator> communicator, GroupOptions options)
    : state_(std::make_unique<State>(std::move(communicator), std::move(options))) {
  if (!state_->options.on_log) return;
  const std::string note = this->communicator().note();
  log(LogLevel::kInfo,
      concat("ranks: ", size(), ", nodes: ", topology().num_nodes,
             ", communicator: ", this->communicator().name(), note.empty() ? "" : ": ", note));
  log(LogLevel::kDebug, concat("on node ", topology().node_of_rank[static_cast<size_t>(rank())],
                               ", with ", threads()->num_threads(), " threads"));
}

Group::~Group() {
  leave(comm::kPlainLeave);
}

int Group::rank() const {
  return state_->communicator->rank();
}
int Group::size() const {
  return state_->communicator->size();
}
const Topology& Group::topology() const {
  return state_->communicator->topology();
}
Communicator& Group::communicator() {
  return *state_->communicator;
}
const GroupOptions& Group::options() const {
  return state_->options;
}
EventRecorder& Group::recorder() {
  return state_->recorder;
}
BufferPool& Group::pool() {
  return state_->pool;
}
const std::shared_ptr<ThreadPool>& Group::threads() const {
  return state_->options.threads;
}
bool Group::is_poisoned() const {
  return state_->poison.has_value();
}
void Group::log(LogLevel level, const std::string& line) const noexcept {
  const GroupOptions& options = state_->options;
  const bool is_for_all = level == LogLevel::kInfo;
  if (!options.on_log || level > options.log_level || (is_for_all && rank() != 0)) return;
  try {
    options.on_log(level, concat("rank ", rank(), " of ", size(), ": ", line));
  } catch (...) {  // a listener must not change what the ranks do
  }
}

void Group::check() const {
  state_->check();
}

GroupMemory Group::memory() const {
  return {.pool_bytes = state_->pool.bytes_held(), .window_bytes = state_->windows->bytes_held()};
}

WaitContext Group::wait_context(const char* operation, uint64_t sequence) const {
  // All ranks have just agreed, so none of them has other work to do before the exchange: the
  // progress deadline applies to arrival too.
  return {.operation = operation,
          .sequence = sequence,
          .arrival = *options().progress_deadline,
          .progress = *options().progress_deadline,
          .on_wait = &options().on_wait,
          .notice_after = options().notice_after};
}

Agreement Group::agree(const Proposal& proposal) {
  check();
  RendezvousHeader own = comm::make_header(proposal, state_->next_sequence);
  comm::PeerEvents::describe(recorder(), own);
  state_->last_operation = proposal.operation;
  const WaitContext wait = wait_context(proposal.operation, state_->next_sequence++);
  EventRecorder::Scope scope(recorder(), proposal.operation, wait.sequence, own.body_bytes,
                             "rendezvous");
  scope.set_peers(all_peers(communicator()));
  const auto headers = gather_headers(*this, *state_->headers, own, proposal);
  state_->peer_events.open(headers, communicator());

  // From here on every rank sees the same headers and comes to the same result.
  const auto refusal_of = [&](int rank) {
    return gather_refusal(*this, headers, rank, proposal.refusal, wait);
  };
  const auto configs_of = [&](const Disagreement& odd) {
    return gather_configs(*this, headers, odd, proposal.config, wait);
  };
  const ErrorContext context{.culprit = -1, .sequence = wait.sequence, .operation = wait.operation};
  if (const auto error = comm::find_disagreement(headers, refusal_of, configs_of, context)) {
    throw *error;
  }

  Agreement agreement{.sequence = wait.sequence, .bytes = {}, .offsets = {}};
  agreement.offsets.reserve(headers.size() + 1);
  agreement.offsets.push_back(0);
  for (const RendezvousHeader& header : headers) {
    agreement.offsets.push_back(agreement.offsets.back() + header.body_bytes);
  }
  if (agreement.offsets.back() > 0) {
    agreement.bytes = gather(*this, proposal.body, agreement.offsets, wait);
  }
  return agreement;
}

void Group::all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                         std::span<const int64_t> recv_offsets, const WaitContext& wait) {
  EventRecorder::Scope scope(recorder(), wait.operation, wait.sequence, send.num_bytes, "exchange");
  scope.set_peers(all_peers(communicator()));
  guard(*this, wait, [&] { communicator().all_gather_v(send, recv, recv_offsets, wait); });
}

void Group::all_to_all_v(const SharedBytes& send, std::span<const int64_t> send_offsets,
                         const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                         const WaitContext& wait) {
  EventRecorder::Scope scope(recorder(), wait.operation, wait.sequence, send.num_bytes, "exchange");
  scope.set_peers(peers_of(communicator(), send_offsets, recv_offsets));
  guard(*this, wait,
        [&] { communicator().all_to_all_v(send, send_offsets, recv, recv_offsets, wait); });
}

void Group::fail(const Error& cause) noexcept {
  std::optional<Error>& poison = state_->poison;
  if (poison) return;
  try {
    const uint64_t sequence = state_->next_sequence - 1;
    const char* operation = state_->last_operation;
    const int culprit = cause.context().culprit;
    poison = *cause.context().operation != '\0'
                 ? cause
                 : Error(cause.code(),
                         concat(cause.what(), " (in ", operation, ", call ", sequence, ")"),
                         {.culprit = culprit < 0 ? rank() : culprit,
                          .sequence = sequence,
                          .operation = operation});
    communicator().abort(*poison);
    comm::write_flight_report(*this, poison->what(), poison->context());
  } catch (const std::exception&) {
    // The peers find out by their deadlines.
    if (!poison) poison = cause;
  }
}

void Group::leave(std::string_view reason) noexcept {
  try {
    communicator().leave(reason);
    const bool is_failure = reason != comm::kPlainLeave && reason != comm::kReturned;
    if (is_failure && !is_poisoned()) comm::write_flight_report(*this, std::string(reason), {});
  } catch (const std::exception&) {
    // The peers find out by their deadlines.
  }
}

std::unique_ptr<Group> Group::subgroup(std::span<const int> members) {
  auto made = std::make_unique<Group>(communicator().subgroup(members), options());
  made->state_->gpu_pretences = state_->gpu_pretences;
  return made;
}

}  // namespace crossdock
