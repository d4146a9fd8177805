#!/bin/sh
# Builds the kernels without Paddle under AddressSanitizer and UBSan, and runs their standalone tests: attention with
# every instruction set that this CPU has. It prints which, and which were left out.
#   tests/native/run.sh [rounds]
# With PLAIN=1 it builds a static program as it would be installed, without sanitizers, and prints its name instead of
# running it: for another machine, or an emulator of one.
# The kernels run without ThreadSanitizer: it does not see the barriers of an OpenMP runtime that was built without it.
# Copies of records have threads of their own, and run with it too.
set -eu
cd "$(dirname "$0")/../.."
rounds=${1:-3}
plain=${PLAIN:-0}
flags="-std=c++17 -Wall -Wextra -Wno-psabi -Icustom_ops/include -fopenmp -fno-math-errno -fno-trapping-math"
if [ "$plain" = 1 ]; then
  build=build/native-plain
  flags="$flags -O3 -g0 -static"
else
  build=build/native
  flags="$flags -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
fi
mkdir -p "$build"
x86=""
avx512="-mavx512f -mavx512bw -mavx512vl -mavx512dq -Wno-uninitialized -Wno-maybe-uninitialized"
if [ "$(uname -m)" = x86_64 ]; then
  flags="$flags -DFASTKV_HAVE_X86"
  x86="attend_avx2 codec_avx2 attend_avx512 codec_avx512"
fi
objects=""
for name in attend_portable codec_portable cache_rows checks copy_blocks dispatch launch stream_copy $x86; do
  extra=""
  case $name in *_avx2 | *_avx512) extra="-mavx2 -mfma -mf16c" ;; esac
  case $name in *_avx512) extra="$extra $avx512" ;; esac
  case $name in codec_*) extra="$extra -ffp-contract=off" ;; esac
  # kernels are inlined into each other: with all checks of every access, GCC takes ten minutes for each of these
  case $name in attend_*) [ "$plain" = 1 ] || extra="$extra -fno-sanitize=null -fno-sanitize-address-use-after-scope" ;; esac
  object=$build/$name.o
  objects="$objects $object"
  if [ ! -f "$object" ] || [ -n "$(find custom_ops/include custom_ops/cpu/$name.cc -newer "$object")" ]; then
    # shellcheck disable=SC2086
    ${CXX:-g++} $flags $extra -c "custom_ops/cpu/$name.cc" -o "$object"
  fi
done
# shellcheck disable=SC2086
${CXX:-g++} $flags tests/native/byte_query_test.cc -o "$build/byte_query_test"
# shellcheck disable=SC2086
${CXX:-g++} $flags tests/native/attention_test.cc $objects -o "$build/attention_test"
if [ "$plain" = 1 ]; then
  echo "$build/attention_test"
else
  "$build/byte_query_test"
  OMP_NUM_THREADS=2 "$build/attention_test" "$rounds"
  for sanitizer in address,undefined thread; do
    ${CXX:-g++} -std=c++17 -Wall -Wextra -Icustom_ops/include -O1 -g1 -fsanitize=$sanitizer -fno-sanitize-recover=all \
      -fno-omit-frame-pointer tests/native/records_test.cc custom_ops/cpu/records.cc custom_ops/cpu/stream_copy.cc \
      custom_ops/cpu/checks.cc -o "$build/records_test-$sanitizer" -pthread
    "$build/records_test-$sanitizer" $((rounds * 10))
  done
fi
