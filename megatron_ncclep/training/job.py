"""One training as plain data, made from the command line, and the steps that one process does."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ncclep import envs
from megatron_ncclep.cli import folder_lock
from megatron_ncclep.config import EpConfig, given_options
from megatron_ncclep.errors import InputError
from megatron_ncclep.training import checkpoint, corpus, log
from megatron_ncclep.training.settings import Settings, parse_changes

DISPATCHERS = ("ncclep", "alltoall", "allgather")
DEFAULT_RANKS = 2


@dataclass(frozen=True)
class Job:
    """The task of `ncclep train`: its options (see command.py), and these.

    Attributes:
        changes: argument name -> value, overriding the model file: --set, --steps and --seed.
        options: options of the ncclep dispatcher from the command line.
        is_prepared: the command that has started this rank has done that, and holds the lock.
    """

    model: str
    changes: dict[str, Any]
    dispatcher: str
    options: dict[str, Any]
    compare: str | None
    text: list[str]
    out: str
    resume: bool
    overwrite: bool
    ranks: int
    expert_parallel: int
    device: str
    save_every: int
    exit_at_step: int | None
    print_every: int
    is_prepared: bool

    @classmethod
    def of(cls, args: argparse.Namespace, world_size: int | None) -> Job:
        """Turn the parsed arguments into a Job.

        Args:
            args: those of `ncclep train`.
            world_size: the number of ranks that torchrun has started; None outside torchrun.

        Raises:
            InputError: an argument is wrong or contradicts another.
        """
        ranks = args.ranks if args.ranks is not None else world_size or DEFAULT_RANKS
        changes = parse_changes(args.set)
        for name, value in (("train-iters", args.steps), ("seed", args.seed)):
            if value is not None:
                if name in changes:
                    raise InputError(f"--set {name} and its own option contradict each other")
                changes[name] = value
        given = vars(args) | {
            "changes": changes,
            "options": given_options(args),
            "ranks": ranks,
            "expert_parallel": args.expert_parallel if args.expert_parallel is not None else ranks,
        }
        return cls(**{field.name: given[field.name] for field in dataclasses.fields(cls)})

    def __post_init__(self) -> None:
        if self.options and self.dispatcher != "ncclep":
            option = "--ncclep-" + sorted(self.options)[0].replace("_", "-")
            raise InputError(
                f"{option} has no effect with --dispatcher {self.dispatcher}: leave it out, or "
                "use --dispatcher ncclep"
            )
        if (replaced := envs.get("NCCLEP_IN_PLACE_OF")) in self.dispatchers():
            raise InputError(
                f"NCCLEP_IN_PLACE_OF={replaced} puts ncclep in the place of {replaced}, which was "
                "asked for: unset it"
            )
        if self.compare == self.dispatcher:
            raise InputError(f"--compare {self.compare} is the same as --dispatcher")
        for name in ("ranks", "expert_parallel", "save_every", "exit_at_step", "print_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if not self.out:
            raise InputError("--out is empty: name a folder, such as runs/train")
        if self.resume and self.overwrite:
            raise InputError("--resume and --overwrite contradict each other: give one of them")

    def settings(self) -> Settings:
        """The checked settings of the model and its training.

        Raises:
            InputError: the file or the changes are wrong, or do not fit the number of ranks.
        """
        settings = Settings.load(self.model, self.changes)
        settings.check_ranks(self.ranks, self.expert_parallel)
        return settings

    @property
    def data_folder(self) -> Path:
        """The folder of the corpus."""
        return Path(self.out) / "data"

    def dispatchers(self) -> list[str]:
        """The dispatchers to train with, in order."""
        return [self.dispatcher] if self.compare is None else [self.dispatcher, self.compare]

    def _folder(self, dispatcher: str) -> Path:
        return Path(self.out) if dispatcher == self.dispatcher else Path(self.out) / dispatcher

    def log_path(self, dispatcher: str) -> Path:
        """The log of the training with `dispatcher`."""
        return self._folder(dispatcher) / log.NAME

    def checkpoints(self, dispatcher: str) -> Path:
        """The folder of the checkpoints of the training with `dispatcher`."""
        return self._folder(dispatcher) / "checkpoint"

    @contextmanager
    def prepared(self) -> Iterator[int]:
        """Check everything that one process can check, make the corpus, and prepare `out`.

        Not collective: one process calls it before the others read `out`.  Until the end of the
        `with`, no other run writes there.

        Yields:
            The lock's file, for the processes that train.

        Raises:
            InputError: wrong settings or text, `out` holds a run and the job does not say what to
                do with it, or another run is writing there.
        """
        settings = self.settings()
        if "ncclep" in self.dispatchers():
            EpConfig.resolve(**self.options)
        with folder_lock.held(Path(self.out)) as lock:
            self._prepare(settings)
            yield lock

    def _prepare(self, settings: Settings) -> None:
        try:
            earlier = [] if self.resume else self._earlier_results()
            prepared = corpus.prepare(self.text, self.data_folder)
            prepared.check_length(settings["seq-length"])
            for path in earlier:  # not before everything else is right
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            # A write to a full disk names no file.
            path, out = Path(error.filename or self.out), Path(self.out)
            is_text = path != out and out not in path.parents and path not in out.parents
            remedy = "--text must name readable files"
            if not is_text:
                remedy = "make room for --out, or give another folder that can be written"
            raise InputError(f"{path}: {error.strerror}: {remedy}") from error
        if self.resume:
            if not checkpoint.latest_step(self.checkpoints(self.dispatcher)):
                raise InputError(
                    f"--resume: no checkpoint in {self.out}: leave --resume out to start a run "
                    "there, and add --overwrite if there is already a log"
                )
            for dispatcher in self.dispatchers():
                checkpoint.check_settings(
                    self.checkpoints(dispatcher),
                    settings.values,
                    prepared.fingerprint,
                    self.expert_parallel,
                )

    def _earlier_results(self) -> list[Path]:
        """The results of an earlier run in `out`, which may be replaced."""
        out = Path(self.out)
        folders = [out, *(out / dispatcher for dispatcher in DISPATCHERS)]
        results = [
            folder / name
            for folder in folders
            for name in (log.NAME, "checkpoint", "loss.png")
            if (folder / name).exists()
        ]
        if results and not self.overwrite:
            saved = any(checkpoint.latest_step(folder / "checkpoint") for folder in folders)
            go_on = "--resume to continue it, " if saved else ""
            raise InputError(
                f"--out {self.out} already holds a run ({results[0].name}): give {go_on}"
                "--overwrite to replace it, or another --out"
            )
        return results
