"""What the protocol trains in bf16: the arms, their seeds, and the mistakes in two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
CONTROL = "alltoall"
# Of 1000 rows that experts get, one is lost in the arm "zeroed rows".
ONE_IN = 1000


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: as shown.
        subject: what trains, by the name that `ncclep bench` has for it, without `train:`.
        same_bits_as: the arm whose losses it must have to the last bit, which then decides; None:
            what it has learnt decides.
        mistake: one of `MISTAKES`, put into its dispatchers: the protocol must reject it.
        part: of the steps, after which it stops; bits can be compared as far as that.
    """

    name: str
    subject: str
    same_bits_as: str | None = None
    mistake: str | None = None
    part: float = 1.0


@dataclass(frozen=True)
class Size:
    """The protocol for one kind of machine.

    Attributes:
        name: of it.
        model: file with the model and its recipe.
        arms: in the order in which they are shown.
        runs: (arm, seed) in the order in which they are begun: what matters most comes first, and
            the control of a seed before all others of it.
    """

    name: str
    model: Path
    arms: tuple[Arm, ...]
    runs: tuple[tuple[str, int], ...]

    def arm(self, name: str) -> Arm:
        """The arm called `name`."""
        return next(arm for arm in self.arms if arm.name == name)


def _swapped_weights(dispatcher: Any) -> None:
    """Give each of a token's experts the weight of another one of them."""
    original = dispatcher.dispatch_preprocess

    def dispatch_preprocess(*args: Any) -> Any:
        hidden_states, weights = original(*args)
        return hidden_states, weights.flip(1)

    dispatcher.dispatch_preprocess = dispatch_preprocess


def _zeroed_rows(dispatcher: Any) -> None:
    """Lose every 1000th row on its way to the experts, and its gradient on the way back."""
    original = dispatcher.dispatch_postprocess

    def dispatch_postprocess(*args: Any) -> Any:
        rows, counts, weights = original(*args)
        place = torch.arange(len(rows), device=rows.device)
        kept = (place % ONE_IN != ONE_IN // 2).to(rows.dtype)
        return rows * kept[:, None], counts, weights

    dispatcher.dispatch_postprocess = dispatch_postprocess


MISTAKES: dict[str, Callable[[Any], None]] = {
    "swapped weights": _swapped_weights,
    "zeroed rows": _zeroed_rows,
}

# The fastest way to train, and the one that leaves nothing out.
GRAPHED = "ncclep:native:grouped:full_iteration"
GPU = Size(
    "gpu",
    HERE / "gpu_model.yaml",
    (
        Arm(CONTROL, "alltoall"),
        Arm("native", "ncclep:native"),
        Arm("nccl_ep", "ncclep:nccl_ep"),
        Arm("native, grouped experts, CUDA graphs", GRAPHED),
        Arm(
            "native, grouped experts",
            "ncclep:native:grouped:static",
            same_bits_as="native, grouped experts, CUDA graphs",
            part=0.5,
        ),
        Arm("reference", "ncclep:reference", same_bits_as="native", part=0.2),
        Arm("mistake: swapped weights", GRAPHED, mistake="swapped weights"),
        Arm("mistake: zeroed rows", GRAPHED, mistake="zeroed rows"),
    ),
    (
        (CONTROL, 1),
        (CONTROL, 2),
        ("native, grouped experts, CUDA graphs", 1),
        (CONTROL, 3),
        ("native, grouped experts, CUDA graphs", 2),
        ("nccl_ep", 1),
        ("native, grouped experts, CUDA graphs", 3),
        ("mistake: swapped weights", 1),
        ("mistake: zeroed rows", 1),
        ("native", 1),
        ("native, grouped experts", 1),
        ("reference", 1),
        ("nccl_ep", 2),
        ("native", 2),
        ("native", 3),
        ("nccl_ep", 3),
    ),
)

SMALL = Size(
    "small",
    HERE / "small_model.yaml",
    (
        Arm(CONTROL, "alltoall"),
        Arm("reference", "ncclep:reference"),
        Arm("reference, static", "ncclep:reference:static", same_bits_as="reference", part=0.5),
        Arm("mistake: swapped weights", "ncclep:reference", mistake="swapped weights"),
        Arm("mistake: zeroed rows", "ncclep:reference", mistake="zeroed rows"),
    ),
    (
        *((CONTROL, seed) for seed in (1, 2, 3)),
        *(("reference", seed) for seed in (1, 2, 3)),
        ("reference, static", 1),
        ("mistake: swapped weights", 1),
        ("mistake: zeroed rows", 1),
    ),
)
SIZES = {size.name: size for size in (GPU, SMALL)}
