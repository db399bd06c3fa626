"""The sanitized extension, one object of each class in it, and right arguments for every call."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

# So many ranks that others than those that add send, from scratch.
RANKS, RANK, EXPERTS, TOKENS, TOP_K, HIDDEN, ROWS = 8, 1, 16, 5, 2, 8, 2
LOCAL = EXPERTS // RANKS
EP_TOKENS = 16  # of an NCCL EP group
STREAM, OTHER_STREAM = 0x100, 0x200
TOKEN = b"0123456789abcdef"
UNIQUE_ID = bytes([7]) * 128


LIBC = ctypes.CDLL(None)
LIBC.malloc.restype, LIBC.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]
LIBC.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
BYTES = {
    "bool": 1, "uint8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4,
    "float64": 8,
}  # fmt: skip
DTYPES = {name: f"torch.{name}" for name in BYTES}  # one object each, as torch has them
MOST_BYTES = 1 << 24  # that the memory of a tensor has


class Numbers:
    """Looks like a tensor; its memory, zeros, has its very size."""

    def __init__(self, dtype: str, *shape: int, shift: int = 0) -> None:
        self.name, self.dtype, self.shape = dtype, DTYPES[dtype], shape
        size = BYTES[dtype]
        for n in shape:
            size *= max(0, n)
        self.address = 0
        if 0 < size <= MOST_BYTES:
            self.memory = LIBC.malloc(size + shift)
            LIBC.memset(self.memory, 0, size + shift)
            self.address = self.memory + shift

    def __del__(self) -> None:
        if self.address:
            LIBC.free(self.memory)

    def data_ptr(self) -> int:
        return self.address

    def is_contiguous(self) -> bool:
        return True


@dataclass(frozen=True)
class Address:
    """An address among arguments, which a wrong one must not take the place of."""

    value: int
    alignment: int


def plain(value: Any) -> Any:
    """An argument, or all of them, as they are passed."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value.value if isinstance(value, Address) else value


def all_gather(mine: bytes, what: str, timeout_s: float) -> bytes:
    """Every rank says what this one does."""
    return mine * RANKS


class Program:
    """The extension, and the libraries and the GPU that stand in for real ones."""

    def __init__(self, extension: str, library: str) -> None:
        spec = importlib.util.spec_from_file_location("megatron_ncclep._C", extension)
        assert spec is not None
        assert spec.loader is not None
        self.module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.library = library
        self.nccl, self.gpu = ctypes.CDLL(library), ctypes.CDLL(extension)
        self.gpu.standin_take_call.restype = ctypes.c_uint64
        # Of AddressSanitizer; small objects of Python have memory of their own.
        self.heap_bytes = ctypes.CDLL(None)["__sanitizer_get_current_allocated_bytes"]
        self.heap_bytes.restype = ctypes.c_size_t
        self.nccl.fake_make_windows(1)

    def fail_after(self, where: str, num_calls: int) -> None:
        """Let one call of "nccl" or "cuda" fail, after so many more; -1: none."""
        if where == "nccl":
            self.nccl.fake_fail_after(max(num_calls, 0), 0 if num_calls < 0 else 3)
        else:
            self.gpu.standin_fail_after(num_calls)

    def num_alive(self) -> int:
        """Communicators, windows, allocations and events that were not given back."""
        # Windows that are open after a failed step stay, and so does their memory.
        left = 2 * self.nccl.fake_num_open_windows()
        return self.nccl.fake_num_alive() - left + self.gpu.standin_num_allocations()


