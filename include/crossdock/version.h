#ifndef CROSSDOCK_VERSION_H
#define CROSSDOCK_VERSION_H

/// Version of these headers, in C and C++. CMake and the Python package read it from this file;
/// crossdock_version() is the version of the library that is running.
#define CROSSDOCK_VERSION "0.1.0"

#endif
