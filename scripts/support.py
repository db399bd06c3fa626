"""The lists of docs/support.md and docs/tested.md, from the options that tests declare.

    make support                  # writes them
    python scripts/support.py     # says whether they are up to date

Tests are collected, not run.  An option is in the first list if a test has the marker

    @pytest.mark.supports("moe_some_option", compared="outputs with alltoall's, to the bit")

or, with no names, if a parameter of the test is a case that knows its options (`options_shown`).
Names are those of TransformerConfig's fields, with `=value` where the value matters, and
`--ncclep-...`.  The list of refusals is made from `refuses("moe_some_option", words="why, and what
to do")`, with `engines=(...)` if only these refuse it.  A test of tests/gpu counts for an engine
if scripts/gpu_steps.py names it with that engine, and if the Megatron-Core there has its options.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
sys.path[:0] = [str(ROOT), str(TESTS), str(ROOT / "scripts")]

from generated import update  # noqa: E402
from megatron_versions import SUPPORTED  # noqa: E402

from megatron_ncclep.engines import ENGINES  # noqa: E402

# Ranks may share a GPU, so several ranks are not several GPUs.
PLACES = ("a CPU", "one GPU rank", "several GPU ranks")
# The Megatron-Core that `make gpu` has run all its steps with.
ON_GPUS = Version("0.19.2")
# How a result was compared; of several tests the first counts, so that "bits" means all of them.
COMPARED = ("rounding", "bits", "behaviour")
# The parts of the first list: their subject, and a pattern for their options; an option is in the
# first part that matches.
SUBJECTS = {
    "Dispatcher": r"--ncclep-(?!inference)",
    "Text generation": r".*inference|generation of text",
    "CUDA graphs": r"cuda_graph",
    "Precision": r"fp8|params_dtype",
    "Recompute and offloading": r".*recompute|.*offload",
    "Overlap": r"overlap_(moe|disp)|ep_overlap|delay_wgrad|.*shared_expert_overlap",
    "Batches": r"ranks |other sizes|packed|padding_mask",
    "Router": r"moe_(router|aux|z_loss|input_jitter|expert_capacity|pad_expert_input|token_drop)"
    r"|moe_apply_probs",
    "Parallelism, optimizer and checkpoints": r".*parallel|.*pipeline|use_distributed|ckpt|async"
    r"|overlap_(grad|param|p2p)|gradient_acc|calculate_per",
    "Experts and the rest of the model": r"",
}
# Remarks for users besides yes and no.
REMARKS = {
    "--ncclep-max-recv-rows": "static shapes; a number, a factor such as `1.25x`, or `worst`",
    "--ncclep-experts=grouped": "on Hopper GPUs only, with torch 2.10 or newer",
    "adapters on grouped experts": "LoRA of Megatron-Bridge and ms-swift",
    "expert_tensor_parallel_size": "`native`: several NVLink domains need a network for kernels",
    "fp8_recipe=blockwise": "rows cross in FP8 to grouped experts only",
    "moe_layer_recompute": "one more plan, dispatch and combine for a recomputed layer",
    "cuda_graph_impl=full_iteration": "static shapes and grouped experts",
    "cuda_graph_impl=transformer_engine": "static shapes and grouped experts",
    "cuda_graph_impl=local": "static shapes and grouped experts",
    "moe_shared_expert_overlap": "our kernels get their SMs first",
    "overlap_moe_expert_parallel_comm": "gains [little inside one node]"
    "(performance.md#overlap-of-micro-batches)",
    "gradient_accumulation_fusion": "keep it on",
    "moe_use_grouped_tensor": "over a stand-in for its GEMMs",
    "moe_expert_capacity_factor": "drops at the router, as with `alltoall`",
}


class Collector:
    """A pytest plugin that records the declarations of the collected tests.

    Attributes:
        works: option -> place -> how it is compared there.
        releases: option -> releases of Megatron-Core that it is compared with on a CPU.
        engines: option -> engines that it is shown with.
        refusing: option -> engines that refuse it.
        refused: words -> the options that are refused for this reason.
    """

    def __init__(self) -> None:
        self.works: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.releases: dict[str, set[str]] = defaultdict(set)
        self.engines: dict[str, set[str]] = defaultdict(set)
        self.refusing: dict[str, set[str]] = defaultdict(set)
        self.refused: dict[str, dict[str, None]] = defaultdict(dict)
        self.ranks_on_gpus: dict[tuple[str, str], int] = defaultdict(int)
        for steps in runpy.run_path(str(ROOT / "scripts" / "gpu_steps.py"))["PARTS"].values():
            for step in steps:
                for path in step.tests.split():
                    most = max(self.ranks_on_gpus[step.engine, path], *step.ranks)
                    self.ranks_on_gpus[step.engine, path] = most

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Tell conftest.py that no engine will run."""
        config.option.lists_only = True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the options of each test."""
        for item in session.items:
            assert isinstance(item, pytest.Function)
            for mark in item.iter_markers("refuses"):
                self.refused[mark.kwargs["words"]].update(dict.fromkeys(mark.args))
                for option in mark.args:
                    self.refusing[option].update(mark.kwargs.get("engines", ()))
            word, options = shown(item)
            where = self.where(item)
            for option in options if where else ():
                place, engine = where
                self.works[option][place].add(word)
                self.releases[option] |= releases_of(item)
                self.engines[option].add(engine)

    def where(self, item: pytest.Function) -> tuple[str, str] | tuple[()]:
        """The place where a test runs and its engine there; nothing if `make gpu` leaves it out."""
        on_cpu, one_rank, several_ranks = PLACES
        if not is_on_gpus(item):
            return on_cpu, "reference"
        name = item.callspec.params.get("engine_name") if hasattr(item, "callspec") else None
        engine = str(name or "native")
        ranks = self.ranks_on_gpus.get((engine, str(item.path.relative_to(ROOT))))
        if ranks is None or not since(item, ON_GPUS):
            return ()
        is_alone = "one_rank" in item.fixturenames or item.get_closest_marker("alone") is not None
        return one_rank if ranks == 1 or is_alone else several_ranks, engine


def is_on_gpus(item: pytest.Function) -> bool:
    """Whether a test needs GPUs."""
    return item.path.parent == TESTS / "gpu"


def since(item: pytest.Function, release: Version) -> bool:
    """Whether this release of Megatron-Core has all that a test needs."""
    return all(release >= Version(mark.args[0]) for mark in item.iter_markers("since"))


def shown(item: pytest.Function) -> tuple[str, list[str]]:
    """How a test compares, and the options that it shows to work; nothing without the marker.

    Raises:
        pytest.UsageError: the marker does not say how it compares, or which options.
    """
    marks = list(item.iter_markers("supports"))
    if not marks:
        return "", []
    said = [mark.kwargs["compared"] for mark in marks if "compared" in mark.kwargs]
    options = [option for mark in marks for option in mark.args]
    params = item.callspec.params if hasattr(item, "callspec") else {}
    cases = [value for value in params.values() if hasattr(value, "options_shown")]
    for case in cases:
        options += case.options_shown()
    if not said or not (options or cases):
        raise pytest.UsageError(
            f"{item.nodeid}: the marker supports needs {'an option' if said else 'compared=...'}"
        )
    return strictness(said[0], cases), options


def strictness(said: str, cases: list[Any]) -> str:
    """How strict a comparison is, from its cases, if they know, or from the marker's words."""
    known = [
        case.same_bits or getattr(case, "integers", False)
        for case in cases
        if hasattr(case, "same_bits")
    ]
    if known:
        return "bits" if all(known) else "rounding"
    if "to the bit" in said and "rounding" not in said:
        return "bits"
    return "rounding" if " with " in said or "rounding" in said else "behaviour"


