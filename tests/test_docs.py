"""The documents: what they point to exists, and the README starts with the two commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REQUIRED = ("README.md", "CONTRIBUTING.md", "csrc/README.md", "docs/architecture.md")
FOUND = [*ROOT.glob("docs/*.md"), *ROOT.glob("configs/**/*.md")]
DOCUMENTS = sorted({*REQUIRED, *(str(path.relative_to(ROOT)) for path in FOUND)})

# Names that documents use for files of other projects or for what a run writes.
FOREIGN = {"pretrain_gpt.py", "gpt_builders.py", "model_provider.py", "libnccl.so.2"}
# Words that stand for any name, as in configs/KIND/NAME.yaml.
PLACEHOLDERS = {"NAME", "KIND", "VERSION", "XY"}

FOLDERS = (
    "megatron_ncclep", "csrc", "configs", "scripts", "tests", "docs", "constraints", "benchmarks",
    ".ci",
)  # fmt: skip
SUFFIXES = "py|md|sh|slurm|ya?ml|toml|txt|cpp|cuh?|h"
IN_A_FOLDER = re.compile(rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w.*/-]*[\w*/]")
IN_BACKTICKS = re.compile(rf"`([\w.*/-]+\.(?:{SUFFIXES}))`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def named_paths(text: str) -> set[str]:
    """What `text` names as files of this tree, links apart."""
    found = {path.rstrip("/") for path in IN_A_FOLDER.findall(text)}
    return found | set(IN_BACKTICKS.findall(text)) - FOREIGN


def exists(path: str, tree: Path = ROOT) -> bool:
    """Whether `path` is in the tree: from its top, from the package, or by its end alone."""
    pattern = re.sub(rf"\b(?:{'|'.join(PLACEHOLDERS)})\b", "*", path)
    if any(tree.glob(pattern)):
        return True
    return any(
        any(tree.glob(f"{folder}/**/{pattern}")) for folder in FOLDERS if (tree / folder).is_dir()
    )


def commands(text: str) -> list[str]:
    """The lines of all code blocks, without prompts, comments and empty lines."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = (
        line.removeprefix("$ ").partition(" #")[0].strip() for b in blocks for line in b.split("\n")
    )
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_in_documents_exist(name: str):
    document = ROOT / name
    assert document.is_file(), f"{name} is missing"
    missing = sorted(path for path in named_paths(document.read_text()) if not exists(path))
    assert not missing, f"{name} names what is not in the tree: {missing}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_in_documents_lead_somewhere(name: str):
    document = ROOT / name
    targets = [t for t in LINK.findall(document.read_text()) if "://" not in t]
    missing = sorted(t for t in targets if not (document.parent / t).exists())
    assert not missing, f"{name} links to what is not there: {missing}"


def test_readme_starts_with_the_two_commands():
    assert commands((ROOT / "README.md").read_text())[:2] == ["make train", "make test"]


def test_ci_runs_the_readmes_test_command():
    assert re.search(r"^make test\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def test_targets_of_make_that_documents_name_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in DOCUMENTS:
        named = set(re.findall(r"`make ([a-z]+)", (ROOT / name).read_text()))
        assert named <= targets, f"{name} names targets that are not in the Makefile"


def test_the_finders_find(tmp_path: Path):
    """The checks above see nothing but what these functions find."""
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "a.yaml").touch()
    text = """
Run scripts/gone.sh, not Megatron-LM/scripts/x.sh; see `setup.py`, `engines/gone.py`, `x.y.z`,
`pretrain_gpt.py`, configs/KIND/NAME.yaml, `configs/model/` and [this](docs/gone.md#part).
"""
    assert named_paths(text) == {
        "scripts/gone.sh", "setup.py", "engines/gone.py", "configs/KIND/NAME.yaml", "docs/gone.md",
        "configs/model",
    }  # fmt: skip
    assert LINK.findall(text) == ["docs/gone.md"]
    assert exists("configs/KIND/NAME.yaml", tmp_path)
    assert exists("a.yaml", tmp_path)
    assert exists("model/a.yaml", tmp_path)
    assert not exists("configs/model/b.yaml", tmp_path)
    assert not exists("docs/gone.md", tmp_path)
    assert commands("a\n```\n# x\n$ make train  # y\n\nmake test\n```\n") == [
        "make train",
        "make test",
    ]
