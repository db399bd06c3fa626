"""What frameworks need of a GPU, for their models on a CPU: no function of theirs is changed."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

# TransformerEngine needs a GPU; the others are imported by Megatron-Bridge and not called here.
LACKING = ("transformer_engine", "megatron.energon", "nvidia_resiliency_ext")


class Names(ModuleType):
    """A module that has every name: modules in lower case, and classes."""

    __path__ = ()
    __version__ = "2.20.2"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        return vars(self).setdefault(name, type(name, (torch.nn.Module,), {}))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `LACKING` and all that is in them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_lacking = any(f"{fullname}.".startswith(f"{name}.") for name in LACKING)
        return ModuleSpec(fullname, self, is_package=True) if is_lacking else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def prepare() -> None:
    """Megatron-Core on a CPU, and modules for the frameworks to import."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401  (which looks for it, too)

    from megatron_ncclep import cpu

    cpu.enable()
    for name, value in list(vars(transformer_engine).items()):
        if name.startswith("TE") and not isinstance(value, type):  # what mcore_bridge changes
            kind = type(name, (torch.nn.Module,), {"sharded_state_dict": None})
            setattr(transformer_engine, name, kind)
    sys.meta_path.append(Finder())
    torch.cuda.mem_get_info = lambda *_: (1 << 30, 1 << 30)  # which they log


def say(*words: Any) -> None:
    """Print a line in one piece, as two ranks do it at the same time."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")


# Fields of the config that need a GPU otherwise.
FIELDS = {
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "gradient_accumulation_fusion": False,
    "use_cpu_initialization": True,
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
}


def local_layers() -> Any:
    """Megatron's own modules in place of TransformerEngine's, for the model of tiny_model.py."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(
        num_experts=4, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )


def take_no_mask(model: torch.nn.Module) -> list[str]:
    """Have attention be causal only, as padding is at the end; return the dispatchers' classes."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    def causal(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {"attention_mask": None} if "attention_mask" in kwargs else {}
        return (*args[:3], *(None for _ in args[3:4]), *args[4:]), kwargs | given

    for module in model.modules():
        if isinstance(module, DotProductAttention):
            module.register_forward_pre_hook(causal, with_kwargs=True)
    layers = (m for m in model.modules() if hasattr(m, "token_dispatcher"))
    return [type(layer.token_dispatcher).__name__ for layer in layers]
