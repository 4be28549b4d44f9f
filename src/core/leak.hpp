#pragma once

#include <memory>

namespace crossdock {

/// Keeps memory until the process ends, because something outside our control may still be using
/// it.
void leak(std::shared_ptr<const void> memory);

}  // namespace crossdock
