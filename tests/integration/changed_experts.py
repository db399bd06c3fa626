"""What users put on the modules of experts after a layer was built: one layer trained with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron_setup import SWIGLU, build_layer, drawn, initialize, make_config
from torch import nn
from torch.nn.utils import parametrize

from megatron_ncclep.config import EpConfig

# Of layers with TransformerEngine's experts, for the tests on GPUs.
GPU_FIELDS: dict[str, Any] = {
    **SWIGLU,
    "hidden_size": 128,
    "ffn_hidden_size": 64,
    "moe_ffn_hidden_size": 64,
    "moe_grouped_gemm": True,
    "use_cpu_initialization": False,
}
# What Megatron's experts are compared with: the same padding, so that they multiply the same rows.
THEIRS = EpConfig(experts="megatron", alignment=16)

Seen = list[Any]


class Lora(nn.Module):
    """An adapter around a linear layer, as Megatron-Bridge, NeMo and peft make them."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        weight = next(base.parameters())
        out, into = weight.shape
        down, up = (0.1 * torch.randn(shape).to(weight) for shape in ((into, 2), (2, out)))
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, rows: torch.Tensor, *args: Any) -> tuple[torch.Tensor, None]:
        return self.base(rows, *args)[0] + rows @ self.down @ self.up, None


class Scaled(nn.Module):
    """A parametrization of a weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 1.5 * weight


class Around(nn.Module):
    """A module in place of the experts, which calls them and sees what they are passed."""

    def __init__(self, experts: nn.Module, seen: Seen) -> None:
        super().__init__()
        self.experts, self.seen = experts, seen

    def forward(self, *args: Any) -> Any:
        note(self.seen, args)
        return self.experts(*args)


def note(seen: Seen, values: Any) -> None:
    """Keep copies of tensors and lists among `values`."""
    for value in values:
        if isinstance(value, torch.Tensor | list):
            seen.append(torch.as_tensor(value).detach().cpu().clone())


def holder(layer: Any) -> Any:
    """The module that has linear_fc1 and linear_fc2: the experts, or the second of them."""
    experts: Any = layer.experts
    return experts.local_experts[1] if hasattr(experts, "local_experts") else experts


def weights(layer: Any) -> list[nn.Parameter]:
    return [p for name, p in layer.experts.named_parameters() if "weight" in name]


def replace_forward(layer: Any, seen: Seen) -> None:
    linear = holder(layer).linear_fc2
    original = linear.forward
    linear.forward = lambda *args: (3 * original(*args)[0], None)


def replace_class(layer: Any, seen: Seen) -> None:
    linear = holder(layer).linear_fc1
    kind = type(linear)
    forward = lambda self, *args: (kind.forward(self, *args)[0] / 2, None)  # noqa: E731
    linear.__class__ = type("Quantised", (kind,), {"forward": forward})


def replace_class_of_experts(layer: Any, seen: Seen) -> None:
    kind = type(layer.experts)

    def forward(self: Any, *args: Any) -> Any:
        note(seen, args)
        return kind.forward(self, *args)

    layer.experts.__class__ = type("Watched", (kind,), {"forward": forward})


def add_parametrization(layer: Any, seen: Seen) -> None:
    linear = holder(layer).linear_fc1
    name, _ = next(iter(linear.named_parameters()))
    parametrize.register_parametrization(linear, name, Scaled())


def copy_experts(layer: Any, seen: Seen) -> None:
    """As for an average; Megatron's modules hold process groups, which a copy shares."""
    shared: Any = {dist.ProcessGroup: lambda group, memo: group}
    with mock.patch.dict(copy._deepcopy_dispatch, shared):  # type: ignore[attr-defined]
        layer.experts = copy.deepcopy(layer.experts)


def freeze(every: int) -> Callable[[Any, Seen], Any]:
    """Freeze every so many of the weights, from the first on."""
    return lambda layer, seen: [w.requires_grad_(False) for w in weights(layer)[::every]]


def tie(layer: Any, seen: Seen) -> None:
    """Give two experts one weight."""
    linears = [m for m in layer.experts.modules() if "weight" in m._parameters]
    if linears:  # one for each expert, fc1 and fc2 in turn
        linears[2].weight = linears[0].weight
    else:
        layer.experts.linear_fc1.weight1 = layer.experts.linear_fc1.weight0


@dataclass(frozen=True)
class Change:
    """A row of the table.

    Attributes:
        make: changes the layer; what its hooks see goes into the list.
        words: what the log or the error says of it; None: grouped experts honour it.
        after_ddp: it is made after DDP has wrapped the layer.
        loss: a further loss on the weights.
        fuses: the row also holds with gradient_accumulation_fusion.
        later: changes the layer again before the second micro-batch.
    """

    make: Callable[[Any, Seen], Any]
    words: str | None = None
    after_ddp: bool = False
    loss: float = 0.0
    fuses: bool = True
    later: Callable[[Any], None] | None = None


