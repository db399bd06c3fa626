"""Fixtures of several modules."""

from fake_extension import stand_in  # noqa: F401
from fake_machine import machine  # noqa: F401
