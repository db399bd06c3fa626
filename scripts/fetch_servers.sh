#!/usr/bin/env bash
# Unpacks the supported releases of vLLM and SGLang, for tests of their interfaces on a CPU.
#
# Each release goes to VENV/NAME/RELEASE, and what they import to VENV/servers: tests/serving puts
# them on the import path of its ranks, and nothing else sees them.  Only Python files and headers
# are kept: the compiled libraries are for GPUs.
set -euo pipefail

releases=(vllm==0.24.0 vllm==0.33.0 sglang==0.5.23)

if [ $# -ne 1 ] || [ ! -x "$1/bin/pip" ]; then
    echo "usage: scripts/fetch_servers.sh VENV   (a virtual environment that exists)" >&2
    exit 2
fi
# The pinned packages are for Python 3.12; with another one the tests are left out.
[[ $("$1/bin/python" -V) = "Python 3.12."* ]] || exit 0
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Under other names until complete: an interrupted download must not look finished.
needs=$1/servers
if ! cmp -s "$here/constraints/servers.txt" "$needs/constraints.txt"; then
    echo "fetch: what vLLM and SGLang import"
    rm -rf "$needs" "$needs.part"
    "$1/bin/pip" install --quiet --no-deps --only-binary :all: --target "$needs.part" \
        --requirement "$here/constraints/servers.txt"
    cp "$here/constraints/servers.txt" "$needs.part/constraints.txt"
    mv "$needs.part" "$needs"
fi
for release in "${releases[@]}"; do
    folder=$1/${release/==//}
    [ ! -d "$folder" ] || continue
    echo "fetch: $release"
    rm -rf "$folder.part"
    mkdir -p "$folder.part"
    "$1/bin/pip" download --quiet --no-deps --no-cache-dir --only-binary :all: \
        --dest "$folder.part" "$release"
    "$1/bin/python" - "$folder.part" <<'PYTHON'
import sys
from pathlib import Path
from zipfile import ZipFile

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with ZipFile(wheel) as content:
    endings = (".py", ".h", ".cuh", "/METADATA")
    kept = [name for name in content.namelist() if name.endswith(endings)]
    content.extractall(sys.argv[1], kept)
wheel.unlink()
PYTHON
    mv "$folder.part" "$folder"
done
