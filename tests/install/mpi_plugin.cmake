# Included by install_test.cmake: tests the plugin of the installed shared library, and the message if it is missing or
# comes from another build.

file(GLOB_RECURSE plugins ${prefix}/libcrossdock_mpi.so.*)
list(SORT plugins)
list(GET plugins 0 plugin)  # the name that is loaded; the longer one is the file
execute_process(COMMAND ${NM} -D --defined-only ${plugin} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX REPLACE "[0-9a-f]+ [VWu] _Z(N|NK|T.N)9crossdock[^\n]*\n" "" symbols "${symbols}")
if(NOT symbols MATCHES "^[0-9a-f]+ T crossdock_mpi_plugin\n$")
  message(FATAL_ERROR "${plugin} must export crossdock_mpi_plugin and inline parts of the API alone; it exports\n${symbols}")
endif()

function(expect_refusal text)
  execute_process(COMMAND ${mpirun} -n 1 ${WORK_DIR}/by_cmake/mpi_consumer RESULT_VARIABLE status OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  if(NOT status EQUAL 1 OR NOT output MATCHES "${text}")
    message(FATAL_ERROR "mpi_consumer: status ${status}, must be 1 and say '${text}'\n${output}")
  endif()
endfunction()

file(RENAME ${plugin} ${plugin}.away)
expect_refusal("cannot open libcrossdock_mpi.so.*and install it beside libcrossdock")
file(WRITE ${WORK_DIR}/other_plugin.cpp
     "extern \"C\" const void* crossdock_mpi_plugin() { static const char* const build = \"0.0.9\"; return &build; }\n")
run(${CXX} -shared -fPIC ${WORK_DIR}/other_plugin.cpp -o ${plugin})
expect_refusal("is from Crossdock 0.0.9, but libcrossdock is .*install both from the same build")
file(RENAME ${plugin}.away ${plugin})
run(${mpirun} -n 2 ${WORK_DIR}/by_cmake/mpi_consumer)
