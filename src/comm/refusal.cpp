#include "comm/refusal.hpp"

#include <exception>
#include <new>

namespace crossdock {

Error current_error() {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return {ErrorCode::kCapacity, "not enough memory"};
  } catch (const std::exception& error) {
    return {ErrorCode::kInternal, error.what()};
  } catch (...) {
    return {ErrorCode::kInternal, "an exception of unknown type"};
  }
}

}  // namespace crossdock
