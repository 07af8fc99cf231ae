#!/usr/bin/env bash
# Runs the tests, in as many processes as there are CPUs:
#     scripts/test.sh [--torch] [--full] [-n 0] [arguments of pytest]
# --torch: with torch, which some tests need, installed. --full: more cases of each test, not just
# telling ones. -n 0: in one process, as a debugger needs it. It works in the active
# virtual environment, else in .venv, and installs only what is missing.
set -euo pipefail

# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

task=(test)
arguments=()
for argument in "$@"; do
  if [[ $argument == --torch ]]; then task+=(--torch); else arguments+=("$argument"); fi
done

choose_python "${task[@]}"
provide "${task[@]}"
cd "$root"
exec "$python" -m pytest -n auto --dist worksteal ${arguments[@]+"${arguments[@]}"}
