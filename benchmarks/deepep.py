"""DeepEP V2 and HybridEP through their Python packages: a layer's passes, and their check.

Both are branches of one repository and are imported as `deep_ep`, so a process has one of them at
most.  Neither has a plan that its users call: the first dispatch of a routing also exchanges the
numbers of rows, for which the host waits, and backward reuses what it found.  So `dispatch`
includes what is `plan` for other subjects.  Rows end in blocks of experts, as with our engines: in
DeepEP by `do_expand`, in HybridEP by its own permutation, fused with the transfer or after it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.catalogue import DEEPEP, FUSED, NO_OVERLAP
from benchmarks.library import places, put
from megatron_ncclep.benchmark import Setting, Subject, UnavailableError, excused
from megatron_ncclep.benchmark.engines import results_problem, split_name
from megatron_ncclep.benchmark.shapes import Workload
from megatron_ncclep.engines.nccl_ep.engine import CAPS
from megatron_ncclep.libraries.nccl_ep import environment

PACKAGE = "deep_ep"
# Subject -> the class that it needs, and the branch of github.com/deepseek-ai/DeepEP with it.
CLASSES = {"deepep": ("ElasticBuffer", "main (V2)"), "hybridep": ("HybridEPBuffer", "hybrid-ep")}
# V2 takes NVIDIA's libnccl_ep.so, which other subjects load, for a second NCCL.
UNCHECKED = {"EP_SUPPRESS_NCCL_CHECK": "1"}
# Of a sum in bf16.  Both libraries add the rows of one rank in fp32, round this part for the wire,
# and round the sum of all parts; one more for a part on the way to it.
ROUNDINGS = 3
DEEPEP_HIDDEN = 256  # V2 adds rows of a multiple of this many values
HYBRIDEP_SMS = "24"  # HybridEP's choice within an NVLink domain


def buffer_class(base: str) -> Any:
    """Import the class that the subject `base` needs; nothing is imported before.

    Raises:
        UnavailableError: it is not installed, the other branch is, or the import failed.
    """
    needed, branch = CLASSES[base]
    instead = f"build branch {branch} of DeepEP, see benchmarks/README.md"
    if importlib.util.find_spec(PACKAGE) is None:
        raise UnavailableError(f"{PACKAGE} is not installed: {instead}")
    with excused(Exception), environment(UNCHECKED):  # none of this is ours
        package = importlib.import_module(PACKAGE)
    if not hasattr(package, needed):
        raise UnavailableError(f"the installed {PACKAGE} has no {needed}: {instead}")
    return getattr(package, needed)


class _BufferSubject(Subject):
    """The common part: passes that return (rows, weights or None).  `_handle` is of the last plan.

    A derived class makes `_buffer` in `_open`.
    """

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        super().__init__(name, setting, workload)
        self._base, self._num_sms = split_name(name)
        made = buffer_class(self._base.partition(":")[0])
        if workload.case.dtype != torch.bfloat16:
            raise UnavailableError(f"it moves bf16 rows only, and these are {workload.case.dtype}")
        self._handle: Any = None
        with excused(Exception):
            group = setting.new_group()
            # Makes the communicator, which V2 borrows.
            dist.all_reduce(torch.zeros(1, device=setting.device), group=group)
            self._open(made, group, int(setting.timeout_s))
        work = workload
        self.passes = {
            "dispatch": lambda: self._dispatch(),
            "combine": lambda: self._combine(work.y),
            "bwd_dispatch": lambda: self._dispatch_again(work.grad_out),
            "bwd_combine": lambda: self._combine(work.grad_rows, work.grad_row_w),
        }

    def _open(self, made: Any, group: dist.ProcessGroup, timeout_s: int) -> None:
        raise NotImplementedError

    def _dispatch(self) -> tuple[Any, Any]:
        """Dispatch `x` and its weights with a new handle; fp32 [N] weights."""
        raise NotImplementedError

    def _dispatch_again(self, rows: torch.Tensor) -> tuple[Any, Any]:
        raise NotImplementedError

    def _combine(self, rows: torch.Tensor, w: torch.Tensor | None = None) -> tuple[Any, Any]:
        """Combine rows and fp32 [N] weights; weights come back as fp32 [T, K]."""
        raise NotImplementedError

    def problem(self) -> str | None:
        """See `Subject.problem`.  An expert's rows may be in any order, the same for one handle."""
        work = self._workload
        rows, w = self._dispatch()
        place = places(work, self._rank, rows)
        again, _ = self._dispatch_again(work.grad_out)
        padding = work.tables[self._rank].token_of_row < 0
        results = {
            "dispatch": (rows[place], w[place].masked_fill(padding, 0)),
            "bwd_dispatch": (again[place], None),
        }
        moved, moved_w = put(work.grad_rows, place), put(work.grad_row_w, place)
        results["combine"] = self._combine(put(work.y, place))
        results["bwd_combine"] = self._combine(moved, moved_w)
        return results_problem(results, work, CAPS, roundings=ROUNDINGS)


