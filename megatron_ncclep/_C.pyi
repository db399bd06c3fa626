"""The extension: what csrc/bindings binds; tests/native/test_fake_extension.py compares the two.

A `stream`, and whatever names memory without being a Tensor, is an address.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

CHUNK: int
PHASES: int
MAX_RANKS: int
MAX_LOCAL_RANKS: int
NARROW_LOCAL_RANKS: int
MAX_DOMAINS: int
MAX_EXPERTS: int
MAX_LOCAL_EXPERTS: int
MAX_TOKENS: int
MAX_TOP_K: int
LOW_LATENCY_TOKENS: int
MESSAGE_VECTOR: int

class HostExchange:
    def __init__(self, file: int, token: str, num_ranks: int, rank: int) -> None: ...
    def exchange(self, mine: bytes, what: str, timeout_s: float) -> bytes: ...
    def enter(self, call: int, skips_exchange: bool, since: int) -> None: ...
    def refuse(self, reason: bytes) -> None: ...
    def refusal(self, rank: int, since: int) -> str: ...
    def gone_on(self) -> int: ...
    def lost(self) -> str: ...
    def close(self) -> None: ...

class Nccl:
    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> int: ...
    def unique_id(self) -> bytes: ...

class Communicator:
    def __init__(
        self, nccl: Nccl, unique_id: bytes, num_ranks: int, rank: int, device: int, timeout_s: float
    ) -> None: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def lsa_size(self) -> int: ...
    @property
    def num_domains(self) -> int: ...
    def network_problem(self) -> str: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...

class Window:
    def __init__(
        self, communicator: Communicator, num_bytes: int, over_network: bool = False
    ) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def peers(self) -> list[int]: ...
    def close(self) -> None: ...

class Rails:
    def __init__(self, communicator: Communicator, timeout_s: float) -> None: ...
    @property
    def num_domains(self) -> int: ...
    @property
    def transport(self) -> str: ...
    def probe(self, window: Window, timeout_s: float) -> None: ...
    def close(self) -> None: ...

class NcclEp:
    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> int: ...

class NcclEpGroup:
    def __init__(
        self,
        library: NcclEp,
        communicator: Communicator,
        *,
        num_experts: int,
        max_tokens: int,
        max_recv_rows: int,
        row_bytes: int,
        top_k: int,
        num_sms: int,
        timeout_s: float,
        low_latency: bool = False,
    ) -> None: ...
    def handle_bytes(self, alignment: int, top_k: int) -> int: ...
    def close(self) -> None: ...

class NcclEpHandle:
    def __init__(self, group: NcclEpGroup, alignment: int, top_k: int, memory: Tensor) -> None: ...
    def update(
        self, topk_idx: Tensor, expert_counts: Tensor, num_rows: Tensor, stream: int
    ) -> None: ...
    def dispatch(
        self, x: Tensor, w: Tensor | None, rows: Tensor, row_w: Tensor | None, stream: int
    ) -> None: ...
    def combine(
        self, y: Tensor, w: Tensor | None, out: Tensor, topk_w: Tensor | None, stream: int
    ) -> None: ...
    def close(self) -> None: ...

class NcclEpLowLatencyHandle:
    def __init__(self, group: NcclEpGroup, top_k: int) -> None: ...
    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        w: Tensor,
        rows: Tensor,
        row_topk_idx: Tensor,
        row_w: Tensor,
        counts: Tensor,
        stream: int,
    ) -> None: ...
    def combine(self, y: Tensor, out: Tensor, stream: int) -> None: ...
    def close(self) -> None: ...

class PlanSizes:
    @property
    def num_rows(self) -> int: ...
    @property
    def num_pairs(self) -> int: ...
    @property
    def num_assignments(self) -> int: ...
    @property
    def first_bad_rank(self) -> int: ...
    @property
    def has_room(self) -> int: ...

class GroupFailure:
    @property
    def reason(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def peer(self) -> int: ...
    @property
    def operation(self) -> int: ...
    @property
    def deadline_s(self) -> float: ...
    @property
    def own_call(self) -> int: ...
    @property
    def peer_call(self) -> int: ...

class PlanHandle:
    pass

class GroupHandle:
    def __init__(self, communicator: Communicator, num_experts: int, timeout_s: float) -> None: ...
    def reserve(
        self,
        *,
        num_tokens: int,
        top_k: int,
        row_bytes: int,
        stream: int,
        all_gather: Callable[[bytes, str, float], bytes],
    ) -> str | None: ...
    def begin(
        self, timeout_s: float, num_tokens: int, top_k: int, row_bytes: int
    ) -> bool | None: ...
    def release_windows(self) -> None: ...
    def close(self) -> None: ...
    @property
    def num_token_routes(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def was_captured(self) -> bool: ...
    def routes_size(self, max_pairs: int, max_assignments: int, most_tokens: int) -> int: ...
    def plan(
        self,
        *,
        topk_idx: Tensor,
        most_tokens: int,
        number: int,
        alignment: int,
        max_recv_rows: int,
        counts: Tensor,
        token_routes: Tensor,
        routes: Tensor,
        max_pairs: int,
        max_assignments: int,
        kept: Tensor | None,
        lacked: Tensor | None,
        num_sms: int,
        stream: int,
        leaves_unused: bool,
    ) -> PlanHandle: ...
    def wait_for_sizes(
        self, *, plan: PlanHandle, rows_of_expert: Tensor, stream: int
    ) -> PlanSizes | None: ...
    def plan_receive(
        self,
        *,
        plan: PlanHandle,
        routes: Tensor,
        max_pairs: int,
        max_assignments: int,
        num_sms: int,
        stream: int,
    ) -> None: ...
    def dispatch(
        self,
        *,
        plan: PlanHandle,
        tokens: Tensor,
        topk_w: Tensor | None,
        rows: Tensor,
        row_w: Tensor | None,
        sums: Tensor | None,
        num_sms: int,
        stream: int,
    ) -> None: ...
    def combine(
        self,
        *,
        plan: PlanHandle,
        tokens: Tensor,
        topk_w: Tensor | None,
        rows: Tensor,
        row_w: Tensor | None,
        sums: Tensor | None,
        num_sms: int,
        stream: int,
    ) -> None: ...
    def sums_size(self, plan: PlanHandle, num_sms: int, row_bytes: int) -> int: ...
    def wait_until_idle(self) -> None: ...
    def copy_waited_ns(self, out: Tensor, stream: int) -> None: ...
    def bad_ranks(self, forget: bool) -> list[int]: ...
    def bad_low_latency(self, forget: bool) -> list[int]: ...
    def refuse(self, phase: str, stream: int) -> None: ...
    def failure(self) -> GroupFailure | None: ...

class LowLatencyHandle:
    def __init__(
        self,
        group: GroupHandle,
        *,
        max_tokens: int,
        hidden: int,
        top_k: int,
        payload: str,
        dtype: str,
        num_scales: int,
        all_gather: Callable[[bytes, str, float], bytes],
    ) -> None: ...
    def close(self) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def scales(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def weights(self) -> int: ...
    def dispatch(
        self,
        *,
        x: Tensor,
        scales: Tensor | None,
        topk_idx: Tensor,
        weights: Tensor,
        counts: Tensor,
        completes: bool,
        num_ctas: int,
        stream: int,
    ) -> None: ...
    def complete_dispatch(self, *, counts: Tensor, stream: int) -> None: ...
    def combine(
        self,
        *,
        y: Tensor,
        rows_of: Tensor | None,
        out: Tensor,
        sends: bool,
        completes: bool,
        num_ctas: int,
        stream: int,
    ) -> None: ...

def build_info() -> dict[str, Any]: ...
def window_peers(head: bytes, rank: int, num_ranks: int) -> list[int]: ...
def call_values(call: int) -> dict[str, Any]: ...
def split_dispatch(num_ctas: int) -> tuple[int, int]: ...
def num_phases_of(most_tokens: int, row_bytes: int) -> int: ...
def split_combine(
    num_ctas: int, num_ranks: int, top_k: int, row_bytes: int
) -> tuple[int, int, int]: ...
def native_min_sms(num_ranks: int) -> int: ...
def native_device_problem() -> str: ...
def native_memory(
    *,
    num_ranks: int,
    num_domains: int,
    num_experts: int,
    num_tokens: int,
    top_k: int,
    row_bytes: int,
    max_pairs: int,
    max_assignments: int,
) -> dict[str, int]: ...
def low_latency_bytes(
    *,
    num_ranks: int,
    num_domains: int,
    max_tokens: int,
    hidden: int,
    top_k: int,
    payload: str,
    dtype: str,
    num_scales: int,
) -> int: ...
def routes_and_weights(
    routing_map: Tensor,
    probs: Tensor,
    not_routed: int,
    too_many_experts: int,
    topk_idx: Tensor,
    weights: Tensor,
    experts_per_block: int,
    stream: int,
) -> None: ...
def probs_gradient(
    topk_idx: Tensor, grad_weights: Tensor, grad_probs: Tensor, experts_per_block: int, stream: int
) -> None: ...
def pack_messages(
    rows: Tensor,
    w: Tensor | None,
    token: Tensor | None,
    tokens_each: int,
    first: int,
    piece_bytes: int,
    messages: Tensor,
    stream: int,
) -> None: ...
def unpack_messages(messages: Tensor, rows: Tensor, w: Tensor, stream: int) -> None: ...
def add_up_messages(
    messages: Tensor,
    message_index: Tensor,
    out: Tensor,
    first: int,
    piece_bytes: int,
    assignment_node: Tensor | None,
    topk_w: Tensor | None,
    stream: int,
) -> None: ...
def copy_rows(
    direction: str,
    local: int,
    peers: Sequence[int],
    peer_of_row: Tensor,
    peer_row: Tensor,
    num_rows: int,
    row_bytes: int,
    num_sms: int,
    stream: int,
) -> None: ...
def stamp(times: Tensor, index: int, stream: int) -> None: ...
def copy_memory(to: int, from_: int, num_bytes: int) -> None: ...

# Only in an extension that was built for compute capability 9.0.
def fp8_quantize_rows(
    values: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    scales: Tensor | None,
    transposed: Tensor | None,
    scales_transposed: Tensor | None,
    powers_of_two: bool,
    stream: int,
) -> None: ...
def fp8_pack_rows(values: Tensor, packed: Tensor, powers_of_two: bool, stream: int) -> None: ...
def fp8_unpack_rows(
    packed: Tensor,
    offsets: Tensor,
    scales: Tensor | None,
    transposed: Tensor | None,
    scales_transposed: Tensor | None,
    powers_of_two: bool,
    stream: int,
) -> None: ...
def fp8_swiglu(
    gate_up: Tensor,
    probs: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    scales: Tensor | None,
    transposed: Tensor | None,
    scales_transposed: Tensor | None,
    powers_of_two: bool,
    stream: int,
) -> None: ...
def fp8_swiglu_gradients(
    gate_up: Tensor,
    probs: Tensor,
    grads: Tensor,
    offsets: Tensor,
    prob_grads: Tensor,
    rows: Tensor | None,
    scales: Tensor | None,
    transposed: Tensor | None,
    scales_transposed: Tensor | None,
    powers_of_two: bool,
    stream: int,
) -> None: ...
def fp8_quantize_weights(
    values: Tensor,
    weights: Tensor,
    scales: Tensor,
    transposed: Tensor,
    scales_transposed: Tensor,
    powers_of_two: bool,
    stream: int,
) -> None: ...
def fp8_multiply_rows(
    rows: Tensor,
    scales: Tensor,
    weights: Tensor,
    weight_scales: Tensor,
    offsets: Tensor,
    out: Tensor,
    stream: int,
) -> None: ...
def fp8_multiply_for_weights(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    offsets: Tensor,
    out: Tensor,
    adds: bool,
    stream: int,
) -> None: ...
