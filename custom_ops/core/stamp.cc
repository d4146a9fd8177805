// Which sources this library was built from: setup.py hashes all of custom_ops/core into FASTKV_CORE_SOURCES, and
// fastkv/scheduler/_native.py compares, so that an old build in a newer source tree says so.
#include "stamp.h"

#ifndef FASTKV_CORE_SOURCES
#define FASTKV_CORE_SOURCES ""
#endif

namespace fastkv::core {

const char* built_from() { return FASTKV_CORE_SOURCES; }

}  // namespace fastkv::core
