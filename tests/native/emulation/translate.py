"""Turn the native engine's kernels into C++ for the emulator: what no header can stand in for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# All paths here are relative to csrc.  The kernels, and what the host needs to call them.
SOURCES = (
    "native/plan/plan.cu",
    "native/plan/plan_receive.cu",
    "native/plan/overflow.cu",
    "native/rows/dispatch.cu",
    "native/rows/combine.cu",
    "native/rows/cta_roles.cpp",
    "native/low_latency/dispatch.cu",
    "native/low_latency/combine.cu",
    "native/device/stop.cu",
    "native/host/call_signature.cpp",
    "network/probe.cu",
)

# Smaller than on a GPU: CTAs, because a thread is a fiber here, and what is done at a time, so that
# small shapes come to the second time.
SMALLER = {
    "native/state.h": {
        "constexpr int kChunk = 128;": "using emu::kChunk;",
        "constexpr int num_chunks_of(": "inline int num_chunks_of(",
    },
    "native/rows/cta_roles.h": {
        "kWarps = 16;": "kWarps = 6;",
        "kRingBytes = 200 * 1024;": "kRingBytes = 200 * 64;",
        "kMaxRingPiece = 16 * 1024;": "kMaxRingPiece = 16 * 64;",
    },
    "native/plan/chunks.cuh": {
        "kPlanThreads = 512;": "kPlanThreads = 128;",
        'static_assert(kChunk == 128, "a bitmap is two words of 64 bits");': "",
        "constexpr std::size_t kMaxHeldBytes = 148 * 1024;": "using emu::kMaxHeldBytes;",
        "kUnroll = 24;": "kUnroll = 2;",
        "kUnroll = 4;": "kUnroll = 2;",
    },
    "native/plan/overflow.cu": {"kUnroll = 8;": "kUnroll = 2;"},
    "native/plan/plan_receive.cu": {
        "kAssignments = 8, kPairs = 4;": "kAssignments = 2, kPairs = 1;"
    },
    "native/rows/stage.cuh": {"kUnroll = 8;": "kUnroll = 2;"},
    "native/low_latency/protocol.h": {"kLowLatencyTokens = 512;": "kLowLatencyTokens = 64;"},
    "native/low_latency/operation.cuh": {"kLlThreads = 512,": "kLlThreads = 96,"},
    "native/low_latency/combine.cu": {"kAtOnce = 4;": "kAtOnce = 2;"},
}

SHARED = re.compile(r"__shared__ (?:__align__\(\d+\) )?(.+?) (\w+)((?:\[\w+\])*);")
DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) char (\w+)\[\];")
LAUNCH = re.compile(
    r"(\w+)<<<(.+?), (.+?), (.+?), reinterpret_cast<cudaStream_t>\((\w+)\)>>>\((.+?)\);", re.DOTALL
)
VOLATILE = re.compile(r"\*static_cast<volatile [\w: ]+\*>\((&[\w.>-]+)\)")


@dataclass(frozen=True)
class Change:
    """Another text in a kernel, in force where `emu::is_changed(number)`.

    `where` stands once in the file.  What is replaced is its part between « and », or all of it: an
    expression, or statements (with their semicolons) that declare nothing.
    """

    file: str
    where: str
    instead: str

    def position(self, text: str) -> tuple[int, int]:
        plain = re.sub("[«»]", "", self.where)
        assert text.count(plain) == 1, f"{self.file} has {plain!r} {text.count(plain)} times"
        first = max(self.where.find("«"), 0)
        end = self.where.rfind("»") - 1 if "»" in self.where else len(plain)
        return text.index(plain) + first, text.index(plain) + end

    def apply(self, old: str, number: int) -> str:
        condition = f"emu::is_changed({number})"
        if old.rstrip().endswith(";"):
            return f"if ({condition}) {{ {self.instead} }} else {{ {old} }}"
        return f"({condition} ? ({self.instead}) : ({old}))"


def apply_changes(name: str, text: str, changes: Iterable[Change]) -> str:
    """Give the text of file `name` both what it has and, to choose when it runs, the changes."""
    places = sorted(
        (*change.position(text), number, change)
        for number, change in enumerate(changes)
        if change.file == name
    )
    pieces, done = [], 0
    for first, end, number, change in places:
        assert first >= done, f"{name}: {change.where!r} overlaps another change"
        pieces += [text[done:first], change.apply(text[first:end], number)]
        done = end
    return "".join(pieces) + text[done:]


def translate(source: Path, target: Path, changes: Iterable[Change]) -> list[Path]:
    """Write the translated kernels of folder `source` to `target`; return the .cpp files.

    Args:
        source: csrc.
        target: a folder, which is made; files have the same paths in it.
        changes: all of them get into the files; when the program runs, one or none is in force.
    """
    changes = list(changes)
    declarations = itertools.count()

    def shared(match: re.Match[str]) -> str:
        kind, name, bounds = match.groups()
        return f"{kind} (&{name}){bounds} = emu::shared<{kind}{bounds}>({next(declarations)});"

    headers = [
        str(path.relative_to(source))
        for folder, suffix in itertools.product(("native", "network"), ("cuh", "h"))
        for path in (source / folder).rglob(f"*.{suffix}")
    ]
    written = []
    for name in [*SOURCES, *headers]:
        text = apply_changes(name, (source / name).read_text(), changes)
        for old, new in SMALLER.get(name, {}).items():
            assert text.count(old) == 1, f"{name} has no single {old!r}"
            text = text.replace(old, new)
        text = DYNAMIC.sub(r"char* \1 = emu::dynamic_shared();", text)
        text = SHARED.sub(shared, text)
        text = LAUNCH.sub(r"emu::start(\1, \2, \3, \4, \5, \6);", text)
        text = VOLATILE.sub(r"load_volatile(\1)", text)
        assert not re.search(r"__shared__|<<<|\basm\b", text), f"{name}: not all translated"
        written.append(target / re.sub(r"\.cu$", ".cpp", name))
        written[-1].parent.mkdir(parents=True, exist_ok=True)
        written[-1].write_text(text)
    return [path for path in written if path.suffix == ".cpp"]
