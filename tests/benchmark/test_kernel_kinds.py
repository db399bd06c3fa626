"""Kinds of kernels by their names, and how the device's time divides among them."""

from __future__ import annotations

import pytest

from megatron_ncclep.benchmark.kernel_kinds import KINDS, Interval, covered, kind_of, shares

# Names as CUPTI gives them, of what a training step runs on an H200.
NAMES = {
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128>(...)",
        "void flash::flash_bwd_dq_dk_dv_loop_kernel<Flash_bwd_kernel_traits<128, cutlass::bf16>>()",
        "void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>(...)",
    ],
    "GEMM": [
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopB_TNT",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<Gemm>>(...)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)",
    ],
    "dispatch": [
        "void ncclep::native::(anonymous namespace)::dispatch_kernel<true>(ncclep::Rank)",
        "nccl_ep_ht_dispatch_kernel",
    ],
    "combine": ["void ncclep::native::(anonymous namespace)::combine_kernel<2>(Rank, Combine)"],
    "plan": [
        "ncclep::native::(anonymous namespace)::count_kernel(Rank, PlanCount)",
        "ncclep::native::(anonymous namespace)::receive_kernel(Rank, ReceivedRoutes)",
        "ncclep::(anonymous namespace)::routes_and_weights_kernel(RoutesAndWeights)",
    ],
    "permute": [
        "_permute_kernel",
        "_unpermute_bwd_with_merging_probs_kernel",
        "_row_id_map_pass_1_kernel",
        "_sort_chunks_by_map_kernel",
        "void at::native::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2>(...)",
        "void at::native::_scatter_gather_elementwise_kernel<128, 8>(...)",
    ],
    "collectives": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    ],
    "optimizer": ["void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>(...)"],
    "rest": [
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(...)",
        "void transformer_engine::rmsnorm_fwd_tuned_kernel<Kernel_traits>(...)",
        "triton_poi_fused_mul_silu_0",
        "Memset (Device)",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    assert {name: kind_of(name) for name in NAMES[kind]} == dict.fromkeys(NAMES[kind], kind)


def test_in_the_optimizer_all_but_collectives_is_its_own() -> None:
    found = {kind: {kind_of(name, True) for name in names} for kind, names in NAMES.items()}
    assert found.pop("collectives") == {"collectives"}
    assert set(map(frozenset, found.values())) == {frozenset({"optimizer"})}


def interval(kind: str, start: float, end: float) -> Interval:
    return Interval("x", start, end, kind)


def positive(found: dict[str, float]) -> dict[str, float]:
    return {kind: share for kind, share in found.items() if share}


def test_what_overlaps_shares_the_time() -> None:
    """GEMM from 0 to 10 and dispatch from 8 to 12 make 9 and 3, and the device was busy for 12."""
    both = [interval("dispatch", 8, 12), interval("GEMM", 0, 10)]
    assert positive(shares(both)) == {"GEMM": 9.0, "dispatch": 3.0}
    three = [*both, interval("GEMM", 8, 9)]  # between 8 and 9 two of three are GEMM
    assert shares(three)["GEMM"] == pytest.approx(8 + 2 / 3 + 1 / 2)
    assert sum(shares(three).values()) == pytest.approx(12)


def test_gaps_are_nobodys() -> None:
    apart = [interval("GEMM", 0, 10), interval("rest", 10, 11), interval("GEMM", 20, 21)]
    assert positive(shares(apart)) == {"GEMM": 11.0, "rest": 1.0}
    assert covered(apart) == 12
    assert covered([interval("rest", 0, 10), interval("rest", 2, 3)]) == 10
    assert covered([]) == 0
