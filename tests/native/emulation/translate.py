"""Turn the native engine's kernels into C++ for the emulator: what no header can stand in for."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

# CTAs of fewer warps than on a GPU: a thread is a fiber here.
SMALLER = {
    "split.h": ("constexpr int kWarps = 16;", "constexpr int kWarps = 6;"),
    "chunks.cuh": ("constexpr int kPlanThreads = 512;", "constexpr int kPlanThreads = 128;"),
}
SHARED = re.compile(r"__shared__ (?:__align__\(\d+\) )?(.+?) (\w+)((?:\[\w+\])*);")
DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) char (\w+)\[\];")
LAUNCH = re.compile(
    r"(\w+)<<<(.+?), (.+?), (.+?), reinterpret_cast<cudaStream_t>\((\w+)\)>>>\((.+?)\);", re.DOTALL
)


# The kernels, and what they include.
FILES = ("plan", "plan_receive", "overflow", "dispatch", "combine")
NOT_NEEDED = ("group.h", "check_windows.h")


def translate(source: Path, target: Path, changes: dict[str, tuple[str, str]]) -> list[Path]:
    """Write the translated kernels of folder `source` to `target`; return the .cpp files.

    Args:
        source: csrc/native.
        target: a folder, which is made.
        changes: file name -> text that stands in it once, and what replaces it.
    """
    target.mkdir(parents=True)
    declarations = itertools.count()

    def shared(match: re.Match[str]) -> str:
        kind, name, bounds = match.groups()
        return f"{kind} (&{name}){bounds} = emu::shared<{kind}{bounds}>({next(declarations)});"

    headers = [*source.glob("*.cuh"), *source.glob("*.h")]
    written = []
    for path in [*(source / f"{name}.cu" for name in FILES), *headers, source / "split.cpp"]:
        if path.name in NOT_NEEDED:
            continue
        text = path.read_text()
        for table in (SMALLER, changes):
            if path.name in table:
                old, new = table[path.name]
                assert text.count(old) == 1, f"{path.name} has no single {old!r}"
                text = text.replace(old, new)
        text = DYNAMIC.sub(r"char* \1 = emu::dynamic_shared();", text)
        text = SHARED.sub(shared, text)
        text = LAUNCH.sub(r"emu::start(\1, \2, \3, \4, \5, \6);", text)
        assert not re.search(r"__shared__|<<<|\basm\b", text), f"{path.name}: not all translated"
        written.append(target / (f"{path.stem}.cpp" if path.suffix == ".cu" else path.name))
        written[-1].write_text(text)
    return [path for path in written if path.suffix == ".cpp"]
