"""tests/gpu/test_failures.py: what it says of tensors, and that numbers in a failed one fail it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("contract", "gpu")]
from test_failures import NAN, RIGHT, Story, assert_nothing_wrong

EXPECTED = torch.arange(1.0, 7.0).view(2, 3)
SPOILT = torch.full((2, 3), -1, dtype=torch.int32).view(torch.float32)


def story_of(tensor: torch.Tensor, *raised: str) -> Story:
    story = Story(raised=dict.fromkeys(raised, "rank 1 did not come"))
    story.see("rows", tensor, EXPECTED)
    return story


def test_right_and_spoilt_tensors_are_told() -> None:
    assert story_of(EXPECTED).results == {"rows": RIGHT}
    assert story_of(SPOILT).results == {"rows": NAN}
    assert_nothing_wrong([story_of(EXPECTED), story_of(SPOILT, "check")])


@pytest.mark.parametrize(
    ("tensor", "raised", "message"),
    [
        (torch.where(EXPECTED > 5, EXPECTED, SPOILT), ["check"], r"rank 0: .*rows\[0, 0\] is nan"),
        (torch.where(EXPECTED > 5, SPOILT, EXPECTED), ["check"], r"rank 0: .*rows\[1, 2\] is nan"),
        (EXPECTED.flip(0), ["check"], r"rank 0: .*rows\[0, 0\] is 4\.0"),
        (torch.full((2, 3), torch.nan), ["check"], "rank 0: "),  # another NaN: nobody wrote it
        (SPOILT, ["next"], "rank 0: Story"),  # nobody was told
    ],
    ids=["half spoilt", "one number less", "stale", "other NaN", "silent"],
)
def test_anything_else_fails(tensor: torch.Tensor, raised: list[str], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_nothing_wrong([story_of(tensor, *raised)])
