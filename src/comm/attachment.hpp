#pragma once

#include <memory>

#include "crossdock/group.hpp"

namespace crossdock::comm {

/// State that users of this group share, as long as one of them keeps it.
std::weak_ptr<void>& attachment_of(Group& group);

}  // namespace crossdock::comm