def releases_of(item: pytest.Function) -> set[str]:
    """The releases of Megatron-Core that a test runs with on a CPU."""
    if is_on_gpus(item):
        return set()
    each = item.get_closest_marker("each_release") is not None
    releases = SUPPORTED if each else SUPPORTED[-1:]
    return {name for name in releases if since(item, Version(name))}


def collect() -> Collector:
    """Collect the tests: those of the CPU, and those of GPUs.

    Raises:
        RuntimeError: pytest could not; with its output.
    """
    collector = Collector()
    for folder, *rest in (["integration"], ["gpu", "--backend=nccl", "--ranks=4"]):
        engines = [f"--engine={name}" for name in ENGINES if name != "reference"] if rest else []
        with contextlib.redirect_stdout(io.StringIO()) as output:
            options = ["--collect-only", "--assert=plain", "-qq", "-p", "no:cacheprovider", *rest]
            status = pytest.main([str(TESTS / folder), *options, *engines], plugins=[collector])
        if status != pytest.ExitCode.OK:
            raise RuntimeError(output.getvalue()[-4000:])
    return collector


def listed(rows: list[list[str]]) -> str:
    """A list of Markdown: the first of each row, then the others.  A phone shows no wide table."""
    cells = ([" ".join(cell.split()) for cell in row if cell] for row in rows)
    return "\n".join(f"- {what}: {'; '.join(rest)}" for what, *rest in cells)


