"""Settings of one training: the Megatron-LM arguments of a model file, checked.

A file of configs/model/ is used in two ways: `ncclep render` passes it unchanged to Megatron-LM's
own parser, and `ncclep train` and benchmarks/, which run without Megatron-LM, check it here.
model.py passes the values to every Megatron-Core configuration that has a field of that name.

Deliberately left out: the vocabulary (which depends on the data) and all parallelism (which depends
on the machines).  `eval-interval` has no default: without it Megatron-LM's scripts end in a
TypeError, and `ncclep train` validates only at the end. Fusions that Megatron-LM enables by default
(`no-...-fusion` disables them) are off by default in Megatron-Core; they change speed, not results.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ncclep.cli import config_files
from megatron_ncclep.errors import InputError

MOST = 2**31 - 1  # the largest int
TOP_K = 2  # Megatron-Core's default
# Defaults of keys for which Megatron-Core has a different default or none.
DEFAULTS: dict[str, Any] = {
    "group-query-attention": False,
    "multi-latent-attention": False,
    "swiglu": False,
    "disable-bias-linear": False,
    "moe-layer-freq": "1",
    "position-embedding-type": "learned_absolute",
    "rotary-base": 10000,
    "rotary-percent": 1.0,
    "untie-embeddings-and-output-weights": False,
    "transformer-impl": "transformer_engine",
    "no-persist-layer-norm": False,
    "bf16": False,
    "eval-iters": 8,
    "seed": 1234,
    "min-lr": 0.0,
    "weight-decay": 0.01,
    "adam-beta1": 0.9,
    "adam-beta2": 0.999,
    "adam-eps": 1e-8,
    "clip-grad": 1.0,
    "lr-decay-style": "linear",
    "lr-warmup-fraction": 0.0,
}
REQUIRED: dict[str, type] = {
    "num-layers": int, "hidden-size": int, "num-attention-heads": int, "num-experts": int,
    "seq-length": int, "max-position-embeddings": int, "micro-batch-size": int,
    "global-batch-size": int, "train-iters": int, "lr": float,
}  # fmt: skip
# Only MLATransformerConfig has these.
LATENT: dict[str, type] = {
    "q-lora-rank": int, "kv-lora-rank": int, "qk-head-dim": int, "qk-pos-emb-head-dim": int,
    "v-head-dim": int, "rotary-scaling-factor": float, "mscale": float, "mscale-all-dim": float,
}  # fmt: skip
_OTHERS: dict[type, str] = {
    int: """
        ffn-hidden-size num-query-groups kv-channels moe-ffn-hidden-size
        moe-shared-expert-intermediate-size moe-router-topk moe-router-num-groups
        moe-router-group-topk eval-interval
    """,
    float: """
        norm-epsilon hidden-dropout attention-dropout init-method-std moe-aux-loss-coeff
        moe-z-loss-coeff moe-router-topk-scaling-factor moe-router-bias-update-rate
    """,
    bool: """
        qk-layernorm moe-router-pre-softmax moe-router-enable-expert-bias moe-grouped-gemm
    """,
    str: """
        normalization moe-router-score-function moe-router-load-balancing-type moe-router-dtype
    """,
}
# Every argument that a model file may have.
TYPES: dict[str, type] = {
    **{name: type(value) for name, value in DEFAULTS.items()},
    **REQUIRED,
    **LATENT,
    **{name: kind for kind, names in _OTHERS.items() for name in names.split()},
}
# Arguments for which only some of Megatron-LM's values are supported here.
CHOICES = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "position-embedding-type": ("learned_absolute", "rope", "none"),
    "transformer-impl": ("local", "transformer_engine"),
    "lr-decay-style": ("constant", "linear", "cosine"),
    "moe-router-score-function": ("softmax", "sigmoid"),
    "moe-router-load-balancing-type": (
        "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"
    ),
    "moe-router-dtype": ("fp32", "fp64"),
}  # fmt: skip
# Probabilities and shares; all other numbers may be any that are not negative.
BELOW_ONE = (
    "adam-beta1",
    "adam-beta2",
    "attention-dropout",
    "hidden-dropout",
    "lr-warmup-fraction",
)


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
        source = f"model {model}"
        given = config_files.load("model", model) | changes
        for key in given:
            if key not in TYPES:
                raise InputError(f"{source}: unknown key {key!r}: {_known_keys(key)}")
        for key in REQUIRED:
            if key not in given:
                raise InputError(f"{source}: {key!r} is missing; every model needs it")
        checked = {key: _checked(source, key, value) for key, value in given.items()}
        settings = cls(DEFAULTS | checked)
        settings._check()
        return settings

    def _check(self) -> None:
        """Check values that depend on each other."""
        if self["seq-length"] > self["max-position-embeddings"]:
            raise InputError(
                f"seq-length {self['seq-length']} is more than max-position-embeddings "
                f"{self['max-position-embeddings']}: make one shorter or the other longer"
            )
        if self["min-lr"] > self["lr"]:
            raise InputError(f"min-lr {self['min-lr']} is more than lr {self['lr']}: lower it")
        if self["group-query-attention"] != ("num-query-groups" in self.values):
            raise InputError("group-query-attention and num-query-groups need each other")
        heads = self["num-attention-heads"]
        if heads % (groups := self.values.get("num-query-groups", heads)):
            raise InputError(f"num-query-groups {groups} must divide num-attention-heads {heads}")
        channels = self.values.get("kv-channels", self["hidden-size"] // heads)
        is_latent = self["multi-latent-attention"]
        if self["position-embedding-type"] == "rope" and not is_latent and channels % 2:
            raise InputError(
                f"position-embedding-type rope rotates pairs, and a head has {channels} channels "
                "(kv-channels, or hidden-size / num-attention-heads): make it an even number"
            )
        self._check_router()
        latent = [name for name in LATENT if name in self.values]
        if latent and not is_latent:
            raise InputError(f"{latent[0]} needs multi-latent-attention: true")
        layer_pattern(self["moe-layer-freq"], self["num-layers"])

    def _check_router(self) -> None:
        """Check that a token finds as many experts as it is to have."""
        top_k, chosen = self.values.get("moe-router-topk", TOP_K), self["num-experts"]
        of = f"num-experts {chosen}"
        if groups := self.values.get("moe-router-num-groups"):
            if chosen % groups:
                raise InputError(f"moe-router-num-groups {groups} must divide {of}")
            of_groups = self.values.get("moe-router-group-topk", groups)
            chosen = chosen // groups * of_groups
            of += f", of which moe-router-group-topk {of_groups} of {groups} groups have {chosen}"
        if top_k > chosen:
            raise InputError(
                f"moe-router-topk {top_k} is more than {of}: a token cannot have more experts than "
                "there are: lower it"
            )

    def check_ranks(self, num_ranks: int, expert_parallel: int) -> None:
        """Check that the batch and the experts divide among the ranks.

        Raises:
            InputError: they do not; the message says which numbers would.
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

    @property
    def uses_engine(self) -> bool:
        """Whether the model is made of TransformerEngine's modules."""
        return bool(self["transformer-impl"] == "transformer_engine")


