# The compiled files of the Python package: the library and the command. A wheel cannot contain symbolic links, so a
# library has only one name, its SONAME.
if(NOT BUILD_SHARED_LIBS)
  message(FATAL_ERROR "CROSSDOCK_WHEEL needs BUILD_SHARED_LIBS=ON; `pip install .` sets both.")
endif()

set(wheel_libraries crossdock_library)
option(CROSSDOCK_MANYLINUX "For GCC 12's libstdc++: use only what is in GCC 11's too, for make wheels" OFF)
if(CROSSDOCK_MANYLINUX)
  target_sources(crossdock_library PRIVATE ${PROJECT_SOURCE_DIR}/cmake/oldest_libstdcxx.cpp)
  target_link_options(crossdock_library PRIVATE
                      LINKER:--wrap=_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE)
endif()
if(TARGET crossdock_mpi)
  list(APPEND wheel_libraries crossdock_mpi)
endif()
if(TARGET crossdock_cli)
  list(APPEND wheel_libraries crossdock_testing)
  set_target_properties(crossdock_cli PROPERTIES INSTALL_RPATH $ORIGIN/../lib)
  install(TARGETS crossdock_cli RUNTIME DESTINATION crossdock/bin)
endif()
set_target_properties(${wheel_libraries} PROPERTIES VERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
                                                    INSTALL_RPATH $ORIGIN)
if(TARGET crossdock_torch_calls)
  list(APPEND wheel_modules crossdock_torch_calls)
endif()
install(TARGETS ${wheel_libraries} ${wheel_modules} LIBRARY DESTINATION crossdock/lib NAMELINK_SKIP)
install(FILES ${PROJECT_SOURCE_DIR}/include/crossdock/version.h DESTINATION crossdock/lib)
