#!/usr/bin/env bash
# Compiles the extension with several CUDA toolkits, loads it, and prints a table of the results.
#
#   scripts/build_matrix.sh [TOOLKIT[:ARCHITECTURE,...]...]
#
# TOOLKIT is a version such as 13.0, or the folder of an unpacked toolkit; ARCHITECTURE one of GPUs,
# such as 90 or 90+PTX (default: setup.py's).  Without arguments: the oldest supported toolkit, the
# one that this was developed with, and the newest.
#
# A version is this machine's if it has it: CUDA_HOME, /usr/local/cuda, /usr/local/cuda-VERSION or
# nvcc on PATH.  Otherwise it is fetched into a temporary folder: 13.x by pip; 12.4 by pip and, because
# no wheel of CUDA 12 has nvcc, from the package of Debian 13.  Warnings are errors.
#
# Exit status: 0 if everything requested compiled and loaded; 1 if anything failed; 3 if nothing
# failed but a toolkit was not available.  PYTHON is one with pybind11 and setuptools (default:
# python3).
set -uo pipefail

[[ ${1:-} != -* ]] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 2; }
wanted=("$@")
[ $# -gt 0 ] || wanted=(12.4 13.0 13.5)
python=${PYTHON:-python3}
work=$(mktemp -d) || exit
trap 'rm -rf "$work"' EXIT

table=() status=0
row() { table+=("$(printf '%-14s  %-23s  %s' "$@")"); }

# release_of HOME: the version of a toolkit, such as 13.0
release_of() {
    "$1/bin/nvcc" --version 2>/dev/null | sed -nE 's/.* release ([0-9.]+),.*/\1/p'
}

# here VERSION: the folder of this machine's toolkit of that version
here() {
    local home nvcc
    nvcc=$(command -v nvcc) && nvcc=$(realpath "$nvcc")
    for home in "${CUDA_HOME:-}" /usr/local/cuda "/usr/local/cuda-$1" "${nvcc%/bin/nvcc}"; do
        if [ -n "$home" ] && [ "$(release_of "$home")" = "$1" ]; then
            printf '%s\n' "$home"
            return
        fi
    done
    return 1
}

# from_pip VERSION FOLDER: pip's parts of a toolkit
from_pip() {
    echo "fetching CUDA $1 by pip"
    timeout 600 "$python" -m pip install --quiet --no-warn-conflicts --disable-pip-version-check \
        --target "$2" "cuda-toolkit[nvcc,cudart,cccl]==$1.*"
}

# debian_package NAME SUITE COMPONENT FOLDER: unpack a package of another release of Debian.  The
# machine's own sources say where to get it; its apt configuration is read but not changed.
debian_package() {
    local name=$1 suite=$2 component=$3 folder=$4 codename uri
    local keys=/usr/share/keyrings/debian-archive-keyring.gpg
    codename=$(sed -nE 's/^VERSION_CODENAME=//p' /etc/os-release)
    # --no-release-info: also on a machine that has not run `apt-get update` yet.
    uri=$(apt-get indextargets --no-release-info --format "\$(REPO_URI)" \
        "Created-By: Packages" "Release: $codename" "Component: main" | head -n 1)
    if [ -z "$uri" ] || [ ! -f "$keys" ]; then
        echo "apt-get knows no source of Debian's packages here" >&2
        return 1
    fi
    mkdir -p "$folder"/{sources,lists/partial,cache/archives/partial,tree} || return
    printf '%s: %s\n' Types deb URIs "$uri" Suites "$suite" Components "$component" \
        Signed-By "$keys" >"$folder/sources/debian.sources"
    local options=(
        -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$folder/sources"
        -o Dir::State::Lists="$folder/lists" -o Dir::State::Status=/dev/null
        -o Dir::Cache="$folder/cache" -o APT::Sandbox::User=root
        -o Acquire::Languages=none -o APT::Update::Error-Mode=any
    )
    echo "fetching $name of Debian $suite by apt-get"
    timeout 120 apt-get -q -q "${options[@]}" update &&
        (cd "$folder" && timeout 300 apt-get -q -q "${options[@]}" download "$name") &&
        dpkg-deb --extract "$folder/$name"_*.deb "$folder/tree"
}

# assemble_12_4 HOME: a toolkit like an installed one, from pip's parts and Debian's
assemble_12_4() {
    local home=$1 pip="$work/pip-12.4" debian="$work/debian" part
    from_pip 12.4 "$pip" || return
    debian_package nvidia-cuda-toolkit trixie non-free "$debian" || return
    mkdir -p "$home"/{bin,include,lib64,nvvm/bin} || return
    for part in cuda_nvcc cuda_cccl cuda_runtime; do
        cp -r "$pip/nvidia/$part/include/." "$home/include" || return
    done
    cp "$pip/nvidia/cuda_nvcc/bin/ptxas" "$debian"/tree/usr/bin/{cudafe++,fatbinary} "$home/bin" &&
        cp -r "$debian"/tree/usr/lib/nvidia-cuda-toolkit/bin/{nvcc,crt} "$home/bin" &&
        cp "$debian/tree/usr/lib/nvidia-cuda-toolkit/bin/cicc" "$home/nvvm/bin" &&
        cp -r "$pip/nvidia/cuda_nvcc/nvvm/libdevice" "$home/nvvm" &&
        cp "$pip/nvidia/cuda_runtime/lib/libcudart.so.12" "$home/lib64" || return
    # The wheel has only the shared runtime; a linker script takes the static one's name.
    echo 'INPUT(libcudart.so.12)' >"$home/lib64/libcudart_static.a"
    cat >"$home/bin/nvcc.profile" <<'PROFILE'
TOP                = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH              += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES          += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES         =+ $(_SPACE_) "-L$(TOP)/lib64"
PROFILE
}

# obtain VERSION: find or fetch a toolkit; sets `home`
obtain() {
    home=$(here "$1") && return
    case $1 in
    12.4) home="$work/cuda-12.4" && assemble_12_4 "$home" ;;
    13.*) home="$work/cuda-$1/nvidia/cu13" && from_pip "$1" "$work/cuda-$1" ;;
    *) echo "CUDA $1 is not on this machine, and no wheel has its nvcc: name its folder" && false ;;
    esac && [ "$(release_of "$home")" = "$1" ]
}