def _checked(source: str, key: str, value: Any) -> Any:
    """`value` in the type of the argument `key`."""
    wanted: Any = TYPES[key]
    if key == "moe-layer-freq":
        value = str(value)
    if wanted is float and type(value) is int and abs(value) <= MOST:
        value = float(value)
    if type(value) is not wanted:
        raise InputError(
            f"{source}: {key}: {value!r} is {type(value).__name__}, must be {wanted.__name__}"
        )
    if wanted is float and not math.isfinite(value):
        raise InputError(f"{source}: {key}: {value!r} must be a finite number")
    if wanted is float and (value < 0 or (key in BELOW_ONE and value >= 1)):
        limits = "in [0, 1)" if key in BELOW_ONE else "0 or more"
        raise InputError(f"{source}: {key} {value}: must be {limits}")
    least = 0 if key == "seed" else 1
    if wanted is int and not least <= value <= MOST:
        raise InputError(f"{source}: {key} {value}: must be from {least} to {MOST}")
    if value not in CHOICES.get(key, (value,)):
        raise InputError(f"{source}: {key}: {value!r} must be one of {CHOICES[key]}")
    return value


def _known_keys(key: object) -> str:
    """Say which key was meant, or which ones there are."""
    if near := difflib.get_close_matches(str(key), TYPES, n=1, cutoff=0.75):
        return f"did you mean {near[0]}?"
    return f"`ncclep train` supports these arguments of Megatron-LM: {', '.join(sorted(TYPES))}"


def layer_pattern(text: str, num_layers: int) -> list[int]:
    """Which layers have experts, from the value of `moe-layer-freq`.

    Args:
        text: `N` (every N-th layer, beginning with the first, as in Megatron-Core), or a sum of
            repeated lists as in Megatron-LM: `([0]*3+[1]*58)` begins with three dense layers.

    Returns:
        list[int]: `num_layers` entries, 1 for a layer with experts and 0 for a dense one.

    Raises:
        InputError: another form, or a list whose length is not `num_layers`.
    """
    if re.fullmatch(r"[1-9]\d*", text):
        return [int(layer % int(text) == 0) for layer in range(num_layers)]
    term = r"\[[01]\]\*\d+"
    if not re.fullmatch(rf"\(?{term}(\+{term})*\)?", text):
        raise InputError(
            f"moe-layer-freq: {text!r} must be a number or a sum of lists like ([0]*3+[1]*58)"
        )
    pattern: list[int] = []
    for value, count in re.findall(r"\[([01])\]\*(\d+)", text):
        pattern += [int(value)] * int(count)
    if len(pattern) != num_layers:
        raise InputError(
            f"moe-layer-freq: {text!r} names {len(pattern)} layers, num-layers is {num_layers}"
        )
    return pattern


def parse_changes(assignments: Sequence[str]) -> dict[str, Any]:
    """Read `NAME=VALUE` texts of the command line; VALUE is read as YAML, as in the files.

    Raises:
        InputError: a text without `=`, a name twice, or a value that is not YAML.
    """
    changes: dict[str, Any] = {}
    for text in assignments:
        name, separator, value = text.partition("=")
        if not separator:
            raise InputError(f"--set {text}: must be NAME=VALUE, such as num-layers=2")
        if name in changes:
            raise InputError(f"--set {text}: {name} is set twice: leave one of them out")
        read = config_files.parse_yaml(f"--set {text}", value)
        # YAML 1.1 reads 1e-3 as text; on a command line it is meant as a number.
        is_number = isinstance(read, str) and config_files.is_number(read)
        changes[name] = float(read) if is_number else read
    return changes
