#include "comm/inquiry.hpp"

#include <algorithm>
#include <span>
#include <utility>

namespace crossdock::comm {
namespace {

// A waiting rank looks for questions every millisecond; the rest is a margin for loaded machines.
constexpr std::chrono::milliseconds kAnswerTime{500};

}  // namespace

Inquiry::Inquiry(Self self, ControlChannel& control)
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
