#!/usr/bin/env bash
# Checks what only GPUs can show: the contract over NCCL, and a training run against `alltoall`.
# Needs four GPUs and an environment with the package's `test` extra.  Any failure ends it.
#
#   scripts/gpu_check.sh [RESULTS]      RESULTS: folder for the log of the run (default: a new one)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
results=${1:-runs/gpu_check}
mkdir -p "$results"

{
    date -u +"%Y-%m-%d %H:%M UTC"
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    python3 -c 'import torch, sys; print("python", sys.version.split()[0], "torch", torch.__version__,
                                         "NCCL", *torch.cuda.nccl.version())'
    # Bad input (test_errors.py) is about the CPU's messages, and is checked there.
    python3 -m pytest -q --backend nccl tests/contract/test_{plan,dispatch,combine,autograd,properties}.py
    python3 -m megatron_ncclep train --ranks 4 --steps 60 --set micro-batch-size=4 eval-iters=2 \
        --compare alltoall --overwrite --out "$results/train"
} 2>&1 | tee "$results/log.txt"
