# cmake -D KIND=static|shared -D SOURCE_DIR=... -D BUILD_DIR=... -D WORK_DIR=... -D CXX=... -D GENERATOR=...
#       -D NM=... -D PKG_CONFIG=... -P install_test.cmake
#
# Installs into WORK_DIR/prefix, moves that elsewhere (an installed tree must not know where it was installed), and
# builds and runs tests/install/consumer against it. A shared library must export what its headers declare, and nothing
# else.
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

if(KIND STREQUAL "shared")
  string(APPEND BUILD_DIR -shared)  # beside this build, so that a compiler cache knows the objects
  run(${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${BUILD_DIR} -G ${GENERATOR} -D CMAKE_CXX_COMPILER=${CXX}
      -D CMAKE_BUILD_TYPE=Release -D BUILD_SHARED_LIBS=ON -D CROSSDOCK_BUILD_CLI=OFF -D CROSSDOCK_BUILD_TESTS=OFF
      -D CROSSDOCK_BUILD_EXAMPLES=OFF)
  run(${CMAKE_COMMAND} --build ${BUILD_DIR} --parallel 2)
endif()
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/installed)
file(RENAME ${WORK_DIR}/installed ${prefix})

if(KIND STREQUAL "shared")
  message(STATUS "exported symbols")
  set(declared "")
  file(GLOB_RECURSE headers ${prefix}/include/crossdock/*.hpp)
  foreach(header ${headers})
    file(READ ${header} text)
    string(APPEND declared "${text}")
  endforeach()
  file(GLOB_RECURSE libraries ${prefix}/libcrossdock*.so)
  execute_process(COMMAND ${NM} -DC --defined-only ${libraries} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "\n[0-9a-f]+ [A-Za-z] (vtable for |typeinfo for |typeinfo name for )?crossdock::[A-Za-z_0-9]+(::[A-Za-z_0-9~]+)?"
         exported "${symbols}")
  list(TRANSFORM exported REPLACE ".*[ \n]crossdock::" "")
  list(REMOVE_DUPLICATES exported)
  foreach(known Dispatcher::plan Error run_ranks BasicTensorView reference::run_layer conformance::run_checks)
    if(NOT known IN_LIST exported)
      message(FATAL_ERROR "crossdock::${known} is not exported by ${libraries}")
    endif()
  endforeach()
  foreach(known crossdock_dispatch crossdock_last_error crossdock_layer_forward)
    if(NOT symbols MATCHES " T ${known}\n")
      message(FATAL_ERROR "${known}, of the C API, is not exported by ${libraries}")
    endif()
  endforeach()
  foreach(name ${exported})
    string(REGEX MATCHALL "[A-Za-z_0-9]+" words ${name})
    foreach(word ${words})
      if(name MATCHES "^(ops|comm|cuda|detail|build_info)::" OR NOT declared MATCHES "[^A-Za-z_0-9]${word}[^A-Za-z_0-9]")
        message(FATAL_ERROR "crossdock::${name} is exported, but no public header declares it")
      endif()
    endforeach()
  endforeach()
endif()

message(STATUS "find_package")
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/consumer -B ${WORK_DIR}/by_cmake -G ${GENERATOR}
    -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_PREFIX_PATH=${prefix} -D CMAKE_FIND_USE_PACKAGE_REGISTRY=OFF)
run(${CMAKE_COMMAND} --build ${WORK_DIR}/by_cmake)
run(${WORK_DIR}/by_cmake/consumer)
run(${WORK_DIR}/by_cmake/judge)

if(KIND STREQUAL "static" AND EXISTS ${prefix}/bin/crossdock)
  message(STATUS "the installed command")
  run(${prefix}/bin/crossdock info)
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
foreach(source ${CMAKE_CURRENT_LIST_DIR}/consumer/main.cpp ${SOURCE_DIR}/examples/01_single_process.cpp)
  get_filename_component(name ${source} NAME_WE)
  run(${CXX} -std=c++20 ${source} -o ${WORK_DIR}/by_pkg_config/${name} ${flags} -Wl,-rpath,${library_folder})
  run(${WORK_DIR}/by_pkg_config/${name})
endforeach()

if(KIND STREQUAL "static")
  message(STATUS "every header by itself")
  file(GLOB_RECURSE headers ${prefix}/include/crossdock/*.hpp)
  foreach(header ${headers})
    run(${CXX} -std=c++20 -Wall -Wextra -Werror -fsyntax-only -I${prefix}/include -x c++ -include ${header} /dev/null)
  endforeach()
endif()
