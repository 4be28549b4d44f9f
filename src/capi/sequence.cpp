#include "crossdock/sequence.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "capi/configs.hpp"
#include "capi/handles.hpp"
#include "capi/status.hpp"
#include "capi/tensors.hpp"
#include "core/tensor_check.hpp"

using namespace crossdock;
using capi::guarded;
using capi::handle;
using capi::pointee;
using capi::to_view;

struct crossdock_sequence_shard : capi::Handle<crossdock_sequence_shard> {
  explicit crossdock_sequence_shard(SequenceShard shard_in) : shard(std::move(shard_in)) {}

  SequenceShard shard;
};

namespace {

static_assert(static_cast<int>(TokenOrder::kSequenceFirst) == CROSSDOCK_SEQUENCE_FIRST);
static_assert(static_cast<int>(SequenceCut::kZigzag) == CROSSDOCK_CUT_ZIGZAG);
static_assert(static_cast<int>(BalancePolicy::kKeepOrder) == CROSSDOCK_KEEP_ORDER);

SequenceLayout to_layout(const crossdock_sequence_layout& given) {
  SequenceLayout layout;
  if (given.batch != 0) layout.batch = given.batch;
  layout.length = given.length;
  if (given.num_ranks != 0) layout.num_ranks = given.num_ranks;
  layout.order = static_cast<TokenOrder>(capi::checked_enum("order", given.order, 2));
  layout.cut = static_cast<SequenceCut>(capi::checked_enum("cut", given.cut, 2));
  const TensorView cu_seqlens = to_view("cu_seqlens", given.cu_seqlens);
  const TensorView padded = to_view("cu_seqlens_padded", given.cu_seqlens_padded);
  CROSSDOCK_CHECK(cu_seqlens.given() || (!padded.given() && given.num_tokens == 0),
                  "cu_seqlens must be given with cu_seqlens_padded or num_tokens");
  if (!cu_seqlens.given()) return layout;
  PackedSequencesArgs args{.cu_seqlens = cu_seqlens, .cu_seqlens_padded = padded};
  if (given.num_tokens != 0) args.num_tokens = given.num_tokens;
  layout.packed = PackedSequences(args);
  return layout;
}

void copy_shape(const Shape& shape, int64_t (&dims)[2]) {
  for (int i = 0; i < shape.rank(); ++i) dims[i] = shape[i];
}

// Copies a part of a description to the caller's tensor, if there is one.
void copy_to(const char* name, const OwnedTensor& made, const crossdock_tensor* given) {
  if (given == nullptr) return;
  const TensorView view = to_view(name, *given);
  check_tensor(name, view, made.view.dtype, made.view.shape);
  if (view.num_bytes() == 0) return;
  std::memcpy(view.data, made.view.data, static_cast<size_t>(view.num_bytes()));
}

BalanceArgs to_args(const crossdock_balance_args& given) {
  CROSSDOCK_CHECK(given.num_sequences >= 0, "num_sequences must not be negative, got ",
                  given.num_sequences);
  CROSSDOCK_CHECK(given.lengths != nullptr || given.num_sequences == 0,
                  "lengths must not be NULL for ", given.num_sequences, " sequences");
  BalanceArgs args;
  args.lengths = {given.lengths, static_cast<size_t>(given.num_sequences)};
  if (given.num_ranks != 0) args.num_ranks = given.num_ranks;
  args.policy = static_cast<BalancePolicy>(capi::checked_enum("policy", given.policy, 2));
  if (given.cost_per_token == 0 && given.cost_per_token_pair == 0) return args;
  args.cost_per_token = given.cost_per_token;
  args.cost_per_token_pair = given.cost_per_token_pair;
  return args;
}

}  // namespace

crossdock_status crossdock_sequence_shard_create(const crossdock_sequence_layout* layout,
                                                 crossdock_sequence_shard** shard) {
  return guarded([&] {
    crossdock_sequence_shard*& made = pointee("shard", shard);
    const auto given = capi::read_struct("crossdock_sequence_layout", layout);
    made = new crossdock_sequence_shard(SequenceShard(to_layout(given), given.rank));
  });
}

void crossdock_sequence_shard_destroy(crossdock_sequence_shard* shard) {
  capi::destroy(shard);
}

crossdock_status crossdock_sequence_shard_describe(const crossdock_sequence_shard* shard,
                                                   crossdock_sequence_shard_info* info) {
  return guarded([&] {
    const SequenceShard& made = handle("shard", shard).shard;
    const SequenceLayout& layout = made.layout();
    crossdock_sequence_shard_info value = {};
    value.num_tokens = made.num_tokens();
    value.num_global_tokens = made.num_global_tokens();
    value.num_sequences =
        std::max<int64_t>(layout.packed ? layout.packed->num_sequences() : layout.batch, 1);
    value.num_runs = std::ssize(made.runs());
    copy_shape(made.shape(), value.shape);
    copy_shape(made.global_shape(), value.global_shape);
    capi::write_struct("crossdock_sequence_shard_info", info, value);
  });
}

