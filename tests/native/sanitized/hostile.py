"""Call everything that `csrc/bindings` binds with what nobody should pass; run by a test.

    python hostile.py EXTENSION FAKE_LIBRARY LAST_CALL

The extension is one over the stand-ins of this folder, so that a GPU is not needed, kernels say
which of their assumptions does not hold, and AddressSanitizer sees what they touch.  Every call
either raises what a caller can handle or is as good as a right one; a crash ends the process, and
the file LAST_CALL says in which call.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

from hostile_values import Address, Numbers, wrong_values

from megatron_ncclep.errors import EpError

# So many ranks that others than those that add send, from scratch.
RANKS, RANK, EXPERTS, TOKENS, TOP_K, HIDDEN, ROWS = 8, 1, 16, 5, 2, 8, 2
EP_TOKENS = 16  # of an NCCL EP group
STREAM = 0x100
TOKEN = b"0123456789abcdef"
UNIQUE_ID = bytes([7]) * 128
NOTE_BYTES = 4096
# What a caller can handle; AttributeError: of an object that looks like half a tensor.
REFUSALS = (EpError, TypeError, ValueError, OverflowError, AttributeError)


def all_gather(mine: bytes, what: str, timeout_s: float) -> bytes:
    """Every rank says what this one does."""
    return mine * RANKS


def is_nonsense(name: str, argument: str, value: Any) -> bool:
    """Whether this must be refused: a negative number, or none at all, where one says how much."""
    says_nothing = (
        *("not_routed", "too_many_experts", "forget", "goes_on"),
        *("sends", "completes", "low_latency", "device", "number"),
    )
    # Of a shape it only says whether it fits.
    is_shape = name == "group.begin" and argument != "timeout_s"
    if argument in says_nothing or is_shape:
        return False
    return isinstance(value, int | float) and not 0 <= value < inf


class Program:
    """The extension, what to call in it, and what came of it."""

    def __init__(self, module: ModuleType, library: str, last_call: Path) -> None:
        self.module, self.library = module, library
        last_call.write_bytes(bytes(NOTE_BYTES))
        with last_call.open("r+b") as file:
            self._note = mmap.mmap(file.fileno(), NOTE_BYTES)  # there even after a crash
        self.fake = ctypes.CDLL(library)
        self.fake.fake_make_windows(1)
        self.uninitialised = [
            cls.__new__(cls) for cls in vars(module).values() if isinstance(cls, type)
        ]
        self.num_calls = self.num_refused = 0
        self.complaints: list[str] = []

    def attempt(self, name: str, call: Callable[..., Any], arguments: dict[str, Any]) -> bool:
        """Whether the call was refused; what it must not raise is a complaint."""
        text = f"{name}({arguments})"
        note = text.encode("utf-8", "replace")[:NOTE_BYTES]
        self._note[:] = note.ljust(NOTE_BYTES, b"\0")
        self.fake.fake_reset(0)
        self.num_calls += 1
        try:
            call(**arguments)
        except REFUSALS:
            self.num_refused += 1
            return True
        except Exception as error:
            if "non-held to held instance" in str(error):  # pybind11's of what has no __init__
                self.num_refused += 1
                return True
            self.complaints.append(f"{text} raised {type(error).__name__}: {error}")
            return True
        return False

    def try_all(self, name: str, make: Callable[[], tuple[Callable[..., Any], dict[str, Any]]]):
        """Call what `make` makes with right arguments but one."""
        call, right = make()
        if self.attempt(name, call, plain(right)):
            self.complaints.append(f"{name} refuses the right arguments")
            plain_call = plain(right)
            call(**plain_call)
        call, right = make()
        for argument, value in right.items():
            wrong_ones = wrong_values(value, self.uninitialised)
            for wrong in wrong_ones:
                if not self.attempt(name, call, {**plain(right), argument: wrong}):
                    if is_nonsense(name, argument, wrong):
                        self.complaints.append(f"{name} takes {wrong} for {argument}")
                    call, right = make()  # it was right too, and may have changed something
                    value = right[argument]
            # What was refused has changed nothing.
            if self.attempt(name, call, plain(right)):
                self.complaints.append(f"{name} does not work any more after wrong {argument}")
            call, right = make()
        self.attempt(name, call, {})
        self.attempt(name, call, {**plain(right), "another": 1})


def plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as they are passed."""

    def value_of(value: Any) -> Any:
        if isinstance(value, list):
            return [value_of(one) for one in value]
        return value.value if isinstance(value, Address) else value

    return {name: value_of(value) for name, value in arguments.items()}


