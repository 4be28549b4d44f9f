# `cmake --install`: headers, libraries, command, and the files for find_package(crossdock) and pkg-config.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME crossdock)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/crossdock)

install(TARGETS crossdock_library crossdock_testing EXPORT crossdockTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/crossdock DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
if(TARGET crossdock_mpi)  # nothing links it, so it needs no unversioned name
  install(TARGETS crossdock_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_SKIP COMPONENT mpi)
endif()
if(TARGET crossdock_cli)
  install(TARGETS crossdock_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  if(NOT CMAKE_CROSSCOMPILING)  # man pages and completions, which the command has printed
    install(DIRECTORY ${PROJECT_BINARY_DIR}/share/ DESTINATION ${CMAKE_INSTALL_DATADIR})
  endif()
endif()

install(EXPORT crossdockTargets NAMESPACE crossdock:: DESTINATION ${package_dir})
# Programs that link the static library must also link its dependencies; a shared library has its own.
get_property(links GLOBAL PROPERTY CROSSDOCK_LINKS)
list(REMOVE_DUPLICATES links)
set(package_links "${links}")
if(BUILD_SHARED_LIBS)
  set(package_links "")
endif()
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/crossdockConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/crossdockConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/crossdockConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/crossdockConfig.cmake ${PROJECT_BINARY_DIR}/crossdockConfigVersion.cmake
        DESTINATION ${package_dir})

# pkg-config: a static library cannot be used without its dependencies, so these go into Libs.
set(pc_links -pthread)
foreach(link ${links})
  if(link STREQUAL "MPI::MPI_CXX")
    list(APPEND pc_links ${MPI_CXX_LIBRARIES})
  elseif(link STREQUAL "CUDA::cudart_static")
    list(APPEND pc_links -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt)
  elseif(link MATCHES "^CUDA::(.+)$")
    list(APPEND pc_links -L${CUDAToolkit_LIBRARY_DIR} -l${CMAKE_MATCH_1})
  else()
    list(APPEND pc_links -l${link})
  endif()
endforeach()
list(JOIN pc_links " " pc_links)
set(pc_libs "")
if(NOT BUILD_SHARED_LIBS)
  set(pc_libs " ${pc_links}")
endif()
file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${PROJECT_SOURCE_DIR}/cmake/crossdock.pc.in ${PROJECT_BINARY_DIR}/crossdock.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/crossdock.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
