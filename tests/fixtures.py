"""Fixtures of what has to be closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Literal

import pytest


def closed(make: Callable[[], Any], scope: Literal["module", "session"] = "session") -> Any:
    """A fixture of what `make` returns, closed after the last test of the scope."""

    @pytest.fixture(scope=scope)
    def made() -> Iterator[Any]:
        with closing(make()) as thing:
            yield thing

    return made
