"""How the command ends when something goes wrong: one line, the rank, torchrun's summary."""

from __future__ import annotations

import gc
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from fixtures import closed
from fork_server import ForkServer
from timeouts import patient

from megatron_ncclep import cli, envs
from megatron_ncclep.engines import AUTO, ENGINES
from megatron_ncclep.error_reporting import install_excepthook, run_reporting
from megatron_ncclep.errors import InputError, PeerError
from megatron_ncclep.libraries import extension

TIMEOUT_S = patient(60)


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torchrun wants to read what went wrong."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", "3")
    return path


def raise_it(error: Exception) -> int:
    raise error


def summary(error_file: Path) -> str:
    """What torchrun shows of it."""
    message = json.loads(error_file.read_text())["message"]
    return str(message["extraInfo"]["py_callstack"])


def test_errors_stand_in_the_summary(error_file: Path, capfd, monkeypatch) -> None:
    """Our own as one line; without torchrun there is no rank and no file."""
    assert run_reporting("ncclep x", lambda: raise_it(PeerError("rank 1 has died"))) == 2
    assert capfd.readouterr().err == "ncclep x: rank 3: error: rank 1 has died\n"
    assert summary(error_file) == "PeerError: rank 1 has died"
    with pytest.raises(KeyError):
        run_reporting("ncclep x", lambda: raise_it(KeyError("theirs")))
    assert summary(error_file).startswith("Traceback")
    assert summary(error_file).endswith("KeyError: 'theirs'\n")
    for name in ("RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name)
    assert run_reporting("ncclep x", lambda: raise_it(InputError("wrong"))) == 2
    assert capfd.readouterr().err == "ncclep x: error: wrong\n"
    assert run_reporting("ncclep x", lambda: 5) == 5


def test_own_errors_of_other_scripts_stand_in_the_summary(
    error_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that torchrun runs without our command: its summary had "error_file: <N/A>"."""
    theirs = mock.Mock()
    monkeypatch.setattr(sys, "excepthook", theirs)
    install_excepthook.__wrapped__()
    for error in (KeyError("theirs"), RuntimeError("theirs"), PeerError("rank 1 has died")):
        sys.excepthook(type(error), error, None)
        theirs.assert_called_with(type(error), error, None)
        assert error_file.exists() == isinstance(error, PeerError)
    assert summary(error_file) == "PeerError: rank 1 has died"


@pytest.mark.parametrize("full", [False, True])
def test_a_closed_or_full_stdout_is_no_traceback(full: bool) -> None:
    reading, out = os.pipe()
    os.close(reading)
    if full:
        out = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ncclep", "env"], stdout=out, stderr=subprocess.PIPE,
        text=True, timeout=TIMEOUT_S, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    os.close(out)
    told = "ncclep env: error: writing to stdout: No space left on device\n" if full else ""
    assert (done.returncode, done.stderr) == (2 if full else 128 + signal.SIGPIPE, told)


def test_variables_that_nothing_reads_are_warned_of_and_wrong_ones_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCLEP_AUTOLOD=0 was not noticed anywhere."""
    assert (AUTO, *ENGINES) == envs.ENGINES, "those that users may name"
    monkeypatch.setenv("NCCLEP_AUTOLOD", "0")
    monkeypatch.setenv("NCCLEP_TEST_PATIENCE", "1")
    assert cli.main(["env"]) == 0
    told = capsys.readouterr()
    assert "NCCLEP_ENGINE" in told.out
    assert told.err == (
        "ncclep env: warning: NCCLEP_AUTOLOD is not a variable that ncclep reads: did you mean "
        "NCCLEP_AUTOLOAD?\n"
    )
    for name, value in (("NCCLEP_ALIGNMENT", "7"), ("NCCLEP_ENGINE", "nativ")):
        monkeypatch.setenv(name, value)
        assert cli.main(["env"]) == 2
        assert re.fullmatch(rf"ncclep env: error: .*{name}.*\n", capsys.readouterr().err)


A_RANK_DIES = """
import os, signal, sys
import torch, torch.distributed as dist
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.error_reporting import install_excepthook

dist.init_process_group("gloo")
if "alone" in sys.argv:
    install_excepthook()  # as the first layer does
EpGroup.of(dist.group.WORLD).hosts.agree("plan", {}, None, 60.0)
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""


def run_script(script: str, how: str) -> int:
    """Be a rank of a script."""
    sys.argv = [script, how]
    if how == "ncclep run":
        return cli.main(["run", script, how])
    runpy.run_path(script, run_name="__main__")
    return 0


server = closed(lambda: ForkServer("test_command_failures"), "module")


@pytest.mark.parametrize("how", ["alone", "ncclep run"])
def test_a_dead_rank_is_named_where_a_collective_of_the_script_fails(
    server: ForkServer, tmp_path: Path, how: str
) -> None:
    """Most of a training's collectives are not ours.  When a rank is killed in one of them, gloo
    tells the others no more than "Connection closed by peer".
    """
    script = tmp_path / "script.py"
    script.write_text(A_RANK_DIES)
    job = ("test_command_failures:run_script", [str(script), how], 2, TIMEOUT_S)
    survivor, killed = server.run(*job)
    assert killed.exit_code == -signal.SIGKILL
    lines = survivor.output.splitlines()
    assert "in all_reduce" in survivor.output, survivor.output  # the script's own traceback
    # Without shared memory no rank learns what became of another.
    is_reported = extension.unavailable_reason() is None
    assert survivor.exit_code == (2 if how == "ncclep run" and is_reported else 1)
    if not is_reported:
        return
    name = "ncclep" if how == "alone" else how
    assert re.match(
        rf"(\[rank0\]: )?{name}: rank 0: error: rank 0 of 2 of an expert-parallel group: rank 1 "
        r"\(process \d+\) has died; look at the other ranks' output\. \S",
        lines[-1],
    ), survivor.output


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (RuntimeError, "rank 1 has died; look at the other ranks' output. It failed"),
        (InputError, "ncclep x: rank 3: error: It failed"),
    ],
)
def test_what_a_rank_s_error_held_is_never_freed(
    kind: type[Exception], said: str, error_file: Path, capfd, monkeypatch
) -> None:
    """Gloo's thread frees a collective's work otherwise, and aborts where the interpreter is
    ending: one run in 15 with a dead rank, and one with a damaged checkpoint, ended with SIGABRT
    after the right line.
    """
    monkeypatch.setattr("megatron_ncclep.error_reporting._lost_ranks", lambda: "rank 1 has died")
    held: list[weakref.ref[torch.Tensor]] = []

    def all_reduce() -> int:
        tensor = torch.ones(1)
        held.append(weakref.ref(tensor))
        raise kind("It failed")

    assert run_reporting("ncclep x", all_reduce) == 2
    assert said in capfd.readouterr().err
    gc.collect()
    assert held[0]() is not None