class Objects:
    """One of each class, and tensors for their calls; `close` gives back whatever there is."""

    def __init__(self, program: Program) -> None:
        self.program, self.C = program, program.module
        self.closed_at_the_end: list[Any] = []
        self.plan: Any = None
        try:
            self._make()
        except Exception:
            self.close()
            raise

    def _make(self) -> None:
        C, keep = self.C, self._keep
        self.nccl = C.Nccl(self.program.library)
        self.communicator = keep(
            C.Communicator(self.nccl, UNIQUE_ID, RANKS, RANK, device=0, timeout_s=60.0)
        )
        self.window = keep(C.Window(self.communicator, 4096))
        self.ep = C.NcclEp(self.program.library)
        self.ep_group = keep(C.NcclEpGroup(self.ep, self.communicator, **self.ep_options()))
        options = {**self.ep_options(), "low_latency": True}
        self.ep_low_latency = keep(C.NcclEpGroup(self.ep, self.communicator, **options))
        self.ep_ll_handle = keep(C.NcclEpLowLatencyHandle(self.ep_low_latency, TOP_K))
        self.memory = Numbers("uint8", self.ep_group.handle_bytes(16, TOP_K))
        self.handle = keep(C.NcclEpHandle(self.ep_group, 16, TOP_K, self.memory))
        self.group = self.new_group()
        self.low_latency = keep(C.LowLatencyHandle(self.group, **self.low_latency_sizes()))
        self.counts, self.token_routes = (
            Numbers("int64", 2 * LOCAL + 1),
            Numbers("int32", 4, TOKENS),
        )
        self.topk, self.kept = Numbers("int64", TOKENS, TOP_K), Numbers("int32", TOKENS, TOP_K)
        self.x, self.rows = Numbers("bfloat16", TOKENS, HIDDEN), Numbers("bfloat16", ROWS, HIDDEN)
        self.w, self.row_w = Numbers("float32", TOKENS, TOP_K), Numbers("float32", ROWS)
        self.rows_of_expert, self.rank_counts = Numbers("int64", LOCAL), Numbers("int32", RANKS)
        self.routes = Numbers("int32", self.group.routes_size(3, 6, 128))
        file = os.memfd_create("hostile")
        self.exchange = keep(C.HostExchange(file, TOKEN, 1, 0))
        os.close(file)

    def _keep(self, made: Any) -> Any:
        self.closed_at_the_end.append(made)
        return made

    def new_group(self) -> Any:
        group = self._keep(self.C.GroupHandle(self.communicator, EXPERTS, 1.0))
        group.reserve(**self.shape())
        return group

    def shape(self, num_tokens: int = TOKENS) -> dict[str, Any]:
        """Of windows."""
        return {
            "num_tokens": num_tokens, "top_k": TOP_K, "row_bytes": 64, "stream": STREAM,
            "all_gather": all_gather,
        }  # fmt: skip

    def plan_arguments(self, **other: Any) -> dict[str, Any]:
        """With room for all that arrives."""
        return {
            "topk_idx": self.topk, "most_tokens": 128, "number": 1, "alignment": 1,
            "max_recv_rows": 0, "counts": self.counts, "token_routes": self.token_routes,
            "routes": self.routes, "max_pairs": 3, "max_assignments": 6, "kept": None,
            "lacked": None, "num_sms": 8, "stream": STREAM, **other,
        }  # fmt: skip

    def close(self) -> None:
        """Close everything, twice."""
        for where in ("nccl", "cuda"):
            self.program.fail_after(where, -1)
        for _ in range(2):
            for made in reversed(self.closed_at_the_end):
                made.close()

    def ep_options(self) -> dict[str, Any]:
        return {
            "num_experts": EXPERTS, "max_tokens": EP_TOKENS, "max_recv_rows": 0, "row_bytes": 64,
            "top_k": TOP_K, "num_sms": 0, "timeout_s": 1.0, "low_latency": False,
        }  # fmt: skip

    def low_latency_sizes(self) -> dict[str, Any]:
        return {
            "max_tokens": TOKENS, "hidden": HIDDEN, "top_k": TOP_K, "payload": "torch.bfloat16",
            "dtype": "torch.bfloat16", "num_scales": 0, "all_gather": all_gather,
        }  # fmt: skip

    # --- steps that calls need before them ---

    def make_plan(self, max_recv_rows: int = 0, stream: int = STREAM, group: Any = None) -> None:
        """Queue a plan with room for all that arrives."""
        arguments = self.plan_arguments(max_recv_rows=max_recv_rows, stream=stream)
        self.plan = (group or self.group).plan(**arguments)

    def wait_for_sizes(self) -> Any:
        return self.group.wait_for_sizes(
            plan=self.plan, rows_of_expert=self.rows_of_expert, stream=STREAM
        )

    def planned(self) -> None:
        self.make_plan()
        self.wait_for_sizes()

    def dispatch(self, stream: int = STREAM, group: Any = None) -> None:
        (group or self.group).dispatch(
            plan=self.plan, x=self.x, w=self.w, rows=self.rows, row_w=self.row_w, num_sms=8,
            stream=stream,
        )  # fmt: skip

    def dispatch_few(self, completes: bool = True, stream: int = STREAM) -> None:
        """Queue a low-latency dispatch, or its first half."""
        self.low_latency.dispatch(
            x=self.x, scales=None, topk_idx=self.topk, weights=self.w, counts=self.rank_counts,
            completes=completes, num_ctas=8, stream=stream,
        )  # fmt: skip

    # What must come before a call.
    BEFORE: ClassVar[dict[str, Callable[[Objects], None]]] = {
        **dict.fromkeys(
            (
                *("group.wait_for_sizes", "group.dispatch", "group.sums_size", "group.combine"),
                "group.plan_receive",
            ),
            planned,
        ),
        "low_latency.complete_dispatch": lambda o: o.dispatch_few(completes=False),
        "low_latency.combine": dispatch_few,
    }

    def bound(self, name: str) -> Callable[..., Any]:
        """What a name of `arguments` calls."""
        owner, _, member = name.partition(".")
        if name == "C.HostExchange":  # in a file as it is at first
            return lambda file, **given: (os.ftruncate(FILE, 0), self.C.HostExchange(file, **given))
        return getattr(self.C if owner == "C" else getattr(self, owner), member)

    def arguments(self) -> dict[str, dict[str, Any]]:
        """Right arguments of everything that is bound, by object and name; "C": the module."""
        o, none = self, dict[str, Any]()
        messages = Numbers("uint8", ROWS, 48)
        token_rows, few = Numbers("float32", TOKENS, HIDDEN), Numbers("int32", ROWS)
        places = (RANKS, EP_TOKENS)
        room = {"max_pairs": 3, "max_assignments": 6}
        launch = {"num_sms": 8, "stream": STREAM}
        probs = Numbers("float32", TOKENS, EXPERTS)
        return {
            "C.Nccl": {"path": o.program.library},
            "C.NcclEp": {"path": o.program.library},
            "C.Communicator": {
                "nccl": o.nccl, "unique_id": UNIQUE_ID, "num_ranks": RANKS, "rank": RANK,
                "device": -1, "timeout_s": 60.0,
            },
            "C.Window": {"communicator": o.communicator, "num_bytes": 4096},
            "C.window_peers": {
                "head": (0xDEAD).to_bytes(8, "little") + (0x7F00_0000_1000).to_bytes(8, "little")
                + b"\1\0\0\0\1\0\0\0\1\0\0\0\0\0\0\0",
                "rank": 1, "num_ranks": 3,
            },
            "C.NcclEpGroup": {"library": o.ep, "communicator": o.communicator, **o.ep_options()},
            "C.NcclEpHandle": {
                "group": o.ep_group, "alignment": 16, "top_k": TOP_K, "memory": o.memory,
            },
            "C.NcclEpLowLatencyHandle": {"group": o.ep_low_latency, "top_k": TOP_K},
            "C.GroupHandle": {
                "communicator": o.communicator, "num_experts": EXPERTS, "timeout_s": 1.0,
            },
            "C.LowLatencyHandle": {"group": o.group, **o.low_latency_sizes()},
            "C.HostExchange": {"file": FILE, "token": TOKEN, "num_ranks": 1, "rank": 0},
            "C.split_dispatch": {"num_ctas": 8},
            "C.num_phases_of": {"most_tokens": 128, "row_bytes": 64},
            "C.split_combine": {
                "num_ctas": 8, "num_ranks": RANKS, "top_k": TOP_K, "row_bytes": 64,
            },
            "C.native_min_sms": {"num_ranks": RANKS},
            "C.call_values": {"call": 0x1234567},
            "C.build_info": none,
            "C.routes_and_weights": {
                "routing_map": Numbers("bool", TOKENS, EXPERTS), "probs": probs, "not_routed": -1,
                "too_many_experts": -2, "topk_idx": o.topk, "weights": o.w, "block": 2,
                "stream": STREAM,
            },
            "C.probs_gradient": {
                "topk_idx": o.topk, "grad_weights": o.w, "grad_probs": probs, "block": 2,
                "stream": STREAM,
            },
            "C.pack_messages": {
                "rows": token_rows, "w": o.w, "token": few, "tokens_each": 1, "first": 0,
                "piece_bytes": 32, "messages": messages, "stream": STREAM,
            },
            "C.unpack_messages": {
                "messages": messages, "rows": Numbers("uint8", ROWS, 32),
                "w": Numbers("float32", ROWS, TOP_K), "stream": STREAM,
            },
            "C.add_up_messages": {
                "messages": messages, "place": Numbers("int32", 2, TOKENS), "out": token_rows,
                "first": 0, "piece_bytes": 32, "assignment_node": o.kept, "topk_w": o.w,
                "stream": STREAM,
            },
            "C.copy_rows": {
                "direction": "push", "local": Address(o.window.address, 16),
                "peers": [Address(o.window.address, 16)], "peer_of_row": few, "peer_row": few,
                "num_rows": ROWS, "row_bytes": 64, **launch,
            },
            "C.stamp": {"times": Numbers("int64", ROWS), "index": 1, "stream": STREAM},
            "C.copy_memory": {
                "to": Address(o.window.address, 1), "from_": Address(o.window.address + 64, 1),
                "num_bytes": Address(64, 1),  # a wrong length leads nowhere, too
            },
            "communicator.close": none, "communicator.abort": none, "window.close": none,
            "nccl.unique_id": none,
            "ep_group.close": none,
            "ep_group.handle_bytes": {"alignment": 16, "top_k": TOP_K},
            "handle.close": none,
            "handle.update": {
                "topk_idx": o.topk, "expert_counts": o.rows_of_expert,
                "num_rows": Numbers("int64", 1), "stream": STREAM,
            },
            "handle.dispatch": {
                "x": o.x, "w": o.w, "rows": o.rows, "row_w": o.row_w, "stream": STREAM,
            },
            "handle.combine": {
                "y": o.rows, "w": o.row_w, "out": o.x, "topk_w": o.w, "stream": STREAM,
            },
            "ep_ll_handle.close": none,
            "ep_ll_handle.dispatch": {
                "x": o.x, "topk_idx": o.topk, "w": o.w,
                "rows": Numbers("bfloat16", *places, HIDDEN),
                "row_topk_idx": Numbers("int32", *places, TOP_K),
                "row_w": Numbers("float32", *places, TOP_K), "counts": o.rank_counts,
                "stream": STREAM,
            },
            "ep_ll_handle.combine": {
                "y": Numbers("bfloat16", *places, HIDDEN), "out": o.x, "stream": STREAM,
            },
            "group.close": none, "group.failure": none, "group.wait_until_idle": none,
            "group.begin": {
                "timeout_s": 1.0, "num_tokens": TOKENS, "top_k": TOP_K, "row_bytes": 64,
            },
            "group.reserve": o.shape(TOKENS + 200),
            "group.routes_size": {**room, "most_tokens": 128},
            "group.bad_ranks": {"forget": True},
            "group.bad_low_latency": {"forget": True},
            "group.copy_waited_ns": {"out": Numbers("int64", 1), "stream": STREAM},
            "group.plan": o.plan_arguments(
                alignment=16, max_recv_rows=32, kept=o.kept, lacked=Numbers("int64", RANKS)
            ),
            "group.refuse": {"phase": "dispatch", "stream": STREAM},
            "group.plan_receive": {"plan": o.plan, **room, "routes": o.routes, **launch},
            "group.wait_for_sizes": {
                "plan": o.plan, "rows_of_expert": o.rows_of_expert, "stream": STREAM,
            },
            "group.dispatch": {
                "plan": o.plan, "x": o.x, "w": o.w, "rows": o.rows, "row_w": o.row_w, **launch,
            },
            "group.sums_size": {"plan": o.plan, "num_sms": 8, "row_bytes": 16},
            "group.combine": {
                "plan": o.plan, "y": o.rows, "w": o.row_w, "sums": Numbers("bfloat16", 3, HIDDEN),
                "out": o.x, "topk_w": o.w, **launch,
            },
            "low_latency.close": none,
            "low_latency.dispatch": {
                "x": o.x, "scales": None, "topk_idx": o.topk, "weights": o.w,
                "counts": o.rank_counts, "completes": True, "num_ctas": 8, "stream": STREAM,
            },
            "low_latency.complete_dispatch": {"counts": o.rank_counts, "stream": STREAM},
            "low_latency.combine": {
                "y": o.rows, "rows_of": Numbers("int32", RANKS, TOKENS, TOP_K), "out": o.x,
                "sends": True, "completes": True, "num_ctas": 8, "stream": STREAM,
            },
            "exchange.exchange": {"mine": b"mine", "what": "a call", "timeout_s": 1.0},
            "exchange.enter": {"call": 3, "skips_exchange": False, "since": 0},
            "exchange.refuse": {"reason": b"because"},
            "exchange.refusal": {"rank": 0, "since": 0},
            "exchange.gone_on": none, "exchange.lost": none, "exchange.close": none,
        }  # fmt: skip


FILE = os.memfd_create("hostile")
