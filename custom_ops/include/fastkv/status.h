// Status: how a kernel launcher reports a refusal. No exceptions: a std::exception that leaves a custom op aborts the
// process, so launchers return a Status and the binding turns it into the framework's own error.
#pragma once

#include <cstdarg>
#include <cstdio>

namespace fastkv {

enum class StatusCode { kOk, kInvalidArgument, kOutOfRange, kOutOfMemory };

struct Status {
  StatusCode code = StatusCode::kOk;
  char message[512] = {0};

  bool ok() const { return code == StatusCode::kOk; }
};

/// A refusal with a printf-style message: what was given, what is allowed, what to do.
__attribute__((format(printf, 2, 3))) inline Status refuse(StatusCode code, const char* format, ...) {
  Status status;
  status.code = code;
  va_list args;
  va_start(args, format);
  std::vsnprintf(status.message, sizeof(status.message), format, args);
  va_end(args);
  return status;
}

inline Status out_of_memory() {
  return refuse(StatusCode::kOutOfMemory, "no memory for kernel scratch buffers; free host memory or lower the batch");
}

}  // namespace fastkv
