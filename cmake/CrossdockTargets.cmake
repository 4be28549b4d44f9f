# One call per module, test and example. No globs: a file that is not named is not built.

# crossdock_add_module(<folder> SOURCES <file>... [CUDA_SOURCES <file>...] [SEES <module>...] [LINKS <library>...])
#
# One folder of src/ is one object library, crossdock_<folder>. SEES names the modules it uses (tools/check_layers.py
# has the table of those it may use), LINKS external libraries, e.g. MPI::MPI_CXX. CUDA_SOURCES are left out without
# CROSSDOCK_WITH_CUDA. CROSSDOCK_HAS_MPI and CROSSDOCK_HAS_CUDA are defined as 0 or 1. Symbols are hidden unless they
# are marked with CROSSDOCK_API (crossdock/error.hpp).
function(crossdock_add_module name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;CUDA_SOURCES;SEES;LINKS")
  crossdock_no_leftovers(crossdock_add_module ${name})
  set(target crossdock_${name})
  if(CROSSDOCK_HAS_CUDA)
    list(APPEND arg_SOURCES ${arg_CUDA_SOURCES})
    list(APPEND arg_LINKS CUDA::cudart_static)
    crossdock_compile_kernels_alone(${arg_CUDA_SOURCES})
  endif()
  add_library(${target} OBJECT ${arg_SOURCES})
  target_include_directories(
    ${target} PUBLIC ${PROJECT_SOURCE_DIR}/include
    PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_BINARY_DIR}/generated)
  crossdock_define_features(${target})
  crossdock_hide_symbols(${target})
  crossdock_precompile_std(${target})
  list(TRANSFORM arg_SEES PREPEND crossdock_)
  target_link_libraries(${target} PUBLIC ${arg_SEES} ${arg_LINKS} Threads::Threads
                                  PRIVATE crossdock_flags)
  set_property(GLOBAL APPEND PROPERTY CROSSDOCK_MODULES ${target})
  set_property(GLOBAL APPEND PROPERTY CROSSDOCK_LINKS ${arg_LINKS})
endfunction()

# crossdock_compile_kernels_alone(<file>...): compiles each .cu file by itself. CMake 3.31 and later would join them in
# batches, where their private names clash.
function(crossdock_compile_kernels_alone)
  set(kernels ${ARGN})
  list(FILTER kernels INCLUDE REGEX "[.]cu$")
  set_source_files_properties(${kernels} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

# crossdock_add_library(): the library that users link, crossdock::crossdock, made of all modules so far. Its target is
# not called crossdock, because the command has that name.
function(crossdock_add_library)
  get_property(modules GLOBAL PROPERTY CROSSDOCK_MODULES)
  get_property(links GLOBAL PROPERTY CROSSDOCK_LINKS)
  list(REMOVE_DUPLICATES links)
  list(TRANSFORM modules REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
  add_library(crossdock_library ${objects})
  crossdock_publish_library(crossdock_library crossdock OUTPUT_NAME crossdock)
  target_link_libraries(crossdock_library PUBLIC Threads::Threads PRIVATE ${links})
endfunction()

# crossdock_add_mpi_plugin(SOURCES <file>...)
#
# The plugin of a shared library, CROSSDOCK_MPI_PLUGIN. It exports one function (src/comm/mpi/plugin.hpp). Internal
# parts of the library that it uses are compiled into it, because the library does not export them.
function(crossdock_add_mpi_plugin)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "SOURCES")
  crossdock_no_leftovers(crossdock_add_mpi_plugin "")
  add_library(crossdock_mpi SHARED ${arg_SOURCES})
  crossdock_place_library(crossdock_mpi OUTPUT_NAME crossdock_mpi INSTALL_RPATH $ORIGIN)
  crossdock_hide_symbols(crossdock_mpi)
  crossdock_define_features(crossdock_mpi)
  target_include_directories(crossdock_mpi PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_BINARY_DIR}/generated)
  target_link_options(crossdock_mpi PRIVATE LINKER:--no-undefined)
  target_link_libraries(crossdock_mpi PRIVATE crossdock::crossdock MPI::MPI_CXX crossdock_flags)
endfunction()

