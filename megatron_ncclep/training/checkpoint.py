"""Checkpoints in Megatron-Core's distributed format.

`megatron.core.dist_checkpointing` works on the CPU with gloo in every supported version, and
stores each expert under its global number: a run can resume with another dispatcher, another number
of ranks and another expert parallelism.  The exception is a change between one rank and several for
the experts: on several ranks Megatron has one optimizer for the experts and one for the rest, on
one rank a single one, and neither layout loads into the other.  Random states are not stored,
because the loop derives them from the seed and the step.

    OUT/checkpoint/step-000200/     .distcp files, written by all ranks, and settings.json
    OUT/checkpoint/unfinished/ the checkpoint being written
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ncclep.errors import InputError

if TYPE_CHECKING:  # it needs torch, and the command starts without it
    from megatron_ncclep.training.model import TrainedModel

# Settings that may differ between a checkpoint and the run that resumes from it.
CHANGEABLE = frozenset({"train-iters", "micro-batch-size", "eval-iters", "eval-interval"})


def _steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in `folder`, in order."""
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return sorted(int(name) for name in names if name.isdecimal())  # not copies of a user's


def latest_step(folder: Path) -> int:
    """The step of the newest complete checkpoint in `folder`, 0 if there is none."""
    return max(_steps(folder), default=0)


def _step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def check_settings(
    folder: Path, settings: dict[str, Any], fingerprint: str, expert_parallel: int
) -> None:
    """Check that the newest checkpoint in `folder` belongs to the same model, recipe and text.

    Raises:
        InputError: a value differs, or the checkpoint is damaged; the message names it.
    """
    step = latest_step(folder)
    if not step:
        return
    record = _step_folder(folder, step) / "settings.json"
    try:
        saved = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(record, error) from error
    for name in sorted(settings.keys() | saved["settings"].keys()):
        then, now = saved["settings"].get(name), settings.get(name)
        if then != now and name not in CHANGEABLE:
            raise InputError(
                f"--resume: {name} was {then} when {folder} was written and is now {now}: "
                "set it back, or start a new run with another --out"
            )
    if saved["fingerprint"] != fingerprint:
        raise InputError(
            f"--resume: the text has changed since {folder} was written: set --text back, "
            "or start a new run with another --out"
        )
    before = saved["expert_parallel"]
    if (before == 1) != (expert_parallel == 1):
        raise InputError(
            f"--resume: the experts were on {before} ranks when {folder} was "
            "written and are on "
            f"{expert_parallel} now: Megatron's optimizer state does not move between one rank and "
            f"several; choose --ranks or --expert-parallel accordingly"
        )


def _damaged(path: Path, error: BaseException) -> InputError:
    """The error for a checkpoint that cannot be read."""
    return InputError(
        f"--resume: {path} cannot be read, it is damaged or incomplete ({_last_line(error)}): put "
        "a copy of it back, or start again with --overwrite"
    )


def _last_line(error: BaseException) -> str:
    """The reason for an error; torch's CheckpointException holds a traceback of each rank."""
    return str(error).strip().rpartition("\n")[2] or type(error).__name__


def _state(model: TrainedModel, scheduler: Any, is_loading: bool) -> dict[str, Any]:
    """The sharded state dict."""
    from megatron.core import parallel_state

    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        # Optimizer state under plain parameter names, whatever the ranks' optimizers are.
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }
    state = {"model": model.gpt.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = model.optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=metadata
    )
    state["scheduler"] = scheduler.state_dict()
    return state


def save(folder: Path, step: int, model: TrainedModel, scheduler: Any, **belongs_to: Any) -> None:
    """Write the state after `step` steps and delete earlier ones.  Collective.

    After a crash, either the old checkpoint or the new one is the latest.

    Raises:
        InputError: it cannot be written; earlier ones are still there.
    """
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException  # no Exception

    unfinished = folder / "unfinished"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    try:
        dist_checkpointing.save(_state(model, scheduler, is_loading=False), str(unfinished))
    except (Exception, CheckpointException) as error:  # of any kind
        why = f"{unfinished} cannot be written ({_last_line(error)})"
        raise InputError(f"{why}: make room for it, and --resume") from error
    dist.barrier()
    if dist.get_rank() == 0:
        record = json.dumps({"step": step, **belongs_to}, indent=2)
        (unfinished / "settings.json").write_text(record + "\n", encoding="utf-8")
        before = _steps(folder)
        unfinished.rename(_step_folder(folder, step))
        for old in before:
            shutil.rmtree(_step_folder(folder, old))
    dist.barrier()


def load(folder: Path, model: TrainedModel, scheduler: Any) -> int:
    """Load the newest checkpoint of `folder`; return its step, 0 if there is none.  Collective.

    Raises:
        InputError: it cannot be read.
    """
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException  # no Exception

    step = latest_step(folder)
    if step:
        state, path = _state(model, scheduler, is_loading=True), _step_folder(folder, step)
        try:
            state = dist_checkpointing.load(state, str(path))
        except (Exception, CheckpointException) as error:  # of any kind: pickle's, Megatron's
            raise _damaged(path, error) from error
        model.gpt.load_state_dict(state["model"])
        model.optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    return step