def oldest(releases: set[str]) -> str:
    """The oldest release, where it is not the oldest supported one."""
    found = next((name for name in SUPPORTED if name in releases), SUPPORTED[0])
    return "" if found == SUPPORTED[0] else f"from {found}"


def code(name: str) -> str:
    """An option as code; a feature without an option is plain text."""
    return name if " " in name else f"`{name}`"


def merged(names: list[str], cells: dict[str, tuple[str, ...]]) -> list[list[str]]:
    """Rows of a list: options with the same cells share one, with their values after them."""
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for name in names:
        option, _, value = name.partition("=")
        values = rows.setdefault(cells[name], {}).setdefault(option, [])
        values += [f"`{value}`"] if value else []
    return [
        [", ".join(f"{code(name)} {', '.join(v)}".rstrip() for name, v in found.items()), *row]
        for row, found in rows.items()
    ]


def works(collector: Collector) -> str:
    """For users: which options work with which engine."""

    def named(engines: set[str]) -> str:
        return ", ".join(f"`{engine}`" for engine in ENGINES if engine in engines)

    cells: dict[str, tuple[str, ...]] = {
        name: (
            named(collector.engines[name] - collector.refusing[name]),
            "; ".join(filter(None, [
                oldest(collector.releases[name]),
                REMARKS.get(name),
                f"refused by {refusing}" if (refusing := named(collector.refusing[name])) else "",
            ])),
        )
        for name in sorted(collector.works)
    }  # fmt: skip
    left, parts = [*cells], []
    for subject, pattern in SUBJECTS.items():
        names = [name for name in left if re.match(pattern, name)]
        left = [name for name in left if name not in names]
        parts.append(f"**{subject}**\n\n{listed(merged(names, cells))}")
    return "\n\n".join(parts)


def compared(collector: Collector) -> str:
    """For maintainers: how strict the weakest comparison is, in each kind of place."""
    cells = {}
    for name, by_place in sorted(collector.works.items()):
        places = defaultdict(list)
        for place in PLACES:
            words = [word for word in COMPARED if word in by_place[place]]
            if words:
                places[words[0]].append(place)
        cells[name] = tuple(f"{word} on {', '.join(found)}" for word, found in places.items())
    return listed(merged([*cells], cells))


def refusals(collector: Collector) -> str:
    """Refused options, by the reason."""
    rows = sorted((sorted(options), words) for words, options in collector.refused.items())
    return listed([[", ".join(f"`{option}`" for option in found), words] for found, words in rows])


def lists(collector: Collector) -> dict[str, str]:
    """All lists, by name."""
    return {
        "what works": works(collector),
        "what is refused": refusals(collector),
        "how it is compared": compared(collector),
    }


def main() -> int:
    """Compare, or write with --write; return 1 if a document is out of date and not written."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    return update("make support", lists(collect()), parser.parse_args().write)


if __name__ == "__main__":
    sys.exit(main())
