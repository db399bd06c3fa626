"""Marks of tests that need a package which may be missing: they are skipped, and say so."""

from __future__ import annotations

import importlib.util

import pytest

needs_te = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="TransformerEngine is not installed",
)
