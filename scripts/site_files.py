"""Hooks of mkdocs: the site has README.md as its home, and every file that a page links to.

So links in the pages are ordinary paths in the tree, which work where the tree is browsed too.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")
HOME = "README.md"


def site_path(path: str) -> str:
    """Where a file of the tree is on the site: docs/x.md at x.md, others where they are."""
    return "index.md" if path == HOME else path.removeprefix("docs/")


def tree_path(uri: str) -> str:
    """Which file of the tree a page of the site is."""
    if uri == "index.md":
        return HOME
    return f"docs/{uri}" if (ROOT / "docs" / uri).is_file() else uri


def links_of(path: str) -> list[str]:
    """The files of the tree that a page, itself one of them, links to."""
    text = (ROOT / path).read_text()
    targets = [found[2] for found in LINK.finditer(text) if "://" not in found[2]]
    return [posixpath.normpath(posixpath.join(posixpath.dirname(path), t)) for t in targets]


def on_config(config: Any) -> Any:
    """Put pages that mkdocs.yml does not name at the end of its first section."""
    named = str(config.nav)
    section = next(part for part in config.nav if isinstance(next(iter(part.values())), list))
    unnamed = [p.name for p in sorted((ROOT / "docs").glob("*.md")) if f"'{p.name}'" not in named]
    next(iter(section.values())).extend(unnamed)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the home page and whatever is linked to, and what that links to if it is a page."""
    pending = [HOME, *(f"docs/{file.src_uri}" for file in files if file.is_documentation_page())]
    seen = set(pending)
    while pending:
        path = pending.pop()
        if files.get_file_from_path(site_path(path)) is None:
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            # mkdocs reports what is not there, as for any link.
            found = {link for link in links_of(path) if (ROOT / link).is_file()} - seen
            seen |= found
            pending += sorted(found)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links between files of the tree into links between files of the site."""
    here = tree_path(page.file.src_uri)
    if here == HOME:
        page.meta["hide"] = ["navigation"]  # the only page of its section
    folder = posixpath.dirname(site_path(here))

    def on_site(found: re.Match[str]) -> str:
        target = found[2]
        if "://" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        return f"{found[1]}{posixpath.relpath(site_path(path), folder or '.')}{found[3]}"

    return LINK.sub(on_site, markdown)