def lora(name: str, **more: Any) -> Change:
    def change(layer: Any, seen: Seen) -> None:
        setattr(holder(layer), name, Lora(getattr(holder(layer), name)))

    return Change(change, "is now a Lora, and was a ", **more)


CHANGES = {
    "nothing": Change(lambda layer, seen: None),
    "LoRA on linear_fc1": lora("linear_fc1"),
    "LoRA on linear_fc2": lora("linear_fc2", after_ddp=True),
    "forward hook": Change(
        lambda layer, seen: holder(layer).linear_fc1.register_forward_hook(
            lambda m, args, out: (2 * out[0], *out[1:])
        ),
        "has a forward hook",
    ),
    "pre-hook": Change(
        lambda layer, seen: holder(layer).linear_fc2.register_forward_pre_hook(
            lambda m, args: note(seen, args)
        ),
        "has a forward pre-hook",
    ),
    "backward hook": Change(
        lambda layer, seen: holder(layer).linear_fc1.register_full_backward_hook(
            lambda m, into, out: note(seen, out)
        ),
        "has a backward hook",
    ),
    "forward hook of the experts": Change(
        lambda layer, seen: layer.experts.register_forward_hook(
            lambda m, args, out: note(seen, (*args, out[0]))
        ),
        "the experts (",
        after_ddp=True,
    ),
    "pre-hook of the experts": Change(
        lambda layer, seen: layer.experts.register_forward_pre_hook(
            lambda m, args: note(seen, args)
        ),
        "has a forward pre-hook",
    ),
    "another forward": Change(replace_forward, "has another forward"),
    "another class": Change(replace_class, "is now of the class Quantised"),
    "another class of the experts": Change(replace_class_of_experts, "of the class Watched"),
    "parametrization": Change(add_parametrization, "is now of the class Parametrized", fuses=False),
    "another module as experts": Change(
        lambda layer, seen: setattr(layer, "experts", Around(layer.experts, seen)),
        "the layer's experts are now a Around",
    ),
    "a copy as experts": Change(copy_experts),
    "gradient hooks": Change(
        lambda layer, seen: [w.register_hook(lambda grad: 0.25 * grad) for w in weights(layer)],
        fuses=False,
    ),
    "another loss": Change(lambda layer, seen: None, loss=3.0, fuses=False),
    "frozen": Change(freeze(1)),
    "frozen after DDP": Change(freeze(1), after_ddp=True),
    "some frozen": Change(freeze(3)),
    # Fused, GEMMs of TransformerEngine's that run at the same time would add to it.
    "tied weights": Change(tie, fuses=False),
    "some frozen after DDP": Change(freeze(3), after_ddp=True),
}


def train(
    change: Change,
    options: EpConfig,
    device: str,
    te: bool,
    rank: int,
    dtype: torch.dtype | None = None,
    linears: Any = None,
    **fields: Any,
) -> tuple[dict[str, torch.Tensor | None], Seen, set[str]]:
    """Two micro-batches; what comes out, what hooks have seen, and what is logged once.

    Collective.  With experts="auto" grouped ones are chosen, whatever the machine.  `linears` as
    for `build_layer`.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_ncclep.integration.experts import selection
    from megatron_ncclep.ranks.group import EpGroup

    dtype = dtype or (torch.bfloat16 if te else torch.float32)
    initialize(ep=2, device=device)
    if te:
        fields["gradient_accumulation_fusion"] = change.fuses
    config = make_config("ncclep", dtype, 2, ncclep=options, **fields)
    chosen = selection.Choice("grouped", "a test says so")
    with mock.patch.object(selection, "choose", return_value=chosen):
        layer = build_layer(config, device, te, linears)
    seen: Seen = []
    torch.manual_seed(7)
    if not change.after_ddp:
        change.make(layer, seen)
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer
    )
    ddp.zero_grad_buffer()
    if change.after_ddp:
        change.make(layer, seen)
    results: dict[str, torch.Tensor | None] = {}
    with mock.patch.object(EpGroup, "log_once") as logged:
        for number in range(2):
            if number and change.later is not None:
                change.later(layer)
            hidden, probe = drawn(10 * number + rank, 2, 12, 1, config.hidden_size).to(
                device, dtype
            )
            out, _ = ddp(hidden.requires_grad_())
            loss = (out * probe).float().sum()
            for weight in weights(layer) if change.loss else ():
                loss = loss + change.loss * weight.float().pow(2).sum()
            loss.backward()
            results |= {f"output {number}": out.detach(), f"input {number}": hidden.grad}
    for name, weight in layer.named_parameters():
        name = name.replace(".experts.experts.", ".experts.")
        results[f"gradient of {name}"] = weight.grad
        results[f"main_grad of {name}"] = getattr(weight, "main_grad", None)
    return results, seen, {text for _, _, text in (call.args for call in logged.call_args_list)}
