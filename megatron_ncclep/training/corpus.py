"""Text -> a corpus that Megatron-Core's GPTDataset reads, in one process, before the ranks start.

Text becomes bytes: token i is byte i, and 256 ends a file.  Pieces of at most 16 KiB are Megatron's
"documents"; every 20th is written after all others, so training and validation text come from the
same files.  A corpus that is already in Megatron's .bin/.idx form is used unchanged, whatever its
tokens.  The last 5 % of the documents are the validation set.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ncclep.errors import InputError

if TYPE_CHECKING:  # numpy is in the extra `[train]`, and the command starts without it
    import numpy as np

END_OF_FILE = 256  # the token after the last byte of a file
PIECE_BYTES = 16 * 1024
VALIDATION_EVERY = 20  # one piece of this many
TRAIN_SHARE = 0.95  # of the documents
SPLIT = "95,5,0"  # the same for Megatron: training, validation, test
RECORD = "corpus.json"

# Left out of the standard library: its tests (repetitive data) and generated tables.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
)
_LARGEST_SOURCE_BYTES = 256 * 1024


@dataclass(frozen=True)
class Corpus:
    """The ranks' information about a prepared corpus; stored as `RECORD`.

    Attributes:
        prefix: path prefix of a .bin/.idx pair, which `SPLIT` divides into the two parts.
        source: text on what it was made from.
        fingerprint: changes when the source's files do.
        vocab_size: the number of possible tokens, including the one that ends a file.
        end_token: the token that ends a file.
        num_train_tokens, num_valid_tokens: tokens of the two parts.
        unigram_entropy: nats per token of the training part's token frequencies, that is, the loss
            of a model that knows only these.
    """

    prefix: str
    source: str
    fingerprint: str
    vocab_size: int
    end_token: int
    num_train_tokens: int
    num_valid_tokens: int
    unigram_entropy: float

    def check_length(self, seq_length: int) -> None:
        """Check that each part holds at least one sequence and its next token.

        Raises:
            InputError: one does not; the message names the remedy.
        """
        sizes = {"training": self.num_train_tokens, "validation": self.num_valid_tokens}
        for part, tokens in sizes.items():
            if tokens <= seq_length:
                raise InputError(
                    f"{self.source}: its {part} part has {tokens} tokens, too few for seq-length "
                    f"{seq_length}: give more text (at least about {20 * seq_length / 1000:.0f} "
                    "kB), or a smaller --set seq-length"
                )


def standard_library() -> list[Path]:
    """The .py files of the running interpreter's standard library, in the same order everywhere."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [
        path
        for path in sorted(folder.rglob("*.py"), key=lambda path: path.as_posix())
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts)
        and path.stat().st_size <= _LARGEST_SOURCE_BYTES
    ]


def text_files(paths: Sequence[str]) -> list[Path]:
    """The files that `paths` name: files as given, folders with all files below, sorted.

    Hidden files and folders are skipped inside a folder.

    Raises:
        InputError: a path does not exist, or is neither a file nor a folder.
    """
    files: list[Path] = []
    for name in paths:
        if not name:
            raise InputError("--text '': name a file or a folder; '.' is this folder")
        path = Path(name)
        if path.is_dir():
            for entry in sorted(path.rglob("*")):
                is_hidden = any(part.startswith(".") for part in entry.relative_to(path).parts)
                if entry.is_file() and not is_hidden:
                    files.append(entry)
        elif path.is_file():
            files.append(path)
        elif path.exists():
            raise InputError(
                f"--text {name}: it is a device or a pipe: write its text to a file, and give that"
            )
        else:
            raise InputError(
                f"--text {name}: no such file or folder, and no {name}.bin with {name}.idx either"
            )
    return files


