"""The documents: what they point to exists, and they say what is so.

test_doc_commands.py runs what they have users run.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from timeouts import patient

import megatron_ncclep

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/*.md", "configs/**/*.md", "benchmarks/results/*.md")
REQUIRED = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "csrc/README.md", "docs/architecture.md",
    "csrc/network/README.md", "examples/README.md", "benchmarks/README.md",
    "tests/network/README.md",
)  # fmt: skip
FOUND = [path for where in PAGES for path in ROOT.glob(where)]
DOCUMENTS = sorted({*REQUIRED, *(str(path.relative_to(ROOT)) for path in FOUND)})

# Names that documents use for files of other projects or for what a run writes.
FOREIGN = {"pretrain_gpt.py", "gpt_builders.py", "model_provider.py", "libnccl.so.2"}
# Words that stand for any name, as in configs/KIND/NAME.yaml.
PLACEHOLDERS = {"NAME", "KIND", "VERSION", "XY"}

FOLDERS = (
    "megatron_ncclep", "csrc", "configs", "scripts", "tests", "docs", "constraints", "benchmarks",
    "examples", ".ci",
)  # fmt: skip
SUFFIXES = "py|md|sh|slurm|ya?ml|toml|txt|cpp|cuh?|c|h"
IN_A_FOLDER = re.compile(rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w.*/-]*[\w*/]")
IN_BACKTICKS = re.compile(rf"`([\w.*/-]+\.(?:{SUFFIXES}))`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def named_paths(text: str) -> set[str]:
    """What `text` names as files of this tree, links apart."""
    found = {path.rstrip("/") for path in IN_A_FOLDER.findall(text)}
    return found | set(IN_BACKTICKS.findall(text)) - FOREIGN


def exists(path: str) -> bool:
    """Whether `path` is in the tree: from its top, or by its end alone."""
    pattern = re.sub(rf"\b(?:{'|'.join(PLACEHOLDERS)})\b", "*", path)
    return any(any(ROOT.glob(p)) for p in (pattern, *(f"{top}/**/{pattern}" for top in FOLDERS)))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_and_links_in_documents_exist(name: str):
    document = ROOT / name
    text = document.read_text()
    missing = [path for path in named_paths(text) if not exists(path)]
    links = [target for target in LINK.findall(text) if "://" not in target]
    missing += [target for target in links if not (document.parent / target).exists()]
    assert not missing, f"{name} names what is not in the tree: {missing}"


def test_targets_of_make_that_documents_name_exist():
    assert re.search(r"^make test\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in DOCUMENTS:
        named = set(re.findall(r"`make ([a-z]+)", (ROOT / name).read_text()))
        assert named <= targets, f"{name} names targets that are not in the Makefile"


def literals(source: str) -> list[str]:
    """All strings of a Python module, with `…` where a value is put in."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def native_literals(source: str) -> list[str]:
    """All strings of a C++ file; the compiler joins those that follow each other."""
    literal = r'"((?:[^"\\\n]|\\.)*)"'
    runs = re.finditer(rf"(?:{literal}\s*)+", source)
    return ["".join(re.findall(literal, run[0])) for run in runs]


# Megatron's parser; ms-swift's and ROLL's; AReaL; Megatron-Bridge; slime.
OF_OTHERS = [
    "argument --moe-token-dispatcher-type: invalid choice: 'ncclep'",
    "argument --moe_token_dispatcher_type/--moe-token-dispatcher-type: invalid choice: 'ncclep'",
    "Ignoring mcore_config.moe_token_dispatcher_type=… for bridge_type='megatron-bridge'; using "
    "'alltoall' and …",
    "Multi-LoRA on MoE experts replays MoEAlltoAllTokenDispatcher's permutation stages; got "
    "NcclEpTokenDispatcher. …",
    "SGLang DeepEP alignment requires MCore's flex _DeepepManager; …",
]


def says(message: str, texts: list[str]) -> bool:
    """Whether one of `texts` has the message, whose `…` stand for anything."""
    parts = message.split("…")
    pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
    possible = (text for text in texts if all(part in text for part in parts))
    return any(pattern.search(text) for text in possible)


def test_messages_that_troubleshooting_explains_are_ours():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    sources = (ROOT / "megatron_ncclep").rglob("*.py")
    texts = [text for path in sources for text in literals(path.read_text())]
    native = (ROOT / "csrc").rglob("*.cpp")
    texts += [text for path in native for text in native_literals(path.read_text())]
    unknown = [m for m in messages if not says(m, texts)]
    # What others say, where nothing of ours runs.
    assert unknown == OF_OTHERS


def test_the_reference_has_the_whole_public_interface():
    page = (ROOT / "docs" / "reference.md").read_text()
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    assert {*megatron_ncclep.__all__} - {"__version__"} <= shown
    assert dir(megatron_ncclep) == sorted(megatron_ncclep.__all__), "completion shows other names"


@pytest.mark.parametrize("script", ["pages", "support", "versions"])
def test_what_scripts_write_is_up_to_date(script: str):
    """Tables and figures; what works, as the tests show it; and versions that have run.

    The first page listed versions by hand, and one of them had never run.
    """
    command = [sys.executable, f"{ROOT}/scripts/{script}.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(600))
    assert done.returncode == 0, done.stdout + done.stderr


def numbers(text: str) -> set[float]:
    """All numbers in a text, with or without commas between their thousands."""
    return {float(n) for n in re.findall(r"(?<![\w.@])\d+(?:\.\d+)?", text.replace(",", ""))}


def test_numbers_on_performance_are_in_the_results_that_it_links_to():
    """Numbers from 100 on, which are times and rates; most others are ratios of these."""
    page = ROOT / "docs" / "performance.md"
    for section in re.split(r"^(?=##+ )", page.read_text(), flags=re.MULTILINE):
        section = re.sub(r"<!-- written by.*?<!-- end -->", "", section, flags=re.DOTALL)
        rows = re.findall(r"^\|[^|]*\|(.*)\|$", section, re.MULTILINE)
        shown = {number for number in numbers(" ".join(rows)) if number >= 100}
        linked = [page.parent / link for link in LINK.findall(section) if "://" not in link]
        files = [path for path in linked if path.suffix in (".txt", ".md", ".yaml")]
        known = set().union(*(numbers(path.read_text()) for path in files))
        unknown = shown - known - {float(round(number)) for number in known}
        assert not unknown, f"{section.splitlines()[0]}: {sorted(unknown)} in none of {files}"
