"""The job on one rank: build the model, train it, validate it, write the results."""

from __future__ import annotations

import os
import platform
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import megatron_ncclep
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.errors import InputError
from megatron_ncclep.training import checkpoint, corpus, data, log, report
from megatron_ncclep.training.balance import BalanceMeter
from megatron_ncclep.training.job import Job
from megatron_ncclep.training.model import build, forward_step
from megatron_ncclep.training.quiet import remarks_hidden
from megatron_ncclep.training.settings import Settings


def run(job: Job, prepared: bool) -> None:
    """Train with each of the job's dispatchers and write the results.  Collective.

    Args:
        job: the same on every rank.
        prepared: the corpus and the folders are ready; otherwise rank 0 makes them so.
    """
    with remarks_hidden():
        device = _start(job)
        try:
            if not prepared:
                if dist.get_rank() == 0:
                    job.prepare()
                dist.barrier()
            for dispatcher in job.dispatchers():
                Training(job, dispatcher, device).run()
            if dist.get_rank() == 0:
                report.finish(job)
            dist.barrier()
            _close_expert_group()
        finally:
            dist.destroy_process_group()


def _close_expert_group() -> None:
    """Free what engines hold, while every rank is still here to do so.  Collective."""
    from megatron.core import parallel_state

    EpGroup.of(parallel_state.get_expert_model_parallel_group()).close()


def _start(job: Job) -> torch.device:
    """Join the process group, make this rank's device ready, and return it.  Collective."""
    use_gpu = job.device == "cuda" or (job.device == "auto" and torch.cuda.is_available())
    if use_gpu:
        local_rank = int(os.environ["LOCAL_RANK"])
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"rank {local_rank} of this machine has no GPU: {torch.cuda.device_count()} are "
                "visible; use fewer --ranks, or --device cpu"
            )
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    else:
        from megatron_ncclep import cpu

        cpu.enable()
        dist.init_process_group("gloo")
    if dist.get_world_size() != job.ranks:
        raise InputError(f"--ranks {job.ranks}, but torchrun started {dist.get_world_size()}")

    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=job.expert_parallel,
        create_gloo_process_groups=False,  # only the distributed optimizer needs them
    )
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")


