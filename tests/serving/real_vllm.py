"""vLLM's own modules on a CPU, as scripts/fetch_vllm.sh unpacks them, and a layer made of them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

RELEASES = ("0.24.0", "0.33.0")


def folder(release: str) -> Path:
    return Path(sys.prefix) / "vllm" / release


def load(release: str, group: Any = None) -> Any:
    """Let this process import that release, with our backend; returns the module of pairs.

    Its wheel is for GPUs and finds none: it is told that this is a CPU.
    """
    if str(folder(release)) not in sys.path:
        # Last, so that what this environment has comes first.
        sys.path += [str(folder(release)), str(folder("needs"))]
        from vllm import platforms
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = CpuPlatform()
    import megatron_ncclep.vllm

    megatron_ncclep.vllm.register()
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.v1.worker import workspace

    parallel_state._EP = SimpleNamespace(device_group=group)
    workspace._manager = workspace.WorkspaceManager(torch.device("cpu"))
    return all2all_utils


def moe_config(num_local: int, ranks: int, rank: int, **changed: Any) -> Any:
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    parallel: dict[str, Any] = {
        "tp_size": 1, "pcp_size": 1, "dp_size": ranks, "ep_size": ranks, "tp_rank": 0,
        "pcp_rank": 0, "dp_rank": rank, "ep_rank": rank, "sp_size": 1, "use_ep": True,
        "all2all_backend": "ncclep", "enable_eplb": False,
    }  # fmt: skip
    sizes: dict[str, Any] = {
        "num_experts": num_local * ranks, "num_local_experts": num_local,
        "num_logical_experts": num_local * ranks, "intermediate_size": 64,
        "activation": MoEActivation.SILU, "device": "cpu",
        "routing_method": config.RoutingMethodType.Default,
    }  # fmt: skip
    for name in [name for name in changed if name in parallel]:
        parallel[name] = changed.pop(name)
    made = config.FusedMoEParallelConfig(**parallel)
    return config.FusedMoEConfig(moe_parallel_config=made, **{**sizes, **changed})


def experts_class() -> Any:
    """Experts for vLLM's modular kernel: expert e multiplies a row by e + 1.

    They drop what `expert_map` drops.
    """
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceNoOP,
    )

    class Experts(mk.FusedMoEExpertsModular):
        first, defers = 0, False

        @property
        def expects_unquantized_inputs(self) -> bool:
            return self.defers

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        def workspace_shapes(self, M: int, N: int, K: int, topk: int, *rest: Any) -> Any:
            return (M, topk, K), (M, topk, N), (M, K)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def apply(self, output: Any, hidden_states: Any, **given: Any) -> None:
            rows, scales, ids = hidden_states.float(), given["a1q_scale"], given["topk_ids"]
            if scales is not None:
                rows = (rows.view(*scales.shape, -1) * scales[:, :, None]).view(rows.shape)
            # Where there is no row, it is anything.
            self.seen = given["expert_tokens_meta"].expert_num_tokens.tolist()
            local = given["expert_map"][ids.long()]
            factors = torch.where(local >= 0, (ids + 1) * given["topk_weights"], 0).sum(1)
            used = (local >= 0).any(1)
            output[used] = (rows[used] * factors[used].view(-1, 1)).to(output.dtype)

    Experts.__abstractmethods__ = frozenset()  # those by which vLLM chooses experts
    return Experts


def methods(release: str, of: str) -> set[str]:
    """The methods of a class of vLLM's worker, whose import takes 20 seconds."""
    source = (folder(release) / "vllm/v1/worker/gpu_worker.py").read_text()
    (found,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == of)
    return {node.name for node in ast.walk(found) if isinstance(node, ast.FunctionDef)}
