"""Measure engines over the paced test network, and compare them with what the link allows.

    python scripts/over_network.py [PART ...] [--out FOLDER] [--list]

Each case starts its ranks (`scripts/host_ranks.py`) with links of a rate and a latency
(`tests/network/link.h`), and `ncclep bench` checks and times them; the slowest rank counts.  Parts:

    ht            dispatch and combine of `native`, exact and static mode, and their backward passes
    hierarchical  the same of `hierarchical`, exact mode, on the same links
    ll            low-latency mode of `native`
    rounds        `native` with windows for a part of the tokens (docs/network.md)

FOLDER gets a folder for each case, results.json and summary.txt; a case that runs again replaces
its result.  A case that fails is named, and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT / part) for part in (".", "scripts", "tests/network", "tests/native")]
sys.path[:0] = PATHS

import gpu  # noqa: E402
import loop  # noqa: E402
from host_ranks import Grid, run_ranks  # noqa: E402

from benchmarks.network_model import NetworkModel, Puts  # noqa: E402
from megatron_ncclep.benchmark.table import as_text, grid  # noqa: E402

# The aims: times against bytes / rate, and what an operation of few tokens may take besides.
HT_AIM, HT_TOKENS, LL_AIM_US, HIERARCHICAL_AIM = 1.15, 4096, 25.0, 1.3
LATENCY_US = 3.0
PASSES = ("dispatch", "combine", "bwd_dispatch", "bwd_combine")
# Rounds of `ncclep bench` besides the timed ones: one to begin with, two that are checked.
UNTIMED_ROUNDS = 3
DIFFERENT = 0.02  # counted bytes may differ so much from those of the model, which is a mean
SHORTEST_S = 30.0  # ranks need this long to begin
Shape = dict[str, Any]  # an entry of `shapes` in a file of configs/benchmark/


def shape(model: str, tokens: int, top_k: int = 0) -> Shape:
    """A model's layer; `top_k`: in static mode, with room for 1.25 times a balanced load."""
    made: Shape = {"name": f"{model}, {tokens}", "model": model, "tokens": tokens}
    if top_k:
        made |= {"name": f"{made['name']}, static", "max_recv_rows": tokens * top_k * 5 // 4}
    return made


HT = [
    shape("deepseek-v3", 4096),
    shape("deepseek-v3", 4096, top_k=8),
    shape("deepseek-v3", 8192),
    shape("qwen3-30b-a3b", 8192),
]
LL = [shape("deepseek-v3", tokens) for tokens in (1, 8, 32, 128)]
ROUNDS = [shape("deepseek-v3", tokens) for tokens in (4096, 8192, 16384)]


@dataclass(frozen=True)
class Case:
    """One start of the ranks.

    Attributes:
        part: see the top of this file.
        grid: the ranks.
        gb_per_s: of each rank's link, in each direction.
        shapes: what is measured one after the other.
        engine: a subject of `ncclep bench`.
        samples: timed rounds.
    """

    part: str
    grid: Grid
    gb_per_s: float
    shapes: tuple[Shape, ...]
    engine: str = "native"
    samples: int = 20

    @property
    def name(self) -> str:
        """Unique among the cases."""
        return f"{self.part} {self.grid}, {self.gb_per_s:g} GB/s, {LATENCY_US:g} us"

    @property
    def folder(self) -> str:
        """A name for its folder."""
        return self.name.replace(" x ", "x").replace("/", "-").replace(",", "").replace(" ", "_")

    def command(self, folder: Path) -> list[str]:
        """What each rank runs, with results in `folder`."""
        config = folder / "shapes.yaml"
        config.write_text(json.dumps({"shapes": self.shapes, "timeout_s": 30}))  # JSON is YAML
        rank = [sys.executable, str(ROOT / "scripts" / "counted_rank.py"), str(folder)]
        mode = ["--mode", "ll"] if self.part == "ll" else []
        rounds = ["--warmup", "3", "--samples", str(self.samples)]
        bench = ["bench", "--config", str(config), "--subjects", self.engine, "--overwrite"]
        return [*rank, *bench, *mode, *rounds, "--out", str(folder)]


def cases() -> list[Case]:
    """All cases, the most wanted first."""
    pairs, square = Grid(2, 1), Grid(2, 2)
    links = (25.0, 12.5, 50.0)
    ht = [Case("ht", grid, rate, tuple(HT)) for rate in links for grid in (square, pairs)]
    hierarchical = [
        Case("hierarchical", square, rate, (HT[0], HT[3]), "hierarchical") for rate in links[:2]
    ]
    ll = [
        Case("ll", grid, rate, tuple(LL), samples=30)
        for rate in links[:2]
        for grid in (pairs, square)
    ]
    rounds = [Case("rounds", grid, 25.0, tuple(ROUNDS), samples=8) for grid in (pairs, square)]
    return [*ht, *hierarchical, *ll, *rounds]


def network_of(case: Case) -> dict[str, str]:
    """The environment of a case's network."""
    link = {"RMA_LOOP_GBPS": f"{case.gb_per_s:g}", "RMA_LOOP_LATENCY_US": f"{LATENCY_US:g}"}
    plugin = loop.build()
    if case.engine == "hierarchical":
        return {**link, **loop.variables_of_messages(plugin)}
    return {**link, "NCCL_RMA_PLUGIN": str(plugin)}


# --- what was measured, against the link ---------------------------------------------------------


def model_of(case: Case, found: dict[str, Any]) -> NetworkModel:
    """The model of bytes for a shape of bench.json."""
    of = found["shape"]
    sizes = {"num_tokens": of["tokens"], "num_experts": of["experts"], "top_k": of["top_k"]}
    return NetworkModel(
        **sizes, row_bytes=found["row_bytes"], ranks_on_each=case.grid.ranks_on_each
    )


def rows_against_link(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """A shape of bench.json with the times that its bytes need on the link.

    `bytes` are rows of the busiest rank, by the routing that was measured; `model_bytes` those of
    the model, for a mean routing.  `ratio` is the time divided by `least_us`, bytes / rate.
    """
    subject = found["subjects"][0] if found["subjects"] else {}
    problem = found["error"] or subject.get("reason")
    of = found["shape"]
    result: dict[str, Any] = {"shape": of["name"], "tokens": of["tokens"], "problem": problem}
    if problem or not found["network"]:
        return {**result, "problem": problem or "one NVLink domain: no network"}
    num_bytes, model = found["network"]["hierarchical_bytes"], model_of(case, found)
    least_us = num_bytes / case.gb_per_s * 1e-3
    result |= {
        "bytes": num_bytes,
        "model_bytes": model.crossing_bytes(case.grid.hosts),
        "rounds": model.rounds(case.grid.hosts),
        "least_us": least_us,
        "passes": subject["passes"],
    }
    if case.part == "ll":
        one_way = LATENCY_US + least_us + LL_AIM_US
        aims = {"dispatch": one_way, "combine": one_way, "pair": 2 * one_way}
        return {**result, "aim_us": aims}
    times = {name: subject["passes"][name]["median_us"] for name in PASSES}
    ratios = {name: time_us / least_us for name, time_us in times.items()}
    has_aim = case.part == "ht" and of["tokens"] >= HT_TOKENS
    return {**result, "ratio": ratios, "met": max(ratios.values()) <= HT_AIM if has_aim else None}


def expected_bytes(case: Case, found: dict[str, Any]) -> float:
    """What a rank puts while a shape is measured, by the model; plans count as in exact mode."""
    model, hosts = model_of(case, found), case.grid.hosts
    plan, dispatch, with_values = model.puts(hosts)
    rows = model.crossing_bytes(hosts) / (hosts - 1)
    plain = Puts.of_rows(rows / model.row_bytes, model.row_bytes, rounds=model.rounds(hosts))
    of_a_round = plan, dispatch, plain, plain, with_values
    rounds = 3 + case.samples + UNTIMED_ROUNDS
    return rounds * (hosts - 1) * sum(puts.num_bytes for puts in of_a_round)


def counted_against_model(
    case: Case, shapes: list[dict[str, Any]], counters: list[dict[str, int]]
) -> dict[str, Any] | None:
    """What the plugin counted on all ranks, and what the model says; None: not comparable."""
    measured = [found for found in shapes if found["network"]]
    if case.part not in ("ht", "rounds") or len(counters) < case.grid.ranks or not measured:
        return None
    expected = case.grid.ranks * sum(expected_bytes(case, found) for found in measured)
    put, came, refused = (
        sum(each[name] for each in counters) for name in ("bytes", "bytes_in", "refused")
    )
    differs = abs(put / expected - 1) > DIFFERENT or put != came or refused > 0
    return {"put": put, "came": came, "refused": refused, "model": expected, "differs": differs}


def read_case(case: Case, folder: Path) -> dict[str, Any]:
    """The result of a case that has run."""
    bench = json.loads((folder / "bench.json").read_text())
    shapes = bench["low_latency" if case.part == "ll" else "shapes"]
    counters = [json.loads(file.read_text()) for file in sorted(folder.glob("counters-*.json"))]
    return {
        "date": bench["date"],
        "machine": bench["machine"],
        "versions": bench["versions"],
        "shapes": [rows_against_link(case, found) for found in shapes],
        "counted": counted_against_model(case, shapes, counters),
    }


# --- text ----------------------------------------------------------------------------------------


def described(result: dict[str, Any]) -> list[str]:
    """The lines of a case's result."""
    lines = [f"{result['name']}: {result['problem'] or 'ok'}, {result['seconds']} s"]
    shapes = result.get("shapes", [])
    lines += [f"  {each['shape']}: {each['problem']}" for each in shapes if each["problem"]]
    measured = [each for each in shapes if not each["problem"]]
    rows = []
    for each in measured:
        passes = each["passes"]
        if "aim_us" in each:
            head = ["  us, p50 and p99", *(f"{way} (aim)" for way in each["aim_us"])]
            cells = [
                f"{passes[way]['p50_us']:.1f} {passes[way]['p99_us']:.1f} ({aim:.0f})"
                for way, aim in each["aim_us"].items()
            ]
        else:
            head = ["  us", "bytes / rate", "plan", *PASSES, f"<= {HT_AIM}", "rounds"]
            times = [f"{passes[p]['median_us']:.0f} ({each['ratio'][p]:.2f})" for p in PASSES]
            met = {True: "yes", False: "NO", None: "-"}[each["met"]]
            plan = f"{passes['plan']['median_us']:.0f}"
            cells = [f"{each['least_us']:.0f}", plan, *times, met, str(each["rounds"])]
        rows.append([f"  {each['shape']}", *cells])
    if rows:
        lines.append(as_text(grid(head, rows)))
    if counted := result.get("counted"):
        said = "DIFFERENT" if counted["differs"] else "the same"
        gigabytes = [f"{counted[name] / 1e9:.3f}" for name in ("put", "came", "model")]
        lines.append("  GB put, come, of the model: {}, {}, {}: ".format(*gigabytes) + said)
    return lines


def compared(results: dict[str, dict[str, Any]]) -> list[str]:
    """How much faster `native` is than `hierarchical`, for each shape that both have run."""
    lines = []
    for name, other in results.items():
        ours = results.get(name.replace("hierarchical", "ht", 1))
        if not name.startswith("hierarchical") or ours is None:
            continue
        of_ours = {each["shape"]: each for each in ours.get("shapes", []) if not each["problem"]}
        for each in other.get("shapes", []):
            if each["problem"] or each["shape"] not in of_ours:
                continue
            theirs, mine = ([s["passes"][p]["median_us"] for p in PASSES] for s in
                            (each, of_ours[each["shape"]]))  # fmt: skip
            speeds = " ".join(f"{a / b:.2f}" for a, b in zip(theirs, mine, strict=True))
            total = sum(theirs) / sum(mine)
            met = "yes" if total >= HIERARCHICAL_AIM else "NO"
            what = f"native, times as fast as {name}, {each['shape']}"
            lines.append(f"{what}: {total:.2f} ({speeds}); >= {HIERARCHICAL_AIM}: {met}")
    return lines


def write(out: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write results.json and summary.txt."""
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = [datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), gpu.described(), ""]
    lines.append(f"Medians of the slowest rank; in brackets: divided by bytes / rate ({PASSES[0]} "
                 "...), or the aim.")  # fmt: skip
    for result in results.values():
        lines += ["", *described(result)]
    (out / "summary.txt").write_text("\n".join([*lines, "", *compared(results)]) + "\n")


# --- running -------------------------------------------------------------------------------------


def run_case(case: Case, out: Path, limit_s: float, gpus: list[str]) -> dict[str, Any]:
    """Run a case; its result, or what went wrong."""
    begin, folder = time.monotonic(), out / case.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    result: dict[str, Any] = {"name": case.name, "problem": "", "seconds": 0}
    try:
        path = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**network_of(case), "PYTHONPATH": path}
        log = folder / "log.txt"
        result["problem"] = run_ranks(
            case.grid, case.command(folder), environment, log, limit_s, gpus
        )
        result |= read_case(case, folder)
    except Exception as error:  # the next case may be right
        result["problem"] = f"{result['problem']} {type(error).__name__}: {error}".strip()
    result["seconds"] = round(time.monotonic() - begin)
    return result


def main() -> int:
    """Run the parts that the command line names."""
    parts = list(dict.fromkeys(case.part for case in cases()))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"default: all of {parts}")
    add("--cases", default="", help="only cases whose name contains this, such as '2 x 2, 25 GB/s'")
    add("--out", type=Path, default=Path("runs/network"), help="default: runs/network")
    add("--limit-s", type=float, default=540, help="of all cases (default: 540)")
    add("--case-s", type=float, default=150, help="of one case (default: 150)")
    add("--list", action="store_true", help="print the cases, and run none")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"unknown parts: {sorted(unknown)}; there are {parts}")
    chosen = [c for c in cases() if c.part in (args.parts or parts) and args.cases in c.name]
    if not chosen:
        parser.error(f"no case's name contains {args.cases!r}")
    if args.list:
        print("\n".join(f"{c.name}: {'; '.join(s['name'] for s in c.shapes)}" for c in chosen))
        return 0
    if not (gpus := gpu.visible_gpus()):
        parser.error("no GPU is visible")
    args.out.mkdir(parents=True, exist_ok=True)
    kept, until = args.out / "results.json", time.monotonic() + args.limit_s
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    for case in chosen:
        left = min(args.case_s, until - time.monotonic())
        if left < SHORTEST_S:
            print(f"{case.name}: NOT RUN: no time left", flush=True)
            continue
        results[case.name] = run_case(case, args.out, left, gpus)
        print("\n".join(described(results[case.name])), flush=True)
        write(args.out, results)
    print("\n".join(compared(results)))
    return 1 if any(results.get(c.name, {"problem": "x"})["problem"] for c in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
