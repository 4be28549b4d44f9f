# Libraries to link, and their description in build_info.hpp. A missing optional library is not an error:
# CROSSDOCK_HAS_<X> is 0 and CROSSDOCK_<X>_NOTE says why.
find_package(Threads REQUIRED)

# A shared library does not link MPI: it loads this plugin, which does.
set(CROSSDOCK_MPI_PLUGIN libcrossdock_mpi.so.${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set(CROSSDOCK_HAS_MPI 0)
if(CROSSDOCK_WITH_MPI)
  set(MPI_CXX_SKIP_MPICXX ON)  # only the C interface is used
  find_package(MPI QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    set(CROSSDOCK_HAS_MPI 1)
    set(CROSSDOCK_MPI_NOTE "MPI ${MPI_CXX_VERSION}, ${MPI_CXX_COMPILER}")
    if(BUILD_SHARED_LIBS)
      string(APPEND CROSSDOCK_MPI_NOTE ", in the plugin libcrossdock_mpi")
    endif()
  else()
    set(CROSSDOCK_MPI_NOTE "no MPI was found at configuration (Debian: libopenmpi-dev)")
  endif()
else()
  set(CROSSDOCK_MPI_NOTE "configured with CROSSDOCK_WITH_MPI=OFF")
endif()

set(CROSSDOCK_HAS_CUDA 0)
if(CROSSDOCK_WITH_CUDA)
  find_package(CUDAToolkit REQUIRED)
  set(CROSSDOCK_HAS_CUDA 1)
  list(JOIN CMAKE_CUDA_ARCHITECTURES ", " architectures)
  set(CROSSDOCK_CUDA_NOTE "CUDA ${CUDAToolkit_VERSION} for architectures ${architectures}")
elseif(CROSSDOCK_NO_CUDA)
  set(CROSSDOCK_CUDA_NOTE "${CROSSDOCK_NO_CUDA}")
else()
  set(CROSSDOCK_CUDA_NOTE "configured with CROSSDOCK_WITH_CUDA=OFF")
endif()

set(CROSSDOCK_HAS_NCCL 0)
if(CROSSDOCK_HAS_CUDA AND CROSSDOCK_WITH_NCCL)
  # Only the header: libnccl is opened at run time.
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  mark_as_advanced(NCCL_INCLUDE_DIR)
  if(NCCL_INCLUDE_DIR)
    set(CROSSDOCK_HAS_NCCL 1)
    string(APPEND CROSSDOCK_CUDA_NOTE ", NCCL opened at run time")
  else()
    string(APPEND CROSSDOCK_CUDA_NOTE ", no NCCL (nccl.h was not found)")
  endif()
endif()

set(CROSSDOCK_REVISION "" CACHE STRING "Source revision to report; empty: the version alone")
set(CROSSDOCK_COMPILER "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/build_info.hpp.in
               ${PROJECT_BINARY_DIR}/generated/core/build_info.hpp @ONLY)

message(STATUS "crossdock: command ${CROSSDOCK_BUILD_CLI}")
foreach(name MPI CUDA)
  message(STATUS "crossdock: ${name} ${CROSSDOCK_HAS_${name}}: ${CROSSDOCK_${name}_NOTE}")
endforeach()
