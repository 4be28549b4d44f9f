# Languages and flags. crossdock_flags has the flags that every source must be compiled with.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug or Release" FORCE)
endif()

find_program(CROSSDOCK_CCACHE ccache)
mark_as_advanced(CROSSDOCK_CCACHE)
if(CROSSDOCK_CCACHE AND PROJECT_IS_TOP_LEVEL)
  # Precompiled headers need the sloppiness. With relative paths all build trees share headers and objects.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
      CCACHE_NOHASHDIR=1 ${CROSSDOCK_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CROSSDOCK_CCACHE})
endif()

if(CROSSDOCK_WITH_CUDA)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(CMAKE_CUDA_COMPILER nvcc PATHS /usr/local/cuda/bin)
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    crossdock_local_architectures(CMAKE_CUDA_ARCHITECTURES)
  endif()
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS CROSSDOCK_OLDEST_CUDA)
    message(FATAL_ERROR "The CUDA sources need CUDA ${CROSSDOCK_OLDEST_CUDA} or later; ${CMAKE_CUDA_COMPILER} is of CUDA "
                        "${CMAKE_CUDA_COMPILER_VERSION}. Set CUDACXX to a later nvcc, or CROSSDOCK_WITH_CUDA=OFF.")
  endif()
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc 13 has C++20
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  # For sources whose kernels must keep everything in registers: spilling is an error.
  set(CROSSDOCK_NO_SPILLS -Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error)
endif()

# Same bits everywhere: a product and a sum are fused only where the source says fma.
add_library(crossdock_flags INTERFACE)
target_compile_options(
  crossdock_flags
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off -fno-math-errno -Wall -Wextra>
            $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false --expt-relaxed-constexpr
            -Xcompiler=-ffp-contract=off,-fno-math-errno,-Wall,-Wextra>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC mistakes a source that is compiled in a batch for a header.
  target_compile_options(crossdock_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  # Warns about every function that takes a temporary and returns a reference.
  target_compile_options(crossdock_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-dangling-reference>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 gives false warnings about string concatenation and copies; from a precompiled header these count as ours.
  target_compile_options(
    crossdock_flags
    INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds -Wno-restrict -Wno-stringop-overflow -Wno-stringop-overread>)
endif()
if(CROSSDOCK_WERROR)
  target_compile_options(
    crossdock_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>
                              "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:--Werror all-warnings>")
endif()

if(CROSSDOCK_SANITIZE)
  if(CROSSDOCK_SANITIZE MATCHES "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # ThreadSanitizer does not support fences; here they only order words that other processes read.
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-tsan>)
  endif()
  # These pointer checks, which AddressSanitizer also makes, take a quarter of the compile time.
  add_compile_options(-fsanitize=${CROSSDOCK_SANITIZE} -fno-sanitize-recover=all
                      -fno-sanitize=null,object-size,vptr,nonnull-attribute,returns-nonnull-attribute)
  add_link_options(-fsanitize=${CROSSDOCK_SANITIZE})
endif()
