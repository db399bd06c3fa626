"""Check the distributions of a release, as scripts/build_wheel.sh makes them.

    python scripts/check_wheels.py FOLDER [--look] [--tag vX.Y.Z] [--sort-into FOLDER]

Looks into every wheel: its version, processor, licences and the libraries that it links to.  Each
that runs here, with a Python of PATH or pyenv, is installed with its dependencies into a new
environment, where `ncclep doctor` and the README's program must succeed; `--look` leaves that out.

`--tag` also requires that it names this version, that the changelog has a date for it, and that the
project's address is known.  `--sort-into` copies what goes to the package index to FOLDER/index and
what goes beside the release to FOLDER/release (wheels of CUDA 12, whose versions an index refuses),
and writes checksums and FOLDER/notes.md, the version's section of the changelog.

Needs the packages packaging and pyelftools.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
VERSION = runpy.run_path(str(ROOT / "megatron_ncclep" / "version.py"))["__version__"]
MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}
# They are found at run time, so that one wheel serves every torch.
NOT_LINKED = re.compile("lib(cuda|nccl|torch|c10)")
UNKNOWN_ADDRESS = "https://github.com/OWNER/"


def look(wheel: Path) -> tuple[str, str, str]:
    """The processor, the Python such as 3.12, and what the extension was built with.

    Raises:
        SystemExit: something in the wheel is not as a release needs it.
    """

    def require(holds: bool, problem: str) -> None:
        if not holds:
            raise SystemExit(f"{wheel.name}: {problem}")

    _, version, _, tags = parse_wheel_filename(wheel.name)
    require(version.public == VERSION, f"the tree's version is {VERSION}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        compiled = {name: archive.read(name) for name in names if name.endswith(".so")}
    licences = {name.rpartition("/")[2] for name in names if "/licenses/" in name}
    require({"LICENSE", "NOTICE"} <= licences, "LICENSE or NOTICE is missing")
    require(len(compiled) == 2, f"it holds {sorted(compiled)} in place of _C and libncclep.so")
    machines, built = set(), set()
    for name, content in compiled.items():
        elf = ELFFile(io.BytesIO(content))
        machines.add(MACHINES[elf["e_machine"]])
        needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
        wrong = [library for library in needed if NOT_LINKED.match(library)]
        require(not wrong, f"{name} links to {wrong}")
        built |= {each.decode() for each in re.findall(rb"CUDA \d[\d.]+ for [\w .]+", content)}
    require(
        len(machines) == 1 and all(tag.platform.endswith(tuple(machines)) for tag in tags),
        f"its code is for {machines}",
    )
    require(len(built) == 1, f"it was built with {built}")
    (how,) = built
    require(version.local == ("cu12" if "CUDA 12." in how else None), f"it was built with {how}")
    require("with NCCL 2" in how, f"no kernels over a network: set NCCL_HOME; it has {how}")
    machine, python = machines.pop(), next(iter(tags)).interpreter.removeprefix("cp")
    extension = f"megatron_ncclep/_C.cpython-{python}-{machine}-linux-gnu.so"
    require(extension in compiled, f"its Python finds no {sorted(compiled)} as {extension}")
    return machine, f"{python[0]}.{python[1:]}", how


def find_python(version: str) -> str | None:
    """A Python of that version which works, such as 3.12; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for candidate in (f"python{version}", *map(str, pyenv.glob(f"{version}.*/bin/python"))):
        if (
            shutil.which(candidate)
            and not subprocess.run(
                [candidate, "-c", "import venv, ensurepip"], capture_output=True
            ).returncode
        ):
            return candidate
    return None


def install_and_run(wheel: Path, python: str) -> None:
    """Install the wheel into a new environment and run what a newcomer runs.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    with tempfile.TemporaryDirectory() as home:
        run = {"check": True, "cwd": home, "env": {**os.environ, "PYTHONPATH": ""}}
        subprocess.run([python, "-m", "venv", home], **run)
        bin_ = Path(home, "bin")
        pip = [bin_ / "pip", "--quiet", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, f"{wheel}[train]"], **run)  # without Megatron-Core, doctor complains
        subprocess.run([bin_ / "ncclep", "doctor"], **run)
        program = ROOT / "examples" / "dispatch_combine.py"
        subprocess.run([bin_ / "torchrun", "--nproc-per-node", "2", program], **run)


def notes(tag: str | None) -> str:
    """The changelog's section of this version.

    Raises:
        SystemExit: with a tag, something is not ready for it.
    """
    changelog = (ROOT / "CHANGELOG.md").read_text()
    heading, _, rest = changelog.partition(f"## {VERSION} ")[2].partition("\n")
    if tag is not None:
        if tag != f"v{VERSION}":
            raise SystemExit(f"{tag} is not v{VERSION}, the version in megatron_ncclep/version.py")
        if not re.fullmatch(r"\(\d{4}-\d\d-\d\d\)", heading):
            raise SystemExit(f"CHANGELOG.md has no date for {VERSION}: {heading}")
        for name in ("pyproject.toml", "CITATION.cff"):
            if UNKNOWN_ADDRESS in (ROOT / name).read_text():
                raise SystemExit(f"{name}: replace {UNKNOWN_ADDRESS} by the project's address")
    # Beside a release, links need the address of its files.
    project = (ROOT / "pyproject.toml").read_text()
    (address,) = re.findall('^Repository = "(.+)"$', project, re.MULTILINE)
    section = rest.partition("\n## ")[0].strip() + "\n"
    return re.sub(r"\]\((?!https?:|#)", f"]({address}/blob/v{VERSION}/", section)


def sort_into(folder: Path, files: list[Path], text: str) -> None:
    """Copy the files to where they are uploaded from, with checksums and the notes."""
    for part in ("index", "release"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for path in files:
        shutil.copy2(path, folder / ("release" if "+" in path.name else "index"))
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (folder / "release" / "SHA256SUMS").write_text("".join(sums))
    (folder / "notes.md").write_text(text)


def main() -> int:
    """Check each file and print what was found, at once; return 0 or raise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--look", action="store_true")
    parser.add_argument("--tag")
    parser.add_argument("--sort-into", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    text = notes(args.tag)
    wheels, sdists = sorted(args.folder.glob("*.whl")), sorted(args.folder.glob("*.tar.gz"))
    if not wheels or [path.name for path in sdists] != [f"megatron_ncclep-{VERSION}.tar.gz"]:
        raise SystemExit(f"{args.folder} needs wheels and one source distribution of {VERSION}")
    size = "{:5.1f} MB  {}".format
    for path in sdists:
        print(size(path.stat().st_size / 1e6, path.name), flush=True)
    for wheel in wheels:
        machine, version, built = look(wheel)
        print(f"{size(wheel.stat().st_size / 1e6, wheel.name)}: {built}", flush=True)
        python = None if args.look or machine != platform.machine() else find_python(version)
        if python is not None:
            install_and_run(wheel.resolve(), python)
            print(f"          ran with Python {version}", flush=True)
    if args.sort_into:
        sort_into(args.sort_into, [*sdists, *wheels], text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
