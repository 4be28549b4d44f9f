#include "dispatch/cuda/call_account.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "comm/agreed_failure.hpp"
#include "comm/rendezvous.hpp"
#include "core/check.hpp"
#include "core/packed_items.hpp"

namespace crossdock::cuda {
namespace {

using comm::RendezvousHeader;

// The accounts of all ranks.
struct Accounts {
  std::vector<RendezvousHeader> headers;  // [P]; a rank without an account repeats another's
  std::vector<std::string> configs;       // [P]
  std::vector<std::string> refusals;      // [P]
};

std::vector<std::byte> pack(const std::optional<CallAccount>& account) {
  std::vector<std::byte> bytes;
  if (!account) return bytes;
  const std::string refusal = account->refusal ? account->refusal->what() : "";
  append_item(bytes, comm::make_header({.operation = account->call.operation,
                                        .subject = account->call.subject,
                                        .config = account->call.config,
                                        .refusal = as_refusal(account->refusal)},
                                       /*sequence=*/0));
  append_items(bytes, std::vector(account->call.config.begin(), account->call.config.end()));
  append_items(bytes, std::vector(refusal.begin(), refusal.end()));
  return bytes;
}

std::string split_text(std::span<const std::byte>& bytes, int64_t size) {
  const std::vector<char> text = split_items<char>(bytes, size);
  return {text.begin(), text.end()};
}

std::optional<Accounts> unpack(const Agreement& agreement, int num_ranks) {
  Accounts all;
  std::optional<size_t> first;  // first rank with an account
  std::vector<bool> has_account;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::span<const std::byte> bytes = agreement.body(rank);
    has_account.push_back(!bytes.empty());
    all.headers.emplace_back();
    all.configs.emplace_back();
    all.refusals.emplace_back();
    if (bytes.empty()) continue;
    if (!first) first = static_cast<size_t>(rank);
    RendezvousHeader& header = all.headers.back();
    header = split_item<RendezvousHeader>(bytes);
    header.sequence = agreement.sequence;
    all.configs.back() = split_text(bytes, header.config_bytes);
    all.refusals.back() = split_text(bytes, header.refuses() ? header.body_bytes : 0);
  }
  if (!first) return std::nullopt;
  for (size_t r = 0; r < has_account.size(); ++r) {
    if (has_account[r]) continue;
    all.headers[r] = all.headers[*first];
    all.headers[r].refusal = 0;
    all.configs[r] = all.configs[*first];
  }
  return all;
}

}  // namespace

Error explain_halt(Group& group, const std::optional<CallAccount>& own) {
  const std::vector<std::byte> body = pack(own);
  const Agreement agreement = group.agree({.operation = "explain", .body = body});
  const std::optional<Accounts> all = unpack(agreement, group.size());
  const char* const operation = own ? own->call.operation : "";
  const auto context = [&](int culprit) {
    return ErrorContext{.culprit = culprit, .sequence = agreement.sequence, .operation = operation};
  };
  if (!all) {
    return {ErrorCode::kInternal, "the ranks' GPUs were halted and no rank knows why", context(-1)};
  }
  if (const auto odd = comm::find_other_call(all->headers)) {
    return {ErrorCode::kMismatch, comm::describe_other_call(all->headers, *odd),
            context(odd->culprit)};
  }
  if (const int refusing = comm::find_refusal(all->headers); refusing >= 0) {
    const auto r = static_cast<size_t>(refusing);
    return {all->headers[r].refusal_code(), concat("rank ", refusing, ": ", all->refusals[r]),
            context(refusing)};
  }
  if (const auto odd = comm::find_other_config(all->headers)) {
    return {ErrorCode::kMismatch,
            comm::describe_other_config(*odd, all->configs[static_cast<size_t>(odd->culprit)],
                                        all->configs[static_cast<size_t>(odd->reference)]),
            context(odd->culprit)};
  }
  return {ErrorCode::kInternal, "the ranks' GPUs were halted although their calls agree",
          context(-1)};
}

}  // namespace crossdock::cuda