# --- the calls -----------------------------------------------------------------------------------


class Objects:
    """One of each class, alive, and tensors for their calls."""

    def __init__(self, program: Program) -> None:
        C = self.C = program.module
        self.library = program.library
        self.nccl = C.Nccl(self.library)
        self.communicator = C.Communicator(self.nccl, UNIQUE_ID, RANKS, RANK, -1, 60.0)
        self.window = C.Window(self.communicator, 4096)
        self.ep = C.NcclEp(self.library)
        self.ep_group = C.NcclEpGroup(self.ep, self.communicator, **self.ep_options())
        self.ep_low_latency = C.NcclEpGroup(
            self.ep, self.communicator, **{**self.ep_options(), "low_latency": True}
        )
        self.ep_ll_handle = C.NcclEpLowLatencyHandle(self.ep_low_latency, TOP_K)
        self.memory = Numbers("uint8", self.ep_group.handle_bytes(16, TOP_K))
        self.handle = C.NcclEpHandle(self.ep_group, 16, TOP_K, self.memory)
        self.group = C.GroupHandle(self.communicator, EXPERTS, 1.0)
        self.group.reserve(**self.shape())
        self.low_latency = C.LowLatencyHandle(self.group, **self.low_latency_sizes())
        self.rank_counts = Numbers("int32", RANKS)
        self.rows_of = Numbers("int32", RANKS, TOKENS, TOP_K)
        self.counts = Numbers("int64", 2 * EXPERTS // RANKS + 1)
        self.token_routes = Numbers("int32", 4, TOKENS)
        self.lacked = Numbers("int64", RANKS)
        self.topk, self.kept = Numbers("int64", TOKENS, TOP_K), Numbers("int32", TOKENS, TOP_K)
        self.x, self.rows = Numbers("bfloat16", TOKENS, HIDDEN), Numbers("bfloat16", ROWS, HIDDEN)
        self.w, self.row_w = Numbers("float32", TOKENS, TOP_K), Numbers("float32", ROWS)
        self.rows_of_expert = Numbers("int64", EXPERTS // RANKS)
        self.routes = Numbers("int32", self.group.routes_size(3, 6, 128))
        self.plan: Any = None

    def close(self) -> None:
        """Close all that can be closed, twice."""
        for _ in range(2):
            for each in (self.handle, self.ep_group, self.ep_ll_handle, self.ep_low_latency,
                         self.low_latency, self.group, self.window,
                         self.communicator):  # fmt: skip
                each.close()

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

    def shape(self) -> dict[str, Any]:
        return {
            "num_tokens": TOKENS, "top_k": TOP_K, "row_bytes": 64, "stream": STREAM,
            "all_gather": all_gather,
        }  # fmt: skip

    def plan_arguments(self) -> dict[str, Any]:
        return {
            "topk_idx": self.topk, "most_tokens": 128, "number": 1, "alignment": 1,
            "max_recv_rows": 0, "counts": self.counts, "token_routes": self.token_routes,
            "routes": self.routes, "max_pairs": 3, "max_assignments": 6, "kept": None,
            "lacked": None, "num_sms": 8, "stream": STREAM,
        }  # fmt: skip

    def dispatched(self, completes: bool) -> Objects:
        """With a low-latency dispatch, or half of it."""
        self.low_latency.dispatch(
            x=self.x, scales=None, topk_idx=self.topk, weights=self.w, counts=self.rank_counts,
            completes=completes, num_ctas=8, stream=STREAM,
        )  # fmt: skip
        return self

    def planned(self) -> Objects:
        """With a plan that can be dispatched."""
        self.plan = self.group.plan(**self.plan_arguments())
        self.group.wait_for_sizes(plan=self.plan, rows_of_expert=self.rows_of_expert, stream=STREAM)
        return self


def static_calls(program: Program) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Functions and constructors without state, and right arguments."""
    C, o = program.module, Objects(program)
    yield "Nccl", C.Nccl, {"path": o.library}
    yield "NcclEp", C.NcclEp, {"path": o.library}
    yield "Communicator", C.Communicator, {
        "nccl": o.nccl, "unique_id": UNIQUE_ID, "num_ranks": RANKS, "rank": RANK, "device": -1,
        "timeout_s": 60.0,
    }  # fmt: skip
    yield "Window", C.Window, {"communicator": o.communicator, "num_bytes": 4096}
    yield "window_peers", C.window_peers, {
        "head": (0xDEAD).to_bytes(8, "little") + (0x7F00_0000_1000).to_bytes(8, "little")
        + b"\1\0\0\0\1\0\0\0\1\0\0\0\0\0\0\0",
        "rank": 1, "num_ranks": 3,
    }  # fmt: skip
    yield "NcclEpGroup", C.NcclEpGroup, {
        "library": o.ep, "communicator": o.communicator, **o.ep_options(),
    }  # fmt: skip
    yield "NcclEpHandle", C.NcclEpHandle, {
        "group": o.ep_group, "alignment": 16, "top_k": TOP_K, "memory": o.memory,
    }  # fmt: skip
    yield "NcclEpLowLatencyHandle", C.NcclEpLowLatencyHandle, {
        "group": o.ep_low_latency, "top_k": TOP_K,
    }  # fmt: skip
    yield "GroupHandle", C.GroupHandle, {
        "communicator": o.communicator, "num_experts": EXPERTS, "timeout_s": 1.0,
    }  # fmt: skip
    yield "LowLatencyHandle", C.LowLatencyHandle, {"group": o.group, **o.low_latency_sizes()}
    yield "split_dispatch", C.split_dispatch, {"num_ctas": 8}
    yield "num_phases_of", C.num_phases_of, {"most_tokens": 128, "row_bytes": 64}
    yield "split_combine", C.split_combine, {
        "num_ctas": 8, "num_ranks": RANKS, "top_k": TOP_K, "row_bytes": 64,
    }  # fmt: skip
    yield "native_min_sms", C.native_min_sms, {"num_ranks": RANKS}
    yield "call_values", C.call_values, {"call": 0x1234567}
    yield "build_info", C.build_info, {}
    yield "routes_and_weights", C.routes_and_weights, {
        "routing_map": Numbers("bool", TOKENS, EXPERTS),
        "probs": Numbers("float32", TOKENS, EXPERTS), "not_routed": -1, "too_many_experts": -2,
        "topk_idx": o.topk, "weights": o.w, "block": 2, "stream": STREAM,
    }  # fmt: skip
    yield "probs_gradient", C.probs_gradient, {
        "topk_idx": o.topk, "grad_weights": o.w, "grad_probs": Numbers("float32", TOKENS, EXPERTS),
        "block": 2, "stream": STREAM,
    }  # fmt: skip
    token_rows, messages = Numbers("float32", TOKENS, HIDDEN), Numbers("uint8", ROWS, 48)
    yield "pack_messages", C.pack_messages, {
        "rows": token_rows, "w": o.w, "token": Numbers("int32", ROWS), "tokens_each": 1, "first": 0,
        "piece_bytes": 32, "messages": messages, "stream": STREAM,
    }  # fmt: skip
    yield "unpack_messages", C.unpack_messages, {
        "messages": messages, "rows": Numbers("uint8", ROWS, 32),
        "w": Numbers("float32", ROWS, TOP_K), "stream": STREAM,
    }  # fmt: skip
    yield "add_up_messages", C.add_up_messages, {
        "messages": messages, "place": Numbers("int32", 2, TOKENS), "out": token_rows, "first": 0,
        "piece_bytes": 32, "assignment_node": Numbers("int32", TOKENS, TOP_K), "topk_w": o.w,
        "stream": STREAM,
    }  # fmt: skip
    place = Numbers("int32", ROWS)
    yield "copy_rows", C.copy_rows, {
        "direction": "push", "local": Address(o.window.address, 16),
        "peers": [Address(o.window.address, 16)], "peer_of_row": place, "peer_row": place,
        "num_rows": ROWS, "row_bytes": 64, "num_sms": 8, "stream": STREAM,
    }  # fmt: skip
    yield "stamp", C.stamp, {"times": Numbers("int64", ROWS), "index": 1, "stream": STREAM}
    yield "copy_memory", C.copy_memory, {
        "to": Address(o.window.address, 1), "from_": Address(o.window.address + 64, 1),
        "num_bytes": Address(64, 1),  # the same holds for a length
    }  # fmt: skip

    file = os.memfd_create("hostile")

    def exchange(**given: Any) -> None:
        os.ftruncate(file, 0)  # as it is at first
        C.HostExchange(**given)

    yield "HostExchange", exchange, {"file": file, "token": TOKEN, "num_ranks": 1, "rank": 0}


def method_calls(
    program: Program,
) -> Iterator[tuple[str, Callable[[], tuple[Callable[..., Any], dict[str, Any]]]]]:
    """Methods, on objects that are made for them."""

    def of(
        names: str, attribute: str, arguments: Callable[[Objects], dict[str, Any]], is_planned=False
    ) -> tuple[str, Callable[[], tuple[Callable[..., Any], dict[str, Any]]]]:
        def make() -> tuple[Callable[..., Any], dict[str, Any]]:
            o = Objects(program)
            if is_planned:
                o.planned()
            bound = getattr(getattr(o, names), attribute)
            # The objects live as long as the call does.
            return (lambda keep=o, **given: bound(**given)), arguments(o)

        return f"{names}.{attribute}", make

    for names, attribute in (
        ("communicator", "close"), ("communicator", "abort"), ("window", "close"),
        ("ep_group", "close"), ("handle", "close"), ("ep_ll_handle", "close"),
        ("group", "close"), ("group", "failure"), ("low_latency", "close"),
        ("group", "wait_until_idle"), ("nccl", "unique_id"),
    ):  # fmt: skip
        yield of(names, attribute, lambda o: {})
    yield of("ep_group", "handle_bytes", lambda o: {"alignment": 16, "top_k": TOP_K})
    yield of("handle", "update", lambda o: {
        "topk_idx": o.topk, "expert_counts": o.rows_of_expert, "num_rows": Numbers("int64", 1),
        "stream": STREAM,
    })  # fmt: skip
    yield of("handle", "dispatch", lambda o: {
        "x": o.x, "w": o.w, "rows": o.rows, "row_w": o.row_w, "stream": STREAM,
    })  # fmt: skip
    yield of("handle", "combine", lambda o: {
        "y": o.rows, "w": o.row_w, "out": o.x, "topk_w": o.w, "stream": STREAM,
    })  # fmt: skip
    places = (RANKS, EP_TOKENS)
    yield of("ep_ll_handle", "dispatch", lambda o: {
        "x": o.x, "topk_idx": o.topk, "w": o.w, "rows": Numbers("bfloat16", *places, HIDDEN),
        "row_topk_idx": Numbers("int32", *places, TOP_K),
        "row_w": Numbers("float32", *places, TOP_K), "counts": o.rank_counts, "stream": STREAM,
    })  # fmt: skip
    yield of("ep_ll_handle", "combine", lambda o: {
        "y": Numbers("bfloat16", *places, HIDDEN), "out": o.x, "stream": STREAM,
    })  # fmt: skip
    yield of("group", "begin", lambda o: {
        "timeout_s": 1.0, "num_tokens": TOKENS, "top_k": TOP_K, "row_bytes": 64,
    })  # fmt: skip
    yield of("group", "reserve", lambda o: {**o.shape(), "num_tokens": TOKENS + 200})
    yield of(
        "group", "routes_size", lambda o: {"max_pairs": 3, "max_assignments": 6, "most_tokens": 128}
    )
    yield of("group", "bad_ranks", lambda o: {"forget": True})
    yield of("group", "copy_waited_ns", lambda o: {"out": Numbers("int64", 1), "stream": STREAM})
    yield of("group", "bad_low_latency", lambda o: {"forget": True})
    yield of("group", "plan", lambda o: {
        **o.plan_arguments(), "alignment": 16, "max_recv_rows": 32, "kept": o.kept,
        "lacked": o.lacked,
    })  # fmt: skip
    yield of("group", "refuse", lambda o: {"phase": "dispatch", "stream": STREAM})
    yield of("group", "plan_receive", lambda o: {
        "plan": o.plan, "max_pairs": 3, "max_assignments": 6, "routes": o.routes, "num_sms": 8,
        "stream": STREAM,
    }, True)  # fmt: skip
    yield of("group", "wait_for_sizes", lambda o: {
        "plan": o.plan, "rows_of_expert": o.rows_of_expert, "stream": STREAM,
    }, True)  # fmt: skip
    yield of("group", "dispatch", lambda o: {
        "plan": o.plan, "x": o.x, "w": o.w, "rows": o.rows, "row_w": o.row_w, "num_sms": 8,
        "stream": STREAM,
    }, True)  # fmt: skip
    yield of("group", "sums_size", lambda o: {"plan": o.plan, "num_sms": 8, "row_bytes": 16}, True)
    yield of("group", "combine", lambda o: {
        "plan": o.plan, "y": o.rows, "w": o.row_w, "sums": Numbers("bfloat16", 1, HIDDEN),
        "out": o.x, "topk_w": o.w, "num_sms": 8, "stream": STREAM,
    }, True)  # fmt: skip

    yield of("low_latency", "dispatch", lambda o: {
        "x": o.x, "scales": None, "topk_idx": o.topk, "weights": o.w, "counts": o.rank_counts,
        "completes": True, "num_ctas": 8, "stream": STREAM,
    })  # fmt: skip
    yield of("low_latency", "complete_dispatch", lambda o: {
        "counts": o.dispatched(False).rank_counts, "stream": STREAM,
    })  # fmt: skip
    yield of("low_latency", "combine", lambda o: {
        "y": o.dispatched(True).rows, "rows_of": o.rows_of, "out": o.x, "sends": True,
        "completes": True, "num_ctas": 8, "stream": STREAM,
    })  # fmt: skip

    def exchange() -> tuple[Callable[..., Any], dict[str, Any]]:
        file = os.memfd_create("hostile")
        end = program.module.HostExchange(file, TOKEN, 1, 0)
        os.close(file)
        end.lost()
        return (lambda **given: end.exchange(**given)), {
            "mine": b"mine", "what": "a call", "timeout_s": 1.0,
        }  # fmt: skip

    yield "exchange.exchange", exchange

    def of_exchange(
        name: str, arguments: dict[str, Any]
    ) -> tuple[str, Callable[[], tuple[Callable[..., Any], dict[str, Any]]]]:
        def make() -> tuple[Callable[..., Any], dict[str, Any]]:
            file = os.memfd_create("hostile")
            end = program.module.HostExchange(file, TOKEN, 1, 0)
            os.close(file)
            return (lambda **given: getattr(end, name)(**given)), arguments

        return f"exchange.{name}", make

    yield of_exchange("enter", {"call": 3, "goes_on": False, "since": 0})
    yield of_exchange("refuse", {"reason": b"because"})
    yield of_exchange("refusal", {"rank": 0, "since": 0})
    yield of_exchange("gone_on", {})


def use_when_closed(program: Program, name: str, make: Callable[[], Any]) -> None:
    """Every method of objects that are closed raises or does nothing."""
    call, right = make()
    (keep,) = call.__defaults__ or (None,)
    if isinstance(keep, Objects):
        keep.close()
        program.attempt(f"closed {name}", call, plain(right))


def bound_names(module: ModuleType) -> set[str]:
    """All that can be called in the extension: functions, constructors, methods."""
    names = set()
    for name, value in vars(module).items():
        if isinstance(value, type):
            names |= {f"{name}.{n}" for n, v in vars(value).items() if callable(v) and n[0] != "_"}
            if name not in ("PlanSizes", "GroupFailure", "PlanHandle"):
                names.add(name)
        elif callable(value):
            names.add(name)
    return names


CLASSES = {"communicator": "Communicator", "window": "Window", "ep_group": "NcclEpGroup",
           "handle": "NcclEpHandle", "ep_ll_handle": "NcclEpLowLatencyHandle",
           "group": "GroupHandle", "nccl": "Nccl", "low_latency": "LowLatencyHandle",
           "exchange": "HostExchange"}  # fmt: skip


def main(extension: str, library: str, last_call: str) -> None:
    """Try everything; exit status 1 and the complaints when there are any."""
    spec = importlib.util.spec_from_file_location("megatron_ncclep._C", extension)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = Program(module, library, Path(last_call))
    tried = {"HostExchange.close", "HostExchange.lost"}
    for name, call, right in static_calls(program):
        program.try_all(name, lambda call=call, right=right: (call, right))
        tried.add(name)
    for name, make in method_calls(program):
        program.try_all(name, make)
        use_when_closed(program, name, make)
        owner, _, method = name.partition(".")
        tried.add(f"{CLASSES[owner]}.{method}")
    if missing := sorted(bound_names(module) - tried):
        program.complaints.append(f"nobody tries {', '.join(missing)}")
    print(f"{program.num_calls} calls, {program.num_refused} refused")
    for complaint in program.complaints[:20]:
        print(complaint, file=sys.stderr)
    sys.exit(1 if program.complaints else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
