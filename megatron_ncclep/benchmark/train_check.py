"""Whether subjects train alike: the first steps of each, from the same weights on the same batches.

Against Megatron-Core's `alltoall`, three things are compared:

- the initial weights: equal;
- the first MoE layer's output for given hidden states, and the gradient of these for a given one of
  the output.  Only roundings differ there.  n of them, independent and each of at most half a
  spacing of its value, differ by sqrt(n) halves of a spacing.  A thousandth of the rows at a wrong
  expert would make four hundredths, three times what bf16 is allowed with eight experts a token;
- the losses and gradient norms.  In fp32 they part by the order of a sum only (see
  docs/convergence.md).  In bf16, roundings decide which of two nearly equal experts a router takes,
  in about a tenth of the choices; from there on two curves are two draws of one experiment, whose
  means over all tokens are close.

What a CUDA graph replays must give the bits of the same subject without graphs.
"""

from __future__ import annotations

import math

import torch

from megatron_ncclep.benchmark.train_model import Curve

# Of rows on their way through a layer, beside the sum over a token's experts: two products of an
# expert, its activation, what comes back, and in backward what comes from the router.
ROUNDINGS = 6
# Relative to the value: fp32 by docs/convergence.md, nats near 5.
MOST_PART = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
# A norm adds up squares of gradients that part more than their mean does.
NORM_PART = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def curve_problem(curve: Curve, control: Curve, top_k: int) -> str | None:
    """Say where a training leaves that of the control, if it does.

    Args:
        curve, control: of the same rank.
        top_k: experts of a token.
    """
    if problem := _weights_problem(curve, control):
        return problem
    dtype = control.output.dtype
    allowed = _allowed(control.output, top_k)
    for what, part in layer_parts(curve, control).items():
        if not part <= allowed:  # a NaN is within nothing
            return (
                f"the {what} of the first MoE layer is {part:.2g} of its size away from "
                f"alltoall's, {allowed:.2g} is allowed"
            )
    return _steps_problem(curve, control, "alltoall's", MOST_PART[dtype], NORM_PART[dtype])


def bits_problem(graphed: Curve, eager: Curve) -> str | None:
    """Say where a training with graphs leaves that without, by a bit or more, if it does."""
    problem = _weights_problem(graphed, eager)
    return problem or _steps_problem(graphed, eager, "without graphs it", 0.0, 0.0)


def _steps_problem(
    curve: Curve, other: Curve, whose: str, most: float, norm_most: float
) -> str | None:
    """Say in which step a loss or a gradient norm is further from the other's than these parts."""
    comparisons = (
        ("loss", curve.losses, other.losses, most),
        ("gradient norm", curve.grad_norms, other.grad_norms, norm_most),
    )
    for what, mine, theirs, bound in comparisons:
        for step, (value, wanted) in enumerate(zip(mine, theirs, strict=True), start=1):
            if not abs(value - wanted) <= bound * abs(wanted):
                return (
                    f"step {step}: {what} {value!r}, {whose} is {wanted!r}, and they may differ "
                    f"by {bound * abs(wanted):.2g}"
                )
    return None


def _allowed(output: torch.Tensor, top_k: int) -> float:
    """What roundings may make of an output [..., hidden], relative to its size."""
    rows = math.sqrt(top_k + ROUNDINGS) * torch.finfo(output.dtype).eps / 2
    # Inner products, over the hidden size and an expert's, are added up in fp32.
    return rows + math.sqrt(2 * output.shape[-1]) * torch.finfo(torch.float32).eps / 2


def layer_parts(curve: Curve, control: Curve) -> dict[str, float]:
    """How far output and gradient of the first MoE layer are apart, relative to their size."""
    pairs = {
        "output": (curve.output.double(), control.output.double()),
        "gradient": (curve.gradient.double(), control.gradient.double()),
    }
    return {
        what: float((mine - theirs).norm() / theirs.norm())
        for what, (mine, theirs) in pairs.items()
    }


def most_apart(curve: Curve, control: Curve) -> float:
    """The largest difference of the losses of one step, in nats."""
    pairs = zip(curve.losses, control.losses, strict=True)
    return max(abs(mine - theirs) for mine, theirs in pairs)


def _weights_problem(curve: Curve, other: Curve) -> str | None:
    if curve.weights.keys() != other.weights.keys():
        differ = sorted(curve.weights.keys() ^ other.weights.keys())
        return f"other parameters than it is compared with: {differ[0]} and {len(differ) - 1} more"
    for name, sums in curve.weights.items():
        if sums != other.weights[name]:
            return f"{name} starts from other values than in what it is compared with"
    return None