class DeepEpSubject(_BufferSubject):
    """See `Subject`.  DeepEP V2's ElasticBuffer.

    Its kernels have `num_sms` SMs; those that copy rows out of its buffer after a dispatch, and add
    them up after a combine, have all.
    """

    def _open(self, made: Any, group: dist.ProcessGroup, timeout_s: int) -> None:
        case = self._workload.case
        if case.hidden % DEEPEP_HIDDEN:
            limit = f"DeepEP adds rows of a multiple of {DEEPEP_HIDDEN} values"
            raise UnavailableError(f"{limit}, and these have {case.hidden}")
        self._buffer = made(
            group, num_max_tokens_per_rank=max(case.tokens), hidden=case.hidden,
            num_topk=case.top_k, num_cpu_timeout_secs=timeout_s, num_gpu_timeout_secs=timeout_s,
            explicitly_destroy=True,
            prefer_overlap_with_compute=NO_OVERLAP not in DEEPEP[self._base],  # True by default
        )  # fmt: skip
        self._num_sms = self._num_sms or self._buffer.get_theoretical_num_sms(
            case.num_experts, case.top_k
        )
        self.sms = f"{self._num_sms}, all"
        self.window_bytes = self._buffer.num_bytes
        self._options: dict[str, Any] = {
            "num_sms": self._num_sms, "do_expand": True, "do_zero_padding": case.alignment > 1,
        }  # fmt: skip

    def _dispatch(self) -> tuple[Any, Any]:
        work, case = self._workload, self._workload.case
        rows, _, w, self._handle, _ = self._buffer.dispatch(
            work.x, topk_idx=work.topk_idx, topk_weights=work.w, num_experts=case.num_experts,
            expert_alignment=case.alignment, **self._options,
        )  # fmt: skip
        return rows, w

    def _dispatch_again(self, rows: torch.Tensor) -> tuple[Any, Any]:
        return self._buffer.dispatch(rows, handle=self._handle, **self._options)[0], None

    def _combine(self, rows: torch.Tensor, w: torch.Tensor | None = None) -> tuple[Any, Any]:
        out, home_w, _ = self._buffer.combine(
            rows, handle=self._handle, topk_weights=w, num_sms=self._num_sms
        )
        return out, home_w

    def close(self) -> None:
        """See `Subject.close`.  Collective: the ranks wait for each other on the device."""
        torch.cuda.synchronize()
        self.passes, self._handle = {}, None
        self._buffer.destroy()


class HybridEpSubject(_BufferSubject):
    """See `Subject`.  HybridEPBuffer with its permutation, which has all SMs unless it is fused.

    Its input is what Megatron-Core's router gives: a map and probabilities of [T, E].
    """

    def _open(self, made: Any, group: dist.ProcessGroup, timeout_s: int) -> None:
        work, case = self._workload, self._workload.case
        self._num_local = case.num_experts // case.num_ranks
        sms = {"num_sms_dispatch_api": self._num_sms, "num_sms_combine_api": self._num_sms}
        self._buffer = made(
            group=group, hidden_dim=case.hidden, max_num_of_tokens_per_rank=max(case.tokens),
            num_local_experts=self._num_local, **(sms if self._num_sms else {}),
        )  # fmt: skip
        self.sms = f"{self._num_sms or HYBRIDEP_SMS}, all"
        self._fused = FUSED in DEEPEP[self._base]
        self._padding = {"pad_multiple": case.alignment} if case.alignment > 1 else {}
        probs = torch.zeros(len(work.x), case.num_experts, device=work.x.device)
        self._map = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, work.topk_idx, True)
        self._probs = probs.scatter_(1, work.topk_idx, work.w)

    def _dispatch(self) -> tuple[Any, Any]:
        rows, w, _, _, self._handle = self._buffer.dispatch_with_permute(
            hidden=self._workload.x, routing_map=self._map, probs=self._probs,
            num_of_experts_per_rank=self._num_local, fuse_permute_dispatch=self._fused,
            **self._padding,
        )  # fmt: skip
        return rows, w

    def _dispatch_again(self, rows: torch.Tensor) -> tuple[Any, Any]:
        found = self._buffer.dispatch_with_permute(
            hidden=rows, handle=self._handle, num_permuted_tokens=len(self._workload.y),
            fuse_permute_dispatch=self._fused, **self._padding,
        )  # fmt: skip
        return found[0], None

    def _combine(self, rows: torch.Tensor, w: torch.Tensor | None = None) -> tuple[Any, Any]:
        out, probs = self._buffer.combine_with_unpermute(
            hidden=rows, probs=w, handle=self._handle, fuse_unpermute_combine=self._fused,
            **self._padding,
        )  # fmt: skip
        return out, None if w is None else probs.gather(1, self._workload.topk_idx)

    def close(self) -> None:
        """See `Subject.close`.  The buffer frees its memory when nothing refers to it."""
        torch.cuda.synchronize()
        self.passes, self._handle, self._buffer = {}, None, None


SUBJECTS: dict[str, type[_BufferSubject]] = {"deepep": DeepEpSubject, "hybridep": HybridEpSubject}


def make(name: str, setting: Setting, workload: Workload) -> Subject:
    """Prepare the subject called `name`.  Collective; see `Subject` for what it raises."""
    return SUBJECTS[split_name(name)[0].partition(":")[0]](name, setting, workload)
