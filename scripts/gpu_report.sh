#!/usr/bin/env bash
# Tests and measures kvcupy on a GPU, and leaves a file to be attached to an issue:
#     scripts/gpu_report.sh [--no-torch] [arguments of scripts/gpu/report.py]
# The report is build/gpu_report.json. The script works in the active virtual environment, else in
# .venv, and installs only what is missing, torch included where the driver supports it (CUDA 13),
# unless --no-torch is passed.
set -euo pipefail

# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

export PYTHONPATH="$root/scripts:$PYTHONPATH" # for the package gpu
torch=--torch
arguments=()
for argument in "$@"; do
  case $argument in
    --no-torch) torch= ;;
    -h | --help)
      python=$(base_python) || die "No Python 3.10 or newer is on the PATH."
      exec "$python" -m gpu.report --help
      ;;
    *) arguments+=("$argument") ;;
  esac
done

choose_python report ${torch:+"$torch"}
provide report
# Separately: without it, everything else is still installed.
if [[ -n $torch && (-z $made || -d $made) && -z $(needs report) ]]; then
  provide report "$torch"
fi
exec "$python" -m gpu.report ${arguments[@]+"${arguments[@]}"}
