// The C API as a sequence of calls, by one rank or by two that are threads: each call ends with a
// status that is the same on both ranks and that is not CROSSDOCK_INTERNAL. Tensors describe memory
// that exists; everything else may be wrong, on one rank or on both.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "crossdock/crossdock.h"
#include "fuzz/input.hpp"

namespace crossdock::fuzz {
namespace {

constexpr double kDeadline =
    20;  // seconds; every call ends long before, because both ranks make the same calls
constexpr int kMaxCalls = 24;

template <typename Struct>
Struct made() {
  Struct empty{};
  empty.struct_size = sizeof(Struct);
  return empty;
}

/// What both ranks have alike: sizes and the configuration of the dispatcher.
struct Common {
  explicit Common(Input& input) {
    config.num_experts = input.one_in(16) ? input.integer(-1, 1) : 1 + input.integer(0, 8);
    config.top_k = input.one_in(16)
                       ? input.integer(-1, 12)
                       : 1 + input.integer(0, 3) % std::max<int64_t>(config.num_experts, 1);
    config.width = input.one_in(16) ? input.integer(-1, 1) : 1 + input.integer(0, 15);
    config.alignment = input.one_in(4) ? input.integer(-1, 16) : 0;
    config.max_rows = input.one_in(4) ? input.integer(-1, 40) : 0;
    constexpr const char* kStrategies[] = {nullptr,     "direct",       "alltoall",
                                           "allgather", "hierarchical", "auto"};
    config.strategy = input.one_in(16) ? "none" : kStrategies[input.integer(0, 5)];
    if (input.one_in(8)) config.capacity_factor = input.take<float>();
    config.capacity_tokens = input.one_in(4) ? input.integer(-1, 20) : 0;
    config.pad_to_capacity = input.one_in(4) ? 1 : 0;
    config.drop_policy = static_cast<int32_t>(input.integer(0, 2));
    config.nonfinite = static_cast<int32_t>(input.integer(0, 2));
    config.partial_sums = static_cast<int32_t>(input.integer(0, 3));
    config.keep_empty_segments = input.one_in(4) ? 1 : 0;
    config.max_routes_per_token = input.one_in(4) ? input.integer(-1, 10) : 0;
    if (input.one_in(4)) {
      for (int32_t& rank : placement) rank = static_cast<int32_t>(input.integer(-1, 2));
      config.placement = placement.data();
    }
  }

  crossdock_dispatch_config config = made<crossdock_dispatch_config>();
  std::array<int32_t, 16> placement{};
};

/// One rank: its handles, its memory, and the statuses of its calls.
class Rank {
 public:
  Rank(crossdock_group* group, int rank, Input input, const Common& common)
      : group_(group), rank_(rank), input_(input), common_(common) {}

  void run() {
    for (int i = 0; i < kMaxCalls && !input_.is_empty(); ++i) call();
    release_rows();
    crossdock_pending_destroy(pending_);
    crossdock_plan_destroy(plan_);
    crossdock_dispatcher_destroy(dispatcher_);
    crossdock_group_leave(group_, "it returned");
  }

  const std::vector<crossdock_status>& statuses() const { return statuses_; }

 private:
  /// `right`, or on one of the ranks perhaps `wrong`. Both ranks take the same bytes.
  template <typename Value>
  Value either(Value right, Value wrong) {
    const auto chosen = input_.take<uint8_t>();
    return chosen % 32 == 31 && (chosen >> 5) % 2 == rank_ ? wrong : right;
  }
  int64_t size(int64_t right) { return either(right, input_.integer(-1, 20)); }
  int32_t small(int32_t right) {
    return either(right, static_cast<int32_t>(input_.integer(-1, 11)));
  }
  crossdock_tensor matrix(int32_t type, int64_t rows, int64_t columns) {
    crossdock_tensor tensor =
        crossdock_tensor_2d(floats_.data(), small(type), size(rows), size(columns));
    tensor.num_dims = either(2, static_cast<int32_t>(input_.integer(-1, 5)));
    tensor.device_kind = either(0, static_cast<int32_t>(input_.integer(-1, 2)));
    return tensor;
  }
  /// Dispatched rows, or others of the same width.
  crossdock_tensor some_rows() {
    const crossdock_tensor others = matrix(CROSSDOCK_F32, 4, common_.config.width);
    return rows_.rows.owner ? rows_.rows.tensor : others;
  }
  void note(crossdock_status status) {
    if (status == CROSSDOCK_INTERNAL) {
      std::fprintf(stderr, "internal: %s\n", crossdock_last_error());
      std::abort();
    }
    statuses_.push_back(status);
  }

