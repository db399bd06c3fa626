#!/usr/bin/env bash
# Makes a virtual environment with this checkout installed as editable, ready to train and to test.
#
# The Python is the first that runs of: 3.12 (the tested one with the newest Megatron-Core), 3.13,
# and what `python3` means if that is at least 3.10.  Versions are pinned by constraints/pyXY.txt
# where there is one for that Python.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/setup_venv.sh [VENV]

  VENV    folder of the virtual environment (default: .venv); it is made, or brought up to date

environment:
  PYTHON       a version such as 3.12, a command or a path (default: see the top of this script)
  CONSTRAINTS  a pip constraint file, or `none` (default: constraints/pyXY.txt of the Python's XY)
  PIP_...      pip's own variables.  Without an NVIDIA GPU, a CPU build of torch is taken where pip's
               index has one: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu is PyTorch's
TEXT
}

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

# `python3.12` may be a version manager's stub that only fails, and a system's Python may lack the
# modules that make environments, so ask the command itself.
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

# Prints the first usable Python of one version, such as 3.12: from PATH, or one of pyenv's.
python_of_version() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1."*/bin/python; do
        if usable "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

choose_python() {
    local version wanted="${PYTHON:-}"
    if [ -n "$wanted" ]; then
        version="${wanted#python}"
        if [[ $version =~ ^3\.[0-9]+$ ]]; then
            python_of_version "$version" && return
        elif usable "$wanted"; then
            printf '%s\n' "$wanted"
            return
        fi
        die "PYTHON=$wanted: not found, older than 3.10, or without the modules venv and ensurepip"
    fi
    python_of_version 3.12 || python_of_version 3.13 || {
        usable python3 && printf 'python3\n'
    } || die "no Python >= 3.10 with the modules venv and ensurepip was found;" \
        "install Python 3.12, or name one: PYTHON=/path/to/python3.12"
}

# Sets up $venv, or leaves it if it already works.  Only an environment is ever replaced.
make_venv() {
    if "$venv/bin/python" -c '' 2>/dev/null; then
        if [ -n "${PYTHON:-}" ]; then
            local python have want
            python=$(choose_python)
            have=$("$venv/bin/python" -V)
            want=$("$python" -V)
            [ "$have" = "$want" ] || die "$venv has $have, PYTHON=$PYTHON is $want;" \
                "remove $venv, or set VENV to another folder"
        fi
        return
    fi
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
        die "$venv exists and is not a virtual environment; set VENV to another folder"
    fi
    local python
    python=$(choose_python)
    say "making $venv with $("$python" -V)"
    "$python" -m venv --clear "$venv"
}

# The torch to install: the pinned version or any, and on a machine without an NVIDIA GPU its CPU
# build if pip's configured index has one for this Python, which saves gigabytes of libraries.
torch_requirement() {
    local pinned versions cpu_build
    pinned=$(sed -n 's/^torch==//p' "$constraints")
    if [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; then
        say "this machine has an NVIDIA GPU: using torch with CUDA" >&2
    else
        versions=$("$venv/bin/pip" index versions torch 2>/dev/null)
        cpu_build=$(sed -n 's/^Available versions: //p' <<<"$versions" | tr -d ' ' | tr ',' '\n' |
            grep -m 1 -x -e "${pinned:-[0-9.]*}+cpu" || true)
        if [ -n "$cpu_build" ]; then
            say "no NVIDIA GPU: using torch $cpu_build" >&2
            printf 'torch==%s\n' "$cpu_build"
            return
        fi
        say "no NVIDIA GPU, but the package index offers no CPU build of torch for this" \
            "Python: using the one with CUDA.  PyTorch's own index has CPU builds:" \
            "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" >&2
    fi
    printf 'torch%s\n' "${pinned:+==$pinned}"
}

case "${1:-}" in
-h | --help) usage && exit ;;
-*) usage >&2 && exit 2 ;;
esac
venv=${1:-.venv}
[[ $venv = /* ]] || venv=$PWD/$venv
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

make_venv
version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
constraints=${CONSTRAINTS:-constraints/py${version/./}.txt}
if [ "$constraints" = none ] || { [ -z "${CONSTRAINTS:-}" ] && [ ! -f "$constraints" ]; }; then
    say "Python $version, the newest versions that pyproject.toml allows (no constraint file)"
    constraints=/dev/null
else
    [ -f "$constraints" ] || die "CONSTRAINTS=$constraints: no such file"
    say "Python $version, versions of $constraints"
fi

torch=$(torch_requirement)
if ! "$venv/bin/pip" show --quiet torch 2>/dev/null; then
    case $torch in
    *+cpu) say "downloading about 0.6 GB, for 2 GB in $venv" ;;
    *) say "downloading about 3 GB, for 5 GB in $venv, nearly all of it torch and CUDA's libraries" ;;
    esac
    say "this takes a few minutes, the first time only"
fi
# A terminal shows pip's progress; a log gets only its warnings and errors.
quiet=()
[ -t 1 ] || quiet=(--quiet)
"$venv/bin/pip" install "${quiet[@]}" --constraint "$constraints" "$torch" --editable '.[dev]'
if [ "$version" = 3.12 ]; then
    scripts/fetch_megatron.sh "$venv"
fi
say "$venv is ready"
