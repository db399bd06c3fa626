"""Settings of one run, and the Megatron-Core objects that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ncclep import config_files
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import InputError
from megatron_ncclep.training import arguments
from megatron_ncclep.training.arguments import ARGUMENTS, GPT, LATENT, OPTIMIZER, TRANSFORMER


@dataclass(frozen=True)
class Settings:
    """The checked values of one model file, with the command line's changes.

    Attributes:
        values: argument name (with dashes) -> value, defaults filled in.
    """

    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @classmethod
    def load(cls, model: str, changes: dict[str, Any]) -> Settings:
        """Read configs/model/`model`.yaml (or the path `model`) and apply `changes`.

        Raises:
            InputError: no such file, an unknown key, a missing or a wrong value.
        """
        given = config_files.load("model", model) | changes
        settings = cls(arguments.check(f"model {model}", given))
        settings._check()
        return settings

    def _check(self) -> None:
        if self["seq-length"] > self["max-position-embeddings"]:
            raise InputError(
                f"seq-length {self['seq-length']} is more than max-position-embeddings "
                f"{self['max-position-embeddings']}: make one shorter or the other longer"
            )
        if not 0 <= self["lr-warmup-fraction"] < 1:
            raise InputError(f"lr-warmup-fraction {self['lr-warmup-fraction']}: must be in [0, 1)")
        if self["group-query-attention"] != ("num-query-groups" in self.values):
            raise InputError("group-query-attention and num-query-groups need each other")
        latent = sorted(name for name in self.values if ARGUMENTS[name].owner == LATENT)
        if latent and not self["multi-latent-attention"]:
            raise InputError(f"{latent[0]} needs multi-latent-attention: true")
        arguments.layer_pattern(self["moe-layer-freq"], self["num-layers"])

    def check_ranks(self, num_ranks: int, expert_parallel: int) -> None:
        """Check that the batch and the experts divide among the ranks.

        Raises:
            InputError: they do not; the message says what would.
        """
        if num_ranks % expert_parallel:
            raise InputError(
                f"--expert-parallel {expert_parallel}: must divide the {num_ranks} ranks"
            )
        if self["num-experts"] % expert_parallel:
            raise InputError(
                f"num-experts {self['num-experts']} cannot be divided among {expert_parallel} "
                "expert-parallel ranks: choose --ranks or --expert-parallel so that it can"
            )
        per_step = self["micro-batch-size"] * num_ranks
        if self["global-batch-size"] % per_step:
            raise InputError(
                f"global-batch-size {self['global-batch-size']}: must be a multiple of "
                f"micro-batch-size {self['micro-batch-size']} x {num_ranks} ranks = {per_step}"
            )

    def num_microbatches(self, num_ranks: int) -> int:
        """Micro-batches of each rank in one step; all ranks are data-parallel."""
        return self["global-batch-size"] // (self["micro-batch-size"] * num_ranks)

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises from 0 to `lr`."""
        return int(self["lr-warmup-fraction"] * self["train-iters"])

    @property
    def num_routers(self) -> int:
        """Layers that have experts."""
        return sum(arguments.layer_pattern(self["moe-layer-freq"], self["num-layers"]))

    def _of(self, owner: str) -> dict[str, Any]:
        """The values that `owner` takes, by its own field names."""
        return {
            ARGUMENTS[name].field or name.replace("-", "_"): value
            for name, value in self.values.items()
            if ARGUMENTS[name].owner == owner
        }

    def transformer_config(
        self, dispatcher: str, expert_parallel: int, options: EpConfig | None, **more: Any
    ) -> Any:
        """Build Megatron's TransformerConfig (or MLATransformerConfig).

        Args:
            dispatcher: value of `moe_token_dispatcher_type`; for `ncclep` the caller has called
                `megatron_ncclep.install()` before.
            expert_parallel: ranks among which the experts are divided.
            options: the dispatcher's options; None for Megatron's own dispatchers.
            more: further fields.
        """
        import torch
        from megatron.core.transformer.transformer_config import (
            MLATransformerConfig,
            TransformerConfig,
        )

        dtype = torch.bfloat16 if self["bf16"] else torch.float32
        pattern = arguments.layer_pattern(self["moe-layer-freq"], self["num-layers"])
        fields = self._of(TRANSFORMER)
        fields.update(
            add_bias_linear=not self["disable-bias-linear"],
            gated_linear_unit=self["swiglu"],
            persist_layer_norm=self._persist_layer_norm,
            # A list, even of ones only, makes Megatron treat the layers as heterogeneous.
            moe_layer_freq=pattern if 0 in pattern else 1,
            moe_token_dispatcher_type=dispatcher,
            expert_model_parallel_size=expert_parallel,
            bf16=self["bf16"],
            params_dtype=dtype,
            pipeline_dtype=dtype,
        )
        if self["swiglu"]:
            fields["activation_func"] = torch.nn.functional.silu
        fields |= more
        if self["multi-latent-attention"]:
            fields |= self._of(LATENT)
            # MLATransformerConfig and not GPTModel holds these two when attention is latent.
            fields |= {"rotary_base": self["rotary-base"], "rotary_percent": self["rotary-percent"]}
            config = MLATransformerConfig(multi_latent_attention=True, **fields)
        else:
            config = TransformerConfig(**fields)
        if options is not None:
            config.ncclep = options
        return config

    @property
    def _persist_layer_norm(self) -> bool:
        """Apex' persistent LayerNorm kernel; torch's norms, which `local` falls to, refuse it."""
        return self["transformer-impl"] != "local" and not self["no-persist-layer-norm"]

    def gpt_model(self, config: Any, vocab_size: int) -> Any:
        """Build the GPTModel.  Collective: the ranks' weights come from one seed.

        Raises:
            InputError: `transformer-impl: transformer_engine` without TransformerEngine.
        """
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        engine = self["transformer-impl"] == "transformer_engine"
        if engine:
            _require_transformer_engine()
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=engine, normalization=config.normalization
        )
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=vocab_size,
            max_sequence_length=self["max-position-embeddings"],
            share_embeddings_and_output_weights=not self["untie-embeddings-and-output-weights"],
            rotary_base=self["rotary-base"],
            rotary_percent=self["rotary-percent"],
            **self._of(GPT),
        )

    def optimizer(self, model: Any, **more: Any) -> Any:
        """Build Megatron's Adam for the wrapped `model`, with `more` fields of OptimizerConfig."""
        import torch
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        dtype = torch.bfloat16 if self["bf16"] else torch.float32
        config = OptimizerConfig(
            optimizer="adam",
            bf16=self["bf16"],
            params_dtype=dtype,
            **self._of(OPTIMIZER),
            **more,
        )
        return get_megatron_optimizer(config, [model], use_gloo_process_groups=False)

    def scheduler(self, optimizer: Any) -> Any:
        """Build the learning-rate schedule; one unit of it is one sample, as in Megatron-LM.

        A resumed run follows this run's settings and takes only the position from the checkpoint,
        so that `--steps` can be raised.
        """
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        batch, steps = self["global-batch-size"], self["train-iters"]
        return OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=self["lr"],
            min_lr=self["min-lr"],
            lr_warmup_steps=self.warmup_steps * batch,
            lr_decay_steps=steps * batch,
            lr_decay_style=self["lr-decay-style"],
            start_wd=self["weight-decay"],
            end_wd=self["weight-decay"],
            wd_incr_steps=steps * batch,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )


def _require_transformer_engine() -> None:
    from importlib.util import find_spec

    if find_spec("transformer_engine") is None:
        raise InputError(
            "transformer-impl: transformer_engine needs TransformerEngine, which is not installed: "
            "pip install 'megatron-ncclep[te]', or use --set transformer-impl=local with "
            "--set moe-grouped-gemm=false"
        )


def parse_changes(assignments: Sequence[str]) -> dict[str, Any]:
    """Read `NAME=VALUE` texts of the command line; VALUE is read as YAML, as in the files.

    Raises:
        InputError: a text without `=`, or a value that is not YAML.
    """
    changes: dict[str, Any] = {}
    for text in assignments:
        name, separator, value = text.partition("=")
        if not separator:
            raise InputError(f"--set {text}: must be NAME=VALUE, such as num-layers=2")
        changes[name] = config_files.parse_yaml(f"--set {text}", value)
        if isinstance(changes[name], str):
            changes[name] = _number_or_text(changes[name])
    return changes


def _number_or_text(text: str) -> float | str:
    """YAML 1.1 takes 1e-3 for a text; on a command line it is meant as a number."""
    try:
        return float(text)
    except ValueError:
        return text
