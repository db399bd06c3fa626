#!/usr/bin/env bash
# Compiles the extension with several CUDA toolkits, and ends with a table of what compiled.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/build_matrix.sh [TOOLKIT[:ARCHITECTURE,...]...]

  TOOLKIT       a version such as 13.0, or the folder of an unpacked toolkit (as CUDA_HOME)
  ARCHITECTURE  of GPUs, such as 90 or 90+PTX (default: what setup.py takes)

Without arguments: 12.4 13.0 13.5, the oldest supported toolkit, the one that this was developed
with, and the newest.

A version is taken from this machine where it is: CUDA_HOME, /usr/local/cuda, /usr/local/cuda-VERSION
or nvcc on PATH.  Otherwise it is fetched into a temporary folder, and nothing is installed:

  13.x  all of it by pip
  12.4  headers, libraries and ptxas by pip; nvcc, which no wheel of CUDA 12 has, from the package of
        Debian 13, by apt-get from where this machine gets its other packages of Debian

Each extension is compiled in a temporary folder, with warnings as errors, and loaded, for which no
GPU is needed.  A toolkit that cannot be had is listed as NOT RUN.  The exit status is 0 only if
everything asked for compiled and loaded, 3 if nothing failed but something was not run, else 1.

Environment:

  PYTHON              the Python to use, one with pybind11 and setuptools (default: python3)
  NVCC_PREPEND_FLAGS  read by nvcc.  `-ccbin g++-13` names a host compiler: nvcc 12.4 takes g++ up
                      to version 13
TEXT
}

case "${1:-}" in
-h | --help) usage && exit ;;
-*) usage >&2 && exit 2 ;;
esac
wanted=("$@")
[ $# -gt 0 ] || wanted=(12.4 13.0 13.5)

python=${PYTHON:-python3}
work=$(mktemp -d) || exit
trap 'rm -rf "$work"' EXIT

table=()     # lines of the summary
failures=0   # toolkits that compiled nothing that can be loaded
not_run=0    # toolkits that could not be had

row() { table+=("$(printf '%-14s  %-23s  %-7s  %7s  %s' "$@")"); }

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

# from_pip VERSION FOLDER: what pip has of a toolkit
from_pip() {
    echo "fetching CUDA $1 by pip"
    timeout 600 "$python" -m pip install --quiet --no-warn-conflicts --disable-pip-version-check \
        --target "$2" "cuda-toolkit[nvcc,cudart,cccl]==$1.*"
}

# debian_package NAME SUITE COMPONENT FOLDER: unpack a package of another release of Debian.  The
# machine's own sources say where to get it; its apt configuration is read and left as it is.
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

# assemble_12_4 HOME: a toolkit like an installed one, of pip's parts and of Debian's
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
    # The wheel has the shared runtime only; under the static one's name, a script for the linker.
    echo 'INPUT(libcudart.so.12)' >"$home/lib64/libcudart_static.a"
    cat >"$home/bin/nvcc.profile" <<'PROFILE'
TOP                = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH              += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES          += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES         =+ $(_SPACE_) "-L$(TOP)/lib64"
PROFILE
}

# obtain VERSION: find or fetch a toolkit; sets `home`, or `remark` where it cannot be had
obtain() {
    local version=$1
    home=$(here "$version") && remark="this machine's" && return
    local start=$SECONDS
    case $version in
    12.4)
        home="$work/cuda-12.4"
        remark="from pip and Debian"
        assemble_12_4 "$home"
        ;;
    13.*)
        home="$work/cuda-$version/nvidia/cu13"
        remark="from pip"
        from_pip "$version" "$work/cuda-$version"
        ;;
    *)
        remark="not on this machine, and no wheel has its nvcc; name its folder instead"
        return 1
        ;;
    esac && [ "$(release_of "$home")" = "$version" ] &&
        remark+=", fetched in $((SECONDS - start)) s" && return
    remark="not on this machine, and not to be fetched: see above"
    return 1
}

# compile HOME ARCHITECTURES FOLDER: compile the extension and load it
compile() {
    local home=$1 architectures=$2 folder=$3
    (
        export CUDA_HOME=$home NCCLEP_BUILD_EXTENSION=1
        # setuptools reads one or the other, by its version, instead of flags of its own or besides.
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

number=0
for entry in "${wanted[@]}"; do
    number=$((number + 1))
    IFS=: read -r toolkit architectures <<<"$entry"
    echo "--- CUDA $toolkit"
    home=$toolkit
    remark=""
    start=$SECONDS
    if [[ $toolkit != */* ]]; then
        obtain "$toolkit"
    elif [ -z "$(release_of "$toolkit")" ]; then
        remark="no bin/nvcc that runs in this folder"
        false
    fi || {
        row "$toolkit" "${architectures:--}" "NOT RUN" $((SECONDS - start)) "$remark"
        not_run=$((not_run + 1))
        continue
    }
    start=$SECONDS
    log="$work/log-$number"
    status=0
    compile "$home" "$architectures" "$work/build-$number" >"$log" 2>&1 || status=$?
    loaded=$(tail -n 1 "$log")
    # setup.py goes on to another toolkit where one is incomplete.
    if [ $status -eq 0 ] && [[ $loaded != "loaded: CUDA $(release_of "$home") "* ]]; then
        remark="compiled with another toolkit: this one has no include/cuda_runtime.h"
        status=1
    fi
    if [ $status -eq 0 ]; then
        echo "$loaded"
        row "$toolkit" "${loaded#loaded: CUDA * }" pass $((SECONDS - start)) "$remark"
    else
        cat "$log"
        row "$toolkit" "${architectures:--}" FAIL $((SECONDS - start)) "$remark"
        failures=$((failures + 1))
    fi
done

printf '\n%-14s  %-23s  %-7s  %7s  %s\n' toolkit architectures result seconds remark
printf '%s\n' "${table[@]}"
[ "$failures" -eq 0 ] || exit 1
[ "$not_run" -eq 0 ] || exit 3
