#include "comm/polled/control_message.hpp"

#include <algorithm>
#include <span>
#include <utility>

namespace crossdock::comm {
namespace {

template <size_t N>
void set_text(std::array<char, N>& target, std::string_view text) {
  const size_t length = std::min(text.size(), N - 1);
  std::copy_n(text.begin(), length, target.begin());
  target[length] = '\0';
}

template <size_t N>
bool has_end(const std::array<char, N>& text) {
  return std::find(text.begin(), text.end(), '\0') != text.end();
}

}  // namespace

ControlMessage abort_message(const Failure& failure) {
  ControlMessage message;
  message.kind = ControlMessage::Kind::kAbort;
  message.code = static_cast<int32_t>(failure.code);
  message.culprit = failure.culprit;
  message.reporter = failure.reporter;
  message.sequence = failure.sequence;
  set_text(message.operation, failure.operation);
  set_text(message.text, failure.text);
  return message;
}

Failure failure_from(const ControlMessage& abort_message) {
  return {.code = static_cast<ErrorCode>(abort_message.code),
          .culprit = abort_message.culprit,
          .reporter = abort_message.reporter,
          .sequence = abort_message.sequence,
          .operation = abort_message.operation.data(),
          .text = abort_message.text.data()};
}

ControlMessage left_message(std::string_view reason, uint64_t exchange, uint64_t num_begun) {
  ControlMessage message;
  message.kind = ControlMessage::Kind::kLeft;
  message.exchange = exchange;
  message.num_begun = num_begun;
  set_text(message.text, reason);
  return message;
}

bool is_valid(const ControlMessage& message, int size) {
  const auto is_rank = [size](int32_t rank) { return rank >= -1 && rank < size; };
  const auto kind = static_cast<int32_t>(message.kind);
  if (kind < 0 || kind > static_cast<int32_t>(ControlMessage::Kind::kWaiting)) return false;
  if (message.code < 0 || message.code > static_cast<int32_t>(ErrorCode::kOutOfMemory)) {
    return false;
  }
  if (!is_rank(message.culprit) || !is_rank(message.reporter)) return false;
  if (message.num_pending < 0 ||
      message.num_pending > static_cast<int32_t>(ControlMessage::kMaxPending)) {
    return false;
  }
  const auto pending = message.pending_ranks();
  return std::all_of(pending.begin(), pending.end(),
                     [size](int32_t rank) { return rank >= 0 && rank < size; }) &&
         has_end(message.operation) && has_end(message.text);
}

namespace {

// A waiting rank looks for questions every millisecond; the rest is a margin for loaded machines.
constexpr std::chrono::milliseconds kAnswerTime{500};

}  // namespace

Inquiry::Inquiry(Self self, ControlLinks& control)
    : self_(std::move(self)), control_(control), begin_(Clock::now()) {
  for (const int peer : self_.pending) ask(peer);
}

void Inquiry::ask(int peer) {
  if (peer == self_.rank || !asked_.insert(peer).second) return;
  ControlMessage question;
  question.kind = ControlMessage::Kind::kQuestion;
  control_.send(peer, question);
}

void Inquiry::note_answer(int peer, const ControlMessage& answer) {
  answers_[peer] = answer;
  for (const int next : answer.pending_ranks()) ask(next);
}

bool Inquiry::is_over() const {
  return Clock::now() - begin_ > kAnswerTime;
}

bool Inquiry::has_all_answers() const {
  return std::all_of(self_.pending.begin(), self_.pending.end(),
                     [&](int peer) { return answers_.contains(peer); });
}

std::optional<ControlMessage> Inquiry::first_to_miss(int peer) const {
  std::optional<ControlMessage> first;
  for (const auto& [rank, answer] : answers_) {
    const auto pending = answer.pending_ranks();
    const bool misses = pending.size() == ControlMessage::kMaxPending ||  // perhaps not all of them
                        std::find(pending.begin(), pending.end(), peer) != pending.end();
    const uint64_t earliest = first ? first->exchange : self_.exchange;
    if (misses && answer.exchange < earliest) first = answer;
  }
  return first;
}

Inquiry::Verdict Inquiry::verdict() const {
  const auto behind = std::min_element(
      answers_.begin(), answers_.end(),
      [](const auto& a, const auto& b) { return a.second.exchange < b.second.exchange; });
  const bool self_is_behind = behind == answers_.end() || self_.exchange <= behind->second.exchange;
  const auto waited_for =
      self_is_behind ? std::span<const int>(self_.pending) : behind->second.pending_ranks();
  Verdict verdict;
  const auto is_silent_peer = [&](int peer) { return is_silent(peer); };
  if (!self_is_behind) verdict.first_missed_by = behind->second;
  if (const auto it = std::find_if(waited_for.begin(), waited_for.end(), is_silent_peer);
      it != waited_for.end()) {
    verdict.culprit = *it;
  } else if (const auto any = std::find_if(asked_.begin(), asked_.end(), is_silent_peer);
             any != asked_.end()) {
    verdict.culprit = *any;
  } else {
    verdict.culprit = behind->first;
    verdict.first_missed_by.reset();
  }
  return verdict;
}

}  // namespace crossdock::comm
