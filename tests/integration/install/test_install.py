"""Loading: autoload imports nothing and can be switched off; hooks work in any order of imports."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from megatron_setup import has
from rank_pool import RankContext
from timeouts import patient

from megatron_ncclep.errors import IntegrationError, UnsupportedError
from megatron_ncclep.integration import hooks
from megatron_ncclep.integration.import_hook import after_import


def run_python(program: str, *words: str, **environment: str) -> str:
    """Run a program, or the text of one, in a fresh process; return what it prints."""
    given = (program,) if program.endswith(".py") else ("-c", textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, *given, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=patient(240),
    )
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def test_a_plain_install_is_enough() -> None:
    """The entry point is found by `import torch`; nothing of Megatron is imported by it."""
    out = run_python(
        """
        import sys, torch
        early = [m for m in sys.modules if m.startswith("megatron.")]
        assert not early, early
        assert "megatron_ncclep.autoload" in sys.modules
        assert len([f for f in sys.meta_path if "ncclep" in type(f).__module__]) == 1
        assert "megatron_ncclep.integration.hooks" not in sys.modules
        from megatron.core.transformer.transformer_config import TransformerConfig
        made = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1,
            num_moe_experts=2, moe_token_dispatcher_type="ncclep", add_bias_linear=False)
        print(made.moe_token_dispatcher_type)
        """
    )
    assert "ncclep" in out


def test_torchs_switch_turns_it_off() -> None:
    """With NCCLEP_AUTOLOAD=0 test_as_it_is.py finds Megatron unchanged."""
    run_python(
        """
        import sys, torch
        assert not [f for f in sys.meta_path if "ncclep" in type(f).__module__]
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_a_failure_does_not_break_import_torch() -> None:
    out = run_python("import torch; print(torch.ones(1).item())", NCCLEP_AUTOLOAD="maybe")
    assert "1.0" in out
    assert "could not hook into imports" in out
    assert "NCCLEP_AUTOLOAD='maybe'" in out


def test_looking_for_a_module_does_not_use_the_hook_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_module.py").write_text("class Found:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    changed: list[ModuleType] = []
    after_import("some_module", changed.append, "nothing")
    for _ in range(2):
        assert find_spec("some_module") is not None
    assert not changed
    module = importlib.import_module("some_module")
    assert changed == [module]
    # The module has the loader it always has: sources and resources are still found.
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert "class Found" in inspect.getsource(module)


@pytest.mark.alone
def test_a_changed_hook_point_is_an_error_that_names_it(ctx: RankContext) -> None:
    import megatron.core.transformer.moe.moe_layer as layer
    import megatron.core.transformer.transformer_config as config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer.MoELayer, "__init__", lambda self, settings: None)
        with pytest.raises(
            IntegrationError, match=r"moe_layer.MoELayer.__init__ is not .*'config'"
        ):
            hooks.change_module(layer)
        field = config.TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
        patch.setattr(field, "type", str)
        with pytest.raises(IntegrationError, match="moe_token_dispatcher_type is not a Literal"):
            hooks.change_module(config)


@pytest.mark.alone
def test_options_of_the_command_line(ctx: RankContext) -> None:
    """They win over the environment, `--help` shows them, and another dispatcher refuses them."""
    hooks.install()
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not has("training"):
        return  # this release's wheel has no command line
    from megatron.training.arguments import add_megatron_arguments, parse_args

    with pytest.MonkeyPatch.context() as patch:

        def parse(*arguments: str) -> Any:
            patch.setattr(sys, "argv", ["train", *arguments])
            return parse_args()

        def printed(*arguments: str) -> str:
            with (
                contextlib.redirect_stdout(io.StringIO()) as text,
                contextlib.redirect_stderr(text),
                pytest.raises(SystemExit),
            ):
                parse(*arguments)
            return text.getvalue()

        patch.setattr(TransformerConfig, "ncclep", None)
        patch.setenv("NCCLEP_ALIGNMENT", "32")
        patch.setenv("NCCLEP_TIMEOUT_S", "7")
        ours, aligned = ("--moe-token-dispatcher-type", "ncclep"), ("--ncclep-alignment", "16")
        assert parse(*ours, *aligned).moe_token_dispatcher_type == "ncclep"
        assert TransformerConfig.ncclep.alignment == 16
        assert TransformerConfig.ncclep.timeout_s == 7.0
        for kind in ("alltoall", "allgather"):
            with pytest.raises(UnsupportedError, match="--ncclep-alignment was given"):
                parse(ours[0], kind, *aligned)
        with pytest.raises(ValueError, match=r"timeout_s 0\.0: must be"):
            parse("--ncclep-timeout-s", "0", *ours)
        assert "invalid choice: 'nativ' (choose from" in printed("--ncclep-engine", "nativ", *ours)
        assert "--ncclep-max-recv-rows" in printed("--help")
        # In the place of a type that a framework sets, options are used.
        patch.setenv("NCCLEP_IN_PLACE_OF", "alltoall")
        assert parse(ours[0], "alltoall", *aligned).moe_token_dispatcher_type == "alltoall"
        assert TransformerConfig.ncclep.alignment == 16
        with pytest.raises(UnsupportedError, match="--ncclep-alignment was given"):
            parse(ours[0], "flex", *aligned)
        # The field of configs is no argument, and each of ours is there once.
        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        assert not any(action.dest == "ncclep" for action in parser._actions)
        assert "ncclep" in TransformerConfig.__dataclass_fields__
        patch.setenv("NCCLEP_ENGINE", "nativ")
        with pytest.raises(ValueError, match="NCCLEP_ENGINE='nativ': not one of auto, native"):
            parse(*ours)