# crossdock_add_testing_library(SOURCES <file>...)
#
# crossdock::testing: reference, conformance and faults (include/crossdock/testing/). It uses the public headers and
# header-only parts of src/core, so it works with a shared crossdock::crossdock too.
function(crossdock_add_testing_library)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "SOURCES")
  crossdock_no_leftovers(crossdock_add_testing_library "")
  add_library(crossdock_testing ${arg_SOURCES})
  crossdock_publish_library(crossdock_testing testing OUTPUT_NAME crossdock_testing INSTALL_RPATH $ORIGIN)
  crossdock_hide_symbols(crossdock_testing)
  crossdock_precompile_std(crossdock_testing)
  target_include_directories(crossdock_testing PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(crossdock_testing PUBLIC crossdock::crossdock PRIVATE $<BUILD_INTERFACE:crossdock_flags>)
endfunction()

# crossdock_add_test(<name> SOURCES <file>... [ALONE <file>...] [LABELS unit|conformance|mpi|cuda|slow ...]
#                    [RANKS <n>... | PROCESSES <n>...] [NEEDS rapidcheck|mpi|cuda ...] [LINKS <library>...]
#                    [ARGS <argument>...] [TIMEOUT <seconds>])
#
# A GoogleTest program; it may have its own main(), and may include headers of src/ and tests/. It is one test; with
# RANKS it is one test <name>_np<n> for each n, under mpirun, labelled mpi; with PROCESSES one for each n, whose main()
# starts n processes (tests/support/sockets_main.cpp). Libraries in NEEDS are linked; if one is missing, the test is not
# built and is reported as skipped. ALONE names sources that are not compiled in a batch with others
# (CROSSDOCK_JOIN_SOURCES), because their private names would clash. TIMEOUT, for a test that hangs, should be at least
# ten times the test's time on an idle machine. Tests with the longest TIMEOUT start first.
function(crossdock_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "SOURCES;ALONE;LABELS;RANKS;PROCESSES;NEEDS;LINKS;ARGS")
  crossdock_no_leftovers(crossdock_add_test ${name})
  if(arg_RANKS)
    list(APPEND arg_NEEDS mpi)
  endif()
  crossdock_find_missing(missing ${arg_NEEDS})
  if(missing)
    crossdock_add_skipped_test(${name} "${missing}" "${arg_LABELS}")
    return()
  endif()
  if(arg_PROCESSES)
    list(APPEND arg_SOURCES ${PROJECT_SOURCE_DIR}/tests/support/sockets_main.cpp
         ${PROJECT_SOURCE_DIR}/tests/support/rank_processes.cpp ${PROJECT_SOURCE_DIR}/cli/processes/free_port.cpp)
  endif()
  add_executable(${name} ${arg_SOURCES} ${arg_ALONE})
  set_source_files_properties(${arg_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  crossdock_link_needs(${name} ${arg_NEEDS})
  crossdock_compile_as_test(${name} ${arg_LINKS})
  target_link_libraries(${name} PRIVATE GTest::gtest_main)
  crossdock_register_test(${name})
endfunction()

# crossdock_add_test_objects(<name> <file>...)
#
# Sources that several tests share, compiled once: the tests name them in LINKS.
function(crossdock_add_test_objects name)
  add_library(${name} OBJECT EXCLUDE_FROM_ALL ${ARGN})
  # Compiled like executables; otherwise they could not use the precompiled headers of tests.
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${name} PRIVATE -fPIE)
  crossdock_compile_as_test(${name})
endfunction()

function(crossdock_compile_as_test target)
  target_include_directories(
    ${target} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests
                      ${PROJECT_BINARY_DIR}/generated)
  crossdock_define_features(${target})
  target_link_libraries(${target} PRIVATE ${ARGN} crossdock::testing crossdock::crossdock GTest::gmock GTest::gtest
                                          crossdock_flags crossdock_test_flags)
  crossdock_precompile_gtest(${target} ${ARGN})
endfunction()

# crossdock_add_example(<NN_name> [SOURCES <file>...] [NEEDS ...] [LINKS <library>...] [RANKS <n>...] [ARGS <argument>...]
#                       [LABELS ...] [TIMEOUT <seconds>])
#
# Builds examples/<NN_name>.cpp with only the public headers and runs it as the test example_<NN_name>.
function(crossdock_add_example name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "SOURCES;LABELS;RANKS;NEEDS;LINKS;ARGS")
  crossdock_no_leftovers(crossdock_add_example ${name})
  if(NOT arg_SOURCES)
    set(arg_SOURCES ${name}.cpp)
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  if(arg_RANKS)
    list(APPEND arg_NEEDS mpi)
  endif()
  set(target example_${name})
  crossdock_find_missing(missing ${arg_NEEDS})
  if(missing)
    crossdock_add_skipped_test(${target} "${missing}" "${arg_LABELS}")
    return()
  endif()
  add_executable(${target} ${arg_SOURCES})
  crossdock_link_needs(${target} ${arg_NEEDS})
  target_link_libraries(${target} PRIVATE ${arg_LINKS} crossdock::crossdock crossdock_flags crossdock_test_flags)
  crossdock_register_test(${target})
endfunction()

# crossdock_add_program_run(<target> <run> [COMMAND <program>...] [ARGS <argument>...] [LABELS ...] [NEEDS ...])
#
# Runs a program as the test <target>_<run>, with the given arguments and perhaps under a launcher. Exit status 77: skipped.
function(crossdock_add_program_run name run)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "COMMAND;ARGS;LABELS;NEEDS")
  crossdock_no_leftovers(crossdock_add_program_run ${name})
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  set(test ${name}_${run})
  crossdock_find_missing(missing ${arg_NEEDS})
  if(missing)
    crossdock_add_skipped_test(${test} "${missing}" "${arg_LABELS}")
    return()
  endif()
  add_test(NAME ${test} COMMAND ${arg_COMMAND} $<TARGET_FILE:${name}> ${arg_ARGS})
  set_tests_properties(${test} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT 900 SKIP_RETURN_CODE 77
                                          ENVIRONMENT "CUDA_DEVICE_MAX_CONNECTIONS=32")
  if("cuda" IN_LIST arg_LABELS)
    add_dependencies(cuda_tests ${name})
  endif()
endfunction()

# Tests call the library, which is optimised; optimising the calls would double the time to compile them.
add_library(crossdock_test_flags INTERFACE)
if(CROSSDOCK_SANITIZE MATCHES "address")
  target_compile_options(crossdock_test_flags INTERFACE -O0)
else()
  target_compile_options(crossdock_test_flags INTERFACE $<$<CONFIG:Release>:-O1>)
endif()

# Targets that build the tests of `ctest -L unit` and `ctest -L cuda`.
add_custom_target(quick_tests)
add_custom_target(cuda_tests)

# Used by the calls above. Functions that read arg_ variables are macros.

macro(crossdock_no_leftovers call name)
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "${call}(${name}): unknown arguments: ${arg_UNPARSED_ARGUMENTS}")
  endif()
