"""Say whether `ncclep train --compare alltoall` gave one curve, which its exit status does not.

python tests/gpu/check_losses.py FOLDER ENGINE      FOLDER: the --out of the run
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# The model `tiny` has two experts per token and fp32: both dispatchers add the same two numbers,
# and on 4 H200s the curves of 60 steps were the same to the bit.  The bound is that of the protocol
# on the CPU (docs/convergence.md), whose model has four; other seeds part by 0.07 nats there.
MOST_NATS = 1e-5


def read(folder: Path) -> tuple[dict[str, Any], list[float]]:
    """The settings of one training and the loss of each step."""
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    settings, *entries = map(json.loads, lines)
    return settings, [entry["loss"] for entry in entries if entry["type"] == "step"]


def main(folder: Path, engine: str) -> int:
    (settings, ours), (control, theirs) = read(folder), read(folder / "alltoall")
    used = [settings["dispatcher_classes"], settings["options"]["engine"]]
    used += [control["dispatcher_classes"]]
    if used != [["NcclEpTokenDispatcher"], engine, ["MoEAlltoAllTokenDispatcher"]]:
        print(f"not a comparison of engine {engine} with alltoall: {used}")
        return 1
    if not ours or len(ours) != len(theirs):
        print(f"{len(ours)} steps against {len(theirs)}")
        return 1
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"{len(ours)} steps: largest difference {difference:.2e} nats, allowed {MOST_NATS:.0e}")
    return 0 if difference <= MOST_NATS else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
