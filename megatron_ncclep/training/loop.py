"""The job on one rank: build the model, train it, validate it, write the results."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

import megatron_ncclep
from megatron_ncclep import metrics
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import InputError
from megatron_ncclep.logs import remarks_hidden
from megatron_ncclep.ranks import topology
from megatron_ncclep.training import checkpoint, corpus, data, log, report
from megatron_ncclep.training.job import Job
from megatron_ncclep.training.model import TrainedModel, seed_everything, transformer_config


def run(job: Job) -> None:
    """Train with each of the job's dispatchers and write the results.  Collective.

    `job` is the same on every rank; rank 0 prepares it, unless that was done.
    """
    interruption = Interruption()
    with remarks_hidden():
        device = _start(job)
        try:
            prepares = dist.get_rank() == 0 and not job.is_prepared
            with job.prepared() if prepares else contextlib.nullcontext():
                dist.barrier()
                done = all(
                    Training(job, name, device, interruption).run() for name in job.dispatchers()
                )
                if done and dist.get_rank() == 0:
                    report.finish(job)
            # Held until the group is destroyed: up to torch 2.7 a thread of gloo that frees a
            # collective needs Python's lock, which this thread keeps while it destroys the group
            # and waits for that one.
            barrier = dist.barrier(async_op=True)
            barrier.wait()
            megatron_ncclep.close()  # while all ranks are still running
        finally:
            dist.destroy_process_group()


class Interruption:
    """Ctrl-C, which ends a training after its current step, not at once.

    Attributes:
        came: whether this process has received it.
    """

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGINT, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def _note(self, number: int, frame: Any) -> None:
        self.came = True

    def came_to_any(self, device: torch.device) -> bool:
        """Whether any rank has received it, so that all stop after the same step.  Collective."""
        came = torch.tensor([float(self.came)], device=device)
        dist.all_reduce(came)
        return came.item() > 0


def _start(job: Job) -> torch.device:
    """Join the process group, and set up and return this rank's device.  Collective."""
    use_gpu = job.device == "cuda" or (job.device == "auto" and torch.cuda.is_available())
    if use_gpu:
        gpu = topology.use_gpu(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", gpu))
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


class Training:
    """One training with one dispatcher; every method is collective over all ranks."""

    def __init__(
        self, job: Job, dispatcher: str, device: torch.device, interruption: Interruption
    ) -> None:
        self._interruption = interruption
        self.job, self.dispatcher, self.device = job, dispatcher, device
        self.settings = settings = job.settings()
        self.corpus = corpus.load(job.data_folder)
        self.options = EpConfig.resolve(**job.options) if dispatcher == "ncclep" else None
        self.num_ranks, self.rank = dist.get_world_size(), dist.get_rank()
        if dispatcher == "ncclep":
            megatron_ncclep.install()
        self._seed(0)
        config = transformer_config(settings, dispatcher, job.expert_parallel, self.options)
        self.model = TrainedModel(settings, config, self.corpus.vocab_size, device)
        self._dropped_in_evaluations = 0  # on this rank
        self.scheduler = self.model.scheduler()
        self.train_data, self.valid_data = data.build_datasets(
            job.data_folder,
            settings,
            settings["train-iters"],
            settings["eval-iters"],
            settings["seed"],
        )

    def _seed(self, step: int) -> None:
        """Set all random states from the seed and the step.

        So a resumed run draws the same numbers as an uninterrupted one, on any number of ranks, and
        no random state needs to be stored.
        """
        seed_everything(self.settings["seed"] + step)

    def run(self) -> bool:
        """Train from the start or the latest checkpoint to the end, and write the log.

        Returns:
            False if Ctrl-C has ended it early; the checkpoint is that of its last step.
        """
        settings, job = self.settings, self.job
        checkpoints, last = job.checkpoints(self.dispatcher), settings["train-iters"]
        done = checkpoint.load(checkpoints, self.model, self.scheduler) if job.resume else 0
        interval = settings.values.get("eval-interval", last)
        stop = last if job.exit_at_step is None else min(last, job.exit_at_step)
        if self.rank == 0:
            log.truncate(job.log_path(self.dispatcher), steps_to_keep=done)
        self._write("settings", **self._effective_settings(), resumed_from=done)
        for step in range(done + 1, stop + 1):
            entry = self._step(step)
            self._write("step", **entry)
            if self.rank == 0 and (step in (done + 1, last) or step % job.print_every == 0):
                print(self._line(entry), flush=True)
            if step % interval == 0 and step != last:  # the last one is part of the end
                self._write("validation", step=step, valid_loss=self._validate())
            interrupted = self._interruption.came_to_any(self.device)
            if step == stop or step % job.save_every == 0 or interrupted:
                checkpoint.save(
                    checkpoints,
                    step,
                    self.model,
                    self.scheduler,
                    settings=settings.values,
                    fingerprint=self.corpus.fingerprint,
                    expert_parallel=job.expert_parallel,
                )
            if interrupted:
                if self.rank == 0:
                    print(f"stopped and saved after step {step}: --resume continues from there")
                return False
        if stop == last:
            dropped = self._dropped(last - done)
            self._write("end", valid_loss=self._validate(), **dropped)
        return True

    def _layers(self) -> list[Any]:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        return [layer for layer in self.model.gpt.modules() if isinstance(layer, MoELayer)]

    def _dropped(self, steps: int) -> dict[str, float]:
        """For the log: the share of dropped assignments in this many steps, if there are any.

        Evaluations do not count.
        """
        if not steps:
            return {}
        mine = float(self._num_dropped() - self._dropped_in_evaluations)
        total = torch.tensor(mine, device=self.device)
        dist.all_reduce(total)
        tokens = steps * self.settings["global-batch-size"] * self.settings["seq-length"]
        assignments = tokens * len(self._layers()) * self.model.gpt.config.moe_router_topk
        return {"dropped_share": total.item() / assignments} if total.item() else {}

    def _num_dropped(self) -> int:
        """Assignments dropped so far on this rank, in evaluations too; waits for the device."""
        counts = [getattr(layer.token_dispatcher, "num_dropped", None) for layer in self._layers()]
        return sum(int(count) for count in counts if count is not None)

    def _write(self, kind: str, **values: Any) -> None:
        if self.rank == 0:
            log.write(self.job.log_path(self.dispatcher), kind, **values)

    def _line(self, entry: dict[str, Any]) -> str:
        return (
            f"{self.dispatcher}: step {entry['step']}/{self.settings['train-iters']}  "
            f"loss {entry['loss']:.4f}  {entry['tokens_per_s']:,.0f} tokens/s  "
            f"grad norm {entry['grad_norm']:.3f}  lr {entry['lr']:.2e}"
        )

    def _effective_settings(self) -> dict[str, Any]:
        import megatron.core

        dispatchers = [layer.token_dispatcher for layer in self._layers()]
        return {
            "dispatcher": self.dispatcher,
            "dispatcher_classes": sorted({type(each).__name__ for each in dispatchers}),
            "engine": dispatchers[0].engine.caps.name if self.options else None,
            "options": vars(self.options) if self.options is not None else {},
            "model": self.job.model,
            "settings": self.settings.values,
            "ranks": self.num_ranks,
            "expert_parallel": self.job.expert_parallel,
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            **dataclasses.asdict(self.corpus),
            "versions": {
                "megatron_ncclep": megatron_ncclep.__version__,
                "megatron_core": megatron.core.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    def _step(self, step: int) -> dict[str, Any]:
        """Do step `step` (from 1) and return its log entry."""
        begin = time.perf_counter()
        settings, model = self.settings, self.model
        batch = settings["global-batch-size"]
        self._seed(step)
        model.zero()
        loss = self._mean(model.forward_backward(self._batches(self.train_data, step - 1)))
        lr = model.optimizer.param_groups[0]["lr"]
        grad_norm = model.update()
        self.scheduler.step(increment=batch)
        measured = {}
        if self.options is not None and self.options.metrics_interval:
            measured["metrics"] = [interval.as_dict() for interval in metrics.after_step()]
        return {
            "step": step,
            "loss": loss,
            "grad_norm": float(grad_norm),
            "lr": lr,
            "tokens_per_s": batch * settings["seq-length"] / (time.perf_counter() - begin),
            **measured,
        }

    def _validate(self) -> float:
        """Mean loss over `eval-iters` batches of the validation part."""
        count, before = self.settings["eval-iters"], self._num_dropped()
        every = (self._batches(self.valid_data, index) for index in range(count))
        loss = sum(self._mean(self.model.validate(batches)) for batches in every) / count
        self._dropped_in_evaluations += self._num_dropped() - before
        return loss

    def _batches(self, dataset: Any, step: int) -> list[data.Batch]:
        return data.batches(dataset, self.settings, step, self.rank, self.num_ranks, self.device)

    def _mean(self, losses: torch.Tensor) -> float:
        """The mean of the micro-batches' losses over all ranks, in nats."""
        mean = losses.mean()
        dist.all_reduce(mean)
        return mean.item() / self.num_ranks
