#!/usr/bin/env bash
# Runs the tests, in as many processes as there are CPUs:
#     scripts/test.sh [--torch] [--full] [--sanitize] [--arch NN] [-n 0] [arguments of pytest]
# --torch: with torch, which some tests need, installed. --full: more cases of each test, not just
# telling ones. --sanitize: kernels and arrays under the address and undefined-behaviour sanitizers.
# --arch: kernels take the branches that sm_NN takes (75, 80, 89, 90 or 100), on this processor.
# -n 0: in one process, as a debugger needs it. It works in the active virtual environment, else in
# .venv, and installs only what is missing.
set -euo pipefail

# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

task=(test)
arguments=()
sanitize=
for argument in "$@"; do
  if [[ $argument == --torch ]]; then task+=(--torch); else arguments+=("$argument"); fi
  if [[ $argument == --sanitize ]]; then sanitize=1; fi
done

choose_python "${task[@]}"
provide "${task[@]}"
cd "$root"
tests=("$python" -m pytest -n auto --dist worksteal ${arguments[@]+"${arguments[@]}"})
if [[ -z $sanitize ]]; then exec "${tests[@]}"; fi

# A report ends the process of a test, so it is written to a file and printed at the end.
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
listed=$("$python" tests/redzones.py "$reports") || exit
variables=()
while IFS= read -r line; do variables+=("$line"); done <<<"$listed"
status=0
env ${variables[@]+"${variables[@]}"} "${tests[@]}" || status=$?
for report in "$reports"/*; do # one that only warns is of a test that asks for too much memory
  if grep -qE 'ERROR: |runtime error: ' "$report" 2>/dev/null; then
    head -n 40 "$report" >&2
    status=1
  fi
done
exit "$status"