def prepare(texts: Sequence[str], folder: Path) -> Corpus:
    """Make the corpus of `texts` in `folder`, or reuse the one there if nothing has changed.

    Not collective: one process calls it while no other reads `folder`.

    Args:
        texts: files and folders, or one prefix of a .bin/.idx pair; empty: the standard library.
        folder: for the corpus and Megatron's sample indices; made if missing.

    Raises:
        InputError: a path is missing, there is no text, or an indexed corpus cannot be read.
    """
    prefixes = [text for text in texts if _is_indexed(text)]
    if prefixes and len(texts) > 1:
        raise InputError(f"--text {prefixes[0]}: an indexed corpus must be the only --text")
    if prefixes:
        prefix = source = prefixes[0]
        files = [Path(prefix + suffix) for suffix in (".bin", ".idx")]
    else:
        prefix = str(folder / "text")
        files = text_files(texts) if texts else standard_library()
        source = " ".join(texts) if texts else "the Python standard library's source"
    fingerprint = _fingerprint(files)
    # The record may be missing, or a run may have died while writing it.
    with suppress(FileNotFoundError, ValueError, TypeError):
        if (known := load(folder)).fingerprint == fingerprint:
            return known
    folder.mkdir(parents=True, exist_ok=True)
    if not prefixes:
        _write(files, source, prefix)
    try:
        facts = _describe(prefix, None if prefixes else END_OF_FILE)
    except Exception as error:  # any error of its reader
        raise InputError(
            f"--text {source}: {prefix}.bin and .idx are not an indexed corpus of Megatron: "
            f"{type(error).__name__}: {error}"
        ) from error
    corpus = Corpus(prefix=prefix, source=source, fingerprint=fingerprint, **facts)
    record = json.dumps(dataclasses.asdict(corpus), indent=2) + "\n"
    (folder / RECORD).write_text(record, encoding="utf-8")
    return corpus


def load(folder: Path) -> Corpus:
    """Read the result of `prepare` from `folder`."""
    return Corpus(**json.loads((folder / RECORD).read_text(encoding="utf-8")))


def _is_indexed(text: str) -> bool:
    return Path(text + ".bin").is_file() and Path(text + ".idx").is_file()


def _fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(os.fsencode(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n"))
    return digest.hexdigest()


def _pieces(files: Sequence[Path], piece_bytes: int) -> Iterator[np.ndarray]:
    """The files' tokens, uint16, in pieces of at most `piece_bytes`; empty files are skipped."""
    import numpy as np

    for path in files:
        data = np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.uint16)
        if data.size:
            data = np.append(data, np.uint16(END_OF_FILE))
        for begin in range(0, data.size, piece_bytes):
            yield data[begin : begin + piece_bytes]


def _write(files: Sequence[Path], source: str, prefix: str) -> None:
    """Write the files as an indexed corpus, the validation pieces last."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    num_bytes = sum(path.stat().st_size for path in files)
    if num_bytes == 0:
        raise InputError(f"--text {source}: there is no text ({len(files)} files, all empty)")
    # A short text is cut into smaller pieces, so that it has a validation part too.
    piece_bytes = min(PIECE_BYTES, -(-num_bytes // VALIDATION_EVERY))
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    for is_validation in (False, True):
        for index, piece in enumerate(_pieces(files, piece_bytes), start=1):
            if (index % VALIDATION_EVERY == 0) == is_validation:
                builder.add_item(torch.from_numpy(piece))
                builder.end_document()
    builder.finalize(prefix + ".idx")


def _describe(prefix: str, end_token: int | None) -> dict[str, Any]:
    """Count the tokens of a corpus: the fields of `Corpus` that follow from them.

    Args:
        prefix: prefix of the corpus.
        end_token: the largest possible token; None: one more than the largest in the corpus.
    """
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix, multimodal=False, mmap=True)
    first_valid = round(TRAIN_SHARE * len(dataset))  # as BlendedMegatronDatasetBuilder rounds
    lengths = dataset.sequence_lengths
    counts = np.zeros(1, dtype=np.int64)
    largest = 0
    for document in range(len(dataset)):
        tokens = dataset[document]
        largest = max(largest, int(tokens.max(initial=0)))
        if document < first_valid:
            here = np.bincount(tokens, minlength=counts.size)
            here[: counts.size] += counts
            counts = here
    end_token = largest + 1 if end_token is None else end_token
    return {
        "vocab_size": end_token + 1,
        "end_token": end_token,
        "num_train_tokens": int(lengths[:first_valid].sum()),
        "num_valid_tokens": int(lengths[first_valid:].sum()),
        "unigram_entropy": entropy(counts),
    }


def entropy(counts: np.ndarray) -> float:
    """Entropy in nats of the distribution proportional to `counts` [num_values]."""
    import numpy as np

    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
