"""Options from code and from the environment: a config, or an InputError.

Those of a command line are among the words of test_commands.py.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any
from unittest import mock

from anything import FUZZ, attempt, documents, odd_words, scalars, words
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ncclep import envs
from megatron_ncclep.config import ALIGNMENTS, EpConfig
from megatron_ncclep.engines.overflow import rows_limit

NAMES = [field.name for field in dataclasses.fields(EpConfig)]
VARIABLES = {f"NCCLEP_{name.upper()}": name for name in NAMES}
anything = documents(st.nothing())


def check(config: EpConfig) -> None:
    """What every config promises whoever reads it."""
    assert isinstance(config.engine, str)
    assert config.block_alignment in ALIGNMENTS
    assert config.alignment in (None, config.block_alignment)
    for count in (rows_limit(config, 4, 10, 2, 3), config.num_sms):
        assert count is None or (isinstance(count, int) and 0 < count < 2**31)
    assert (rows_limit(config, 4, 10, 2, 3) or 0) % config.block_alignment == 0
    assert config.on_overflow == "drop" or config.max_recv_rows is not None
    assert math.isfinite(config.timeout_s)
    assert config.timeout_s > 0
    assert dataclasses.replace(config) == config
    assert set(config.non_default()) <= set(NAMES)
    assert EpConfig.of(dataclasses.asdict(config)) == EpConfig.of(config) == config


@FUZZ
@given(given_values=st.dictionaries(st.sampled_from([*NAMES, "other"]), scalars | anything))
@example(given_values={"timeout_s": math.inf})
@example(given_values={"timeout_s": math.nan})
@example(given_values={"engine": ["native"]})
@example(given_values={"num_sms": 2**31})
@example(given_values={"max_recv_rows": "0.5x", "alignment": 128, "on_overflow": "raise"})
def test_options_in_code(given_values: dict[str, Any]) -> None:
    config, refusal = attempt(lambda: EpConfig.resolve(**given_values))
    if refusal is not None:
        assert any(name in refusal for name in given_values)
        return
    check(config)
    for name, value in given_values.items():
        assert value is None or getattr(config, name) == value


@FUZZ
@given(texts=st.dictionaries(st.sampled_from(sorted(envs.VARIABLES)), words | odd_words))
def test_environment(texts: dict[str, str]) -> None:
    with mock.patch.dict(os.environ, texts):
        for name, text in texts.items():
            _, refusal = attempt(lambda name=name: envs.get(name))
            assert refusal is None or f"{name}={text!r}" in refusal
        config, refusal = attempt(EpConfig.resolve)
    if refusal is None:
        check(config)
    else:
        names = {*texts, *(VARIABLES[name] for name in texts if name in VARIABLES)}
        assert any(name in refusal for name in names)
