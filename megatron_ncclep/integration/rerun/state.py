"""Everything that a step changes other than gradients, remembered so that it can be put back."""

from __future__ import annotations

import copy
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ncclep.engines.overflow import OverflowReport, set_aside

# Modules of Megatron's, and the dicts in which they add up what they log.
_TRACKERS = {
    "megatron.core.transformer.multi_token_prediction": "MTPLossLoggingHelper",
    "megatron.core.transformer.experimental_attention_variant.dsa": "DSAIndexerLossLoggingHelper",
}
_METRICS_MODULE = "megatron.core.transformer.moe.moe_logging"  # from 0.18 on
_UTILS_MODULE = "megatron.core.transformer.moe.moe_utils"
_RERUN_MODULE = "megatron.core.rerun_state_machine"
# Tensors of delayed FP8 scaling, and what TransformerEngine makes them with in a first step.
_FP8 = {"scale": 1.0, "scale_inv": 1.0, "amax_history": 0.0}
# The largest attention logit so far, for qk_clip: replaced by each forward pass, never in place.
_REPLACED = ("current_max_attn_logits",)


class ModelState:
    """The tensors of a model that forward and backward passes change, other than gradients.

    Buffers: experts' biases, counts of tokens, sums of global auxiliary losses.  FP8: scales and
    histories of largest values.  Our dispatchers' counters.

    Which modules have any is found out once: no module gets its first one later.

    Attributes:
        engines: of all layers with our dispatcher.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        """`chunks`: the parts of the model on this rank."""
        modules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
        weights = {p.untyped_storage().data_ptr() for m in modules for p in m.parameters(False)}
        self._buffers = [
            (module, name)
            for module in modules
            for name, buffer in module._buffers.items()
            # For generating text, Megatron keeps weights as buffers too.
            if buffer is None or buffer.untyped_storage().data_ptr() not in weights
        ]
        self._fp8 = [module for module in modules if hasattr(module, "fp8_meta")]
        self._replaced = [(m, name) for m in modules for name in _REPLACED if hasattr(m, name)]
        dispatchers = [getattr(module, "token_dispatcher", None) for module in modules]
        self._dispatchers: list[Any] = [each for each in dispatchers if hasattr(each, "counters")]
        self.engines = [dispatcher.engines for dispatcher in self._dispatchers]

    def tensors(self) -> list[torch.Tensor]:
        """Those that are changed in place; CUDA graphs know their addresses."""
        found = [module._buffers[name] for module, name in self._buffers]
        found += [counter for each in self._dispatchers for counter in each.counters()]
        return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]

    def made_by_steps(self) -> list[tuple[torch.Tensor, float]]:
        """Those that steps change in place too, but make when they need them: with this value."""
        parts = [part for module in self._fp8 for part in module.fp8_meta.values()]
        found = [
            (getattr(part, name, None), value) for part in parts for name, value in _FP8.items()
        ]
        found += [(tensor, 0.0) for tensor in _logged_tensors()]
        return [(tensor, value) for tensor, value in found if isinstance(tensor, torch.Tensor)]

    def overflow_reports(self) -> list[OverflowReport]:
        """Where the model's layers record rows that ranks lacked; other models may share these."""
        found = [each.overflow_report for each in self.engines]
        return list({id(each): each for each in found if each is not None}.values())

    @contextmanager
    def attempted(self) -> Iterator[None]:
        """Let the calls inside belong to a step that is run again where rows do not fit.

        Inside, `overflow_reports` have only what comes from them; afterwards what they had before.
        """
        for each in self.engines:
            each.is_attempt = True
        try:
            with set_aside(self.overflow_reports()):
                yield
        finally:
            for each in self.engines:
                each.is_attempt = False

    def take_loads(self) -> tuple[torch.Tensor, int] | None:
        """The largest load of this rank since the last call, and the largest allowed one.

        Returns:
            thousandths of a balanced load, the first one int64 on the device; None if no layer on
            this rank counts them.
        """
        loads = [each.load for each in self.engines if each.load is not None]
        if not loads:
            return None
        largest = torch.stack(loads).max().ceil().long()
        torch._foreach_zero_(loads)
        return largest, min(each.most_load() for each in self.engines)

    def attributes(self) -> list[tuple[dict[str, Any], str]]:
        """Places of those that are replaced."""
        buffers = [(module._buffers, name) for module, name in self._buffers]
        return [*buffers, *((vars(module), name) for module, name in self._replaced)]


