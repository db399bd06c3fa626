"""Text -> a corpus that Megatron-Core's GPTDataset reads, on one process, before the ranks start.

Text becomes bytes: token i is byte i, and 256 ends a file.  Pieces of at most 16 KiB are Megatron's
"documents"; every 20th goes to the validation set, so that training and validation text come from
the same files.  A corpus that is already in Megatron's .bin/.idx form is used as it is,
whatever its tokens are, and its last 5 % of documents are the validation set.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ncclep.errors import InputError

if TYPE_CHECKING:  # numpy belongs to the extra `[train]`, and the command starts without it
    import numpy as np

END_OF_FILE = 256  # the token after the last byte of a file
BYTE_VOCABULARY = 257
PIECE_BYTES = 16 * 1024
VALIDATION_EVERY = 20  # one piece of this many
INDEXED_SPLIT = "95,5,0"  # of an indexed corpus' documents: training, validation, test

# Of the standard library: not its tests (repetitive data), and no generated tables.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
)
_LARGEST_SOURCE_BYTES = 256 * 1024


@dataclass(frozen=True)
class Corpus:
    """What the ranks need to know of a prepared corpus; written as corpus.json beside it.

    Attributes:
        train, valid: path prefixes of .bin/.idx pairs; `valid` is None when both parts are made
            from `train` by `INDEXED_SPLIT`.
        source: what it was made from, in words.
        fingerprint: changes when the source's files do.
        vocab_size: tokens that exist, counting the one that ends a file.
        end_token: the token that ends a file.
        num_train_tokens, num_valid_tokens: tokens of the two parts.
        unigram_entropy: nats per token of the training part's token frequencies, i.e. the loss of
            a model that knows nothing but them.
    """

    train: str
    valid: str | None
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
                    f"{seq_length}: give more text (about {20 * seq_length / 1000:.0f} kB at "
                    "least), or a smaller --set seq-length"
                )


def standard_library() -> list[Path]:
    """The .py files of the running interpreter's standard library, in one order everywhere."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in folder.rglob("*.py")
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts)
        and path.stat().st_size <= _LARGEST_SOURCE_BYTES
    ]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def text_files(paths: Sequence[str]) -> list[Path]:
    """The files that `paths` name: files as given, folders with everything below in sorted order.

    Hidden files and folders are skipped inside a folder.

    Raises:
        InputError: a path does not exist.
    """
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            below = (entry for entry in path.rglob("*") if entry.is_file())
            files += sorted(
                entry
                for entry in below
                if not any(part.startswith(".") for part in entry.relative_to(path).parts)
            )
        elif path.is_file():
            files.append(path)
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
        folder: where the corpus and Megatron's sample indices are kept; made if missing.

    Raises:
        InputError: a path is missing, there is no text in what was given, or an indexed corpus is
            not one.
    """
    prefixes = [text for text in texts if _is_indexed(text)]
    if prefixes and len(texts) > 1:
        raise InputError(f"--text {prefixes[0]}: an indexed corpus must be the only --text")
    if prefixes:
        files = [Path(prefixes[0] + suffix) for suffix in (".bin", ".idx")]
        source = prefixes[0]
    else:
        files = text_files(texts) if texts else standard_library()
        source = " ".join(texts) if texts else "the Python standard library's source"
    fingerprint = _fingerprint(files)
    record = folder / "corpus.json"
    known = _kept(record)
    if known is not None and known.fingerprint == fingerprint:
        return known
    folder.mkdir(parents=True, exist_ok=True)
    if prefixes:
        try:
            corpus = _describe_indexed(source, fingerprint)
        except Exception as error:  # whatever its reader comes upon
            raise InputError(
                f"--text {source}: {source}.bin and .idx are no indexed corpus of Megatron's: "
                f"{type(error).__name__}: {error}"
            ) from error
    else:
        corpus = _write(files, source, fingerprint, folder)
    record.write_text(json.dumps(dataclasses.asdict(corpus), indent=2) + "\n", encoding="utf-8")
    return corpus


def _kept(record: Path) -> Corpus | None:
    """What an earlier run wrote to `record`; None if there is none, or not the whole."""
    try:
        return Corpus(**json.loads(record.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # a run may end while it writes
        return None


def load(folder: Path) -> Corpus:
    """Read back what `prepare` left in `folder`."""
    return Corpus(**json.loads((folder / "corpus.json").read_text(encoding="utf-8")))


def _is_indexed(text: str) -> bool:
    return Path(text + ".bin").is_file() and Path(text + ".idx").is_file()


def _fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
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


def _write(files: Sequence[Path], source: str, fingerprint: str, folder: Path) -> Corpus:
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    num_bytes = sum(path.stat().st_size for path in files)
    if num_bytes == 0:
        raise InputError(f"--text {source}: no text in it ({len(files)} files, none with a byte)")
    # A short text is cut finer, so that it has a validation part too.
    piece_bytes = min(PIECE_BYTES, -(-num_bytes // VALIDATION_EVERY))

    prefixes = {part: str(folder / part) for part in ("train", "valid")}
    builders = {
        part: IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
        for part, prefix in prefixes.items()
    }
    counts = {part: np.zeros(BYTE_VOCABULARY, dtype=np.int64) for part in prefixes}
    for index, piece in enumerate(_pieces(files, piece_bytes), start=1):
        part = "valid" if index % VALIDATION_EVERY == 0 else "train"
        builders[part].add_item(torch.from_numpy(piece))
        builders[part].end_document()
        counts[part] += np.bincount(piece, minlength=BYTE_VOCABULARY)
    for part, prefix in prefixes.items():
        builders[part].finalize(prefix + ".idx")
    return Corpus(
        train=prefixes["train"],
        valid=prefixes["valid"],
        source=source,
        fingerprint=fingerprint,
        vocab_size=BYTE_VOCABULARY,
        end_token=END_OF_FILE,
        num_train_tokens=int(counts["train"].sum()),
        num_valid_tokens=int(counts["valid"].sum()),
        unigram_entropy=entropy(counts["train"]),
    )


def _describe_indexed(prefix: str, fingerprint: str) -> Corpus:
    """Count the tokens of an existing corpus; the vocabulary is what occurs in it, and one more."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix, multimodal=False, mmap=True)
    num_documents = len(dataset)
    # The same rounding as BlendedMegatronDatasetBuilder's.
    train_share, valid_share, _ = (float(part) / 100 for part in INDEXED_SPLIT.split(","))
    first_valid = round(train_share * num_documents)
    end_valid = round((train_share + valid_share) * num_documents)
    lengths = dataset.sequence_lengths
    counts = np.zeros(1, dtype=np.int64)
    largest = 0
    for document in range(num_documents):
        tokens = dataset[document]
        largest = max(largest, int(tokens.max(initial=0)))
        if document < first_valid:
            here = np.bincount(tokens, minlength=counts.size)
            here[: counts.size] += counts
            counts = here
    return Corpus(
        train=prefix,
        valid=None,
        source=prefix,
        fingerprint=fingerprint,
        vocab_size=largest + 2,
        end_token=largest + 1,
        num_train_tokens=int(lengths[:first_valid].sum()),
        num_valid_tokens=int(lengths[first_valid:end_valid].sum()),
        unigram_entropy=entropy(counts),
    )


def entropy(counts: np.ndarray) -> float:
    """Entropy in nats of the distribution that `counts` [num_values] is proportional to."""
    import numpy as np

    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
