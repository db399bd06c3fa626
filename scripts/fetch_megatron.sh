#!/usr/bin/env bash
# Unpacks the other supported versions of Megatron-Core next to the installed one.
#
# They go to VENV/megatron/VERSION/, each a folder to put first on the import path; otherwise they
# cannot be imported.  `pytest --megatron VERSION` runs tests with one of them.  Together they
# take about 30 MB, since their dependencies are left out.
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