class Snapshot:
    """The state before a step.  Taking it queues a few small copies and waits for nothing."""

    def __init__(self, model: ModelState) -> None:
        self._model = model
        self._places = [(holder, name, holder.get(name)) for holder, name in model.attributes()]
        made = [tensor for tensor, _ in model.made_by_steps()]
        self._made_before = {id(tensor) for tensor in made}  # the copies keep them alive
        self._copies = _copies([*model.tensors(), *made])
        self._others = [_random_states(), _noted_by_machine()]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, tensors at their addresses: CUDA graphs may know them, also those
        that were made in this step.
        """
        for holder, name, value in self._places:
            holder[name] = value
        for tensors, memories, values in self._copies:
            for tensor, memory in zip(tensors, memories, strict=True):
                # Has the tensor's memory of now room for all bits of that of before?
                widest = torch.promote_types(tensor.dtype, memory.dtype)
                before = (memory.shape, memory.device, widest)
                if (tensor.shape, tensor.device, tensor.dtype) != before:
                    tensor.data = memory
            torch._foreach_copy_(tensors, values)
        for tensor, value in self._model.made_by_steps():
            if id(tensor) not in self._made_before:
                tensor.fill_(value)
        for restore in self._others:
            restore()


def _copies(
    tensors: list[torch.Tensor],
) -> list[tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]]:
    """Tensors, their memory and copies, by device and dtype: one kernel for all of a kind.

    The tensors themselves, because a step may give them other memory: in 16 bit, the first forward
    pass of a router makes its expert biases fp32 (`.data = ...`).
    """
    kinds: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.device, tensor.dtype].append(tensor)
    copies = []
    for group in kinds.values():
        memories = [tensor.detach() for tensor in group]
        flat = torch.cat([memory.reshape(-1) for memory in memories])
        parts = flat.split([memory.numel() for memory in memories])
        values = [part.view(m.shape) for part, m in zip(parts, memories, strict=True)]
        copies.append((group, memories, values))
    return copies


def _logged_tensors() -> list[torch.Tensor]:
    """What Megatron adds up for its log: auxiliary losses, and those of predictions."""
    found: list[Any] = []
    for name, owner in _TRACKERS.items():
        tracker = getattr(getattr(sys.modules.get(name), owner, None), "tracker", None)
        found += (tracker or {}).values()
    if (module := sys.modules.get(_METRICS_MODULE)) is not None:
        tracker = getattr(module, "_MOE_METRICS_TRACKER", None)
        found += [] if tracker is None else [entry.values for entry in tracker.metrics.values()]
    elif (module := sys.modules.get(_UTILS_MODULE)) is not None:
        tracker = module.get_moe_layer_wise_logging_tracker()
        found += [value for entry in tracker.values() for value in entry.values()]
    return [value for value in found if isinstance(value, torch.Tensor)]


def _random_states() -> Callable[[], None]:
    """What puts back the random states of this process: Python's, numpy's, torch's and those of
    Megatron's tracker.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker, numpy = get_cuda_rng_tracker(), sys.modules.get("numpy")
    # Generators that a CUDA graph knows stay the same objects.
    states = {
        name: (state, state.get_state() if isinstance(state, torch.Generator) else None)
        for name, state in tracker.get_states().items()
    }
    on_cpu, of_python = torch.get_rng_state(), random.getstate()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    of_numpy = None if numpy is None else numpy.random.get_state()

    def restore() -> None:
        for state, value in states.values():
            if value is not None:
                state.set_state(value)
        tracker.set_states({name: state for name, (state, _) in states.items()})
        torch.set_rng_state(on_cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)

    return restore


def _noted_by_machine() -> Callable[[], None]:
    """What puts back what Megatron's machine for rerunning steps, which validates results, has
    noted so far.
    """
    machine = getattr(sys.modules.get(_RERUN_MODULE), "_GLOBAL_RERUN_STATE_MACHINE", None)
    if machine is None:
        return lambda: None
    noted = {
        name: copy.copy(value) if isinstance(value, dict | list | set) else value
        for name, value in vars(machine).items()
    }
    noted["error_injector"] = copy.copy(machine.error_injector)
    if machine.get_mode().name == "REPORT_DETERMINISM_STATS":
        noted["stats"] = copy.deepcopy(machine.stats)
    return lambda: vars(machine).update(noted)