def seed_step(seed: int, step: int) -> None:
    """Set all random states from `seed` and `step`.

    So a resumed run draws what the uninterrupted one would have drawn, on any number of ranks, and
    no random state needs to be stored.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed + step)
    model_parallel_cuda_manual_seed(seed + step)


class Training:
    """One training with one dispatcher; every method is collective over all ranks."""

    def __init__(self, job: Job, dispatcher: str, device: torch.device) -> None:
        self.job = job
        self.dispatcher = dispatcher
        self.device = device
        self.settings: Settings = job.settings()
        self.corpus = corpus.load(job.data_folder)
        self.folder = job.folder(dispatcher)
        self.options = EpConfig.resolve(**job.options) if dispatcher == "ncclep" else None
        self.num_ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self._build()

    def _build(self) -> None:
        """Make model, optimizer, schedule and data."""
        from megatron.core.transformer.moe.moe_layer import MoELayer

        if self.dispatcher == "ncclep":
            megatron_ncclep.install()
        settings = self.settings
        seed_step(settings["seed"], 0)
        config = settings.transformer_config(
            self.dispatcher, self.job.expert_parallel, self.options
        )
        built = build(settings, config, self.corpus.vocab_size, self.device)
        self.gpt, self.model, self.optimizer = built.gpt, built.model, built.optimizer
        self.balance = BalanceMeter(self.gpt)
        self.num_parameters = self._count_parameters(self.gpt)
        self.dispatcher_classes = sorted(
            {type(layer.token_dispatcher).__name__ for layer in _modules(self.gpt, MoELayer)}
        )
        self.scheduler = settings.scheduler(self.optimizer)
        batch = settings["global-batch-size"]
        self.train_data, self.valid_data = data.build_datasets(
            self.corpus,
            settings["seq-length"],
            batch * settings["train-iters"],
            batch * settings["eval-iters"],
            settings["seed"],
            self.job.data_folder / "cache",
        )

    def _count_parameters(self, model: torch.nn.Module) -> int:
        """Parameters of the whole model, every expert counted once."""
        experts = sum(p.numel() for p in model.parameters() if not getattr(p, "allreduce", True))
        every = sum(p.numel() for p in model.parameters())
        return every + experts * (self.job.expert_parallel - 1)

    def run(self) -> None:
        """Train from the start or the latest checkpoint to the end, and write the log."""
        settings, job = self.settings, self.job
        checkpoints = self.folder / "checkpoint"
        done = 0
        if job.resume:
            done = checkpoint.load(checkpoints, self.gpt, self.optimizer, self.scheduler)
        last = settings["train-iters"]
        stop = last if job.exit_at_step is None else min(last, job.exit_at_step)
        save = partial(
            checkpoint.save,
            checkpoints,
            model=self.gpt,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            settings=settings.values,
            fingerprint=self.corpus.fingerprint,
            expert_parallel=job.expert_parallel,
        )
        writer = log.LogWriter(self.folder, steps_to_keep=done) if self.rank == 0 else None
        if writer is not None:
            writer.write("settings", **self._effective_settings(resumed_from=done))
        with report.progress(self.dispatcher, done, last, job.print_every, self.rank) as show:
            for step in range(done + 1, stop + 1):
                entry = self._step(step)
                if writer is not None:
                    writer.write("step", **entry)
                show(entry)
                if step == stop or step % job.save_every == 0:
                    save(step)
        if stop == last:
            valid_loss = self._validate()
            if writer is not None:
                writer.write("end", valid_loss=valid_loss)

    def _effective_settings(self, resumed_from: int) -> dict[str, Any]:
        import megatron.core

        return {
            "dispatcher": self.dispatcher,
            "dispatcher_classes": self.dispatcher_classes,
            "options": vars(self.options) if self.options is not None else {},
            "resumed_from": resumed_from,
            "model": self.job.model,
            "settings": self.settings.values,
            "num_parameters": self.num_parameters,
            "ranks": self.num_ranks,
            "expert_parallel": self.job.expert_parallel,
            "device": str(self.device),
            "backend": dist.get_backend(),
            "threads": torch.get_num_threads(),
            "text": self.corpus.source,
            "vocab_size": self.corpus.vocab_size,
            "num_train_tokens": self.corpus.num_train_tokens,
            "unigram_entropy": self.corpus.unigram_entropy,
            "versions": {
                "megatron_ncclep": megatron_ncclep.__version__,
                "megatron_core": megatron.core.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    def _step(self, step: int) -> dict[str, Any]:
        """Do step number `step` (from 1) and return its log entry."""
        begin = time.perf_counter()
        settings = self.settings
        seed_step(settings["seed"], step)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        batch = settings["global-batch-size"]
        loss = self._forward_backward(self.train_data, (step - 1) * batch, forward_only=False)
        lr = self.optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=batch)
        balance = self.balance.take()
        tokens = batch * settings["seq-length"]
        return {
            "step": step,
            "loss": loss,
            "grad_norm": float(grad_norm),
            "lr": lr,
            "tokens_per_s": tokens / (time.perf_counter() - begin),
            "balance": balance,
        }

    def _validate(self) -> float:
        """Mean loss over `eval-iters` batches of the validation part."""
        self.model.eval()
        batch, count = self.settings["global-batch-size"], self.settings["eval-iters"]
        with torch.no_grad():
            losses = [
                self._forward_backward(self.valid_data, index * batch, forward_only=True)
                for index in range(count)
            ]
        self.model.train()
        return sum(losses) / count

    def _forward_backward(self, dataset: Any, first_sample: int, forward_only: bool) -> float:
        """Run the micro-batches of one step; return the mean loss over all ranks, in nats."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        settings = self.settings
        count = settings.num_microbatches(self.num_ranks)
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data.batches(
                dataset,
                first_sample,
                settings["micro-batch-size"],
                count,
                self.rank,
                self.num_ranks,
                self.device,
            ),
            model=[self.model],
            num_microbatches=count,
            seq_length=settings["seq-length"],
            micro_batch_size=settings["micro-batch-size"],
            forward_only=forward_only,
        )
        mean = torch.stack([entry["loss"] for entry in losses]).mean()
        dist.all_reduce(mean)
        return mean.item() / self.num_ranks


def _modules(model: torch.nn.Module, kind: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]
