#!/usr/bin/env bash
# Runs the commands and the CPU tests that depend on torch most, with the ends of its range:
#
#   newest  Python 3.13 and the newest torch that pip finds
#   oldest  Python 3.10 and constraints/oldest.txt
#
#   scripts/torch_range.sh [newest | oldest]...
#
# Each in a new environment, .venv-newest or .venv-oldest, which is removed afterwards, because it
# takes 5 GB; KEEP=1 keeps it.  The package is installed without its extension: on a CPU, torch does
# nearly everything.
#
# Exit status: 0 if everything requested passed; 1 if anything failed; 3 if nothing failed but an
# environment could not be made, because the Python is missing, pip reaches no index or the disk has
# too little room.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

ends=("$@")
[ $# -gt 0 ] || ends=(newest oldest)
# Not those of failing ranks: up to torch 2.7 a gloo group that has failed may hang when it ends.
# Nor test_packed_rows: torch 2.6 cannot index rows of FP8 on a CPU.
tests=(
    tests/contract/test_{steps,autograd,overflow,limits,low_latency}.py
    tests/test_examples.py tests/training/test_{run,resume}.py tests/integration/install/test_cpu.py
    tests/integration/dispatcher/test_moe_layer.py tests/integration/models/test_gpt_model.py
    tests/integration/doctor
)
export NCCLEP_BUILD_EXTENSION=0 PIP_DISABLE_PIP_VERSION_CHECK=1
table=() status=0
# What an environment takes, and what pip unpacks beside it in the meantime.
needed_gb=10

# has_room FOLDER: whether its disk has room for an environment
has_room() {
    [ "$(df --output=avail --block-size=1G "$1" | tail -n 1)" -ge $needed_gb ]
}

# check VENV FOLDER: the commands of a first contact, then the tests
check() {
    local bin=$PWD/$1/bin
    (cd "$2" && "$bin/ncclep" doctor &&
        "$bin/ncclep" train --ranks 2 --device cpu --compare alltoall --steps 20 &&
        "$bin/ncclep" bench --smoke) &&
        "$bin/python" -m benchmarks --smoke --out "$2/benchmarks" &&
        "$bin/python" -m pytest -q -n 2 --ran=runs/ran "${tests[@]}"
}

for end in "${ends[@]}"; do
    case $end in
    newest) python=3.13 constraints=none ;;
    oldest) python=3.10 constraints=constraints/oldest.txt ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 2 ;;
    esac
    venv=.venv-$end work=$(mktemp -d) result=FAIL
    echo "--- $end: Python $python"
    if ! { has_room . && has_room "$work"; }; then
        echo "less than $needed_gb GB are free in $PWD or in ${work%/*}"
        result="NOT RUN"
    elif PYTHON=$python CONSTRAINTS=$constraints scripts/setup_venv.sh "$venv"; then
        ! check "$venv" "$work" || result=pass
    elif ! "$venv/bin/pip" index versions torch &>/dev/null; then
        result="NOT RUN"
    fi
    case $result in
    FAIL) status=1 ;;
    "NOT RUN") [ $status -ne 0 ] || status=3 ;;
    esac
    versions=$([ -x "$venv/bin/pip" ] && "$venv/bin/pip" list 2>/dev/null | awk '/^(torch|megatron-core) / { printf "%s %s  ", $1, $2 }')
    table+=("$(printf '%-8s  Python %-5s  %-40s  %s' "$end" "$python" "$versions" "$result")")
    rm -rf "$work"
    [ -n "${KEEP:-}" ] || rm -rf "$venv"
done
printf '%s\n' "" "${table[@]}"
exit $status
