"""The stand-ins for the extension have its methods, with its arguments, and nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fake_extension import interface

from megatron_ncclep.libraries import extension


@pytest.mark.skipif(
    extension.unavailable_reason() is not None,
    reason=f"nothing to compare: {extension.unavailable_reason()}",
)
def test_the_sources_are_read_as_pybind11_reads_them() -> None:
    """It writes the arguments into docstrings."""

    def arguments_of(thing: Any) -> list[str] | None:
        called = thing.__init__ if isinstance(thing, type) else thing
        if not callable(called):
            return None
        names = re.findall(r"(\w+): ", called.__doc__.partition(" -> ")[0])
        return [name for name in names if name != "self"]

    def members_of(owner: Any) -> dict[str, list[str] | None]:
        made_there_only = ("GroupFailure", "PlanHandle", "PlanSizes")
        return {
            name: arguments_of(thing)
            for name, thing in vars(owner).items()
            if not name.startswith("_") and name not in made_there_only
        }

    module = extension.load()
    classes = {name: thing for name, thing in vars(module).items() if isinstance(thing, type)}
    assert interface() == {name: members_of(c) for name, c in {"": module, **classes}.items()}