endmacro()

function(crossdock_hide_symbols target)
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden
                                             VISIBILITY_INLINES_HIDDEN ON DEFINE_SYMBOL "")
endfunction()

# crossdock_place_library(<target> [<property> <value>...]): puts a library at the top of the build folder, with the
# project's version. A shared library exports the symbols in cmake/exported_symbols.map.
function(crossdock_place_library target)
  set_target_properties(
    ${target}
    PROPERTIES LINKER_LANGUAGE CXX
               VERSION ${PROJECT_VERSION}
               SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
               ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}
               LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}
               ${ARGN})
  if(BUILD_SHARED_LIBS)
    set(map ${PROJECT_SOURCE_DIR}/cmake/exported_symbols.map)
    target_link_options(${target} PRIVATE LINKER:--version-script=${map})
    set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${map})
  endif()
endfunction()

# crossdock_publish_library(<target> <name> [<property> <value>...]): users link it as crossdock::<name>.
function(crossdock_publish_library target name)
  add_library(crossdock::${name} ALIAS ${target})
  crossdock_place_library(${target} EXPORT_NAME ${name} ${ARGN})
  target_compile_features(${target} INTERFACE cxx_std_20)
  target_include_directories(${target} INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                 $<INSTALL_INTERFACE:include>)
endfunction()

function(crossdock_define_features target)
  target_compile_definitions(
    ${target} PRIVATE CROSSDOCK_HAS_MPI=${CROSSDOCK_HAS_MPI}
                      CROSSDOCK_HAS_CUDA=${CROSSDOCK_HAS_CUDA} CROSSDOCK_HAS_NCCL=${CROSSDOCK_HAS_NCCL})
  if(CROSSDOCK_HAS_NCCL)
    target_include_directories(${target} SYSTEM PRIVATE ${NCCL_INCLUDE_DIR})
  endif()
endfunction()

# Compiles the standard headers that most sources include once, with the flags of the modules. Sources still include the
# headers they use: clang-tidy reads them without precompiled headers.
function(crossdock_precompile_std target)
  if(NOT TARGET crossdock_std_headers)
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/std_headers.cpp CONTENT "")
    add_library(crossdock_std_headers OBJECT EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/generated/std_headers.cpp)
    crossdock_hide_symbols(crossdock_std_headers)
    target_link_libraries(crossdock_std_headers PRIVATE crossdock_flags Threads::Threads)
    target_precompile_headers(
      crossdock_std_headers PRIVATE <algorithm> <array> <atomic> <chrono> <cstdint> <cstring> <functional> <map> <memory>
                                    <mutex> <optional> <span> <string> <string_view> <thread> <utility> <vector>)
    set_target_properties(crossdock_std_headers PROPERTIES PCH_WARN_INVALID OFF)
  endif()
  set_target_properties(${target} PROPERTIES PCH_WARN_INVALID OFF)
  target_precompile_headers(${target} REUSE_FROM crossdock_std_headers)
endfunction()

