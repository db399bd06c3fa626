"""The small model and text, and one finished run that several tests look at."""

from __future__ import annotations

import pytest
import yaml
from small_job import MODEL, Finished, train, write_text


@pytest.fixture(scope="session")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """--model and --text of the small job."""
    folder = tmp_path_factory.mktemp("small")
    model = folder / "small.yaml"
    model.write_text(yaml.safe_dump(MODEL), encoding="utf-8")
    text = write_text(folder / "text.txt")
    return ("--model", str(model), "--text", str(text), "--ranks", "2")


@pytest.fixture(scope="session")
def finished(arguments: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    out = tmp_path_factory.mktemp("finished") / "out"
    output = train(
        *(*arguments, "--compare", "alltoall", "--print-every", 1, "--out", out),
        *("--ncclep-metrics-interval", 2),
    )
    return Finished(arguments, out, output)
