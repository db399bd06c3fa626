"""The stand-ins for the extension have its methods, with its arguments, and nothing else."""

from __future__ import annotations

import inspect
import re
from typing import Any

from fake_extension import members
from fakes import needs_extension

from megatron_ncclep.libraries import extension

MADE_THERE_ONLY = ("GroupFailure", "PlanHandle", "PlanSizes")


def declared(thing: Any) -> list[str] | None:
    """The arguments of a call in the stub; "*" stands before those that need their names."""
    if not callable(thing):
        return None
    parameters = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
    names, kinds = [p.name for p in parameters], [p.kind for p in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        names.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    return names


def bound(thing: Any) -> list[str] | None:
    """Those of pybind11, which writes them into docstrings."""
    called = thing.__init__ if isinstance(thing, type) else thing
    if not callable(called):
        return None
    text = called.__doc__.partition(" -> ")[0].partition("(")[2]
    return re.findall(r"(?:^|, )(?!self)(\*|\w+)(?=[:,)])", text)


@needs_extension
def test_the_stub_is_what_pybind11_binds() -> None:
    module = extension.load()
    for owner in ("", *(n for n, thing in vars(module).items() if isinstance(thing, type))):
        real = vars(getattr(module, owner) if owner else module)
        names = {n for n in real if not n.startswith("_")}.difference(MADE_THERE_ONLY)
        stub = members(owner)
        assert names == stub.keys() - set(MADE_THERE_ONLY), owner
        for name in names:
            assert declared(stub[name]) == bound(real[name]), f"_C.pyi: {owner} {name}"
