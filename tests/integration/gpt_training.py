"""A small GPTModel with Megatron's DDP and optimizer, for tests over several ranks."""

from __future__ import annotations

import copy
import multiprocessing
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron_setup import EXPERTS, initialize, make_config, make_experts_differ

VOCABULARY, SEQUENCE, BATCH = 48, 12, 2


@dataclass(frozen=True)
class Layout:
    """Over how many ranks experts are divided, layers are cut, and experts are cut."""

    ep: int = 2
    tp: int = 1
    etp: int = 1


class Training:
    """A GPTModel in Megatron's DDP with its distributed optimizer, all overlaps on, or without."""

    def __init__(
        self,
        options: dict[str, Any],
        seed: int,
        dispatcher: str = "ncclep",
        layout: Layout = Layout(),
        distributed: bool = True,
        device: str = "cpu",
        **of_experts: Any,
    ) -> None:
        """Build everything; collective.

        Args:
            options: fields of TransformerConfig.
            seed: added to all weights.
            dispatcher: value of moe_token_dispatcher_type.
            layout: how the ranks share the model.
            distributed: the data-parallel ranks share the optimizer's state.
            device: "cpu" or "cuda".
            of_experts: options that only the experts are to see.
        """
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import gpt_layer_specs
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        initialize(layout.ep, layout.tp, device, layout.etp)
        config = make_config(
            dispatcher,
            torch.float32,
            layout.ep,
            layout.tp,
            expert_tensor_parallel_size=layout.etp,
            **options,
        )
        if device == "cpu":
            spec = gpt_layer_specs.get_gpt_layer_local_spec(EXPERTS, moe_grouped_gemm=False)
        else:  # torch's norms know no sequence parallelism
            spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
                num_experts=EXPERTS, moe_grouped_gemm=False
            )
        self.gpt = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
        ).to(device)
        self._device = device
        make_experts_differ(self.gpt)
        with torch.no_grad():  # a checkpoint that is loaded has to bring everything
            for parameter in self.gpt.parameters():
                parameter += seed
        self.experts = [layer.mlp.experts for layer in self.gpt.decoder.layers]
        for module in self.experts:  # options that the other layers would need a GPU for
            module.config = copy.copy(module.config)
            vars(module.config).update(of_experts)
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=distributed,
                overlap_grad_reduce=distributed,
                overlap_param_gather=distributed,
            ),
            self.gpt,
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self.model.no_sync
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.01,
                params_dtype=torch.float32,
                use_distributed_optimizer=distributed,
                overlap_param_gather=distributed,
            ),
            [self.model],
        )
        # No grad_scale_func, which is 1 here: through it the config would lead to the optimizer, in
        # a cycle through autograd's nodes that Python cannot see, and no model would ever go.

    def step(self) -> tuple[float, float]:
        """Two micro-batches and an update: mean loss of this rank, and the gradients' norm."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(self._device),
            model=[self.model],
            num_microbatches=2,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        return torch.stack([entry["loss"] for entry in losses]).mean().item(), float(norm)

    def state(self, is_loading: bool) -> dict[str, Any]:
        """The sharded state dict of model and optimizer."""
        from megatron.core import parallel_state

        metadata = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "distrib_optim_sharding_type": "dp_reshardable",  # Megatron's default
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        }
        state = {"model": self.gpt.sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
        return state

    def load(self, folder: Path) -> None:
        """Take weights and the optimizer's state from what `state` was saved to in `folder`."""
        from megatron.core import dist_checkpointing

        for _ in range(2):  # the optimizer has a state from its first step on; steps are not stored
            self.step()
        state = dist_checkpointing.load(self.state(is_loading=True), str(folder))
        self.gpt.load_state_dict(state["model"])
        with torch.no_grad():  # Megatron's leaves it out for fp32 parameters
            self.optimizer.load_state_dict(state["optimizer"])

    def everything(self) -> dict[str, torch.Tensor]:
        """Parameters, and this rank's shards of the optimizer's state, by place."""
        self.model.start_param_sync(force_sync=True)
        found = {name: p.detach().clone() for name, p in self.gpt.named_parameters()}
        for i, optimizer in enumerate(self.optimizer.chained_optimizers):
            for j, state in enumerate(optimizer.optimizer.state.values()):
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        found[f"{i}.{j}.{key}"] = value.detach().clone()
        return found


@contextmanager
def checkpoints_written() -> Iterator[None]:
    """Let Megatron write checkpoints in a process of a pool.

    The pool's processes are daemons, which may not start others, as 0.16.1 does to write.  For what
    has been written all releases have a queue that lives in a further process, which takes longer
    to start than a test takes; nothing is written in the background here, so that a plain one does.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    process: Any = multiprocessing.current_process()
    is_daemon, process._config["daemon"] = process.daemon, False
    assert filesystem_async._results_queue is None
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        process._config["daemon"] = is_daemon
        filesystem_async._results_queue = None


def batches(device: str) -> Any:
    """The same in every step, so that the loss goes down."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    while True:
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        yield tokens.to(device)


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device).triu(1)
    losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())

    def mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return output.mean(), {"loss": output.detach().mean()}

    return losses, mean
