"""One rank of `ncclep` over the test network; writes what its links have carried to a file.

    python scripts/counted_rank.py FOLDER bench ...

`scripts/over_network.py` starts it; FOLDER gets `counters-RANK.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from loop import counters

from megatron_ncclep.cli import main

if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    plugin = os.environ.get("NCCL_RMA_PLUGIN")
    if plugin:
        counters(plugin)  # from now on it stays loaded, also when NCCL no longer needs it
    status = main(arguments)
    if plugin:
        file = Path(folder, f"counters-{os.environ['RANK']}.json")
        file.write_text(json.dumps(counters(plugin)))
    sys.exit(status)
