"""How the command ends when something goes wrong: one line, the rank, torchrun's summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ncclep.errors import InputError, PeerError, UnsupportedError
from megatron_ncclep.failures import run_told


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torchrun wants to read what went wrong."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", "3")
    return path


def raise_it(error: Exception) -> int:
    raise error


def test_own_errors_are_a_line_and_the_summary(error_file: Path, capfd) -> None:
    assert run_told("ncclep x", lambda: raise_it(PeerError("rank 1 has died"))) == 2
    assert capfd.readouterr().err == "ncclep x: rank 3: error: rank 1 has died\n"
    message = json.loads(error_file.read_text())["message"]
    assert message["extraInfo"]["py_callstack"] == "PeerError: rank 1 has died"


def test_other_errors_go_on_and_stand_in_the_summary(error_file: Path) -> None:
    with pytest.raises(KeyError):
        run_told("ncclep x", lambda: raise_it(KeyError("theirs")))
    text = json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"]
    assert text.startswith("Traceback")
    assert text.endswith("KeyError: 'theirs'\n")


def test_without_torchrun_there_is_no_rank_and_no_file(capfd, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert run_told("ncclep x", lambda: raise_it(InputError("wrong"))) == 2
    assert capfd.readouterr().err == "ncclep x: error: wrong\n"
    assert run_told("ncclep x", lambda: 5) == 5


def test_what_megatron_appends_reads_well() -> None:
    """See hooked_core.py for Megatron itself; nested builders append twice."""
    error = UnsupportedError("x=True: leave it out")
    for name in ("MoELayer", "TransformerLayer", "GPTModel"):
        error = type(error)(f"{error} when instantiating {name}")
    built = "MoELayer in TransformerLayer in GPTModel"
    assert str(error) == f"x=True: leave it out (while building {built})"
    assert str(InputError("stands when instantiating")) == "stands when instantiating"
