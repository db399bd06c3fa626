"""One job as plain data: made from the command line, read by every rank."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ncclep.errors import InputError
from megatron_ncclep.training import checkpoint, corpus, log
from megatron_ncclep.training.settings import Settings

DISPATCHERS = ("ncclep", "alltoall", "allgather")


@dataclass(frozen=True)
class Job:
    """Everything that `ncclep train` was asked to do.

    Attributes:
        model: name or path of the model file.
        changes: argument name -> value, laid over the model file.
        dispatcher: value of `moe_token_dispatcher_type`.
        options: options of the ncclep dispatcher that the command line named.
        compare: dispatcher of a second training to compare with; None: none.
        texts: files, folders or one .bin/.idx prefix; empty: the standard library's source.
        out: folder that everything is written to.
        resume, overwrite: what to do with a run that `out` holds already.
        ranks: processes of the job; all of them are data-parallel.
        expert_parallel: ranks among which the experts are divided.
        device: "cpu" or "cuda"; "auto" takes the GPUs when there are any.
        save_every: steps between checkpoints; the last step always writes one.
        exit_at_step: stop (with a checkpoint) after this step; None: after the last.
        print_every: steps between lines when stdout is not a terminal.
    """

    model: str
    changes: dict[str, Any]
    dispatcher: str
    options: dict[str, Any]
    compare: str | None
    texts: list[str]
    out: str
    resume: bool
    overwrite: bool
    ranks: int
    expert_parallel: int
    device: str
    save_every: int
    exit_at_step: int | None
    print_every: int

    def __post_init__(self) -> None:
        if self.options and self.dispatcher != "ncclep":
            option = "--ncclep-" + sorted(self.options)[0].replace("_", "-")
            raise InputError(
                f"{option} has no effect with --dispatcher {self.dispatcher}: leave it out, or "
                "use --dispatcher ncclep"
            )
        if self.compare == self.dispatcher:
            raise InputError(f"--compare {self.compare} is the same as --dispatcher")
        for name in ("ranks", "expert_parallel", "save_every", "print_every"):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise InputError(f"{option} {getattr(self, name)}: must be at least 1")
        if self.exit_at_step is not None and self.exit_at_step < 1:
            raise InputError(f"--exit-at-step {self.exit_at_step}: must be at least 1")
        if self.resume and self.overwrite:
            raise InputError("--resume and --overwrite contradict each other: give one of them")

    def settings(self) -> Settings:
        """The checked settings of the model and its training.

        Raises:
            InputError: something in the file or the changes is wrong, or does not fit the ranks.
        """
        settings = Settings.load(self.model, self.changes)
        settings.check_ranks(self.ranks, self.expert_parallel)
        return settings

    @property
    def data_folder(self) -> Path:
        """Where the corpus is kept."""
        return Path(self.out) / "data"

    def folder(self, dispatcher: str) -> Path:
        """Where the log and the checkpoint of the training with `dispatcher` go."""
        return Path(self.out) if dispatcher == self.dispatcher else Path(self.out) / dispatcher

    def dispatchers(self) -> list[str]:
        """The dispatchers to train with, in order."""
        return [self.dispatcher] if self.compare is None else [self.dispatcher, self.compare]

    def prepare(self) -> None:
        """Check everything that one process can check, make the corpus, and make `out` ready.

        Not collective: one process, before the others read `out`.

        Raises:
            InputError: wrong settings or text, or `out` holds a run and the job does not say what
                to do with it.
        """
        settings = self.settings()
        try:
            if not self.resume:
                self._make_room()
            prepared = corpus.prepare(self.texts, self.data_folder)
        except OSError as error:
            raise InputError(
                f"{error.filename or self.out}: {error.strerror}: --text must name what can be "
                "read, and --out a folder that can be written to"
            ) from error
        prepared.check_length(settings["seq-length"])
        if self.resume:
            if checkpoint.latest_step(self.folder(self.dispatcher) / "checkpoint") is None:
                raise InputError(
                    f"--resume: no checkpoint in {self.out}: leave --resume out to start there"
                )
            for dispatcher in self.dispatchers():
                checkpoint.check_settings(
                    self.folder(dispatcher) / "checkpoint",
                    settings.values,
                    prepared.fingerprint,
                    self.expert_parallel,
                )

    def _make_room(self) -> None:
        """Remove an earlier run's results from `out`, never anything else that lies there."""
        out = Path(self.out)
        folders = [out, *(out / dispatcher for dispatcher in DISPATCHERS)]
        results = [
            folder / name
            for folder in folders
            for name in (log.NAME, "checkpoint", "loss.png")
            if (folder / name).exists()
        ]
        if results and not self.overwrite:
            raise InputError(
                f"--out {self.out} holds a run already ({results[0].name}): give --resume to go "
                "on with it, --overwrite to replace it, or another --out"
            )
        for path in results:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def save(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
