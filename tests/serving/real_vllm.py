"""vLLM's own modules on a CPU, unpacked by scripts/fetch_servers.sh, and a layer made of them."""

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


def unavailable_reason() -> str | None:
    missing = [r for r in RELEASES if not (folder(r) / "vllm").is_dir()]
    return (
        f"no vLLM {missing[0]}: run scripts/fetch_servers.sh with Python 3.12" if missing else None
    )


def load(release: str, group: Any = None) -> Any:
    """Let this process import that release, with our backend; returns the module of pairs.

    Its wheel is for GPUs and finds none: it is told that this is a CPU.
    """
    if str(folder(release)) not in sys.path:
        # Last, so that what this environment has comes first.
        sys.path += [str(folder(release)), str(Path(sys.prefix) / "servers")]
        from vllm import platforms
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = CpuPlatform()
        from vllm.engine import arg_utils

        arg_utils.get_kwargs(arg_utils.ParallelConfig)  # it keeps an option's choices
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


def methods(release: str, of: str) -> set[str]:
    """The methods of a class of vLLM's worker, whose import takes 20 seconds."""
    source = (folder(release) / "vllm/v1/worker/gpu_worker.py").read_text()
    (found,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == of)
    return {node.name for node in ast.walk(found) if isinstance(node, ast.FunctionDef)}