  void call() {
    // The usual order is the most likely one.
    constexpr void (Rank::*kCalls[])() = {
        &Rank::make_plan,        &Rank::dispatch,          &Rank::combine,
        &Rank::combine_backward, &Rank::dispatch_backward, &Rank::begin_and_finish,
        &Rank::describe,         &Rank::all_reduce,        &Rank::share_rows,
        &Rank::make_dispatcher,  &Rank::refuse_next};
    const int64_t chosen = input_.integer(0, 31);
    const size_t next = chosen < 21 ? num_calls_++ % 9 : static_cast<size_t>(chosen - 21);
    (this->*kCalls[next])();
  }

  void refuse_next() { crossdock_refuse_next_call(either<const char*>(nullptr, "refused")); }

  void make_dispatcher() {
    crossdock_plan_destroy(plan_);
    crossdock_dispatcher_destroy(dispatcher_);
    plan_ = nullptr;
    dispatcher_ = nullptr;
    crossdock_dispatch_config config = common_.config;
    config.top_k = either(config.top_k, input_.integer(0, 4));
    config.alignment = either(config.alignment, input_.integer(0, 16));
    note(crossdock_dispatcher_create(group_, &config, &dispatcher_));
  }

  void make_plan() {
    if (!dispatcher_) make_dispatcher();
    if (!dispatcher_) return;
    crossdock_plan_destroy(plan_);
    plan_ = nullptr;
    num_tokens_ = input_.integer(0, 6) * (rank_ + 1) % 7;
    const int64_t top_k = common_.config.top_k;
    const int64_t first = input_.integer(0, 8);
    const int64_t step = input_.integer(0, 8);
    for (size_t i = 0; i < 32; ++i) {  // distinct in a token
      const auto slot = static_cast<int64_t>(i);
      const int64_t token = top_k > 0 ? slot / top_k : 0;
      const int64_t id = first + slot + token * step + rank_;
      ids_[i] = static_cast<int32_t>(
          common_.config.num_experts > 0 ? id % common_.config.num_experts : id);
    }
    ids_[static_cast<size_t>(input_.integer(0, 31))] =
        either(-1, static_cast<int32_t>(input_.integer(-3, 10)));
    floats_[static_cast<size_t>(input_.integer(0, 31))] = either(0.5F, input_.take<float>());
    auto routing = made<crossdock_routing>();
    routing.expert_ids = crossdock_tensor_2d(ids_.data(), small(CROSSDOCK_I32), size(num_tokens_),
                                             size(common_.config.top_k));
    if (routing.expert_ids.dtype == CROSSDOCK_BOOL)
      routing.expert_ids.dtype = CROSSDOCK_U8;  // a bool must be 0 or 1
    routing.weights = matrix(CROSSDOCK_F32, num_tokens_, common_.config.top_k);
    if (input_.one_in(8))
      routing.mask = crossdock_tensor_1d(mask_.data(), small(CROSSDOCK_BOOL), size(num_tokens_));
    note(crossdock_plan_create(dispatcher_, &routing, &plan_));
  }

  void dispatch() {
    if (!plan_) return;
    release_rows();
    auto args = made<crossdock_dispatch_args>();
    args.x = matrix(CROSSDOCK_F32, num_tokens_, common_.config.width);
    args.with_row_weights = input_.one_in(2) ? 1 : 0;
    args.num_chunks = either(static_cast<int32_t>(input_.integer(0, 4)), -1);
    args.struct_size = either(args.struct_size, static_cast<size_t>(input_.integer(0, 300)));
    note(crossdock_dispatch(dispatcher_, plan_, &args, &rows_));
  }

  void combine() {
    if (!plan_) return;
    const crossdock_tensor y = some_rows();
    crossdock_output out{};
    out.tensor = either({}, matrix(CROSSDOCK_F32, num_tokens_, common_.config.width));
    note(crossdock_combine(dispatcher_, plan_, &y, &out));
    crossdock_output_release(&out, nullptr);
  }

  void combine_backward() {
    if (!plan_) return;
    auto args = made<crossdock_combine_backward_args>();
    args.grad_out = matrix(CROSSDOCK_F32, num_tokens_, common_.config.width);
    args.y = some_rows();
    auto result = made<crossdock_combine_backward_result>();
    note(crossdock_combine_backward(dispatcher_, plan_, &args, &result));
    crossdock_output_release(&result.grad_rows, nullptr);
    crossdock_output_release(&result.grad_weights, nullptr);
  }

