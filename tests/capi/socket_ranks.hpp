#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "capi/c_ranks.hpp"

namespace crossdock::capi_test {

inline crossdock_bootstrap_config local_bootstrap() {
  auto config = made<crossdock_bootstrap_config>();
  config.address = "127.0.0.1";
  config.setup_deadline_s = 120;
  return config;
}

/// The blob of a bootstrap.
inline std::string blob_of(const crossdock_bootstrap* bootstrap) {
  const void* blob = nullptr;
  int64_t num_bytes = 0;
  EXPECT_OK(crossdock_bootstrap_blob(bootstrap, &blob, &num_bytes));
  return {static_cast<const char*>(blob), static_cast<size_t>(num_bytes)};
}

/// The blobs of all ranks in the form that crossdock_group_join takes.
struct Blobs {
  explicit Blobs(const std::vector<std::string>& blobs) {
    for (const std::string& blob : blobs) {
      bytes += blob;
      offsets.push_back(static_cast<int64_t>(bytes.size()));
    }
  }

  crossdock_join_args args(int rank) const {
    auto made_args = made<crossdock_join_args>();
    made_args.bytes = bytes.data();
    made_args.offsets = offsets.data();
    made_args.rank = rank;
    made_args.size = static_cast<int32_t>(offsets.size()) - 1;
    return made_args;
  }

  std::string bytes;
  std::vector<int64_t> offsets = {0};
};

/// Runs body(group, rank) on `size` threads that have joined each other by blobs, as processes do.
inline void run_socket_ranks(int size, const crossdock_bootstrap_config& config,
                             const std::function<void(crossdock_group*, int)>& body) {
  std::vector<std::string> blobs(static_cast<size_t>(size));
  std::barrier all_have_blobs(size);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      crossdock_bootstrap* bootstrap = nullptr;
      EXPECT_OK(crossdock_bootstrap_open(&config, &bootstrap));
      blobs[static_cast<size_t>(rank)] = blob_of(bootstrap);
      all_have_blobs.arrive_and_wait();
      const Blobs all(blobs);
      const crossdock_join_args args = all.args(rank);
      const crossdock_group_config deadlines = with_deadlines();
      crossdock_group* group = nullptr;
      EXPECT_OK(crossdock_group_join(bootstrap, &args, &deadlines, &group));
      crossdock_bootstrap_destroy(bootstrap);
      if (group != nullptr) body(group, rank);
      crossdock_group_destroy(group);
    });
  }
}

}  // namespace crossdock::capi_test
