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
def test_the_stub_is_what_pybind11_binds() -> None:
    """It writes the arguments into docstrings."""

    def arguments_of(thing: Any) -> list[str] | None:
        called = thing.__init__ if isinstance(thing, type) else thing
        if not callable(called):
            return None
        text = called.__doc__.partition(" -> ")[0].partition("(")[2]
        names = re.findall(r"(?:^|, )(\*|\w+)(?=[:,)])", text)
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
    bound = {name: members_of(c) for name, c in {"": module, **classes}.items()}
    assert interface() == bound, "change megatron_ncclep/_C.pyi as csrc/bindings was changed"
