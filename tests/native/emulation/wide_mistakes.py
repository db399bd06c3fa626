"""Sequences in NVLink domains of more than 32 ranks, and mistakes (test_emulation.py)."""

# Kind, ranks, number.
CASES = (
    ("wide-many", 33, 2), ("wide-many", 64, 1), ("wide-many", 72, 1), ("wide-rails-many", 72, 1),
    ("wide-rails-many", 80, 1), ("wide-failures", 36, 4),
)  # fmt: skip

# As `Mistake` has them.
MISTAKES: dict[str, tuple[str, str, str, str, int, str]] = {}
