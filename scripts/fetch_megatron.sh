#!/usr/bin/env bash
# Unpacks the other supported versions of Megatron-Core next to the installed one.
#
# They go to VENV/megatron/VERSION/, each a folder to put first on the import path; otherwise they
# cannot be imported.  `pytest --megatron VERSION` runs tests with one of them.  Together they
# take about 30 MB, since their dependencies are left out.
#
# pip has no 0.20 yet: that is the main branch of Megatron-LM, a checkout of which MEGATRON_LM names.
# Its sources are copied to the folder of the version that they have, and its helpers are compiled,
# as pip's releases bring them.
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
    # Under another name until it is complete, so an interrupted download is not taken for a finished one.
    rm -rf "$folder.part"
    "$1/bin/pip" install --quiet --no-deps --target "$folder.part" "megatron-core==$version"
    mv "$folder.part" "$folder"
done

if [ -n "${MEGATRON_LM:-}" ]; then
    info=$MEGATRON_LM/megatron/core/package_info.py
    [ -f "$info" ] || {
        echo "fetch: MEGATRON_LM=$MEGATRON_LM: no checkout of Megatron-LM: $info is missing" >&2
        exit 2
    }
    version=$(sed -nE 's/^(MAJOR|MINOR|PATCH) = //p' "$info" | paste -sd .)
    folder=$1/megatron/$version
    if [ ! -d "$folder" ]; then
        echo "fetch: Megatron-Core $version of $MEGATRON_LM"
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
    echo "fetch: Megatron-Core 0.20 is left out, because pip does not have it: give a checkout of" \
        "Megatron-LM, as in MEGATRON_LM=../Megatron-LM make test"
fi
