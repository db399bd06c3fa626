"""SGLang's own modules on a CPU, as scripts/fetch_servers.sh unpacks them."""

from __future__ import annotations

import ast
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import tomllib
import torch

RELEASE = "0.5.23"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
GROUP = "sglang.srt.plugins"
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256,
    "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 64,
    "moe_intermediate_size": 64, "vocab_size": 1000, "max_position_embeddings": 2048,
    "mlp_only_layers": [], "decoder_sparse_step": 1, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def folder() -> Path:
    return Path(sys.prefix) / "sglang" / RELEASE


def unavailable_reason() -> str | None:
    if not (folder() / "sglang").is_dir():
        return f"no SGLang {RELEASE}: run scripts/fetch_servers.sh with Python 3.12"
    if torch.version.cuda is None:
        return "SGLang imports torchvision, whose wheel needs a torch that is built with CUDA"
    return None


def load() -> None:
    """Let this process import it, and let it load its plugins: ours, from pyproject.toml."""
    if str(folder()) not in sys.path:
        # Last, so that what this environment has comes first.
        sys.path += [str(folder()), str(Path(sys.prefix) / "servers")]
    from sglang.srt import plugins

    declared = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][GROUP]
    points = [EntryPoint(name, value, GROUP) for name, value in declared.items()]
    with mock.patch.object(plugins, "entry_points", lambda group: points if group == GROUP else []):
        plugins.load_plugins()


def prepare() -> None:
    """Import what the tests use of it, for ranks that are forks of this process."""
    load()
    for name in ("layers.moe.fused_moe_triton.layer", "models.qwen3_moe", "server_args"):
        importlib.import_module(f"sglang.srt.{name}")


def publish(rank: int, command: str) -> Any:
    """Let SGLang resolve, check and publish its arguments for a small model; returns its config.

    Two ranks, on a CPU, in fp32.
    """
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.server_args import prepare_server_args

    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        own = ["--model-path", model, "--device", "cpu", "--dtype", "float32"]
        args = prepare_server_args([*own, "--skip-tokenizer-init", *command.split()])
        args.resolve_once()
        args.check_server_args()
        placed = runtime_context.SpawnRanks(world_rank=rank, gpu_id=0)
        runtime_context.publish(args, role="scheduler", ranks=placed)
        initialize_moe_config()
        return model_config_of(args).hf_config


@contextmanager
def running(group: Any, rank: int, backend: str = "ncclep") -> Iterator[None]:
    """In a model of data-parallel attention over the ranks of `group`."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    size = 2
    ranks = SimpleNamespace(device_group=group, world_size=size)
    moe = runtime_context.get_flags().moe
    moe.a2a_backend = MoeA2ABackend(backend)
    with runtime_context.get_parallel().override(
        moe_ep_group=ranks, tp_group=ranks, moe_ep_size=size, moe_ep_rank=rank, tp_size=size,
        moe_tp_group=ranks, dwdp_size=1,
    ):  # fmt: skip
        yield


def methods(of: str) -> set[str]:
    """The methods of a class of SGLang's scheduler, whose import needs a GPU's packages."""
    source = (folder() / "sglang/srt/managers/scheduler.py").read_text()
    (found,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == of)
    return {node.name for node in ast.walk(found) if isinstance(node, ast.FunctionDef)}
