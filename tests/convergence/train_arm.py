"""One arm of the protocol on one rank: train it, validate it, and write down what came out."""

from __future__ import annotations

import faulthandler
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from arms import CONTROL, MISTAKES, SIZES, Arm

from megatron_ncclep.benchmark import result
from megatron_ncclep.benchmark.job import known_variant
from megatron_ncclep.benchmark.layer_model import initialize
from megatron_ncclep.benchmark.ranks import DeviceMemory, Ranks
from megatron_ncclep.benchmark.shapes import TrainingShape
from megatron_ncclep.benchmark.training import curve_problem, layer_parts
from megatron_ncclep.benchmark.training_model import SubjectModel, TrainingText, load_text
from megatron_ncclep.logs import remarks_hidden
from megatron_ncclep.ranks.pool import RankContext
from megatron_ncclep.training import corpus, data
from megatron_ncclep.training.settings import Settings

# In the folder for what need not be kept: how the controls begin.
STARTS = "starts"
# Static mode has room for all that can come.
MAX_RECV_ROWS = "worst"
# Steps between two lines of the log: the losses stay on the device until then, so that no step
# waits for one of them.
STEPS_A_LINE = 50
# Tenths of the steps after which all are validated: the second half, when what is learnt shows.
VALIDATED_TENTHS = range(5, 11)
# Of the validation text's order, whatever the training's seed: all answer the same questions.
VALIDATION_SEED = 0


