#!/usr/bin/env bash
# Runs the tests:
#     scripts/test.sh [--torch] [arguments of pytest]
# --torch: with torch, which some tests need, installed. It works in the active virtual environment,
# else in .venv, and installs only what is missing.
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
exec "$python" -m pytest ${arguments[@]+"${arguments[@]}"}
