#!/usr/bin/env bash
# Unpacks the other supported versions of Megatron-Core next to the installed one.
#
# Each version goes to VENV/megatron/VERSION/, and is used only if that folder comes first on the
# import path; `pytest --megatron VERSION` runs the tests with it.  Without their dependencies, the
# versions take about 30 MB together.
#
# 0.20 is not on pip yet; it is the main branch of Megatron-LM.  MEGATRON_LM names a checkout of it.
# This script copies the sources to the folder of the checkout's version and compiles its helpers,
# which pip's releases contain already compiled.
set -euo pipefail

# Megatron-Core needs Python 3.12 from 0.17 on, and 0.16.1 can be imported there too.
versions=(0.16.1 0.17.1 0.18.2)

if [ $# -ne 1 ] || [ ! -x "$1/bin/pip" ]; then
    echo "usage: scripts/fetch_megatron.sh VENV   (a virtual environment that exists)" >&2
    exit 2
fi
for version in "${versions[@]}"; do
    folder=$1/megatron/$version
    [ ! -d "$folder" ] || continue
    echo "fetch: Megatron-Core $version"
    # Under another name until complete: an interrupted download must not look finished.
    rm -rf "$folder.part"
    "$1/bin/pip" install --quiet --no-deps --target "$folder.part" "megatron-core==$version"
    mv "$folder.part" "$folder"
done

if [ -n "${MEGATRON_LM:-}" ]; then
    info=$MEGATRON_LM/megatron/core/package_info.py
    [ -f "$info" ] || {
        echo "fetch: MEGATRON_LM=$MEGATRON_LM is not a checkout of Megatron-LM: $info is missing" >&2
        exit 2
    }
    version=$(sed -nE 's/^(MAJOR|MINOR|PATCH) = //p' "$info" | paste -sd .)
    folder=$1/megatron/$version
    if [ ! -d "$folder" ]; then
        echo "fetch: Megatron-Core $version from $MEGATRON_LM"
        rm -rf "$folder.part"
        mkdir -p "$folder.part"
        cp -r "$MEGATRON_LM/megatron" "$folder.part/"
        datasets=$folder.part/megatron/core/datasets
        read -ra includes < <("$1/bin/python" -m pybind11 --includes)
        suffix=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
        g++ -O3 -shared -std=c++17 -fPIC "${includes[@]}" "$datasets/helpers.cpp" \
            -o "$datasets/helpers_cpp$suffix"
        rm -f "$datasets/Makefile"
        mv "$folder.part" "$folder"
    fi
elif ! compgen -G "$1/megatron/0.20.*" >/dev/null; then
    echo "fetch: skipping Megatron-Core 0.20, which is not on pip: name a checkout of" \
        "Megatron-LM, as in MEGATRON_LM=../Megatron-LM make test"
fi
