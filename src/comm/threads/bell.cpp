#include "comm/threads/bell.hpp"

namespace crossdock::comm {

void Bell::ring() {
  count_.fetch_add(1);
  if (num_asleep_.load() > 0) futex_wake(count_);
}

}  // namespace crossdock::comm
