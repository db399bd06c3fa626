#!/usr/bin/env bash
# Rewrites constraints/pyXY.txt: the exact versions in a fresh installation of this tree.
set -euo pipefail

if [ $# -lt 1 ] || [ "$1" = --help ]; then
    echo "usage: scripts/update_constraints.sh VERSION [REQUIREMENT...]" >&2
    echo "  VERSION      of Python, such as 3.12" >&2
    echo "  REQUIREMENT  a version to keep instead of the newest, such as torch==2.13.0" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ $# -gt 0 ]; then
    printf '%s\n' "$@" >"$work/keep.txt"
fi
PYTHON=$version CONSTRAINTS=$([ $# -gt 0 ] && echo "$work/keep.txt" || echo none) \
    scripts/setup_venv.sh "$work/venv"
{
    echo "# A fresh installation with Python $version; scripts/setup_venv.sh installs these versions."
    echo "# Written by: scripts/update_constraints.sh $version $*" | sed 's/ *$//'
    # A CPU build of torch, 2.13.0+cpu, satisfies the version without its suffix.
    "$work/venv/bin/pip" freeze --all --exclude pip --exclude-editable | sed 's/+cpu$//'
} >"$work/constraints.txt"
mv "$work/constraints.txt" "constraints/py${version/./}.txt"
echo "wrote constraints/py${version/./}.txt"
