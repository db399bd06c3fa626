"""What the tests of the network share with those of the native code, and of scripts over it."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "native"))


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The script that a module `test_NAME` is about: `scripts/NAME.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TESTS.parent / "scripts")
        yield importlib.import_module(request.module.__name__.removeprefix("test_"))