crossdock_status crossdock_sequence_shard_runs(const crossdock_sequence_shard* shard,
                                               crossdock_token_run* runs) {
  return guarded([&] {
    const auto all = handle("shard", shard).shard.runs();
    CROSSDOCK_CHECK(runs != nullptr || all.empty(), "runs must not be NULL");
    for (const TokenRun& run : all) {
      *runs++ = {.local = run.local, .global = run.global, .count = run.count};
    }
  });
}

crossdock_status crossdock_sequence_shard_global_index(const crossdock_sequence_shard* shard,
                                                       int64_t i, int64_t* global_index) {
  return guarded([&] {
    int64_t& index = pointee("global_index", global_index);
    index = handle("shard", shard).shard.global_index(i);
  });
}

crossdock_status crossdock_describe_tokens(const crossdock_sequence_shard* shard,
                                           const crossdock_tensor* sequence_ids,
                                           const crossdock_tensor* positions,
                                           const crossdock_tensor* mask) {
  return guarded([&] {
    const TokenDescription tokens = describe_tokens(handle("shard", shard).shard);
    copy_to("sequence_ids", tokens.sequence_ids, sequence_ids);
    copy_to("positions", tokens.positions, positions);
    copy_to("mask", tokens.mask, mask);
  });
}

crossdock_status crossdock_shard_tokens(const crossdock_sequence_shard* shard,
                                        const crossdock_tensor* global,
                                        const crossdock_tensor* local, void* stream) {
  return guarded([&] {
    shard_tokens(handle("shard", shard).shard, to_view("global", global), to_view("local", local),
                 Stream{stream});
  });
}

crossdock_status crossdock_place_tokens(const crossdock_sequence_shard* shard,
                                        const crossdock_tensor* local,
                                        const crossdock_tensor* global, void* stream) {
  return guarded([&] {
    place_tokens(handle("shard", shard).shard, to_view("local", local), to_view("global", global),
                 Stream{stream});
  });
}

crossdock_status crossdock_gather_shards(const crossdock_sequence_shard* shard,
                                         const crossdock_tensor* locals,
                                         const crossdock_tensor* global, void* stream) {
  return guarded([&] {
    const SequenceLayout& layout = handle("shard", shard).shard.layout();
    CROSSDOCK_CHECK(locals != nullptr, "locals must not be NULL");
    std::vector<ConstTensorView> views;
    views.reserve(static_cast<size_t>(layout.num_ranks));
    for (int rank = 0; rank < layout.num_ranks; ++rank) {
      views.emplace_back(to_view("locals", locals[rank]));
    }
    gather_shards(layout, views, to_view("global", global), Stream{stream});
  });
}

crossdock_status crossdock_gather_tokens(crossdock_group* group,
                                         const crossdock_sequence_shard* shard,
                                         const crossdock_tensor* local, crossdock_output* global) {
  return guarded([&] {
    const crossdock_group& owner = handle("group", group);
    Group& ranks = owner.shared->open();
    const SequenceShard* made = nullptr;
    TensorView from;
    TensorView to;
    capi::convert({ranks, "gather_tokens"}, [&] {
      made = &handle("shard", shard).shard;
      from = to_view("local", local);
      to = capi::given_output("global", global);
    });
    OwnedTensor result = gather_tokens(ranks, *made, from, to);
    const std::array<capi::Result, 1> results = {{{global, &result}}};
    capi::set_outputs(results, {.group = owner.shared});
  });
}

crossdock_status crossdock_pad_tokens(const crossdock_tensor* x, const crossdock_tensor* padded,
                                      void* stream) {
  return guarded([&] { pad_tokens(to_view("x", x), to_view("padded", padded), Stream{stream}); });
}

crossdock_status crossdock_trim_tokens(const crossdock_tensor* padded, const crossdock_tensor* x,
                                       void* stream) {
  return guarded([&] { trim_tokens(to_view("padded", padded), to_view("x", x), Stream{stream}); });
}

crossdock_status crossdock_pad_mask(int64_t num_tokens, const crossdock_tensor* mask,
                                    const crossdock_tensor* padded, void* stream) {
  return guarded([&] {
    const TensorView given = mask != nullptr ? to_view("mask", *mask) : TensorView();
    pad_mask(num_tokens, given, to_view("padded", padded), Stream{stream});
  });
}

crossdock_status crossdock_balance_sequences(const crossdock_balance_args* args, int32_t* ranks,
                                             double* imbalance) {
  return guarded([&] {
    const auto given = capi::read_struct("crossdock_balance_args", args);
    const BalanceArgs wanted = to_args(given);
    CROSSDOCK_CHECK(ranks != nullptr || wanted.lengths.empty(), "ranks must not be NULL");
    const SequenceBalance balance = balance_sequences(wanted);
    for (int rank = 0; rank < wanted.num_ranks; ++rank) {
      for (const int64_t s : balance.of_rank(rank)) ranks[s] = rank;
    }
    if (imbalance != nullptr) *imbalance = balance.imbalance;
  });
}
