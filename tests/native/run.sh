#!/bin/sh
# Builds the kernels without Paddle under AddressSanitizer and UBSan, and runs their standalone test.
#   tests/native/run.sh [rounds]
# No ThreadSanitizer: it does not see the barriers of an OpenMP runtime that was built without it.
set -eu
cd "$(dirname "$0")/../.."
rounds=${1:-3}
build=build/native
mkdir -p "$build"
flags="-std=c++17 -O1 -g1 -Wall -Wextra -Wno-psabi -Icustom_ops/include -fopenmp -fno-math-errno -fno-trapping-math
 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
avx2=""
if [ "$(uname -m)" = x86_64 ]; then
  flags="$flags -DFASTKV_HAVE_AVX2"
  avx2="attend_avx2 codec_avx2"
fi
objects=""
for name in attend_portable codec_portable checks copy_blocks dispatch launch stream_copy $avx2; do
  extra=""
  case $name in *_avx2) extra="-mavx2 -mfma -mf16c" ;; esac
  case $name in codec_*) extra="$extra -ffp-contract=off" ;; esac
  object=$build/$name.o
  objects="$objects $object"
  if [ ! -f "$object" ] || [ -n "$(find custom_ops/include custom_ops/cpu/$name.cc -newer "$object")" ]; then
    # shellcheck disable=SC2086
    ${CXX:-g++} $flags $extra -c "custom_ops/cpu/$name.cc" -o "$object"
  fi
done
# shellcheck disable=SC2086
${CXX:-g++} $flags tests/native/attention_test.cc $objects -o "$build/attention_test"
OMP_NUM_THREADS=2 "$build/attention_test" "$rounds"
