// What GCC parses once for all host builds of kernels (kvcupy/devices/cxx.py).

#include "runner.h"

// After the names that it uses.
#include "copy.h"
