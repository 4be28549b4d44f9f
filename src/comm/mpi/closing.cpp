#include "comm/mpi/closing.hpp"

#include <mutex>
#include <utility>

#include "comm/mpi/environment.hpp"

namespace crossdock::comm {
namespace {

using Kind = ControlMessage::Kind;

enum class Progress : uint8_t { kOpen, kAllLeft, kFailed };

// Never freed: used while the process exits.
struct Closings {
  std::mutex mutex;
  std::vector<MpiClosing> waiting;
};

Closings& closings() {
  static auto* all = new Closings;
  return *all;
}

std::vector<MpiClosing> take_all() {
  const std::lock_guard lock(closings().mutex);
  return std::exchange(closings().waiting, {});
}

Progress listen(MpiClosing& closing) {
  bool has_failed = false;
  closing.links->poll([&](int sender, const ControlMessage& message) {
    if (message.kind == Kind::kAbort) has_failed = true;
    if (message.kind == Kind::kLeft) closing.left[static_cast<size_t>(sender)] = message;
  });
  if (has_failed) return Progress::kFailed;
  bool all_left = true;
  for (const auto& goodbye : closing.left) {
    if (!goodbye) {
      all_left = false;
    } else if (goodbye->exchange != closing.own_goodbye.exchange ||
               goodbye->num_begun != closing.own_goodbye.num_begun) {
      return Progress::kFailed;
    }
  }
  return all_left ? Progress::kAllLeft : Progress::kOpen;
}

// Whether nothing remains to be done: freed, or never to be freed because of a failure.
bool is_over(MpiClosing& closing) {
  try {
    const Progress progress = listen(closing);
    if (progress == Progress::kOpen) return false;
    closing.links.reset();
    if (progress == Progress::kFailed) return true;
    check_mpi(MPI_Comm_free(&closing.control), "MPI_Comm_free");
    check_mpi(MPI_Comm_free(&closing.data), "MPI_Comm_free");
  } catch (const Error&) {
    // Not freed.
  }
  return true;
}

}  // namespace

void free_when_all_have_left(MpiClosing closing) {
  const std::lock_guard lock(closings().mutex);
  closings().waiting.push_back(std::move(closing));
}

void free_closed_communicators() {
  std::vector<MpiClosing> some = take_all();  // no lock is held if MPI blocks
  std::erase_if(some, is_over);
  for (MpiClosing& closing : some) free_when_all_have_left(std::move(closing));
}

void give_up_closing() {
  take_all();
}

void keep_until_exit(AbandonedRequests abandoned) {
  static std::mutex mutex;
  static auto* kept = new std::vector<AbandonedRequests>;  // never freed: MPI may still use it
  const std::lock_guard lock(mutex);
  std::erase_if(*kept, [](AbandonedRequests& one) {  // completed in the meantime
    int done = 0;
    const auto count = static_cast<int>(one.requests.size());
    return MPI_Testall(count, one.requests.data(), &done, MPI_STATUSES_IGNORE) == MPI_SUCCESS &&
           done != 0;
  });
  kept->push_back(std::move(abandoned));
}

}  // namespace crossdock::comm
