"""Write the parts of README.md and docs/ that come from results and code: `make pages`.

These are tables and lists (generated.py), and the figures in docs/figures.  Without `--write` it
says whether they are up to date.

mkdocs calls the functions `on_...` for `make site`: the site has README.md as its home, and every
file that a page links to.  So links in the pages are ordinary paths, which also work when the tree
is browsed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import comparison  # noqa: E402
import figures  # noqa: E402
from generated import update  # noqa: E402
from results import RESULTS, measured_on, read  # noqa: E402

from benchmarks.catalogue import baseline  # noqa: E402
from benchmarks.flops import step_tflops  # noqa: E402
from megatron_ncclep import envs  # noqa: E402
from megatron_ncclep.benchmark.result import PEAK_TFLOPS  # noqa: E402
from megatron_ncclep.config import EpConfig  # noqa: E402

TRAINING = RESULTS / "2026-11-24-1xH100-training" / "bench.json"

# Subjects of layers and trainings, and their names in README.md's picture.
ADDED = {
    "ncclep:native": "ncclep as dispatcher",
    "ncclep:native:grouped": "+ grouped experts",
    "ncclep:native:grouped:partial_graphs": "+ partial CUDA graphs",
    "ncclep:native:grouped:full_iteration": "+ one CUDA graph (the grey has none)",
}
DENSE_TFLOPS = 989.4  # of an H100 SXM in bf16, by NVIDIA's data sheet; MFU is of this

HOME = "README.md"
LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")
CODE, DASHES = re.compile(r"<code>[^<\n]*</code>"), re.compile(r"(?<![\w-])--?\w+")


def layer_tflops(result: dict[str, Any]) -> dict[str, float]:
    """The experts' GEMMs of a layer, in TFLOP/s of a GPU, by the name of a subject."""
    least = PEAK_TFLOPS * sum(result["products_us"].values())
    return {s["name"]: least / s["sum_us"] for s in result["subjects"] if s["sum_us"]}


def gains() -> str:
    """README.md's picture: training steps on 4 and 2 GPUs, and layers on 4."""
    trained = [(n, *comparison.result(n, "training")["trainings"]) for n in (4, 2)]
    layers = comparison.result(4, "layers")
    steps = [(f"{num_gpus} GPUs", step_tflops(run)) for num_gpus, run in trained]
    rates = [(one["shape"]["name"], layer_tflops(one)) for one in layers["shapes"]]
    measured = {name.partition(":")[2] for _, of in (*steps, *rates) for name in of}
    added = [name for name in ADDED if name in measured]

    def bar(what: str, of: dict[str, float], peak: float | None = None) -> figures.Bar:
        base = str(baseline({name: 1 / rate for name, rate in of.items()}))
        kind, _, theirs = base.partition(":")
        ours = [of.get(f"{kind}:{name}", 0.0) for name in added]
        # What is not faster than the one before it has no part of the bar.
        speeds = [rate / of[base] for rate in itertools.accumulate([of[base], *ours], max)]
        said = f"{ours[-1] / of[base]:.2f}x {theirs}, {of[base]:.0f} to {ours[-1]:.0f}"
        share = (
            ""
            if peak is None
            else f" ({100 * of[base] / peak:.0f} to {100 * ours[-1] / peak:.0f} %)"
        )
        return what, speeds, said + share

    groups = [
        ("Training step, GPT of 1.9 billion parameters: TFLOP/s of a GPU (MFU)",
         [bar(*step, DENSE_TFLOPS) for step in steps]),
        ("One MoE layer on 4 GPUs, forward and backward: TFLOP/s of a GPU",
         [bar(*layer) for layer in rates]),
    ]  # fmt: skip
    parts = ["Megatron-Core's fastest", *(ADDED[name] for name in added)]
    return figures.gains(groups, parts, measured_on(layers))


def options_list() -> str:
    """Every option of EpConfig and its default, from the code."""
    lines = []
    for option in dataclasses.fields(EpConfig):
        flag = f"`--ncclep-{option.name.replace('_', '-')}`"
        default = "" if option.default is None else f" (`{str(option.default).lower()}`)"
        lines.append(f"- {flag}{default}: {_quoted(option.metadata['help'])}")
    return "\n".join(lines)


def variables_list() -> str:
    """The environment variables that are not options."""
    return "\n".join(f"- `{v.name}`: {_quoted(v.meaning)}" for v in envs.VARIABLES.values())


def _quoted(text: str) -> str:
    """`text` of the code in Markdown: quoted words of an option become code."""
    return re.sub(r"'([\w.-]+)'", r"`\1`", text)


def main() -> int:
    """Compare, or write with --write; return 1 if something is out of date and not written."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parts = {"steps": comparison.steps(read(TRAINING), "train:ncclep:native"),
             "options": options_list(),
             "variables": variables_list(),
             **comparison.tables()}  # fmt: skip
    drawn = {"gains": gains(), "libraries": comparison.figure()}
    files = {ROOT / "docs" / "figures" / f"{name}.svg": svg for name, svg in drawn.items()}
    return update("make pages", parts, parser.parse_args().write, files)


# --- hooks of mkdocs -----------------------------------------------------------------------------


def site_path(path: str) -> str:
    """The place of a file of the tree on the site: docs/x.md at x.md, others unchanged."""
    return "index.md" if path == HOME else path.removeprefix("docs/")


def _linked(page: str, target: str) -> str:
    """The file of the tree that `target` means in a page of the tree."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def on_config(config: Any) -> Any:
    """Put pages that mkdocs.yml does not name at the end of its first section."""
    named = str(config.nav)
    section = next(part for part in config.nav if isinstance(next(iter(part.values())), list))
    unnamed = [p.name for p in sorted((ROOT / "docs").glob("*.md")) if f"'{p.name}'" not in named]
    next(iter(section.values())).extend(unnamed)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the home page and all files that are linked to, and those that linked pages link to."""
    from mkdocs.structure.files import File

    pending = [HOME, *(f"docs/{file.src_uri}" for file in files if file.is_documentation_page())]
    seen = set(pending)
    while pending:
        path = pending.pop()
        if files.get_file_from_path(site_path(path)) is None:
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            links = {_linked(path, found[2]) for found in LINK.finditer((ROOT / path).read_text())}
            # mkdocs reports missing files, as for any link.
            found = {link for link in links - seen if (ROOT / link).is_file()}
            seen |= found
            pending += sorted(found)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links between files of the tree into links between files of the site."""
    uri = page.file.src_uri
    here = f"docs/{uri}" if (ROOT / "docs" / uri).is_file() else uri
    if uri == site_path(HOME):
        here = HOME
        page.meta["hide"] = ["navigation"]  # the only page of its section
    folder = posixpath.dirname(site_path(here)) or "."

    def on_site(found: re.Match[str]) -> str:
        if "://" in found[2]:
            return found[0]
        path = posixpath.relpath(site_path(_linked(here, found[2])), folder)
        return f"{found[1]}{path}{found[3]}"

    return LINK.sub(on_site, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Keep the dashes of options on the lines of their names."""
    whole = r'<span class="option">\g<0></span>'
    return CODE.sub(lambda found: DASHES.sub(whole, found[0]), html)


if __name__ == "__main__":
    sys.exit(main())
