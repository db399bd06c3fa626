"""Folders of tests can run together, in any choice: pytest imports their modules by bare names."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_modules_have_names_of_their_own() -> None:
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, number in names.items() if number > 1] == []


def test_nobody_imports_a_conftest() -> None:
    """Each folder has its own: `pytest tests/integration tests/training` got another folder's."""
    importing = re.compile(r"^\s*(from|import) conftest\b", re.MULTILINE)
    guilty = [str(path) for path in TESTS.rglob("*.py") if importing.search(path.read_text())]
    assert guilty == []