@dataclass(frozen=True)
class Run:
    """One training: an arm with a seed, and where its results go.

    Attributes:
        size: name of one of `SIZES`.
        arm: name of one of its arms.
        seed: of the weights and of the text's order.
        log: file that lines are appended to.
        work: folder for what need not be kept.
        lane: of the ranks that run it; several lanes share `work`.
        timeout_s: seconds that a rank waits for the others.
    """

    size: str
    arm: str
    seed: int
    log: str
    work: str
    lane: int
    timeout_s: float = 60.0

    def settings(self, num_ranks: int) -> Settings:
        """The checked settings of the model."""
        size = SIZES[self.size]
        shape = TrainingShape(size.name, str(size.model), {"seed": self.seed})
        return shape.settings(num_ranks)

    def write(self, kind: str, **values: Any) -> None:
        """Append one line to the log."""
        line = {"arm": self.arm, "seed": self.seed, "type": kind, **values}
        with open(self.log, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")


def train_arm(context: RankContext, run: Run) -> None:
    """Train one arm from the start to the end.  Collective; rank 0 writes the log."""
    ranks = Ranks(context, run.timeout_s, run.arm)
    try:
        with remarks_hidden():
            _Training(ranks, run).run()
        ranks.close()
    finally:
        gc.unfreeze()
        faulthandler.cancel_dump_traceback_later()


class _ScheduledModel(SubjectModel):
    """The model of a subject of the benchmark, with a learning rate that rises and falls."""

    def __init__(self, arm: Arm, settings: Settings, ranks: Ranks, text: TrainingText) -> None:
        choice = known_variant(f"train:{arm.subject}")
        super().__init__(choice, settings, ranks.setting, text, MAX_RECV_ROWS)
        self._scheduler = self.scheduler()
        if arm.mistake is not None:
            for module in self.gpt.modules():
                if hasattr(module, "token_dispatcher"):
                    MISTAKES[arm.mistake](module.token_dispatcher)

    def _update(self) -> None:
        super()._update()
        self._scheduler.step(increment=self.settings["global-batch-size"])

    def steps(self, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Train `count` steps; yield the loss on this rank and the gradient norm, on the device."""
        for _ in range(count):
            self.step()
            yield self._loss, torch.as_tensor(self._grad_norm, device=self._loss.device)

    def close(self, engines: bool = True) -> None:
        """See SubjectModel; the schedule holds the optimizer."""
        del self._scheduler
        super().close(engines)


class _Training:
    """The state of `train_arm`."""

    def __init__(self, ranks: Ranks, run: Run) -> None:
        self._ranks, self._run = ranks, run
        self._arm = SIZES[run.size].arm(run.arm)
        self._settings = run.settings(ranks.num_ranks)
        self._begin = time.monotonic()

    def run(self) -> None:
        """See `train_arm`."""
        ranks, settings, steps = self._ranks, self._settings, self._settings["train-iters"]
        ranks.step(self._arm.name)
        initialize(ranks.setting)
        folder = Path(self._run.work) / f"lane-{self._run.lane}"
        text = load_text(settings, ranks, folder, steps)
        validation = self._validation(folder)
        ranks.deadline()
        memory = DeviceMemory(ranks.on_gpu)
        model = _ScheduledModel(self._arm, settings, ranks, text)
        self._write_settings(model, text)
        start = model.first_steps(0, ranks.deadline)
        if self._arm.name == CONTROL:
            self._start_path().parent.mkdir(parents=True, exist_ok=True)
            # Whole, or not at all: others may be reading.
            unfinished = self._start_path().with_suffix(".unfinished")
            torch.save(start, unfinished)
            unfinished.rename(self._start_path())
        validated = {steps * tenth // 10 for tenth in VALIDATED_TENTHS}
        last = round(self._arm.part * steps)
        # What lies there by now stays: a step need not wait until all of it was looked through.
        gc.collect()
        gc.freeze()
        pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        clock = time.perf_counter()
        for step, values in enumerate(model.steps(last), start=1):
            pending.append(values)
            if step % STEPS_A_LINE == 0 or step in validated or step == last:
                means, norms = self._means(pending)
                self._write(
                    "steps", first=step - len(means) + 1, loss=means, grad_norm=norms,
                    seconds=time.perf_counter() - clock,
                )  # fmt: skip
                ranks.deadline()
                if step in validated:
                    (loss,) = self._mean_over_ranks(
                        model.validate(validation).double().mean()[None]
                    )
                    self._write("valid", step=step, loss=loss)
                pending, clock = [], time.perf_counter()
        growth = ranks.largest(memory.growth())
        self._compare_start(start)
        dropped = ranks.gather(model.num_dropped)
        model.close()
        self._write(
            "end", memory=growth, dropped=sum(dropped),
            seconds=time.monotonic() - self._begin,
        )  # fmt: skip

    def _validation(self, folder: Path) -> list[data.Batch]:
        """The validation micro-batches of this rank, the same for every arm and seed."""
        ranks, settings = self._ranks, self._settings
        count, device = settings["eval-iters"], torch.device(ranks.setting.device)
        _, dataset = data.build_datasets(folder, settings, 1, count, VALIDATION_SEED)
        return [
            part
            for step in range(count)
            for part in data.batches(dataset, settings, step, ranks.rank, ranks.num_ranks, device)
        ]

    def _write(self, kind: str, **values: Any) -> None:
        if self._ranks.rank == 0:
            self._run.write(kind, **values)

    def _write_settings(self, model: SubjectModel, text: TrainingText) -> None:
        device = self._ranks.setting.device
        every = self._ranks.gather(model.num_parameters)
        found = corpus.load(Path(self._run.work) / f"lane-{self._run.lane}")
        if self._ranks.rank == 0:
            self._run.write(
                "settings",
                subject=self._arm.subject,
                settings=self._settings.values,
                ranks=self._ranks.num_ranks,
                lane=self._run.lane,
                parameters_of_ranks=every,
                text=text.source,
                text_tokens=found.num_train_tokens,
                entropy=found.unigram_entropy,
                machine=result.machine(device, self._ranks.num_ranks),
                versions=result.versions(device),
                build_s=time.monotonic() - self._begin,
            )

    def _means(
        self, values: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[list[float], list[float]]:
        """Losses of steps, the mean over the ranks, and gradient norms, which ranks agree on."""
        losses, norms = zip(*values, strict=True)
        return self._mean_over_ranks(torch.stack(losses)), torch.stack(norms).flatten().tolist()

    def _mean_over_ranks(self, values: torch.Tensor) -> list[float]:
        total = values.double()
        dist.all_reduce(total, group=self._ranks.group)
        found: list[float] = (total / self._ranks.num_ranks).tolist()
        return found

    def _start_path(self) -> Path:
        name = f"seed-{self._run.seed}-rank-{self._ranks.rank}.pt"
        return Path(self._run.work) / STARTS / name

    def _compare_start(self, start: Any) -> None:
        """Write down how the first MoE layer compares with the control's, before the first step."""
        part, problem = None, "the control of this seed has not begun"
        if self._start_path().is_file():
            control = torch.load(self._start_path(), weights_only=False)
            part = max(layer_parts(start, control).values())
            problem = curve_problem(start, control, self._settings["moe-router-topk"]) or ""
        every = self._ranks.gather((part, problem))
        parts = [part for part, _ in every if part is not None]
        problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(every) if text]
        self._write(
            "start",
            layer_apart=max(parts) if len(parts) == len(every) else None,
            problem="; ".join(problems) or None,
        )
