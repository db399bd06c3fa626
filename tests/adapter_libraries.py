"""Stand-ins for the adapters (LoRA) of Megatron-Bridge 0.6.2 and mcore-bridge 1.6.5: their classes'
names, attributes and results.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

BRIDGE, SWIFT = "megatron.bridge.peft", "mcore_bridge.tuners.lora"
TE = "megatron.core.extensions.transformer_engine"
RANK, ALPHA = 4, 8


def named(module: str, attributes: str = "") -> Any:
    """Give a class the module of the one that it stands for, and its objects further attributes."""

    def change(kind: Any) -> Any:
        kind.__module__ = module
        own, names = kind.forward, {**globals(), "__name__": module}
        kind.forward = FunctionType(
            own.__code__, names, "forward", own.__defaults__, own.__closure__
        )
        kind.forward.__qualname__ = f"{kind.__name__}.forward"
        made = kind.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            for name in attributes.split():
                vars(self).setdefault(name, None)

        kind.__init__ = init  # type: ignore[misc]
        return kind

    return change


def random(*shape: int, like: torch.Tensor) -> nn.Parameter:
    """Neither factor is zero, so that both have gradients."""
    return nn.Parameter((0.3 * torch.randn(shape, dtype=torch.float32)).to(like))


def each_expert(rows: torch.Tensor, counts: Sequence[int], weights: Any) -> torch.Tensor:
    """Multiply every expert's rows by its weight, one expert after the other."""
    counts = [int(count) for count in counts]
    assert sum(counts) == len(rows)
    parts = zip(rows.split(counts), weights, strict=True)
    return torch.cat([F.linear(block, weight) for block, weight in parts])


# ---- TransformerEngine


