#include "comm/agreement/rendezvous.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/check.hpp"
#include "core/hash.hpp"

namespace crossdock::comm {
namespace {

template <typename Same>
std::optional<Disagreement> find_wrong_side(std::span<const RendezvousHeader> headers,
                                            const Same& same) {
  const auto size_of_side = [&](const RendezvousHeader& header) {
    return std::count_if(headers.begin(), headers.end(),
                         [&](const RendezvousHeader& other) { return same(header, other); });
  };
  if (size_of_side(headers[0]) == std::ssize(headers)) return std::nullopt;
  const auto right = std::max_element(
      headers.begin(), headers.end(),
      [&](const auto& a, const auto& b) { return size_of_side(a) < size_of_side(b); });
  const auto wrong = std::find_if(headers.begin(), headers.end(),
                                  [&](const auto& header) { return !same(header, *right); });
  return Disagreement{.culprit = static_cast<int>(wrong - headers.begin()),
                      .reference = static_cast<int>(right - headers.begin()),
                      .num_wrong = static_cast<int>(std::ssize(headers) - size_of_side(*right))};
}

// "dispatch of plan 11"; with the number of the call if it differs.
std::string place_of(const RendezvousHeader& header, bool with_call) {
  std::string text = header.operation;
  if (header.subject != 0) text += concat(" of plan ", header.subject);
  if (with_call) text += concat(" at call ", header.sequence);
  return text;
}

bool has_stopped(const RendezvousHeader& header) {
  return std::strcmp(header.operation, kStopOperation) == 0;
}

struct Setting {
  std::string_view key;
  std::string_view value;
};

// "key=value;key=value"
std::vector<Setting> parse_config(std::string_view config) {
  std::vector<Setting> settings;
  while (!config.empty()) {
    const std::string_view item = config.substr(0, config.find(';'));
    const size_t equals = std::min(item.find('='), item.size());
    settings.push_back({item.substr(0, equals), item.substr(std::min(equals + 1, item.size()))});
    config.remove_prefix(std::min(item.size() + 1, config.size()));
  }
  return settings;
}

const Setting* find_key(const std::vector<Setting>& settings, std::string_view key) {
  const auto found = std::find_if(settings.begin(), settings.end(),
                                  [&](const Setting& setting) { return setting.key == key; });
  return found == settings.end() ? nullptr : &*found;
}

// Shows a long value from shortly before the first difference from `other`.
std::string show(const Setting* setting, std::string_view key, const Setting* other) {
  constexpr size_t kBefore = 16;
  constexpr size_t kMaxShown = 64;
  if (!setting) return concat("no ", key);
  std::string_view value = setting->value;
  if (value.size() <= kMaxShown) return concat(key, "=", value);
  const std::string_view other_value = other ? other->value : "";
  const auto [here, there] =
      std::mismatch(value.begin(), value.end(), other_value.begin(), other_value.end());
  const auto differs_at = static_cast<size_t>(here - value.begin());
  const size_t begin = differs_at > kBefore ? differs_at - kBefore : 0;
  value = value.substr(begin, kMaxShown);
  return concat(key, "=", begin > 0 ? "..." : "", value,
                begin + value.size() < setting->value.size() ? "..." : "");
}

}  // namespace

bool is_stop(const Error& error) {
  return std::strcmp(error.context().operation, kStopOperation) == 0;
}

RendezvousHeader make_header(const Proposal& proposal, uint64_t sequence) {
  const std::string_view operation = proposal.operation;
  CROSSDOCK_CHECK(operation.size() <= RendezvousHeader::kMaxOperation, "the operation '", operation,
                  "' must have at most ", RendezvousHeader::kMaxOperation, " characters");
  RendezvousHeader header;
  header.sequence = sequence;
  header.subject = proposal.subject;
  header.config_hash = hash_bytes(proposal.config);
  header.config_bytes = std::ssize(proposal.config);
  header.body_bytes = std::ssize(proposal.body);
  if (const Error* refusal = proposal.refusal) {
    header.refusal = 1 + static_cast<uint32_t>(refusal->code());
    header.body_bytes = static_cast<int64_t>(std::strlen(refusal->what()));
  }
  std::copy(operation.begin(), operation.end(), header.operation);
  return header;
}

std::optional<Disagreement> find_other_call(std::span<const RendezvousHeader> headers) {
  return find_wrong_side(headers, [](const RendezvousHeader& a, const RendezvousHeader& b) {
    return a.magic == b.magic && a.sequence == b.sequence && a.subject == b.subject &&
           std::strncmp(a.operation, b.operation, sizeof a.operation) == 0;
  });
}

std::optional<Disagreement> find_other_config(std::span<const RendezvousHeader> headers) {
  return find_wrong_side(headers, [](const RendezvousHeader& a, const RendezvousHeader& b) {
    return a.config_hash == b.config_hash && a.config_bytes == b.config_bytes;
  });
}

int find_stopped(std::span<const RendezvousHeader> headers) {
  const auto stopped = std::find_if(headers.begin(), headers.end(), has_stopped);
  return stopped == headers.end() ? -1 : static_cast<int>(stopped - headers.begin());
}

int find_refusal(std::span<const RendezvousHeader> headers) {
  const auto refusing = std::find_if(headers.begin(), headers.end(),
                                     [](const auto& header) { return header.refuses(); });
  return refusing == headers.end() ? -1 : static_cast<int>(refusing - headers.begin());
}

std::string describe_other_call(std::span<const RendezvousHeader> headers,
                                const Disagreement& odd) {
  const RendezvousHeader& wrong = headers[static_cast<size_t>(odd.culprit)];
  const RendezvousHeader& right = headers[static_cast<size_t>(odd.reference)];
  if (wrong.magic != right.magic) {
    return concat("rank ", odd.culprit, " and rank ", odd.reference,
                  " run different versions of Crossdock; all ranks must run the same build");
  }
  if (const int stopped = find_stopped(headers); stopped >= 0) {
    return concat("rank ", stopped,
                  " has stopped, because the ranks' calls differ or one was refused; ",
                  "the next call of a dispatcher that runs ahead says why");
  }
  const bool other_sequence = wrong.sequence != right.sequence;
  const bool others_agree = odd.num_wrong == 1 && headers.size() > 2;
  return concat("rank ", odd.culprit, " is at ", place_of(wrong, other_sequence), " while ",
                others_agree ? "the others are" : concat("rank ", odd.reference, " is"), " at ",
                place_of(right, false), " (call ", right.sequence,
                "); every rank must make the same calls in the same order");
}

std::string describe_other_config(const Disagreement& odd, std::string_view culprit_config,
                                  std::string_view reference_config) {
  const auto culprit = parse_config(culprit_config);
  const auto reference = parse_config(reference_config);
  std::string_view key;
  const auto differs_in = [&](const std::vector<Setting>& settings) {
    return std::any_of(settings.begin(), settings.end(), [&](const Setting& setting) {
      const Setting* mine = find_key(culprit, setting.key);
      const Setting* theirs = find_key(reference, setting.key);
      key = setting.key;
      return !mine || !theirs || mine->value != theirs->value;
    });
  };
  if (!differs_in(reference) && !differs_in(culprit)) {  // e.g. the keys are in a different order
    return concat("rank ", odd.culprit, " has '", culprit_config, "' where rank ", odd.reference,
                  " has '", reference_config,
                  "'; all ranks of a group must have the same configuration");
  }
  const Setting* mine = find_key(culprit, key);
  const Setting* theirs = find_key(reference, key);
  return concat("rank ", odd.culprit, " has ", show(mine, key, theirs), " where rank ",
                odd.reference, " has ", show(theirs, key, mine),
                "; all ranks of a group must have the same configuration");
}

}  // namespace crossdock::comm
