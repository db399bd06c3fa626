"""Small GPTModels, trained with Megatron's own optimizer, and their checkpoints."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rank_pool import RankContext
from trainer import Model, ModelCase, Results

# Relative difference allowed between losses of `Training`, by device, where sums come in another
# order: at most 3e-7 was seen on a CPU, and rows that come back one percent too large make 5e-5.
SAME = {"cpu": 2e-6, "cuda": 1e-5}


class Training(Model):
    """A GPTModel with Megatron's optimizer, Adam, always trained on the same batch."""

    def __init__(
        self,
        ctx: RankContext,
        dispatcher: str,
        case: ModelCase,
        seed: int = 0,
        distributed: bool = True,
    ) -> None:
        """Build everything.  Collective.

        `seed` is added to all weights.  If `distributed`, data-parallel ranks share the optimizer's
        state, and all overlaps are on.
        """
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self._seed = seed
        overlaps = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        super().__init__(ctx, dispatcher, case, **dict.fromkeys(overlaps, distributed))
        no_syncs = [chunk.no_sync for chunk in self.wrapped]
        self.config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.01,
                # Far above the roundings of gradients: Adam's first steps divide a gradient by its
                # own size.
                adam_eps=1e-4,
                params_dtype=case.dtype,
                bf16=case.dtype is torch.bfloat16,
                use_distributed_optimizer=distributed,
                overlap_param_gather=distributed,
            ),
            self.wrapped,
        )
        # No grad_scale_func: through it the config would lead to the optimizer, in a cycle through
        # autograd's nodes that Python cannot see, and no model would ever go.

    def _change(self, chunk: Any) -> None:
        super()._change(chunk)
        with torch.no_grad():  # a checkpoint that is loaded has to bring everything
            for parameter in chunk.parameters():
                parameter += self._seed

    def step(self) -> tuple[float, float]:
        """Two micro-batches and an update: mean loss of this rank, and the gradients' norm."""
        self.optimizer.zero_grad()
        losses = self.gradients(0)
        _, norm, _ = self.optimizer.step()
        return losses.mean().item(), float(norm)

    def state(self, is_loading: bool) -> dict[str, Any]:
        """The sharded state dict of model and optimizer."""
        from megatron.core import parallel_state

        metadata = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "distrib_optim_sharding_type": "dp_reshardable",  # Megatron's default
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        }
        state = {"model": self.chunks[0].sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
        return state

    def save(self, folder: Path, **how: Any) -> Any:
        """Write `state` into `folder`, which exists.  Collective."""
        from megatron.core import dist_checkpointing

        return dist_checkpointing.save(self.state(is_loading=False), str(folder), **how)

    def load(self, folder: Path) -> None:
        """Take weights and the optimizer's state from what `save` wrote to `folder`."""
        from megatron.core import dist_checkpointing

        for _ in range(2):  # the optimizer has a state from its first step on; steps are not stored
            self.step()
        state = dist_checkpointing.load(self.state(is_loading=True), str(folder))
        self.chunks[0].load_state_dict(state["model"])
        with torch.no_grad():  # Megatron's leaves it out for fp32 parameters
            self.optimizer.load_state_dict(state["optimizer"])

    def everything(self) -> Results:
        """Parameters, and this rank's shards of the optimizer's state, by place."""
        found: dict[str, Any] = {}
        for i, (chunk, wrapped) in enumerate(zip(self.chunks, self.wrapped, strict=True)):
            wrapped.start_param_sync(force_sync=True)
            found |= {f"{i} {name}": p for name, p in chunk.named_parameters()}
        for i, optimizer in enumerate(self.optimizer.chained_optimizers):
            for j, state in enumerate(optimizer.optimizer.state.values()):
                found |= {f"{i}.{j}.{key}": value for key, value in state.items()}
        return {k: v.detach().clone() for k, v in found.items() if isinstance(v, torch.Tensor)}


@contextmanager
def checkpoints_written(in_background: bool = False) -> Iterator[None]:
    """Let Megatron write checkpoints in a process of a pool.

    The pool's processes are daemons, which may not start others, as 0.16.1 does to write.  All
    releases keep what is being written in a queue, in a further process that takes longer to start
    than a test; where nothing is written in the background, a plain queue does.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    process: Any = multiprocessing.current_process()
    is_daemon, process._config["daemon"] = process.daemon, False
    assert filesystem_async._results_queue is None
    filesystem_async._results_queue = None if in_background else queue.Queue()
    try:
        yield
    finally:
        process._config["daemon"] = is_daemon
        filesystem_async._results_queue = None
