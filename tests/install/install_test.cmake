# cmake -D KIND=static|shared -D SOURCE_DIR=... -D BUILD_DIR=... -D WORK_DIR=... -D CXX=... -D GENERATOR=...
#       -D NM=... -D READELF=... -D PKG_CONFIG=... -D MPIRUN=... -P install_test.cmake
#
# Installs into WORK_DIR/prefix, moves that elsewhere (an installed tree must be relocatable), and builds and runs
# tests/install/consumer against it. PKG_CONFIG and MPIRUN may be empty. A shared library must export exactly what its
# headers declare; it must not link MPI, NCCL or the CUDA driver.
cmake_minimum_required(VERSION 3.24)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}: status ${status}\n${output}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK_DIR}/installed ${WORK_DIR}/prefix ${WORK_DIR}/by_cmake ${WORK_DIR}/by_pkg_config)
file(MAKE_DIRECTORY ${WORK_DIR}/by_pkg_config)
set(prefix ${WORK_DIR}/prefix)
set(with_mpi OFF)
if(MPIRUN)
  set(with_mpi ON)
  set(mpirun ${MPIRUN} --allow-run-as-root --oversubscribe --mca btl_tcp_if_include lo)
endif()

if(KIND STREQUAL "shared")
  string(APPEND BUILD_DIR -shared)  # beside this build, to share its compiler cache
  run(${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${BUILD_DIR} -G ${GENERATOR} -D CMAKE_CXX_COMPILER=${CXX}
      -D CMAKE_BUILD_TYPE=Release -D BUILD_SHARED_LIBS=ON -D CROSSDOCK_BUILD_CLI=OFF -D CROSSDOCK_BUILD_TESTS=OFF
      -D CROSSDOCK_BUILD_EXAMPLES=OFF)
  run(${CMAKE_COMMAND} --build ${BUILD_DIR} --parallel 2)
endif()
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/installed)
file(RENAME ${WORK_DIR}/installed ${prefix})

if(KIND STREQUAL "shared")
  include(${CMAKE_CURRENT_LIST_DIR}/shared_library.cmake)
endif()

message(STATUS "find_package")
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/consumer -B ${WORK_DIR}/by_cmake -G ${GENERATOR}
    -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_PREFIX_PATH=${prefix} -D CMAKE_FIND_USE_PACKAGE_REGISTRY=OFF
    -D CONSUMER_WITH_MPI=${with_mpi})
run(${CMAKE_COMMAND} --build ${WORK_DIR}/by_cmake)
run(${WORK_DIR}/by_cmake/consumer)
run(${WORK_DIR}/by_cmake/judge)
if(with_mpi)
  message(STATUS "MPI")
  run(${mpirun} -n 2 ${WORK_DIR}/by_cmake/mpi_consumer)
  if(KIND STREQUAL "shared")
    include(${CMAKE_CURRENT_LIST_DIR}/mpi_plugin.cmake)
  endif()
endif()

if(KIND STREQUAL "static" AND EXISTS ${prefix}/bin/crossdock)
  message(STATUS "the installed command")
  run(${prefix}/bin/crossdock info)
  foreach(file man/man1/crossdock.1 man/man1/crossdock-run.1 bash-completion/completions/crossdock
               zsh/site-functions/_crossdock fish/vendor_completions.d/crossdock.fish)
    if(NOT EXISTS ${prefix}/share/${file})
      message(FATAL_ERROR "share/${file} is not installed")
    endif()
  endforeach()
endif()

if(NOT PKG_CONFIG)
  message(STATUS "pkg-config: left out, it is not on this machine")
  return()
endif()
message(STATUS "pkg-config")
file(GLOB_RECURSE pc_file ${prefix}/crossdock.pc)
get_filename_component(pc_folder ${pc_file} DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${pc_folder})
execute_process(COMMAND ${PKG_CONFIG} --cflags --libs crossdock OUTPUT_VARIABLE flags
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
get_filename_component(library_folder ${pc_folder} DIRECTORY)
function(build_by_pkg_config source program)
  run(${CXX} -std=c++20 ${source} -o ${program} ${flags} -Wl,-rpath,${library_folder})
endfunction()
foreach(source ${CMAKE_CURRENT_LIST_DIR}/consumer/main.cpp ${SOURCE_DIR}/examples/01_single_process.cpp)
  get_filename_component(name ${source} NAME_WE)
  build_by_pkg_config(${source} ${WORK_DIR}/by_pkg_config/${name})
  run(${WORK_DIR}/by_pkg_config/${name})
endforeach()
if(with_mpi)  # a program that does not call MPI itself
  build_by_pkg_config(${SOURCE_DIR}/examples/02_mpi.cpp ${WORK_DIR}/by_pkg_config/02_mpi)
  run(${mpirun} -n 2 ${WORK_DIR}/by_pkg_config/02_mpi)
endif()

if(KIND STREQUAL "static")
  message(STATUS "every header by itself")
  file(GLOB_RECURSE headers ${prefix}/include/crossdock/*.hpp)
  foreach(header ${headers})
    run(${CXX} -std=c++20 -Wall -Wextra -Werror -fsyntax-only -I${prefix}/include -x c++ -include ${header} /dev/null)
  endforeach()
endif()
