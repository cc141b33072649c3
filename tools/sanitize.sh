#!/usr/bin/env bash
# Builds moeflux with a sanitizer into an environment of its own and runs pytest there.
#   tools/sanitize.sh asan|ubsan|tsan [pytest arguments]
#   tools/sanitize.sh asan|ubsan|tsan --script SCRIPT [arguments]   another script in place of pytest
# The interpreter is not instrumented, so the sanitizer's runtime is loaded before it. This needs GCC on Linux.
set -euo pipefail
kind=${1:?asan, ubsan or tsan}
shift
folder=build/sanitize-$kind
compiler=${CXX:-g++}
report=$PWD/$folder/report # a file: pytest captures what a dying process writes to stderr
command="-m pytest -q -p no:cacheprovider"
if [ "${1-}" = --script ]; then
  shift
  command=""
fi
runtime() { "$compiler" -print-file-name="$1"; }

case $kind in
  # Python frees little at exit, so nothing looks for leaks. libstdc++ is loaded too, so that exceptions are intercepted.
  # Use after return is not looked for: GCC 13 keeps the frames for that off the stack and does not align them to the 64 bytes
  # that a vector of AVX-512 has, so that a right store to one crashes.
  asan)
    sanitizers=address,undefined
    preload="$(runtime libasan.so) $(runtime libstdc++.so.6)"
    export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:strict_string_checks=1:detect_stack_use_after_return=0:log_path=$report
    ;;
  ubsan)
    sanitizers=undefined
    preload=""
    ;;
  tsan)
    sanitizers=thread
    preload="$(runtime libtsan.so)"
    # ThreadSanitizer gives up in a child of fork that starts threads or lets go of those of its parent. AddressSanitizer runs
    # these tests.
    [ -z "$command" ] || set -- --deselect tests/engine/test_engine_robustness.py::test_fork \
      --deselect tests/engine/test_thread_pool.py::test_a_forked_child_computes_alone \
      --deselect tests/io/test_io_pool.py::test_a_fork_has_no_reading_threads "$@"
    export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:ignore_noninstrumented_modules=1:log_path=$report
    ;;
  *)
    echo "sanitize.sh: expected asan, ubsan or tsan, found $kind" >&2
    exit 2
    ;;
esac
export UBSAN_OPTIONS=print_stacktrace=1:log_path=$report
# In instrumented code, GCC warns of values that it believes to be unset. So warnings are no errors here.
unset MOEFLUX_DEV
# numpy's own threads are not what is tested here.
export OPENBLAS_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

if [ ! -e "$folder/ready" ]; then
  "${PYTHON:-python3}" -m venv "$folder"
  "$folder/bin/pip" install --quiet "scikit-build-core>=1.0" "pybind11>=3.0" "cmake>=3.25" ninja
  touch "$folder/ready"
fi
CXX=$compiler "$folder/bin/pip" install --quiet --no-build-isolation ".[test]" -Cbuild-dir="$folder/cmake" \
  -Ccmake.build-type=RelWithDebInfo -Cinstall.strip=false -Ccmake.define.MOEFLUX_SANITIZE="$sanitizers" \
  -Ccmake.define.MOEFLUX_BENCH=ON

rm -f "$report".*
status=0
# The address layout is fixed, because ThreadSanitizer's shadow memory does not fit every random one.
LD_PRELOAD=$preload setarch -R "$folder/bin/python" $command "$@" || status=$?
cat "$report".* 2>/dev/null || true
exit $status
