#!/bin/sh
# The scheduler core's stress target under AddressSanitizer + UBSan, then under ThreadSanitizer. `make sanitize` runs it.
#   sanitize.sh [build folder]        environment: CXX, CALLS (calls a thread, default 6000)
set -eu
core=$(cd "$(dirname "$0")/.." && pwd)
build=${1:-$core/../../build/sanitize}
mkdir -p "$build"
sources=$(ls "$core"/*.cc | grep -v /bindings)

stress() { # name, flags...
  name=$1
  shift
  echo "building the stress target: $name"
  # shellcheck disable=SC2086
  ${CXX:-g++} -std=c++17 -O1 -g -fno-omit-frame-pointer -Wall -Wextra "$@" $sources "$core/tests/stress.cc" \
    -o "$build/stress-$name" -pthread
  for arguments in "1 ${CALLS:-6000} 1 lru" "1 ${CALLS:-6000} 2 2q" "4 ${CALLS:-6000} 3 lru" "3 ${CALLS:-6000} 4 2q"; do
    # shellcheck disable=SC2086
    "$build/stress-$name" $arguments
  done
}

ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1
export ASAN_OPTIONS UBSAN_OPTIONS
stress address -fsanitize=address,undefined -fno-sanitize-recover=all
TSAN_OPTIONS=halt_on_error=1
export TSAN_OPTIONS
stress thread -fsanitize=thread
echo "sanitizers: clean"
