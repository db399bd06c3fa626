#!/usr/bin/env bash
# Unpacks the supported releases of vLLM, for tests of its interfaces on a CPU.
#
# Each release goes to VENV/vllm/RELEASE, and what they import to VENV/vllm/needs: tests/serving puts
# them on the import path of its ranks, and nothing else sees them.  Only vLLM's Python files are
# kept, 90 MB of 620; its compiled libraries are for GPUs.
set -euo pipefail

versions=(0.24.0 0.33.0)

if [ $# -ne 1 ] || [ ! -x "$1/bin/pip" ]; then
    echo "usage: scripts/fetch_vllm.sh VENV   (a virtual environment that exists)" >&2
    exit 2
fi
# The pinned packages are for Python 3.12; with another one the tests are left out.
[[ $("$1/bin/python" -V) = "Python 3.12."* ]] || exit 0
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Under other names until complete: an interrupted download must not look finished.
needs=$1/vllm/needs
if ! cmp -s "$here/constraints/vllm.txt" "$needs/constraints.txt"; then
    echo "fetch: what vLLM imports"
    rm -rf "$needs" "$needs.part"
    "$1/bin/pip" install --quiet --no-deps --only-binary :all: --target "$needs.part" \
        --requirement "$here/constraints/vllm.txt"
    cp "$here/constraints/vllm.txt" "$needs.part/constraints.txt"
    mv "$needs.part" "$needs"
fi
for version in "${versions[@]}"; do
    folder=$1/vllm/$version
    [ ! -d "$folder" ] || continue
    echo "fetch: vLLM $version"
    rm -rf "$folder.part"
    mkdir -p "$folder.part"
    "$1/bin/pip" download --quiet --no-deps --no-cache-dir --only-binary :all: \
        --dest "$folder.part" "vllm==$version"
    "$1/bin/python" - "$folder.part" <<'PYTHON'
import sys
from pathlib import Path
from zipfile import ZipFile

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with ZipFile(wheel) as content:
    kept = [name for name in content.namelist() if name.endswith((".py", "/METADATA"))]
    content.extractall(sys.argv[1], kept)
wheel.unlink()
PYTHON
    mv "$folder.part" "$folder"
done
