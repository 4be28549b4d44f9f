#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/sockets/links.hpp"
#include "comm/transfers.hpp"

namespace crossdock::comm {

/// The blocks of an all-gather of small blocks on one node: every rank posts its block and reads
/// the others'. Reused for every exchange, so exchanges allocate nothing.
class PostedTransfers final : public Transfers {
 public:
  /// `links` must outlive this and have posts.
  explicit PostedTransfers(Links& links);

  /// Whether blocks with these offsets [P + 1] fit into posts.
  static bool fits(std::span<const int64_t> recv_offsets);

  struct Args {
    uint64_t exchange = 0;
    std::span<const std::byte> send;
    std::byte* recv = nullptr;
    std::span<const int64_t> recv_offsets;  // [P + 1]
  };
  /// Begins the next exchange. The memory in `args` must be valid until the exchange has ended.
  void begin(const Args& args);

  bool is_done() const override { return missing_.empty(); }
  bool advance() override;
  bool is_pending(int peer) const override;
  bool has_arrived(int peer) const override { return !is_pending(peer); }
  int size() const override { return links_.size(); }

 private:
  bool read_posts();
  void check_for_streams() const;

  Links& links_;
  Args args_;
  bool is_published_ = false;
  std::vector<int> missing_;  // peers whose posts have not been read
};

}  // namespace crossdock::comm
