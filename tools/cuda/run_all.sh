#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, CuPy and compute-sanitizer: every case, plain and under four tools; then planted bugs
# under the tool that should see them, which shows that the tools look.
#   bash run_all.sh FOLDER
set -uo pipefail
folder=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run=(python3 "$here/run.py" "$folder")
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
"$sanitizer" --version | grep -i version
echo "== plain"
"${run[@]}"
for tool in memcheck racecheck initcheck synccheck; do
  echo "== $tool"
  timeout 120 "$sanitizer" --tool "$tool" --print-limit 5 "${run[@]}" 2>&1 | grep -E "SUMMARY|cases of|FAILED|Error:|Race reported|Invalid|Uninitialized" | head -12
done
for bug in missing_barrier:racecheck threadgroup_out_of_bounds:memcheck read_past_the_end:memcheck; do
  echo "== planted: $bug"
  timeout 60 "$sanitizer" --tool "${bug#*:}" --print-limit 1 "${run[@]}" --bug "${bug%:*}" 2>&1 | grep -E "SUMMARY|Race reported|Invalid" | head -3
done
