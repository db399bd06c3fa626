"""Training text: any bytes become a corpus that holds them, or an InputError."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from anything import FUZZ, attempt
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ncclep.training import corpus

CONTENTS = st.binary(max_size=200) | st.sampled_from(
    [b"", b"\0", b"one line", b"\n" * 70, b"\xff\xfe\x00\xd8", "ü".encode("utf-16"), b"x" * 20000]
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "text"


@settings(FUZZ, max_examples=40)
@given(contents=st.lists(CONTENTS, max_size=4))
@example(contents=[])
@example(contents=[b"", b""])
def test_any_bytes(folder: Path, tmp_path: Path, contents: list[bytes]) -> None:
    """Token i is byte i, and 256 ends a file: in both parts together, in order, and counted."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for old in (folder, tmp_path / "out"):
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir()
    for number, content in enumerate(contents):
        (folder / f"{number}.txt").write_bytes(content)
    made, refusal = attempt(lambda: corpus.prepare([str(folder)], tmp_path / "out"))
    if refusal is not None:
        assert f"--text {folder}: there is no text" in refusal
        assert not any(contents)
        return
    expected = [[*content, corpus.END_OF_FILE] for content in contents if content]
    data = IndexedDataset(made.prefix, multimodal=False, mmap=True)
    pieces = [data[i].tolist() for i in range(len(data))]
    assert sum(map(len, pieces)) == made.num_train_tokens + made.num_valid_tokens
    num_train = len(pieces) - len(pieces) // corpus.VALIDATION_EVERY
    pieces, last = pieces[:num_train], pieces[num_train:]
    for place, piece in enumerate(last, start=1):
        pieces.insert(place * corpus.VALIDATION_EVERY - 1, piece)
    assert [*chain(*pieces)] == [*chain(*expected)]
    assert 0 <= made.unigram_entropy <= np.log(corpus.END_OF_FILE + 1)
    assert corpus.load(tmp_path / "out") == made
    assert corpus.prepare([str(folder)], tmp_path / "out") == made  # as it is kept


@pytest.mark.parametrize("kept", [b"", b"[]", b"\xff", b'{"train": 1}', b'{"train": "'])
def test_a_corpus_that_is_not_whole_is_made_again(tmp_path: Path, kept: bytes) -> None:
    """As a run leaves it that was killed while it wrote."""
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("some text", encoding="utf-8")
    out.mkdir()
    (out / "corpus.json").write_bytes(kept)
    made = corpus.prepare([str(text)], out)
    assert made.num_train_tokens + made.num_valid_tokens == len("some text") + 1
    assert corpus.load(out) == made
