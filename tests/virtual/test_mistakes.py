"""mistakes.py: what it plants has a place in the kernels still, and reaches those that have it."""

from __future__ import annotations

import pytest
from mistakes import MISTAKES, SOURCES, Mistake, kernels_with


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_changes_kernels(mistake: Mistake) -> None:
    assert mistake.source() != (SOURCES / mistake.file).read_text()
    assert kernels_with(mistake.file)


def test_a_header_is_in_the_kernels_that_include_it() -> None:
    assert kernels_with("native/pairs.cuh") == {"native/combine.cu"}
    assert kernels_with("native/dispatch.cu") == {"native/dispatch.cu"}
    assert {"native/plan.cu", "native/dispatch.cu"} < kernels_with("common/order.cuh")
