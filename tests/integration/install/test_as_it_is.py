"""A process that does not use this package finds Megatron as it is, and every import goes on."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fork_server import ForkServer
from forked_python import run_forked
from test_install import run_python

from megatron_ncclep.errors import IntegrationError
from megatron_ncclep.integration import hooks
from megatron_ncclep.integration.checks.optimizer_step import _check_step
from megatron_ncclep.integration.import_hook import Finder, the_finder
from megatron_ncclep.integration.patching import Changes, replaces
from megatron_ncclep.integration.releases import MEGATRON
from megatron_ncclep.vllm import hooks as vllm_hooks

PROGRAM = Path(__file__).with_name("megatron_contents.py")
CONFIGS = "megatron.core.transformer.transformer_config"
# All that parsing needs, and noticing that a config asks for us.
ALLOWED = {
    "finders of imports",
    f"{CONFIGS}.TransformerConfig.__init__",
    f"{CONFIGS}.TransformerConfig.__setattr__",
    f"{CONFIGS}.TransformerConfig.__setstate__",
    f"{CONFIGS}.TransformerConfig.ncclep",
    f"{CONFIGS}.MLATransformerConfig.__init__",
    "megatron.training.arguments.add_megatron_arguments",
    "megatron.training.arguments.parse_args",
    "megatron.training.initialize.parse_args",  # 0.17 imports it there
    "megatron.training.yaml_arguments.core_config_from_args",
}
FIELDS = {"ncclep", "moe_token_dispatcher_type", "inference_moe_token_dispatcher_type"}
# Some of what is changed once a config asks for us.
IN_USE = {
    f"{CONFIGS}.TransformerConfig.__post_init__",
    "megatron.core.transformer.moe.moe_layer.MoELayer.__init__",
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel.__init__",
    "megatron.core.pipeline_parallel.schedules.forward_backward_no_pipelining",
    "megatron.core.parallel_state.destroy_model_parallel",
}


@pytest.mark.each_release
def test_other_dispatchers_find_megatron_as_it_is(python: ForkServer) -> None:
    """Everyone who had installed this package trained with 19 changed modules of Megatron's,
    whatever their dispatcher.

    Three processes list all classes and functions: without us, with another dispatcher, with ours.
    """

    def contents(dispatcher: str, is_loaded: bool) -> dict[str, str]:
        switch = str(int(is_loaded))
        words = [dispatcher, *hooks.PLACES]
        out = run_forked(python, str(PROGRAM), *words, NCCLEP_AUTOLOAD=switch)
        found: dict[str, str] = json.loads(out.splitlines()[-1])
        return found

    def differences(other: dict[str, str]) -> set[str]:
        return {name for name in {*without, *other} if without.get(name) != other.get(name)}

    without, idle = contents("alltoall", False), contents("alltoall", True)
    used = contents("ncclep", True)
    found = differences(idle)
    fields = {name for name in found if ", field " in name}
    assert found - fields == {name for name in ALLOWED if name in idle}
    assert {name.partition(", field ")[2] for name in fields} <= FIELDS
    assert int(idle["finders of imports"]) == int(without["finders of imports"]) + 1

    changed = differences(used)
    assert changed >= found | IN_USE
    # Whoever had imported one of the functions by then has ours.
    replaced = {without.get(name) for name in changed if "megatron_ncclep" in used.get(name, "")}
    replaced.discard("<string>:2")  # every constructor of a dataclass
    assert not {name for name in {*used} - changed if used[name] in replaced}


def empty_modules(folder: Path, *names: str) -> str:
    """Modules of these names that contain nothing; the import path that finds them first."""
    for name in names:
        path = folder.joinpath(*name.split("."))
        path.mkdir(parents=True, exist_ok=True)
        for part in (path, *path.parents):
            if part not in (folder, *folder.parents, folder / "megatron"):
                (part / "__init__.py").touch()
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.mark.parametrize("case", ["default", "error", "blocked"])
def test_whatever_fails_megatrons_import_goes_on(
    python: ForkServer, tmp_path: Path, case: str
) -> None:
    """An AttributeError about a class that a Megatron did not have ended the import of scripts that
    used other dispatchers.

    Here nothing is as expected, also where warnings are errors, or our own modules are broken.
    """
    places = [*hooks.EARLY.table, *hooks.LATE.table]
    out = run_forked(
        python,
        """
        import importlib, sys, warnings
        import torch
        case, *places = sys.argv[1:]
        if case == "blocked":
            sys.modules["megatron_ncclep.integration.hooks"] = None
        else:
            warnings.simplefilter(case)
        for name in places:
            importlib.import_module(name)
        if case != "blocked":
            import megatron_ncclep
            from megatron_ncclep.errors import IntegrationError
            try:
                megatron_ncclep.install()
            except IntegrationError as error:
                print("install:", error)
        """,
        case,
        *places,
        PYTHONPATH=empty_modules(tmp_path, *places),
        NCCLEP_GRADIENT_AVERAGING="a2sgd",  # so all places are to be changed
    )
    assert out.count("--moe-token-dispatcher-type ncclep is not available: ") == 1
    assert ("install: megatron.core" in out) == (case != "blocked")


@pytest.mark.parametrize("order", ["register first", "import first"])
def test_whatever_fails_vllms_import_goes_on(tmp_path: Path, order: str) -> None:
    """So it was with vLLM, which ended where Python's way to block an import had been used, too."""
    out = run_python(
        """
        import importlib, sys
        import megatron_ncclep.vllm
        order, *places = sys.argv[1:]
        sys.modules["tensorflow"] = None
        if order == "register first":
            megatron_ncclep.vllm.register()
        for name in places:
            importlib.import_module(name)
        megatron_ncclep.vllm.register()
        from megatron_ncclep.errors import IntegrationError
        from megatron_ncclep.vllm import hooks
        try:
            hooks.require_all()
        except IntegrationError as error:
            print("in use:", error)
        """,
        order,
        *vllm_hooks.HOOKS.table,
        PYTHONPATH=empty_modules(tmp_path, *vllm_hooks.HOOKS.table),
    )
    assert out.count("--all2all-backend ncclep is not available: ") == 1
    assert "in use: vllm." in out


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Finder]:
    """A finder of the test's own."""
    others = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    monkeypatch.setattr(sys, "meta_path", others)
    return the_finder()


