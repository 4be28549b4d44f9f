#include <condition_variable>
#include <mutex>

// For wheels (CROSSDOCK_MANYLINUX). GCC 12's libstdc++ has a new version of one function that the library calls; the
// others are in GCC 11's, which distributions with glibc 2.34 have. The linker sends calls here (--wrap), and the older
// version, which is in both, does the same.
extern "C" void oldest_wait(std::condition_variable* condition, std::unique_lock<std::mutex>& lock);
asm(".symver oldest_wait,_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");

extern "C" void __wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(  // NOLINT: the linker's name
    std::condition_variable* condition, std::unique_lock<std::mutex>& lock) {
  oldest_wait(condition, lock);
}
