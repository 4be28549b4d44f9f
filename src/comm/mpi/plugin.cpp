// The MPI communicator of a shared library: a plugin next to it.
#include "comm/mpi/plugin.hpp"

#include <dlfcn.h>

#include <cstring>
#include <filesystem>
#include <system_error>

#include "core/build_info.hpp"
#include "core/check.hpp"
#include "core/process.hpp"

namespace crossdock {
namespace {

/// Where the plugin is expected: in the directory of the shared library that contains this
/// function.
std::filesystem::path plugin_beside_this_library() {
  static const char kHere = 0;
  Dl_info info{};
  if (dladdr(&kHere, &info) == 0 || info.dli_fname == nullptr) return build_info::kMpiPlugin;
  return std::filesystem::path(info.dli_fname).parent_path() / build_info::kMpiPlugin;
}

bool is_beside_this_library() {
  std::error_code ignored;
  return std::filesystem::exists(plugin_beside_this_library(), ignored);
}

OpenedLibrary open_library() {
  try {
    // MPI libraries load components that expect the symbols of MPI to be global.
    return OpenedLibrary(
        is_beside_this_library() ? plugin_beside_this_library().string() : build_info::kMpiPlugin,
        OpenedLibrary::Symbols::kGlobal);
  } catch (const Error& error) {
    throw Error(
        ErrorCode::kUnsupported,
        concat(
            error.what(), "; the MPI communicator of a shared libcrossdock is this plugin: ",
            "build it with your MPI (CROSSDOCK_WITH_MPI=ON) and install it beside libcrossdock. ",
            "This build: ", build_info::kMpiNote));
  }
}

const comm::MpiPlugin* open_plugin() {
  const OpenedLibrary library = open_library();
  comm::GetMpiPlugin get = nullptr;
  library.find(comm::kGetMpiPlugin, get);
  const comm::MpiPlugin* plugin = get();
  if (std::strcmp(plugin->build, build_info::kBuild) != 0) {
    throw Error(
        ErrorCode::kUnsupported,
        concat(library.file(), " is from Crossdock ", plugin->build, ", but libcrossdock is ",
               build_info::kBuild, "; install both from the same build"));
  }
  return plugin;
}

const comm::MpiPlugin& opened_plugin() {
  static const comm::MpiPlugin* const kPlugin = open_plugin();  // tried again after a failure
  return *kPlugin;
}

}  // namespace

bool mpi_is_built() {
  return is_beside_this_library();
}

std::unique_ptr<Communicator> make_mpi_communicator(const MpiOptions& options) {
  return opened_plugin().make_world(options);
}

std::unique_ptr<Communicator> make_mpi_communicator(const void* mpi_comm,
                                                    const MpiOptions& options) {
  return opened_plugin().make_over(mpi_comm, options);
}

}  // namespace crossdock