def test_a_finder_that_somebody_has_saved_finds_nothing(alone: Finder) -> None:
    """A tool asked the finders that it had replaced, and the import of Megatron broke."""
    alone.changes["sched"] = {}
    sys.meta_path.remove(alone)
    assert alone.find_spec("sched", None) is None


def test_a_failure_during_a_later_import_stops_training(alone: Finder) -> None:
    def change(module: ModuleType) -> None:
        raise KeyError("place")

    def import_twice() -> None:
        late = Changes(MEGATRON, {"late": (change,)})
        for _ in range(2):
            alone.guard(lambda: late.change(ModuleType("late")), MEGATRON.feature)

    words = r"ncclep is not available: late cannot be changed \(KeyError: 'place'\)"
    with pytest.warns(UserWarning, match=words) as seen:
        import_twice()
    assert len(seen) == 1
    with pytest.raises(IntegrationError, match="late cannot be changed") as caught:
        _check_step(None, (), {})
    assert isinstance(caught.value.__cause__.__cause__, KeyError)


def test_a_function_is_replaced_where_it_has_been_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is in `sys.modules`; what is loaded lazily stays unloaded."""
    home, user, other = (ModuleType(name) for name in ("home", "user", "other"))
    home.work = user.renamed = lambda tokens: tokens  # type: ignore[attr-defined]
    other.work = lambda tokens: -tokens  # type: ignore[attr-defined]
    (tmp_path / "lazy.py").write_text("raise AssertionError('loaded')")
    spec = importlib.util.spec_from_file_location("lazy", tmp_path / "lazy.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    for name, module in {
        "home": home, "user": user, "other": other, "lazy": lazy, "blocked": None, "odd": object()
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    change = replaces("work", ["tokens"])(lambda original: lambda tokens: 2 * original(tokens))
    for _ in range(2):
        change(home)
    assert [home.work(3), user.renamed(3), other.work(3)] == [6, 6, -3]
    with pytest.raises(IntegrationError, match=r"other\.work is not .* the parameter 'rows'"):
        replaces("work", ["rows"])(lambda original: original)(other)


def test_what_counts_as_use(python: ForkServer) -> None:
    """A type in a copy, as an unpickled config has it: no constructor has run in that process.  And
    the variable with which Megatron's DDP refuses other dispatchers.
    """
    code = """
        import copy, torch
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.transformer.transformer_config import TransformerConfig
        from megatron_ncclep.integration.patching import is_changed
        sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
        for experts in (2, None):
            made = TransformerConfig(
                **sizes, num_moe_experts=experts, moe_token_dispatcher_type="alltoall"
            )
            print(made.moe_token_dispatcher_type)
        print(is_changed(DistributedDataParallel.__init__))
        config = object.__new__(TransformerConfig)
        vars(config)["moe_token_dispatcher_type"] = "ncclep"
        copied = copy.copy(config)
        print(is_changed(DistributedDataParallel.__init__), copied.moe_token_dispatcher_type)
        class Locked(TransformerConfig):
            def __setattr__(self, name, value):
                raise AttributeError(name)
        locked = object.__new__(Locked)
        vars(locked)["hidden_size"] = 8
        print(copy.copy(locked).hidden_size)
        """
    assert "alltoall\nalltoall\nFalse\nTrue ncclep\n8" in run_forked(python, code)
    assert "True\nTrue" in run_forked(python, code, NCCLEP_GRADIENT_AVERAGING="a2sgd")
    # In a framework's worker nothing of ours runs but what `import torch` loads.
    assert "ncclep\nalltoall\nTrue" in run_forked(python, code, NCCLEP_IN_PLACE_OF="alltoall")
