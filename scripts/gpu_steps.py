"""The steps of `make gpu`: which tests run with which engine, on which ranks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

RANDOM = "tests/contract/test_random.py --iterations"


@dataclass(frozen=True)
class Step:
    """One run of pytest.

    Attributes:
        engine: the engine under test.
        ranks: sizes of its pools; contract cases run with each of them.
        tests: paths, and more arguments.
        hosts: the number of hosts that the ranks appear to be on.
        library: the package whose libnccl_ep is used (NCCLEP_NCCL_EP_LIBRARY); empty: any.
        network: what kernels' puts between hosts go over (pytest --network); empty: nothing.
        mps: ranks that share a GPU run at the same time.  Not where ranks are killed: under MPS
            that harms the others.
        alone: no other step uses the GPU meanwhile, because the tests measure its memory.
    """

    engine: str
    ranks: tuple[int, ...]
    tests: str
    hosts: int = 1
    library: str = ""
    network: str = ""
    mps: bool = True
    alone: bool = False

    @property
    def name(self) -> str:
        """Unique among all steps."""
        grid = "+".join(map(str, self.ranks))
        if self.hosts > 1:
            grid = f"{self.hosts}x{self.ranks[-1] // self.hosts}"
        engine = f"{self.engine} of {self.library}" if self.library else self.engine
        return f"{engine} {grid}: {self.tests}"

    @property
    def cores(self) -> int:
        """How many cores it keeps busy; over the test network, a thread of each rank polls."""
        return self.ranks[-1] * (2 if self.network else 1)

    def command(self, report: Path) -> list[str]:
        """What runs it."""
        options = ["--backend", "nccl", "--engine", self.engine, "--hosts", str(self.hosts)]
        for number in self.ranks:
            options += ["--ranks", str(number)]
        options += ["--network", self.network] if self.network else []
        run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        return [*run, f"--junitxml={report}", *self.tests.split(), *options]


GRAPHS = "tests/gpu/test_graphs.py tests/gpu/test_gpu_static_mode.py"
ENGINE = f"{GRAPHS} tests/gpu/test_gpu_stream_order.py tests/gpu/test_gpu_streams.py " + (
    "tests/gpu/test_gpu_route_plan.py tests/gpu/test_gpu_metrics.py"
)
LOW_LATENCY = "tests/gpu/test_gpu_low_latency.py"
# Over hosts no rank of `native` shares memory with all others.
FAULTS = "tests/faults/test_host.py tests/faults/test_device.py --deselect " + (
    "tests/faults/test_host.py::test_a_rank_that_dies_while_memory_is_shared_leaves_none"
)
STEPS = "tests/contract/test_steps.py tests/contract/test_autograd.py"
# What differs with the grid of hosts and ranks; 2 x 2 runs all of the contract.
GRID = " ".join(
    f"tests/contract/test_{name}.py"
    for name in ("steps", "autograd", "batches_in_turn", "low_latency", "overflow")
)
PARTS: dict[str, list[Step]] = {
    "contract": [
        Step("native", (8,), "tests/contract"),
        Step("native", (4,), "tests/contract"),
        Step("native", (2,), "tests/contract"),
        Step("hierarchical", (4,), "tests/contract", hosts=2),
        Step("hierarchical", (8,), "tests/contract", hosts=2),
        Step("hierarchical", (8,), "tests/contract", hosts=4),
        Step("reference", (4,), "tests/contract"),
        Step("nccl_ep", (2,), "tests/contract", mps=False),
        Step("nccl_ep", (2,), STEPS, mps=False, library="transformer-engine"),
    ],
    "random": [
        *(Step("native", (ranks,), f"{RANDOM} 250") for ranks in (8, 4, 2)),
        Step("hierarchical", (4,), f"{RANDOM} 200", hosts=2),
        Step("hierarchical", (8,), f"{RANDOM} 100", hosts=2),
        Step("hierarchical", (8,), f"{RANDOM} 100", hosts=4),
    ],
    "engine": [
        Step("native", (4,), f"{ENGINE} {LOW_LATENCY}"),
        Step("native", (8,), f"{GRAPHS} {LOW_LATENCY}"),
        Step("hierarchical", (4,), f"{GRAPHS} tests/gpu/test_gpu_stream_order.py", hosts=2),
        Step("hierarchical", (8,), GRAPHS, hosts=2),
        Step("hierarchical", (8,), GRAPHS, hosts=4),
        Step("hierarchical", (2,), "tests/gpu/test_gpu_nodes.py", hosts=2),
        Step("native", (2,), "tests/gpu/test_gpu_rebuilding.py", alone=True),
        Step("native", (2,), "tests/gpu/test_gpu_released_memory.py", alone=True),
        Step("native", (2,), "tests/gpu/test_large_offsets.py", alone=True),
        Step("native", (2,), "tests/gpu/test_gpu_c_example.py"),
    ],
    "network": [
        Step("native", (2,), "tests/gpu/test_gpu_network.py", hosts=2, network="loop"),
        Step("native", (4,), "tests/gpu/test_gpu_network.py", hosts=2, network="loop"),
        Step("native", (4,), "tests/gpu/test_gpu_network.py", hosts=4, network="loop"),
        Step("hierarchical", (4,), "tests/gpu/test_gpu_links.py", hosts=2, network="loop-all"),
        Step("native", (4,), "tests/contract", hosts=2, network="loop"),
        Step("native", (8,), GRID, hosts=2, network="loop"),
        Step("native", (8,), GRID, hosts=8, network="loop"),
        Step("native", (4,), GRID, hosts=4, network="loop"),
        Step("native", (2,), GRID, hosts=2, network="loop"),
        *(
            Step("native", (4,), f"{RANDOM} 100 --seed {seed}", hosts=2, network="loop")
            for seed in range(2)  # in one step they would take longer than a step may
        ),
        Step("native", (8,), f"{RANDOM} 50", hosts=2, network="loop"),
        Step("native", (4,), f"{ENGINE} {LOW_LATENCY}", hosts=2, network="loop"),
        Step("native", (8,), f"{GRAPHS} {LOW_LATENCY}", hosts=4, network="loop"),
        Step("native", (4,), FAULTS, hosts=2, network="loop", mps=False),
        Step("native", (2,), "tests/gpu/test_gpu_inference.py", hosts=2, network="loop"),
        Step("native", (4,), "tests/gpu/test_gpu_gpt.py", hosts=2, network="loop"),
        Step("native", (4,), "tests/gpu/test_gpu_reruns.py -k auto", hosts=2, network="loop"),
    ],
    "layers": [
        Step("native", (2,), "tests/gpu/test_gpu_experts.py tests/gpu/test_gpu_grouped_experts.py"),
        Step("native", (1, 2), "tests/gpu/test_gpu_batch_invariance.py"),
        Step("native", (1,), "tests/gpu/test_gpu_quack.py tests/gpu/test_gpu_gradient_fusion.py"),
        Step(
            "native", (2,), "tests/gpu/test_gpu_changed_experts.py tests/gpu/test_gpu_adapters.py"
        ),
        Step("native", (4,), "tests/gpu/test_gpu_moe_layer.py"),
        Step("native", (4,), "tests/gpu/test_gpu_shapes.py"),
        Step("native", (4,), "tests/gpu/test_gpu_packed_batches.py"),
        Step(
            "native", (2,), "tests/gpu/test_gpu_shared_experts.py tests/gpu/test_gpu_inference.py"
        ),
        Step(
            "native", (1,), "tests/gpu/test_gpu_fp8_experts.py tests/gpu/test_gpu_fp8_crossing.py"
        ),
    ],
    "train": [  # the longest first
        Step("native", (1,), "tests/gpu/test_gpu_bridge.py -rP"),
        Step("native", (2,), "tests/gpu/test_megatron_graphs.py"),
        Step("native", (4,), "tests/gpu/test_gpu_gpt.py"),
        Step("native", (4,), "tests/gpu/test_gpu_train_command.py"),
        Step("native", (2,), "tests/gpu/test_gpu_doc_commands.py"),
        Step("native", (8,), "tests/gpu/test_gpu_gpt.py"),
        Step("hierarchical", (4,), "tests/gpu/test_gpu_gpt.py", hosts=2),
        Step("native", (2,), "tests/gpu/test_gpu_overlapped_schedule.py"),
        Step("native", (2,), "tests/gpu/test_gpu_memory.py", alone=True),
        Step("native", (4,), "tests/gpu/test_gpu_reruns.py"),
        # There an expert is alone on its rank, and 2.5 times a balanced load is another limit.
        # Beside four other steps a rank once came later than its deadline of 60 s allows.
        Step("native", (8,), "tests/gpu/test_gpu_reruns.py -k auto", alone=True),
        Step("native", (2,), "tests/gpu/test_fp8_training.py"),
    ],
    "faults": [
        Step("native", (4,), "tests/faults --ignore tests/faults/test_growth.py", mps=False),
        Step("native", (4,), "tests/faults/test_growth.py", mps=False, alone=True),
        Step("native", (4,), "tests/gpu/test_failures.py", mps=False),
        Step("native", (8,), "tests/faults/test_host.py", mps=False),
        Step("hierarchical", (4,), "tests/faults/test_host.py", hosts=2, mps=False),
    ],
}


def every_step() -> list[tuple[str, Step]]:
    """All steps, each with the name of its part."""
    return [(part, step) for part, steps in PARTS.items() for step in steps]


def chosen_steps(names: list[str]) -> list[tuple[str, Step]]:
    """The steps that `names` pick, each PART or PART:NUMBER; all of them if there are none.

    Raises:
        ValueError: no such part or step.
    """
    chosen = []
    for name in names or PARTS:
        part, colon, number = name.partition(":")
        if part not in PARTS:
            raise ValueError(f"unknown part {part!r}: there are {[*PARTS]}")
        steps = PARTS[part]
        if colon and not (number.isdecimal() and int(number) < len(steps)):
            raise ValueError(f"{name}: part {part} has steps 0 to {len(steps) - 1}")
        chosen += [(part, step) for step in ([steps[int(number)]] if colon else steps)]
    return chosen
