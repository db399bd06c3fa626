"""NVIDIA's libnccl_ep called directly: the yardstick, without this package's checks and agreements.

Outputs are allocated once and the exact sizes are known beforehand, so that nothing but the
library's own calls is timed.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from megatron_ncclep import envs
from megatron_ncclep.benchmark.engine_subject import CHECKED, DEFAULT_SMS, results_problem
from megatron_ncclep.benchmark.subjects import (
    Setting,
    UnavailableError,
    Workload,
    limits_problem,
)
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import choose_engine, extension, libraries, nccl_ep
from megatron_ncclep.engines.communicator import communicator_of
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.errors import EngineUnavailableError

# The library's staging memory is made for a multiple of this many tokens.
TOKENS_MULTIPLE = 64


class LibrarySubject:
    """See `Subject`.

    Args:
        name: as on the command line.
        num_sms: SMs that the library's communication kernels may use; None: its own choice.
    """

    kind = "library"
    checked = CHECKED

    def __init__(self, name: str, num_sms: int | None) -> None:
        self.name = name
        self._num_sms = num_sms

    def prepare(self, setting: Setting, workload: Workload) -> PreparedLibrary:
        """See `Subject.prepare`.  Over a process group and a communicator of its own."""
        case = workload.case
        group = EpGroup.of(setting.new_group())
        config = EpConfig(
            engine="nccl_ep",
            alignment=case.alignment,
            num_sms=self._num_sms,
            timeout_s=setting.timeout_s,
        )
        if reason := limits_problem(case, nccl_ep.CAPS):
            raise UnavailableError(reason)
        try:
            choose_engine(group, config, case.num_experts)  # nothing stands in the engine's way
        except EngineUnavailableError as error:
            raise UnavailableError(str(error)) from error
        return PreparedLibrary(group, workload, config)


class PreparedLibrary:
    """See `Prepared`."""

    shared_bytes = 0

    def __init__(self, group: EpGroup, workload: Workload, config: EpConfig) -> None:
        self._group = group
        self._workload = workload
        self.sms = str(config.num_sms or DEFAULT_SMS["nccl_ep"])
        case, routes = workload.case, workload.routes
        native = extension.load()
        found = libraries.find_nccl_ep()
        assert found is not None  # `obstacle` looked for it
        for name, folder in libraries.jit_folders(found).items():
            if envs.get(name) is None:
                os.environ[name] = str(folder)  # the library reads it when it compiles
        communicator = communicator_of(group, config.timeout_s)
        tokens = -(-max(case.tokens) // TOKENS_MULTIPLE) * TOKENS_MULTIPLE
        self._staging = native.NcclEpGroup(
            native.NcclEp(str(found.path)),
            communicator,
            num_experts=case.num_experts,
            max_tokens=tokens,
            max_recv_rows=0,
            row_bytes=case.hidden * case.dtype.itemsize,
            top_k=case.top_k,
            num_sms=config.num_sms or 0,
            timeout_s=config.timeout_s,
        )
        device = group.device
        self._memory = torch.empty(
            self._staging.handle_bytes(case.alignment, case.top_k), dtype=torch.uint8, device=device
        )
        self._handle = native.NcclEpHandle(self._staging, case.alignment, case.top_k, self._memory)
        self._counts = torch.empty(
            case.num_experts // case.num_ranks, dtype=torch.int64, device=device
        )
        self._total = torch.empty(1, dtype=torch.int64, device=device)
        num_rows = routes.num_rows(group.rank)
        self._rows = torch.empty(num_rows, case.hidden, dtype=case.dtype, device=device)
        self._row_w = torch.empty(num_rows, dtype=torch.float32, device=device)
        self._out = torch.empty_like(workload.x)
        self._home_w = torch.empty_like(workload.w)
        self.passes = {
            "plan": self._plan,
            "dispatch": self._dispatch,
            "combine": self._combine,
            "bwd_dispatch": self._backward_dispatch,
            "bwd_combine": self._backward_combine,
        }

    def _plan(self) -> None:
        self._handle.update(
            self._workload.topk_idx, self._counts, self._total, extension.current_stream()
        )

    def _dispatch(self) -> None:
        work = self._workload
        self._handle.dispatch(work.x, work.w, self._rows, self._row_w, extension.current_stream())

    def _combine(self) -> None:
        self._handle.combine(self._workload.y, None, self._out, None, extension.current_stream())

    def _backward_dispatch(self) -> None:
        self._handle.dispatch(
            self._workload.grad_out, None, self._rows, None, extension.current_stream()
        )

    def _backward_combine(self) -> None:
        work = self._workload
        self._handle.combine(
            work.grad_rows, work.grad_row_w, self._out, self._home_w, extension.current_stream()
        )

    def problem(self) -> str | None:
        """See `Prepared.problem`.  Outputs are overwritten with NaN first, and copied after."""
        self._plan()
        results: dict[str, tuple[Any, Any]] = {}
        for name, rows, weights in (
            ("dispatch", self._rows, self._row_w),
            ("combine", self._out, None),
            ("bwd_dispatch", self._rows, None),
            ("bwd_combine", self._out, self._home_w),
        ):
            for tensor in (rows, weights):
                if tensor is not None:
                    tensor.fill_(float("nan"))
            self.passes[name]()
            results[name] = (rows.clone(), None if weights is None else weights.clone())
        return results_problem(results, self._workload, self._group.rank, nccl_ep.CAPS.reduction)

    def close(self) -> None:
        """See `Prepared.close`."""
        torch.cuda.synchronize(self._group.device)
        self._handle.close()
        self._staging.close()
