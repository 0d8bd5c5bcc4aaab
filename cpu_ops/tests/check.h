// What the tests check with.
#ifndef CPU_OPS_TESTS_CHECK_H_
#define CPU_OPS_TESTS_CHECK_H_

#include <cstdio>
#include <cstdlib>

// Prints the condition and ends the process if it does not hold.
#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

#endif  // CPU_OPS_TESTS_CHECK_H_
