#!/usr/bin/env bash
# Checks what only GPUs can show, step by step, and ends with a table of what passed.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/gpu_check.sh [RESULTS] [ENGINE...]

  RESULTS   folder for a log of each step and summary.txt (default: runs/gpu_check)
  ENGINE    engines to check (default: all that can run here; the others are listed as NOT RUN)

Steps:

  versions  what the machine has, and which engines can run on it
  contract  tests/contract over NCCL: every engine on 2 and 4 GPUs, `reference` on 1 and 3 too
  random    the random test of tests/contract, 1000 batches from a new seed
  faults    tests/faults and tests/gpu/test_failures.py: a rank that dies, stops, or is late
  gpu       tests/gpu: a Megatron layer against `alltoall`, streams, CUDA graphs, large offsets
  train     60 steps of `ncclep train` with each engine: the losses of `alltoall`
  doctor    `ncclep doctor`
  bench     `ncclep bench`, its results in RESULTS/bench, and with `native` that of low-latency mode
  convergence
            trainings of 1000 steps against those with `alltoall` (docs/convergence.md); takes as
            long as a step may, and runs only when STEPS names it
  sanitizer our kernels of `native` under compute-sanitizer; takes minutes, and runs only when
            STEPS names it

`native` runs contract, random, faults, gpu and sanitizer a second time, as NAME-virtual, with 2 to 8
ranks that are threads and share one GPU (tests/virtual).  On a machine with one GPU that is all
there is of groups of ranks.  It shows nothing of links, of the order of accesses over NVLink, or of
NCCL's own windows.

It needs an environment with the package's `test` extra, and two GPUs, or one on which `native` runs;
what needs more is left out with fewer, and listed.  All steps run, whatever happens in one.  The exit
status is 0 only if none failed, no engine named on the command line was unable to run, and there
were such GPUs.

Environment:

  STEPS         steps to run beside `versions` (default: "contract random faults gpu train doctor
                bench")
  SEED          of `random` (default: another one each time)
  STEP_TIMEOUT  seconds that one step may take (default: 1200)
  PYTHON        the Python to use (default: python3)
TEXT
}

case "${1:-}" in
-h | --help) usage && exit ;;
-*) usage >&2 && exit 2 ;;
esac
read -ra steps <<<"${STEPS:-contract random faults gpu train doctor bench}"
for step in "${steps[@]}"; do
    case $step in
    contract | random | faults | gpu | train | doctor | bench | convergence | sanitizer) ;;
    *) echo "STEPS: there is no step '$step'" >&2 && usage >&2 && exit 2 ;;
    esac
done

mkdir -p "${1:-runs/gpu_check}" || exit
results=$(cd "${1:-runs/gpu_check}" && pwd)
asked=("${@:2}")
python=${PYTHON:-python3}
limit=${STEP_TIMEOUT:-1200}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
# Multicast does not work on every machine with NVLink; nothing here needs it.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}

passed=0     # steps that ran and succeeded
failures=0   # whatever makes the exit status differ from 0

# row STEP RESULT SECONDS REMARK: a line of the summary, which a check that is stopped leaves behind
row() { printf '%-28s %-8s %7s  %s\n' "$@" >>"$results/summary.txt"; }
printf '\n%-28s %-8s %7s  %s\n' step result seconds remark >"$results/summary.txt"

# step NAME COMMAND...: run a command, its output into RESULTS/NAME.log
step() {
    local name=$1 log="$results/$1.log" start=$SECONDS status=0 remark=""
    shift
    echo "--- $name"
    timeout --kill-after=30 "$limit" "$@" >"$log" 2>&1 </dev/null || status=$?
    if [ $status -eq 0 ]; then
        passed=$((passed + 1))
        row "$name" pass $((SECONDS - start)) "$(tail -n 1 "$log" | tr -d '=')"
        # A test that pytest skipped, or that virtual ranks leave out, did not pass.
        local skipped
        while read -r skipped; do
            not_run "$name" "$skipped"
        done < <(grep -E '^(SKIPPED|LEFT OUT) ' "$log")
        return 0
    fi
    failures=$((failures + 1))
    [ $status -eq 124 ] && remark="stopped after $limit s; "
    row "$name" FAIL $((SECONDS - start)) "${remark}exit status $status, $log"
    tail -n 30 "$log"
    return 1
}

# not_run NAME REASON [counts]: list what cannot run; with a third word it makes the check fail
not_run() {
    [ -n "${3:-}" ] && failures=$((failures + 1))
    row "$1" "NOT RUN" - "$2"
}

wanted() { [[ " ${steps[*]} " == *" $1 "* ]]; }

# fitting GPUS N...: those of the numbers that are not above the first one, as --ranks options
fitting() {
    local most=$1 n
    shift
    for n in "$@"; do
        [ "$n" -gt "$most" ] || printf -- '--ranks %s ' "$n"
    done
}

