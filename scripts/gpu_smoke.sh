#!/usr/bin/env bash
# Says in under three minutes whether kvcupy works on this machine's GPU:
#     scripts/gpu_smoke.sh [arguments of scripts/gpu/report.py]
# It is scripts/gpu_report.sh --smoke.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/gpu_report.sh" --smoke "$@"
