#!/usr/bin/env bash
# Runs lists of tests side by side, each in a process: tools/test.sh PYTHON "TESTS ..." "TESTS ..." ...
# The first writes as it goes. What the others wrote is shown when all have ended. The script fails when any of them does.
set -uo pipefail
python=$1
shift
# Importing rebuilds what has changed. It is done here once, before all processes would do it.
"$python" -c 'import moeflux._core' || exit 1
mkdir -p build
# Bytecode is kept, whatever the environment says: hundreds of processes import the package.
export PYTHONPYCACHEPREFIX=$PWD/build/pycache
unset PYTHONDONTWRITEBYTECODE

others=()
trap '[ ${#others[@]} -eq 0 ] || kill "${others[@]}" 2>/dev/null' EXIT
for ((i = 2; i <= $#; i++)); do
  "$python" -m pytest -q ${!i} >"build/tests-$i.txt" 2>&1 &
  others+=($!)
done
"$python" -m pytest -q $1
statuses=($?)
for other in "${others[@]}"; do
  wait "$other"
  statuses+=($?)
done
trap - EXIT

for ((i = 2; i <= $#; i++)); do
  printf '\n==== beside it: %s\n' "${!i}"
  cat "build/tests-$i.txt"
done
failed=0
for ((i = 1; i <= $#; i++)); do
  [ "${statuses[i - 1]}" -eq 0 ] || { echo "failed: ${!i}" && failed=1; }
done
exit $failed
