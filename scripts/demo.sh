#!/usr/bin/env bash
# Runs the demonstration, on a GPU where there is one, else on this processor:
#     scripts/demo.sh [arguments of scripts/overlap_demo.py]
# The timelines, as Perfetto JSON and as pictures, go to build/overlap_demo.
# It runs in the active virtual environment, else in .venv, and installs only what is missing.
set -euo pipefail

# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

choose_python demo
provide demo
exec "$python" "$root/scripts/overlap_demo.py" --out "$root/build/overlap_demo" "$@"
