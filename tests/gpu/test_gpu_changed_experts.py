"""What users put on TransformerEngine's experts, with grouped ones of quack-kernels: the table of
tests/integration/changed_experts.py on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from changed_experts import CHANGES, GPU_FIELDS, train
from deselect import needs_te
from rank_pool import RankContext

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import UnsupportedError

# Of the largest value: as in test_gpu_grouped_experts.py.
TOLERANCE = 2e-2


@needs_te
@pytest.mark.parametrize("name", CHANGES)
def test_what_users_put_on_experts(ctx: RankContext, engine_name: str, name: str) -> None:
    change, options = CHANGES[name], {"engine": engine_name}
    # TransformerEngine looks at the first weight only, so that some frozen experts freeze or train
    # all: there, the gradients are those without a change.
    is_partly_frozen = name.startswith("some frozen")
    theirs = CHANGES["nothing"] if is_partly_frozen else change
    with_theirs = EpConfig(**options, experts="megatron", alignment=16)
    expected, seen, _ = train(theirs, with_theirs, "cuda", True, ctx.rank, **GPU_FIELDS)
    found, also_seen, said = train(
        change, EpConfig(**options, experts="auto"), "cuda", True, ctx.rank, **GPU_FIELDS
    )
    assert found.keys() == expected.keys()
    of_experts = [key.partition(" of ")[2] for key in expected if "main_grad of experts" in key]
    frozen = of_experts[::3] if is_partly_frozen else []
    for key, value in expected.items():
        mine = found[key]
        if key.partition(" of ")[2] in frozen:
            assert mine is None or not mine.any(), key
        elif value is None or mine is None:
            assert value is mine is None, key
        elif change.words is not None:
            assert torch.equal(mine, value), key
        else:
            error = (mine.float() - value.float()).abs().max()
            assert error <= TOLERANCE * value.float().abs().max(), key
    assert len(also_seen) == len(seen)
    assert all(map(torch.equal, also_seen, seen))
    warnings = [line for line in said if "Megatron's experts compute" in line]
    assert len(warnings) == (change.words is not None)
    assert all(str(change.words) in line for line in warnings)
    if change.words is not None:
        asked = EpConfig(**options, experts="grouped")
        with pytest.raises(UnsupportedError) as caught:
            train(change, asked, "cuda", True, ctx.rank, **GPU_FIELDS)
        assert change.words in str(caught.value)
