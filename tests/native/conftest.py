"""Fixtures of several modules."""

from fake_machine import machine  # noqa: F401
