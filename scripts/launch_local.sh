#!/usr/bin/env bash
# Trains with a Megatron-LM script on this machine, composed from configs/ by `ncclep render`.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/launch_local.sh [--dry-run] --model NAME --script SCRIPT
                               [--dispatcher NAME] [--cluster NAME] [--nproc N]
                               [-- MEGATRON_ARGUMENT...]

  --dry-run     print the command instead of running it
  --dispatcher  default: ncclep
  --cluster     default: local-cpu; local-gpu uses the GPUs of this machine

The rest goes to `ncclep render`, whose --help says more.  An example:

  scripts/launch_local.sh --model tiny --script Megatron-LM/pretrain_gpt.py -- \
      --mock-data --tokenizer-type NullTokenizer --vocab-size 255
TEXT
}

dry_run=false
case "${1:-}" in
-h | --help) usage && exit ;;
"") usage >&2 && exit 2 ;;
--dry-run) dry_run=true && shift ;;
esac

# Uses the environment that `make` sets up, unless another one is active.
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$tree/.venv/bin/ncclep" ]; then
    PATH=$tree/.venv/bin:$PATH
fi

command=$(ncclep render --dispatcher ncclep --cluster local-cpu "$@")
printf '%s\n' "$command"
$dry_run || exec bash -euc "$command"