  void dispatch_backward() {
    if (!plan_) return;
    const crossdock_tensor rows = some_rows();
    crossdock_output grad_x{};
    note(crossdock_dispatch_backward(dispatcher_, plan_, &rows, &grad_x));
    crossdock_output_release(&grad_x, nullptr);
  }

  void begin_and_finish() {
    if (!plan_) return;
    release_rows();
    crossdock_pending_destroy(pending_);
    pending_ = nullptr;
    auto args = made<crossdock_dispatch_args>();
    args.x = matrix(CROSSDOCK_F32, num_tokens_, common_.config.width);
    args.num_chunks = static_cast<int32_t>(input_.integer(0, 4));
    note(crossdock_begin_dispatch(dispatcher_, plan_, &args, nullptr, &pending_));
    if (!pending_ || input_.one_in(4)) return;
    int64_t first = 0;
    int64_t last = 0;
    auto chunk = made<crossdock_dispatch_result>();
    if (input_.one_in(2)) note(crossdock_next_chunk(dispatcher_, pending_, &chunk, &first, &last));
    const crossdock_status status = crossdock_finish_dispatch(dispatcher_, pending_, &rows_);
    note(status);
    if (status != CROSSDOCK_INVALID_ARGUMENT) pending_ = nullptr;
  }

  void describe() {
    auto group = made<crossdock_group_info>();
    note(crossdock_group_describe(group_, &group));
    auto info = made<crossdock_plan_info>();
    if (plan_) note(crossdock_plan_describe(plan_, &info));
    auto error = made<crossdock_error_info>();
    crossdock_last_error_info(&error);
  }

  void all_reduce() {
    const crossdock_tensor one = matrix(CROSSDOCK_F32, 3, 5);
    note(crossdock_group_all_reduce(group_, &one, size(1) == 1 ? 1 : 0));
  }

  // The deleter was compiled with another declaration of the same struct.
  __attribute__((no_sanitize("function"))) void share_rows() {
    void* managed = nullptr;
    if (!rows_.rows.owner ||
        crossdock_output_to_dlpack(&rows_.rows, nullptr, &managed) != CROSSDOCK_OK)
      return;
    struct Managed {  // the end of DLPack's DLManagedTensor
      std::array<char, 48> tensor;
      void* context;
      void (*deleter)(Managed*);
    };
    static_cast<Managed*>(managed)->deleter(static_cast<Managed*>(managed));
  }

  void release_rows() {
    crossdock_output_release(&rows_.rows, nullptr);
    crossdock_output_release(&rows_.row_scales, nullptr);
    crossdock_output_release(&rows_.row_weights, nullptr);
    rows_ = made<crossdock_dispatch_result>();
  }

  crossdock_group* group_;
  int rank_;
  Input input_;
  const Common& common_;
  crossdock_dispatcher* dispatcher_ = nullptr;
  crossdock_plan* plan_ = nullptr;
  crossdock_pending* pending_ = nullptr;
  crossdock_dispatch_result rows_ = made<crossdock_dispatch_result>();
  size_t num_calls_ = 0;
  int64_t num_tokens_ = 0;
  std::array<int32_t, 1024> ids_{};
  std::array<uint8_t, 512> mask_{};
  std::vector<float> floats_ = std::vector<float>(1024);
  std::vector<crossdock_status> statuses_;
};

}  // namespace
}  // namespace crossdock::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crossdock::fuzz;
  Input input(data, size);
  const int num_ranks = input.one_in(4) ? 1 : 2;
  auto config = made<crossdock_group_config>();
  config.arrival_deadline_s = kDeadline;
  config.progress_deadline_s = kDeadline;
  config.num_threads = 1;
  config.ranks_per_node = input.one_in(4) ? 1 : 0;
  std::array<crossdock_group*, 2> groups{};
  if (crossdock_group_from_threads(num_ranks, &config, groups.data()) != CROSSDOCK_OK) std::abort();
  const Common common(input);
  std::vector<Rank> ranks;
  for (int rank = 0; rank < num_ranks; ++rank)
    ranks.emplace_back(groups[static_cast<size_t>(rank)], rank, input, common);
  {
    std::vector<std::jthread> threads;
    for (Rank& rank : ranks) threads.emplace_back([&rank] { rank.run(); });
  }
  for (crossdock_group* group : groups) crossdock_group_destroy(group);
  if (ranks.front().statuses() != ranks.back().statuses()) {
    for (const Rank& rank : ranks) {
      for (const crossdock_status status : rank.statuses()) std::fprintf(stderr, " %d", status);
      std::fprintf(stderr, "\n");
    }
    std::abort();
  }
  return 0;
}