# crossdock_precompile_gtest(<target> [<library>...]): the headers of GoogleTest, and of JSON if the target links it, take
# longer to compile than most tests. They are compiled once, for an otherwise empty executable, because a library would
# have other flags. If a test's flags differ, the compiler falls back to the plain headers.
function(crossdock_precompile_gtest target)
  set(headers gtest_headers)
  set(libraries GTest::gmock GTest::gtest)
  set(includes <gmock/gmock.h> <gtest/gtest.h>)
  if("nlohmann_json::nlohmann_json" IN_LIST ARGN)
    set(headers gtest_json_headers)
    list(APPEND libraries nlohmann_json::nlohmann_json)
    list(APPEND includes <nlohmann/json.hpp>)
  endif()
  if(NOT TARGET ${headers})
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/${headers}.cpp CONTENT "int main() {}\n")
    add_executable(${headers} EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/generated/${headers}.cpp)
    set_target_properties(${headers} PROPERTIES PCH_WARN_INVALID OFF)
    crossdock_define_features(${headers})
    target_link_libraries(${headers} PRIVATE crossdock::crossdock ${libraries} crossdock_flags crossdock_test_flags)
    target_precompile_headers(${headers} PRIVATE ${includes})
  endif()
  set_target_properties(${target} PROPERTIES PCH_WARN_INVALID OFF)
  target_precompile_headers(${target} REUSE_FROM ${headers})
endfunction()

function(crossdock_find_missing out)
  set(missing "")
  foreach(need ${ARGN})
    if(need STREQUAL "mpi")
      set(there ${CROSSDOCK_HAS_MPI})
    elseif(need STREQUAL "cuda")
      set(there ${CROSSDOCK_HAS_CUDA})
    elseif(need STREQUAL "rapidcheck")
      find_package(rapidcheck QUIET)
      set(there ${rapidcheck_FOUND})
    else()
      message(FATAL_ERROR "NEEDS ${need}: must be rapidcheck, mpi or cuda")
    endif()
    if(NOT there)
      list(APPEND missing ${need})
    endif()
  endforeach()
  set(${out} "${missing}" PARENT_SCOPE)
endfunction()

function(crossdock_link_needs target)
  foreach(need ${ARGN})
    if(need STREQUAL "mpi")
      target_link_libraries(${target} PRIVATE MPI::MPI_CXX)
    elseif(need STREQUAL "cuda")
      target_link_libraries(${target} PRIVATE CUDA::cudart_static)
    else()
      find_package(rapidcheck QUIET)
      target_link_libraries(${target} PRIVATE rapidcheck rapidcheck_gtest)
    endif()
  endforeach()
endfunction()

function(crossdock_add_skipped_test name missing labels)
  add_test(NAME ${name} COMMAND ${CMAKE_COMMAND} -E echo "skipped: ${name} needs ${missing}, not in this build")
  set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "^skipped:" LABELS "${labels}")
endfunction()

macro(crossdock_register_test target)
  # Each of several ranks on one GPU needs a hardware queue.
  set(environment UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 CUDA_DEVICE_MAX_CONNECTIONS=32)
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 900)
  endif()
  if(CROSSDOCK_SANITIZE)
    math(EXPR arg_TIMEOUT "3 * ${arg_TIMEOUT}")
  endif()
  if("unit" IN_LIST arg_LABELS)
    add_dependencies(quick_tests ${target})
  endif()
  if("cuda" IN_LIST arg_LABELS)
    add_dependencies(cuda_tests ${target})
  endif()
  set(tests "")
  if(arg_RANKS)
    foreach(ranks ${arg_RANKS})
      list(APPEND tests ${target}_np${ranks})
      add_test(NAME ${target}_np${ranks}
               COMMAND ${MPIEXEC_EXECUTABLE} --allow-run-as-root --oversubscribe --mca btl_tcp_if_include lo
                       ${MPIEXEC_NUMPROC_FLAG} ${ranks} $<TARGET_FILE:${target}> ${arg_ARGS})
    endforeach()
    list(APPEND arg_LABELS mpi)
    list(REMOVE_DUPLICATES arg_LABELS)
    list(APPEND environment ASAN_OPTIONS=detect_leaks=0)  # Open MPI itself leaks
    set_tests_properties(${tests} PROPERTIES PROCESSORS 2)
  elseif(arg_PROCESSES)
    foreach(processes ${arg_PROCESSES})
      list(APPEND tests ${target}_np${processes})
      add_test(NAME ${target}_np${processes} COMMAND ${target} ${processes} ${arg_ARGS})
    endforeach()
    set_tests_properties(${tests} PROPERTIES PROCESSORS 2)
  else()
    list(APPEND tests ${target})
    add_test(NAME ${target} COMMAND ${target} ${arg_ARGS})
  endif()
  set_tests_properties(
    ${tests} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} COST ${arg_TIMEOUT}
                        ENVIRONMENT "${environment}")
endmacro()