@named(TE)
class TEGroupedLinear(nn.Module):
    """One weight for each expert in one module."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **more: Any) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        like = torch.empty(0, dtype=more["config"].params_dtype)
        for number in range(num_gemms):
            weight = random(output_size, input_size, like=like)
            weight.allreduce = False  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", weight)

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, None]:
        return each_expert(rows, counts, self._parameters.values()), None


# ---- Megatron-Bridge


@named(f"{BRIDGE}.utils")
class _GroupedExpertAdapterWeight(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        weight.allreduce = False  # type: ignore[attr-defined]

    def forward(self, indices: Any = None) -> torch.Tensor:
        return self.weight


class _Adapter(nn.Module):
    def __init__(
        self,
        factors: Any,
        config: Any,
        dropout: float = 0.0,
        dropout_position: str = "pre",
        rank: int = RANK,
    ) -> None:
        super().__init__()
        self.dim, self.alpha, self.config = rank, ALPHA, config
        self.dropout_position = dropout_position
        self.activation = nn.Identity()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.linear_in, self.linear_out = factors

    def forward(self, rows: torch.Tensor, counts: Any = None) -> torch.Tensor:
        if self.dropout_position == "pre":
            rows = self.dropout(rows)
        # DDP's hooks of the modules wait for their weights (overlap_param_gather).
        for factor in self.linear_in, self.linear_out:
            if isinstance(factor, _GroupedExpertAdapterWeight):
                rows = each_expert(rows, counts, factor())
            else:
                rows, _ = factor(rows)
        if self.dropout_position == "post":
            rows = self.dropout(rows)
        return rows * (self.alpha / self.dim)


def one_for_all(sizes: tuple[int, int], config: Any, like: Any, is_shared: bool) -> nn.Module:
    """A factor of one expert, or `is_shared` by all experts: then ranks add up its gradients."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    linear: nn.Module = ColumnParallelLinear(
        *sizes, config=config, bias=False, gather_output=True, is_expert=True,
        init_method=lambda values: nn.init.normal_(values, std=0.3),
    ).to(like.device, like.dtype)  # fmt: skip
    if is_shared:
        group = parallel_state.get_expert_model_parallel_group()

        def add_up(grad: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(grad, group=group)
            return grad

        with torch.no_grad():
            dist.broadcast(linear.weight, src=dist.get_global_rank(group, 0), group=group)
        linear.weight.register_hook(add_up)
    return linear


def one_for_each(*shape: int, like: torch.Tensor) -> nn.Module:
    return _GroupedExpertAdapterWeight(random(*shape, like=like.detach()))


OF_ALL = "base_linear_name base_linear_is_parallel is_expert"
GROUPS = "pg_collection ep_group expert_dp_group input_is_parallel"


@named(
    f"{BRIDGE}.utils",
    f"""{OF_ALL} {GROUPS} use_a2a sequence_parallel_input_regather tp_group
    _sequence_parallel_input_regather_fallback_logged disable_sequence_parallel_comm
    use_legacy_shared_expert_adapter_checkpoint""",
)
class ParallelLinearAdapter(_Adapter):
    """A pair of factors of one expert, or of all of a rank, whose gradients ranks then add up."""

    def __init__(
        self, weight: Any, config: Any, is_shared: bool = False, rank: int = RANK, **more: Any
    ) -> None:
        out, into = weight.shape
        sizes = (into, rank), (rank, out)
        factors = [one_for_all(size, config, weight, is_shared) for size in sizes]
        super().__init__(factors, config, rank=rank, **more)


@named(
    f"{BRIDGE}.utils",
    f"""{OF_ALL} {GROUPS} num_local_experts _te_grouped_linear_helpers expert_tp_group
    _linear_in_tp_axis _linear_out_tp_axis""",
)
class GroupedExpertLinearAdapter(_Adapter):
    """A pair of factors for each expert."""

    def __init__(self, number: int, weight: Any, config: Any, **more: Any) -> None:
        out, into = weight.shape
        sizes = (RANK, into), (out, RANK)
        super().__init__([one_for_each(number, *s, like=weight) for s in sizes], config, **more)


@named(f"{BRIDGE}.utils", f"{OF_ALL} num_local_experts")
class SharedOuterGroupedExpertAdapter(_Adapter):
    """One factor for each expert, the other one shared."""

    def __init__(self, number: int, weight: Any, config: Any, is_fc1: bool, **more: Any) -> None:
        out, into = weight.shape
        sizes = (into, RANK) if is_fc1 else (RANK, out)
        shared = one_for_all(sizes, config, weight, is_shared=True)
        shape = (number, out, RANK) if is_fc1 else (number, RANK, into)
        of_each = one_for_each(*shape, like=weight)
        super().__init__((shared, of_each) if is_fc1 else (of_each, shared), config, **more)
        self._is_fc1 = is_fc1


@named(f"{BRIDGE}.lora_layers")
class LoRALinear(nn.Module):
    def __init__(self, to_wrap: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter
        self._adapter_enabled = True

    def forward(self, rows: torch.Tensor, *args: Any) -> tuple[torch.Tensor, None]:
        result = self.to_wrap(rows, *args)[0]
        if self._adapter_enabled:
            result = result + self.adapter(rows.contiguous(), *args)
        return result, None


# ---- mcore-bridge, for ms-swift


@named(
    SWIFT,
    """r lora_alpha _caches ephemeral_gpu_offload cast_input_dtype_enabled kwargs in_features
    out_features is_parallel_a is_grouped fan_in_fan_out is_expert sequence_parallel tp_size
    is_target_conv_1d_layer""",
)
class LoraParallelLinear(nn.Module):
    """peft's layer: any number of named adapters, some of them active."""

    def __init__(self, base_layer: nn.Module, config: Any, names: Sequence[str] = ("one",)) -> None:
        super().__init__()
        self.base_layer, self.config = base_layer, config
        self.lora_A, self.lora_B, self.lora_dropout = (nn.ModuleDict() for _ in range(3))
        self.lora_magnitude_vector = nn.ModuleDict()
        self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()
        self._disable_adapters, self.merged_adapters = False, list[str]()
        self._active_adapter: Any = names[0]
        self.scaling, self.lora_variant = dict[str, float](), dict[str, Any]()
        self.use_dora, self.use_rslora, self.lora_bias = (dict.fromkeys(names, False),) * 3
        weights = list(base_layer.parameters())
        out, into = weights[0].shape
        for number, name in enumerate(names):
            for factors, sizes in ((self.lora_A, (into, RANK)), (self.lora_B, (RANK, out))):
                factor = TEGroupedLinear(len(weights), *sizes, config=config)
                factors[name] = factor.to(weights[0].device)
            self.lora_dropout[name] = nn.Identity()
            self.scaling[name] = 0.5 + number

    def forward(self, rows: torch.Tensor, *args: Any) -> tuple[torch.Tensor, None]:
        result, dtype = self.base_layer(rows, *args)[0], rows.dtype
        names = [self._active_adapter] if isinstance(self._active_adapter, str) else None
        for name in names or self._active_adapter:
            if self._disable_adapters or self.merged_adapters or name not in self.lora_A:
                continue
            a, b = self.lora_A[name], self.lora_B[name]
            rows = rows.to(next(a.parameters()).dtype)
            low, _ = a(self.lora_dropout[name](rows), *args)
            result = result + b(low, *args)[0] * self.scaling[name]
        return result.to(dtype), None
