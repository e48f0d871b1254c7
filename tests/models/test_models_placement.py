"""Plans over a table of cards and models, and what must hold for any of them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from builder_models import KNOWN, known_header
from hypothesis import given, settings
from hypothesis import strategies as st

from node.errors import NoSpace
from node.hardware import GPU, Hardware
from node.models import PlacementPlan, PlacementRequest, TensorInfo, plan_placement, smaller
from node.models.shape import model_shape

GIB, MIB = 2**30, 2**20
CARDS_GIB = (0, 8, 12, 16, 24)


def machine(card_gib: float, ram_gib: float = 64) -> Hardware:
    total = int(card_gib * GIB)
    # A desktop of its own takes some of the card.
    gpus = (GPU("card", total, total - 400 * MIB, "1"),) if total else ()
    ram = int(ram_gib * GIB)
    return Hardware(8, 16, ram, ram - 2 * GIB, gpus)


def plan(model: str, card_gib: float, ram_gib: float = 64, **request: object) -> PlacementPlan:
    asked = PlacementRequest(**request)  # type: ignore[arg-type]
    return plan_placement(KNOWN[model], machine(card_gib, ram_gib), asked)


def check_margins(made: PlacementPlan, hardware: Hardware) -> None:
    ram_margin = max(1.5 * GIB, hardware.ram_total_bytes * 0.1)
    assert made.ram_bytes <= hardware.ram_free_bytes - ram_margin + 1
    free = sum(g.free_bytes - max(512 * MIB, g.total_bytes // 20) for g in hardware.gpus)
    assert made.vram_bytes <= max(0, free)


@pytest.mark.parametrize("model", KNOWN)
@pytest.mark.parametrize("card_gib", CARDS_GIB)
def test_every_plan_keeps_its_margins_and_has_a_useful_context(model: str, card_gib: int) -> None:
    made = plan(model, card_gib)
    check_margins(made, machine(card_gib))
    assert made.n_ctx >= 8192 and made.n_ctx % 256 == 0
    assert 0 <= made.gpu_layers <= KNOWN[model].n_layers + 1
    assert (made.gpu_layers == 0) == (card_gib == 0) == (made.vram_bytes == 0)


@pytest.mark.parametrize("model", KNOWN)
def test_a_larger_card_never_holds_less(model: str) -> None:
    plans = [plan(model, gib) for gib in (0, 1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48)]
    kept_off = [made.choice.cpu_experts for made in plans if made.gpu_layers]
    assert [p.gpu_layers for p in plans] == sorted(p.gpu_layers for p in plans)
    assert kept_off == sorted(kept_off, reverse=True)
    for small, large in zip(plans, plans[1:], strict=False):
        if small.choice[:3] == large.choice[:3]:
            assert small.n_ctx <= large.n_ctx


@pytest.mark.parametrize(
    ("model", "card_gib", "gpu_layers", "kv_type", "overrides"),
    [
        ("smollm2-135m", 0, 0, "f16", False),
        ("smollm2-135m", 8, 31, "f16", False),
        ("llama-3.1-8b", 8, 33, "f16", False),
        ("llama-3.1-8b", 24, 33, "f16", False),
        ("qwen3-14b", 10.5, 41, "q8_0", False),
        ("qwen3-14b", 16, 41, "f16", False),
        ("gemma-3-12b", 16, 49, "f16", False),
        ("gpt-oss-20b", 8, 25, "f16", True),
        ("gpt-oss-20b", 16, 25, "f16", False),
        ("qwen3-30b-a3b", 12, 49, "f16", True),
        ("qwen3-30b-a3b", 24, 49, "f16", False),
    ],
)
def test_the_expected_plan_for_a_card(
    model: str, card_gib: float, gpu_layers: int, kv_type: str, overrides: bool
) -> None:
    made = plan(model, card_gib)
    assert (made.gpu_layers, made.type_k, made.type_v) == (gpu_layers, kv_type, kv_type)
    assert bool(made.tensor_overrides) == overrides


def test_a_dense_model_too_large_for_the_card_is_split() -> None:
    made = plan("qwen3-14b", 8)
    assert 10 < made.gpu_layers < 41
    assert made.tensor_overrides == ()


def test_experts_that_stay_on_the_cpu_are_named_by_a_pattern() -> None:
    (override,) = plan("gpt-oss-20b", 8).tensor_overrides
    pattern, _, device = override.rpartition("=")
    assert device == "CPU"
    assert re.search(pattern, "blk.0.ffn_gate_exps.weight")
    assert not re.search(pattern, "blk.23.ffn_gate_exps.weight")
    assert not re.search(pattern, "blk.0.attn_k.weight")


def test_numbers_agree_with_what_llama_cpp_reports() -> None:
    # KV of an 8B model; scratch of SmolLM2 (measured 98.25 MiB) and Llama 3 8B (258.5 MiB).
    assert model_shape(KNOWN["llama-3.1-8b"]).kv_bytes_per_token("f16") == 131_072
    assert model_shape(KNOWN["smollm2-135m"]).kv_bytes_per_token("f16") == 23_040
    small = model_shape(KNOWN["smollm2-135m"]).compute_bytes(512, 32_768)
    large = model_shape(KNOWN["llama-3.1-8b"]).compute_bytes(512, 8192)
    assert 98.25 * MIB <= small <= 1.1 * 98.25 * MIB
    assert 258.5 * MIB <= large <= 1.1 * 258.5 * MIB


@pytest.mark.parametrize("card_gib", CARDS_GIB)
@pytest.mark.parametrize("model", KNOWN)
def test_what_the_user_fixed_is_kept(model: str, card_gib: int) -> None:
    made = plan(
        model, card_gib, n_ctx=5000, kv_type="q8_0", threads=3, n_batch=128, max_sequences=7
    )
    assert (made.n_ctx, made.type_k, made.threads) == (5000, "q8_0", 3)
    assert (made.n_batch, made.n_ubatch, made.max_sequences) == (128, 128, 7)
    zero = plan(model, card_gib, gpu_layers=0)
    assert (zero.gpu_layers, zero.vram_bytes, zero.tensor_overrides) == (0, 0, ())


def test_forced_layers_that_do_not_fit_are_an_error_that_says_so() -> None:
    with pytest.raises(NoSpace, match="lower engine.gpu_layers"):
        plan("qwen3-14b", 8, gpu_layers=99)


def test_forced_layers_without_a_known_card_are_counted_as_ram() -> None:
    forced, plain = plan("llama-3.1-8b", 0, gpu_layers=99), plan("llama-3.1-8b", 0)
    assert forced.gpu_layers == 33 and forced.vram_bytes == 0
    assert forced.ram_bytes > plain.ram_bytes


def test_a_model_too_large_for_the_machine_is_an_error_with_both_numbers() -> None:
    with pytest.raises(NoSpace, match=r"needs \d.* GiB of RAM .* GiB may be used"):
        plan("qwen3-30b-a3b", 0, ram_gib=12)


def test_a_memory_limit_shrinks_the_context_before_it_refuses() -> None:
    wide = plan("llama-3.1-8b", 0)
    narrow = plan("llama-3.1-8b", 0, memory_limit_bytes=6 * GIB)
    assert wide.n_ctx == 32_768 and wide.type_k == "f16"
    assert 512 <= narrow.n_ctx < 8192 or narrow.type_k == "q8_0"
    assert narrow.ram_bytes <= 6 * GIB
    with pytest.raises(NoSpace):
        plan("llama-3.1-8b", 0, memory_limit_bytes=4 * GIB)


@pytest.mark.parametrize("model", KNOWN)
@pytest.mark.parametrize("card_gib", CARDS_GIB)
def test_smaller_plans_shrink_until_there_is_none(model: str, card_gib: int) -> None:
    made: PlacementPlan | None = plan(model, card_gib)
    seen: list[PlacementPlan] = []
    while made is not None and len(seen) < 200:
        seen.append(made)
        made = smaller(made)
    assert 1 < len(seen) < 40
    for before, after in zip(seen, seen[1:], strict=False):
        assert after.vram_bytes < before.vram_bytes or after.n_ctx < before.n_ctx
        check_margins(after, machine(card_gib))
    assert (seen[-1].gpu_layers, seen[-1].n_ctx) == (0, 512)


def test_a_smaller_plan_leaves_alone_what_the_user_fixed() -> None:
    fixed = plan("gpt-oss-20b", 16, n_ctx=8192, gpu_layers=25)
    less = smaller(fixed)
    assert less is not None and (less.n_ctx, less.gpu_layers) == (8192, 25)
    assert less.tensor_overrides and less.vram_bytes < fixed.vram_bytes
    assert smaller(plan("llama-3.1-8b", 8, n_ctx=8192, gpu_layers=33)) is None


def test_the_sums_are_shown() -> None:
    lines = "\n".join(plan("gpt-oss-20b", 8).lines)
    for text in (
        "weights",
        "a token × ",
        "card:",
        "RAM:",
        "VRAM:",
        "after the margin",
        "experts of",
    ):
        assert text in lines


def test_layers_without_kv_and_recurrent_state_are_told_apart() -> None:
    header = known_header(
        "hybrid", layers=4, embd=1024, heads=8, kv_heads=2, head_dim=128, ffn=2048, vocab=1000,
        context=4096,
    )  # fmt: skip
    attention = [t for t in header.tensors if not re.match(r"blk\.[02]\.attn_[kv]", t.name)]
    ssm = [TensorInfo(f"blk.{i}.ssm_in.weight", (1024, 64), "F32", 0, 262_144) for i in (0, 2)]
    metadata = {**header.metadata, "hybrid.ssm.inner_size": 2048, "hybrid.ssm.state_size": 128}
    mixed = replace(header, tensors=(*attention, *ssm), metadata=metadata)
    shape = model_shape(mixed)
    assert [layer.kv_elements for layer in shape.layers] == [0, 512, 0, 512]
    assert [layer.state_bytes for layer in shape.layers] == [4 * 2048 * 128, 0, 4 * 2048 * 128, 0]
    made = plan_placement(mixed, machine(0, ram_gib=6), PlacementRequest())
    assert made.max_sequences == 64
    tight = PlacementRequest(memory_limit_bytes=600 * MIB)
    assert 1 <= plan_placement(mixed, machine(0), tight).max_sequences < 64


headers = st.builds(
    known_header,
    st.just("llama"),
    layers=st.integers(1, 80),
    embd=st.sampled_from([64, 576, 2048, 5120]),
    heads=st.integers(1, 64),
    kv_heads=st.integers(1, 16),
    head_dim=st.sampled_from([64, 80, 128, 256]),
    ffn=st.sampled_from([256, 3072, 14_336]),
    vocab=st.sampled_from([1000, 32_000, 262_144]),
    context=st.sampled_from([100, 512, 4096, 40_960, 1_048_576]),
    experts=st.sampled_from([0, 0, 8]),
    tied=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(headers, st.floats(0, 80), st.floats(1, 256))
def test_any_plan_fits_grows_with_the_card_and_never_overlaps_its_parts(
    header: object, card_gib: float, ram_gib: float
) -> None:
    assert isinstance(header, type(KNOWN["qwen3-14b"]))
    hardware = machine(card_gib if card_gib >= 1 else 0, ram_gib)
    try:
        made = plan_placement(header, hardware, PlacementRequest())
    except NoSpace as error:
        assert "may be used" in error.message
        return
    check_margins(made, hardware)
    assert 0 < made.n_ctx <= max(256, header.context_tokens)
    shape, basis = model_shape(header), made.basis
    # Every byte of weights is on exactly one device; a tied output is there twice.
    on_both = basis.cpu(made.choice).weights + basis.gpu(made.choice).weights
    twice = shape.tied_bytes if made.gpu_layers else 0
    assert on_both == shape.weight_bytes + twice
    kv = basis.cpu(made.choice).kv + basis.gpu(made.choice).kv
    assert kv == made.n_ctx * shape.kv_bytes_per_token(made.type_k)
