#include "comm/mpi/abandoned_requests.hpp"

#include <mutex>
#include <utility>

namespace crossdock::comm {

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
