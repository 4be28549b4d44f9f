#include "comm/secret.hpp"

#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "core/check.hpp"

namespace crossdock::comm {

Secret make_secret() {
  Secret secret;
  size_t done = 0;
  while (done < secret.size()) {
    const ssize_t got = getrandom(secret.data() + done, secret.size() - done, 0);
    if (got < 0 && errno != EINTR) {
      throw Error(ErrorCode::kUnsupported,
                  concat("cannot get random bytes: ", std::strerror(errno)));
    }
    if (got > 0) done += static_cast<size_t>(got);
  }
  return secret;
}

bool is_equal(const Secret& a, const Secret& b) {
  std::byte difference{0};
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{0};
}

}  // namespace crossdock::comm