# compile HOME ARCHITECTURES FOLDER: compile the extension and load it
compile() {
    local home=$1 architectures=$2 folder=$3
    (
        export CUDA_HOME=$home NCCLEP_BUILD_EXTENSION=1
        # Depending on its version, setuptools reads one or the other, instead of or besides its own flags.
        export CFLAGS="-O2 -Wall -Werror" CXXFLAGS="-O2 -Wall -Werror"
        export NVCC_APPEND_FLAGS="-Werror all-warnings"
        [ -z "$architectures" ] || export NCCLEP_CUDA_ARCHITECTURES=${architectures//,/ }
        cd "$(dirname "${BASH_SOURCE[0]}")/.." &&
            "$python" setup.py build_ext --build-lib "$folder/lib" --build-temp "$folder/temp"
    ) || return
    # Only the toolkit that is assembled above has a runtime to be found at run time.
    LD_LIBRARY_PATH="$home/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
        "$python" - "$folder"/lib/megatron_ncclep/_C.*.so <<'PYTHON'
import importlib.util
import sys

spec = importlib.util.spec_from_file_location("megatron_ncclep._C", sys.argv[1])
extension = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
info = extension.build_info()
print("loaded:", "CUDA", info["cuda"], *info["architectures"])
PYTHON
}

for entry in "${wanted[@]}"; do
    IFS=: read -r toolkit architectures <<<"$entry"
    echo "--- CUDA $toolkit"
    home=$toolkit
    if [[ $toolkit == */* ]]; then
        [ -n "$(release_of "$home")" ]
    else
        obtain "$toolkit"
    fi || {
        row "$toolkit" "${architectures:--}" "NOT RUN"
        [ $status -ne 0 ] || status=3
        continue
    }
    build="$work/build-${#table[@]}"
    compile "$home" "$architectures" "$build" >"$work/log" 2>&1
    compiled=$?
    loaded=$(tail -n 1 "$work/log")
    # setup.py tries another toolkit if one is incomplete.
    if [ $compiled -eq 0 ] && [[ $loaded == "loaded: CUDA $(release_of "$home") "* ]]; then
        row "$toolkit" "${loaded#loaded: CUDA * }" pass
    else
        cat "$work/log"
        row "$toolkit" "${architectures:--}" FAIL
        status=1
    fi
done

printf '\n%-14s  %-23s  %s\n' toolkit architectures result
printf '%s\n' "${table[@]}"
exit $status
