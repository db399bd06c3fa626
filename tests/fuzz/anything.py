"""Strategies for what people, files and shells may hand over, and how much of it is tried.

The same examples on every machine and in every run: what fails can be run again, and CI does not
fail by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megatron_ncclep.errors import InputError

FUZZ = settings(
    derandomize=True,
    database=None,
    deadline=None,  # no timing assertions
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# What an argument of a program, or an environment variable, can hold.
words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
odd_words = st.sampled_from(
    ["", " ", "-", "--", "-1", "0", "1", "3", "nan", "-inf", "1e400", "0x10", "1_0", " 3 ",
     "\uff19", "9" * 5000, "x" * 300, "x" * 300 + ".yaml", "a/b.yaml", ".", "/", "a=b", "=", ",",
     "true", "None", "[]"]
)  # fmt: skip
numbers = (
    st.sampled_from([0, -1, 2**31 - 1, 2**31, 2**63, 10**400, 16, 48, 1e300]) | st.integers()
) | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8)


def documents(keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Scalars, lists and mappings with `keys` and others, in each other."""
    return st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(keys | scalars, inner, max_size=5)
        ),
        max_leaves=10,
    )


def attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `call` returns and None, or None and its InputError's text; it raises nothing else."""
    try:
        return call(), None
    except InputError as error:
        return None, str(error)


PIECES = (
    "a: ", "b: ", "- ", "&a ", "*a", "<<: ", "? ", "[", "]", "{", "}", ":", ",", "\n", "  ", "\t",
    "|", ">", '"', "'", "%YAML", "---", "...", "!!python/object:os.system ", "!!int ", "!!binary ",
    "!!float ", "!!bool ", "!!null ", "!!set ", "!!omap ", "!!timestamp ", "2001-99-99", "1:30",
    ".nan", "1e400", "0o17", "0x", "=", "x", "num-layers: 1", "\u2028", "\ufeff",
)  # fmt: skip


def yaml_bytes(keys: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Contents of a file that is to be YAML: whole documents, pieces of some, and any bytes."""
    return (
        st.binary(max_size=60)
        | documents(keys).map(
            lambda document: yaml.safe_dump(document, allow_unicode=True).encode()
        )
        | st.lists(st.sampled_from(PIECES), max_size=9).map("".join).map(str.encode)
        | st.sampled_from([b"&a [*a]", b"a: &a {b: *a}", "a: b".encode("utf-16")])
    )