versions() {
    date -u +"%Y-%m-%d %H:%M UTC"
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    "$python" - <<'PYTHON'
import sys
from importlib import metadata

import torch

import megatron_ncclep

print("python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.version.cuda)
print("NCCL", *torch.cuda.nccl.version())
print("megatron-core", metadata.version("megatron-core"))
print("megatron_ncclep", megatron_ncclep.__version__)
PYTHON
}

train() {
    local engine=$1 ranks=$2 out="$results/train-$1"
    "$python" -m megatron_ncclep train --ranks "$ranks" --steps 60 \
        --set micro-batch-size=4 eval-iters=2 --compare alltoall --ncclep-engine "$engine" \
        --overwrite --out "$out" &&
        "$python" tests/gpu/check_losses.py "$out" "$engine"
}

# `timeout` runs programs, not functions.
export -f versions train
export python results

step versions bash -c versions

# The engines and the number of GPUs.
gpus=0
engines=()
if step engines "$python" tests/gpu/engines_here.py ${asked[@]+"${asked[@]}"}; then
    while IFS=$'\t' read -r name reason; do
        if [ "$name" = gpus ]; then
            gpus=$reason
        elif [ -z "$reason" ]; then
            engines+=("$name")
        else
            not_run "engine $name" "$reason" "${asked[*]+named}"
        fi
    done < <(grep -P '^[\w-]+\t' "$results/engines.log")
    if [ ${#engines[@]} -eq 0 ]; then
        not_run "contract, gpu, train" "no engine can run" counts
    fi
else
    not_run "contract, gpu, train" "see $results/engines.log" counts
fi
virtual=""  # whether there are virtual ranks
[[ $gpus -ge 1 && " ${engines[*]-} " == *" native "* ]] && virtual=yes
if [ "$gpus" -lt 2 ] && [ -z "$virtual" ]; then
    not_run "groups of ranks" "two GPUs are needed, $gpus found" counts
elif [ "$gpus" -lt 2 ]; then
    not_run "groups of GPUs" "two GPUs are needed, $gpus found: links, NCCL's windows"
fi
most=$((gpus >= 4 ? 4 : gpus >= 2 ? 2 : gpus))

for engine in ${engines[@]+"${engines[@]}"}; do
    numbers=(2 4)
    [ "$engine" = reference ] && numbers=(1 2 3 4)
    read -ra ranks <<<"$(fitting "$gpus" "${numbers[@]}")"
    [ ${#ranks[@]} -gt 0 ] || continue
    if wanted contract; then
        step "contract-$engine" "$python" -m pytest -q tests/contract --backend nccl \
            --engine "$engine" "${ranks[@]}"
        [ "$gpus" -ge 4 ] || not_run "contract-$engine, 4 ranks" "four GPUs are needed, $gpus found"
    fi
    if wanted random; then
        step "random-$engine" "$python" -m pytest -q tests/contract/test_random.py --backend nccl \
            --engine "$engine" "${ranks[@]}" --iterations 1000 --seed "${SEED:-$((RANDOM * 1000))}"
    fi
    if wanted faults; then
        if [ "$most" -ge 2 ]; then
            step "faults-$engine" "$python" -m pytest -q tests/faults tests/gpu/test_failures.py \
                --backend nccl --engine "$engine" --ranks "$most"
        else
            not_run "faults-$engine" "two GPUs are needed, $gpus found"
        fi
    fi
    if wanted gpu; then
        step "gpu-$engine" "$python" -m pytest -q tests/gpu --ignore tests/gpu/test_failures.py \
            --backend nccl --engine "$engine" --ranks "$most"
    fi
    if wanted train; then
        step "train-$engine" bash -c "train $engine $most"
    fi
done
if [ -n "$virtual" ]; then
    over=(--backend virtual --engine native)
    row "virtual ranks" note - "threads on one GPU: no links, no order over NVLink, no NCCL windows"
    if wanted contract; then
        step contract-virtual "$python" -m pytest -q tests/contract "${over[@]}" \
            --ranks 2 --ranks 3 --ranks 4 --ranks 8
    fi
    if wanted random; then
        step random-virtual "$python" -m pytest -q tests/contract/test_random.py "${over[@]}" \
            --ranks 2 --ranks 3 --ranks 4 --ranks 8 --iterations 1000 \
            --seed "${SEED:-$((RANDOM * 1000))}"
    fi
    if wanted faults; then
        step faults-virtual "$python" -m pytest -q tests/faults tests/gpu/test_failures.py \
            "${over[@]}" --ranks 4
    fi
    if wanted gpu; then
        step gpu-virtual "$python" -m pytest -q tests/gpu --ignore tests/gpu/test_failures.py \
            "${over[@]}" --ranks 4
    fi
fi
if wanted sanitizer; then
    if [ -z "$virtual" ]; then
        not_run sanitizer "it needs a GPU and the engine native"
    elif ! "$python" tests/gpu/sanitize.py --find; then
        not_run sanitizer "no compute-sanitizer on PATH or under CUDA_HOME"
    else
        for tool in memcheck racecheck synccheck; do
            step "$tool-virtual" "$python" tests/gpu/sanitize.py "$tool" native --virtual
        done
        for tool in memcheck racecheck; do
            if [ "$gpus" -ge 2 ]; then
                step "$tool-native" "$python" tests/gpu/sanitize.py "$tool" native
            else
                not_run "$tool-native" "two GPUs are needed, $gpus found"
            fi
        done
    fi
fi
if wanted convergence; then
    if [ "$gpus" -ge 1 ]; then
        step convergence "$python" tests/convergence/gpu_protocol.py run "$results/convergence" \
            --seconds "$((limit - limit / 10))"
    else
        not_run convergence "a GPU is needed, none found"
    fi
fi
wanted doctor && step doctor "$python" -m megatron_ncclep doctor
if wanted bench; then
    step bench "$python" -m megatron_ncclep bench --out "$results/bench"
    if [[ " ${engines[*]-} " == *" native "* ]]; then
        step bench-low-latency "$python" -m megatron_ncclep bench --mode ll \
            --out "$results/bench-low-latency"
    fi
fi

cat "$results/summary.txt"
[ "$failures" -eq 0 ] && [ "$passed" -gt 0 ]
