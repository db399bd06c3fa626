"""How long tests wait for what should come: deadlines that are only a safety net.

On a busy machine, ranks that do nothing wrong are late: NCCLEP_TEST_PATIENCE multiplies all these
deadlines.  A deadline that is itself under test, such as that of a rank that gives up, stays.
"""

from __future__ import annotations

import math
import os
from typing import Any

from rank_pool import RankPool

VARIABLE = "NCCLEP_TEST_PATIENCE"


def patient(seconds: float) -> float:
    """`seconds`, times the variable (default: 1).

    Raises:
        ValueError: the variable is not a positive number.
    """
    text = os.environ.get(VARIABLE) or "1"
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:  # nan is neither
        raise ValueError(f"{VARIABLE}={text!r}: must be a positive number")
    return seconds * factor


class PatientPool(RankPool):
    """A pool whose jobs may take longer when the variable says so."""

    def run(self, *args: Any, timeout: float = 240, **options: Any) -> list[Any]:
        """As `RankPool.run`; `timeout` is for a machine that has nothing else to do."""
        return super().run(*args, timeout=patient(timeout), **options)
