"""The limits of the options: an error in words, wherever the value comes from."""

from __future__ import annotations

import argparse
import dataclasses
import math
from datetime import timedelta
from typing import Any

import pytest

from megatron_ncclep.config import (
    MAX_COUNT,
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    EpConfig,
    add_option_arguments,
    given_options,
)
from megatron_ncclep.errors import InputError


@pytest.mark.parametrize(
    "field",
    ["max_recv_rows", "max_tokens_per_rank", "num_sms", "timeout_s", "metrics_interval"],
)
def test_a_switch_is_no_number(field: str) -> None:
    """`ncclep_max_recv_rows: yes` in a file of options meant one row."""
    with pytest.raises(InputError, match=f"{field} True: must be a (whole )?number"):
        EpConfig(**{field: True})


@pytest.mark.parametrize("name", ["timeout_s", "first_timeout_s"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0, -1.0, 9e-4, 1.1e9, "60"])
def test_deadlines_that_are_none(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """timeout_s=inf once meant no deadline, and ended in an OverflowError of the first wait."""
    words = rf"{name} .*: must be a number of seconds from 0\.001"
    with pytest.raises(InputError, match=words):
        EpConfig(**{name: value})
    if not isinstance(value, str):
        monkeypatch.setenv(f"NCCLEP_{name.upper()}", str(value))
        with pytest.raises(InputError, match=words):
            EpConfig.resolve()


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({}, 600.0),
        ({"timeout_s": 5}, 5),
        ({"timeout_s": 90.0}, 90.0),
        ({"timeout_s": 1e4}, 1e4),
        ({"timeout_s": 5, "first_timeout_s": 7.5}, 7.5),
        ({"first_timeout_s": 60}, 60),
    ],
)
def test_the_deadline_of_the_first_step(given: dict[str, float], first: float) -> None:
    """One that is asked for holds from the first call on, unless another is asked for too."""
    assert EpConfig(**given).first_deadline_s == first


def test_a_first_step_is_not_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLEP_FIRST_TIMEOUT_S", "59.5")
    with pytest.raises(InputError, match=r"first_timeout_s 59\.5: must be at least timeout_s, 60:"):
        EpConfig.resolve()
    assert EpConfig.resolve(timeout_s=5).first_deadline_s == 59.5


def test_ranks_compare_all_options_but_deadlines() -> None:
    names = {f.name for f in dataclasses.fields(EpConfig)}
    assert set(EpConfig().common()) == names - {"timeout_s", "first_timeout_s"}


@pytest.mark.parametrize("value", [MIN_TIMEOUT_S, 1, 60.0, MAX_TIMEOUT_S])
def test_deadlines_that_every_clock_takes(value: float) -> None:
    timeout_s = EpConfig(timeout_s=value).timeout_s
    # torch's backends: milliseconds, where zero would mean no deadline.
    assert timedelta(seconds=timeout_s) >= timedelta(milliseconds=1)
    # From 1970, or the start of the node, in nanoseconds; plan's host waits twice as long.
    assert (2 * timeout_s + 100 * 365 * 86400) * 1e9 < 2**63


@pytest.mark.parametrize("name", ["inference_tokens", "max_recv_rows", "num_sms"])
@pytest.mark.parametrize("value", [0, -1, MAX_COUNT + 1, 24.0, "24"])
def test_counts(name: str, value: Any) -> None:
    """They cross the wire as integers: a float was an error of `struct`, on one rank alone."""
    words = rf"{name} .*: must be a whole number from 1 to 2147483647"
    with pytest.raises(InputError, match=words):
        EpConfig(**{name: value})
    assert getattr(EpConfig(**{name: MAX_COUNT}), name) == MAX_COUNT


@pytest.mark.parametrize(
    "value", ["worst", "1x", "1.25x", "0.001x", "999999.999x", "1.5x"], ids=str
)
def test_rows_in_words(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From code, the environment and a command line: the same config, and copies of it."""
    config = EpConfig(max_recv_rows=value, alignment=16, on_overflow="raise")
    assert dataclasses.replace(config, alignment=1).max_recv_rows == value
    assert EpConfig(**dataclasses.asdict(config)) == config
    parser = argparse.ArgumentParser()
    add_option_arguments(parser)
    flags = ["--ncclep-max-recv-rows", value, "--ncclep-alignment", "16"]
    parsed = parser.parse_args([*flags, "--ncclep-on-overflow", "raise"])
    assert EpConfig.resolve(**given_options(parsed)) == config
    monkeypatch.setenv("NCCLEP_MAX_RECV_ROWS", value)
    monkeypatch.setenv("NCCLEP_ON_OVERFLOW", "raise")
    assert EpConfig.resolve(alignment=16) == config
    monkeypatch.setenv("NCCLEP_MAX_RECV_ROWS", "64")
    assert EpConfig.resolve().max_recv_rows == 64


@pytest.mark.parametrize(
    "value", ["best", "Worst", "1.25", "x", "0x", "0.000x", "-1x", "1.2345x", "1e3x", "infx", "1 x"]
)
def test_words_that_name_no_rows(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = r"max_recv_rows '.*': must be .* a factor of a balanced load such as '1\.25x', 'worst'"
    with pytest.raises(InputError, match=words):
        EpConfig(max_recv_rows=value)
    monkeypatch.setenv("NCCLEP_MAX_RECV_ROWS", value)
    with pytest.raises(InputError, match=words):
        EpConfig.resolve()


def test_overflow() -> None:
    with pytest.raises(InputError, match=r"on_overflow 'stop': must be one of \('drop', "):
        EpConfig(max_recv_rows=8, on_overflow="stop")
    for value in ("raise", "rerun"):
        with pytest.raises(InputError, match=f"on_overflow '{value}' without max_recv_rows: not"):
            EpConfig(on_overflow=value)
    with pytest.raises(InputError, match="on_overflow 'rerun' with gradient_averaging 'a2sgd': it"):
        EpConfig(max_recv_rows=8, on_overflow="rerun", gradient_averaging="a2sgd")
    with pytest.raises(
        InputError, match="max_recv_rows 'auto' with on_overflow 'raise': the limit"
    ):
        EpConfig(max_recv_rows="auto", on_overflow="raise")
    with pytest.raises(
        InputError, match="max_recv_gib 1 with max_recv_rows '2x': it limits 'auto'"
    ):
        EpConfig(max_recv_rows="2x", max_recv_gib=1)
    with pytest.raises(InputError, match="max_recv_gib nan: must be a number of GiB, more than 0"):
        EpConfig(max_recv_rows="auto", on_overflow="rerun", max_recv_gib=math.nan)


@pytest.mark.parametrize("value", [0, 2, 16.0, "16"])
def test_alignments(value: Any) -> None:
    with pytest.raises(
        InputError, match=r"alignment .*: must be one of \(1, 16, 32, 64, 128, 256\), or left"
    ):
        EpConfig(alignment=value)
