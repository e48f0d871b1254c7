"""Where a model's parts go: layers on the GPU, KV type, context, experts, and the sums behind it.

A plan is a pure function of header, hardware and request. It keeps a margin free on every device,
because the estimate is one and the desktop needs memory too; `smaller` is the answer when a device
refuses nevertheless.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from node.errors import NoSpace
from node.hardware import Hardware
from node.models.download import human_bytes
from node.models.header import GGUFHeader
from node.models.shape import ModelShape, model_shape

__all__ = ["PlacementPlan", "PlacementRequest", "plan_placement", "smaller"]

_MIB, _GIB = 2**20, 2**30
_TARGET_TOKENS = 32_768
_USEFUL_TOKENS = 8_192
_LEAST_TOKENS = 512
_STEP_TOKENS = 256
_MAX_UBATCH = 512
# What a process takes before any model: Python and llama.cpp; the driver's context on a card.
_PROCESS_BYTES = 200 * _MIB
_DRIVER_BYTES = 400 * _MIB


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What the user fixed; None leaves it to the plan."""

    n_ctx: int | None = None
    gpu_layers: int | None = None
    kv_type: str | None = None
    threads: int | None = None
    n_batch: int = 512
    max_sequences: int = 64
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """`gpu_layers` counts the output as one more layer, as llama.cpp does.

    `threads` None follows the machine's load. `max_sequences` is below the request only where each
    sequence has a state of its own and all of them would take too much.
    """

    gpu_layers: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    type_k: str
    type_v: str
    threads: int | None
    tensor_overrides: tuple[str, ...]
    use_mmap: bool
    max_sequences: int
    ram_bytes: int
    vram_bytes: int
    lines: tuple[str, ...]
    basis: _Basis = field(repr=False)
    choice: _Choice = field(repr=False)


class _Choice(NamedTuple):
    """`cpu_experts`: of how many layers, from the first, the experts stay on the CPU."""

    gpu_layers: int
    cpu_experts: int
    kv_type: str
    n_ctx: int


class _Need(NamedTuple):
    ram_bytes: int
    vram_bytes: int


class _Part(NamedTuple):
    """Bytes of one device by what they are for."""

    weights: int
    kv: int
    state: int
    compute: int
    base: int


@dataclass(frozen=True, slots=True)
class _Basis:
    """Everything that does not change from one choice to the next."""

    shape: ModelShape
    hardware: Hardware
    request: PlacementRequest
    max_sequences: int

    @property
    def ram_budget(self) -> int:
        machine = self.hardware
        margin = max(3 * _GIB // 2, machine.ram_total_bytes // 10)
        budget = machine.ram_free_bytes - margin
        limit = self.request.memory_limit_bytes
        return max(0, budget if limit is None else min(budget, limit))

    @property
    def vram_budget(self) -> int:
        return sum(
            max(0, gpu.free_bytes - max(512 * _MIB, gpu.total_bytes // 20))
            for gpu in self.hardware.gpus
        )

    @property
    def n_ubatch(self) -> int:
        return min(self.request.n_batch, _MAX_UBATCH)

    def fits(self, choice: _Choice) -> bool:
        need = self.need(choice)
        return need.ram_bytes <= self.ram_budget and need.vram_bytes <= self.vram_budget

    def need(self, choice: _Choice) -> _Need:
        cpu, gpu = sum(self.cpu(choice)), sum(self.gpu(choice))
        if not self.hardware.gpus:
            # Layers forced onto a card we cannot see may lie in main memory: count them there.
            return _Need(cpu + gpu, 0)
        return _Need(cpu, gpu)

    def gpu(self, choice: _Choice) -> _Part:
        if choice.gpu_layers == 0:
            return _Part(0, 0, 0, 0, 0)
        shape, first = self.shape, self._first_on_gpu(choice)
        kept = shape.expert_layers[: choice.cpu_experts]
        layers = shape.layers[first:]
        experts_off = sum(shape.layers[i].expert_bytes for i in kept if i >= first)
        weights = sum(layer.dense_bytes + layer.expert_bytes for layer in layers) - experts_off
        compute = shape.compute_bytes(self.n_ubatch, choice.n_ctx)
        if first > 0 or kept:
            # Weights of the CPU are copied over, one at a time, while a long prompt is read.
            compute += shape.largest_tensor_bytes
        return _Part(
            weights + shape.output_bytes + shape.tied_bytes,
            choice.n_ctx * sum(layer.kv_bytes(choice.kv_type) for layer in layers),
            self.max_sequences * sum(layer.state_bytes for layer in layers),
            compute,
            _DRIVER_BYTES * max(1, len(self.hardware.gpus)),
        )

    def cpu(self, choice: _Choice) -> _Part:
        shape, first = self.shape, self._first_on_gpu(choice)
        layers = shape.layers[:first]
        kept = shape.expert_layers[: choice.cpu_experts]
        experts_here = sum(shape.layers[i].expert_bytes for i in kept if i >= first)
        weights = sum(layer.dense_bytes + layer.expert_bytes for layer in layers) + experts_here
        if choice.gpu_layers == 0:
            weights += shape.output_bytes
        return _Part(
            weights + shape.input_bytes,
            choice.n_ctx * sum(layer.kv_bytes(choice.kv_type) for layer in layers),
            self.max_sequences * sum(layer.state_bytes for layer in layers),
            shape.compute_bytes(self.n_ubatch, choice.n_ctx)
            + self.max_sequences * shape.logits_bytes,
            _PROCESS_BYTES,
        )

    def _first_on_gpu(self, choice: _Choice) -> int:
        return min(self.shape.n_layers, max(0, self.shape.n_layers + 1 - choice.gpu_layers))


def plan_placement(
    header: GGUFHeader, hardware: Hardware, request: PlacementRequest
) -> PlacementPlan:
    """The best plan that fits with its margins.

    Preferred in this order: everything on the GPU; of a mixture of experts, the experts of as few
    layers as possible on the CPU; as many layers as possible on the GPU; all on the CPU. Each
    with a useful context (8192 tokens or what the model has) before any with less.

    Raises:
        NoSpace: not even the smallest context fits, with the sums.
    """
    shape = model_shape(header)
    basis = _Basis(shape, hardware, request, 0)
    basis = replace(basis, max_sequences=_sequences(basis))
    target = request.n_ctx or _rounded(min(shape.context_tokens, _TARGET_TOKENS))
    useful = request.n_ctx or min(target, _USEFUL_TOKENS)
    least = request.n_ctx or min(target, _LEAST_TOKENS)
    for low, high in ((useful, target), (least, useful)):
        for choice in _preferred(basis, low):
            if basis.fits(choice):
                return _plan(basis, _grown(basis, choice, high))
    raise NoSpace(_why_not(basis, least))


def smaller(plan: PlacementPlan) -> PlacementPlan | None:
    """The next smaller plan after an allocation failed; None when there is none.

    Takes layers (of a mixture of experts, first experts) off the GPU, then halves the context.
    What the user fixed is not touched.
    """
    basis, choice = plan.basis, plan.choice
    for smaller_choice in (_less_on_gpu(basis, choice), _less_context(basis, choice)):
        if smaller_choice is not None:
            return _plan(basis, smaller_choice)
    return None


def _preferred(basis: _Basis, n_ctx: int) -> Iterator[_Choice]:
    """Choices from best to worst at one context size."""
    request, shape = basis.request, basis.shape
    kv_types = (request.kv_type,) if request.kv_type else ("f16", "q8_0")
    full, experts = shape.n_layers + 1, len(shape.expert_layers)
    if request.gpu_layers is not None:
        layers = min(request.gpu_layers, full)
        moves = range(experts + 1) if layers else range(1)
        for kv_type in kv_types:
            yield from (_Choice(layers, moved, kv_type, n_ctx) for moved in moves)
        return
    if basis.hardware.gpus:
        # Quantised KV is the lesser evil only if it keeps the whole model on the GPU.
        yield from (_Choice(full, 0, kv_type, n_ctx) for kv_type in kv_types)
    for kv_type in kv_types:
        if basis.hardware.gpus:
            yield from (_Choice(full, n, kv_type, n_ctx) for n in range(1, experts + 1))
            yield from (_Choice(n, experts, kv_type, n_ctx) for n in range(full - 1, 0, -1))
        yield _Choice(0, 0, kv_type, n_ctx)


def _grown(basis: _Basis, choice: _Choice, most: int) -> _Choice:
    """The same choice with the largest context that fits."""
    if basis.fits(choice._replace(n_ctx=most)):
        return choice._replace(n_ctx=most)
    low, high = choice.n_ctx // _STEP_TOKENS, most // _STEP_TOKENS
    while low + 1 < high:
        middle = (low + high) // 2
        fits = basis.fits(choice._replace(n_ctx=middle * _STEP_TOKENS))
        low, high = (middle, high) if fits else (low, middle)
    return choice._replace(n_ctx=max(choice.n_ctx, low * _STEP_TOKENS))


def _less_on_gpu(basis: _Basis, choice: _Choice) -> _Choice | None:
    shape, experts = basis.shape, len(basis.shape.expert_layers)
    if choice.gpu_layers == 0:
        return None
    step = max(1, shape.n_layers // 8)
    if choice.cpu_experts < experts:
        less = choice._replace(cpu_experts=min(experts, choice.cpu_experts + step))
    elif basis.request.gpu_layers is None:
        layers = max(0, choice.gpu_layers - step)
        less = choice._replace(gpu_layers=layers, cpu_experts=experts if layers else 0)
    else:
        return None
    return less if basis.need(less).ram_bytes <= basis.ram_budget else None


def _less_context(basis: _Basis, choice: _Choice) -> _Choice | None:
    if basis.request.n_ctx is not None or choice.n_ctx <= _LEAST_TOKENS:
        return None
    return choice._replace(n_ctx=max(_LEAST_TOKENS, _rounded(choice.n_ctx // 2)))


def _sequences(basis: _Basis) -> int:
    """Recurrent state is allocated for every possible sequence: let it take an eighth at most."""
    wanted, each = basis.request.max_sequences, basis.shape.state_bytes
    if each == 0:
        return wanted
    memory = basis.vram_budget or basis.ram_budget
    return max(1, min(wanted, memory // 8 // each))


def _rounded(n_ctx: int) -> int:
    return n_ctx // _STEP_TOKENS * _STEP_TOKENS or n_ctx


def _plan(basis: _Basis, choice: _Choice) -> PlacementPlan:
    need = basis.need(choice)
    return PlacementPlan(
        gpu_layers=choice.gpu_layers,
        n_ctx=choice.n_ctx,
        n_batch=basis.request.n_batch,
        n_ubatch=basis.n_ubatch,
        type_k=choice.kv_type,
        type_v=choice.kv_type,
        threads=basis.request.threads,
        tensor_overrides=_overrides(basis.shape, choice),
        use_mmap=True,
        max_sequences=basis.max_sequences,
        ram_bytes=need.ram_bytes,
        vram_bytes=need.vram_bytes,
        lines=tuple(_lines(basis, choice)),
        basis=basis,
        choice=choice,
    )


def _overrides(shape: ModelShape, choice: _Choice) -> tuple[str, ...]:
    kept = shape.expert_layers[: choice.cpu_experts]
    if not kept or not choice.gpu_layers:
        return ()
    return (rf"blk\.({'|'.join(map(str, kept))})\.ffn_.*_exps\.=CPU",)


def _lines(basis: _Basis, choice: _Choice) -> Iterator[str]:
    shape, machine = basis.shape, basis.hardware
    per_token = shape.kv_bytes_per_token(choice.kv_type)
    yield f"weights {human_bytes(shape.weight_bytes)} in {shape.n_layers} layers"
    yield (
        f"KV {choice.kv_type}: {human_bytes(per_token)} a token × {choice.n_ctx} tokens"
        f" = {human_bytes(per_token * choice.n_ctx)}"
    )
    if choice.n_ctx > shape.context_tokens:
        yield f"context {choice.n_ctx} is beyond the {shape.context_tokens} of the training"
    if shape.state_bytes:
        yield (
            f"state: {human_bytes(shape.state_bytes)} a sequence × {basis.max_sequences} sequences"
            f" = {human_bytes(shape.state_bytes * basis.max_sequences)}"
        )
    if choice.gpu_layers:
        yield f"{choice.gpu_layers} of {shape.n_layers + 1} layers (with the output) on the GPU"
    if choice.cpu_experts and choice.gpu_layers:
        yield f"experts of {choice.cpu_experts} of {len(shape.expert_layers)} layers on the CPU"
    for gpu in machine.gpus:
        yield f"{gpu.name}: {human_bytes(gpu.free_bytes)} of {human_bytes(gpu.total_bytes)} free"
    if not machine.gpus:
        yield "no NVIDIA card: everything runs on the CPU"
    yield _sum_line("RAM", basis.cpu(choice), basis.ram_budget)
    if choice.gpu_layers:
        yield _sum_line("VRAM", basis.gpu(choice), basis.vram_budget)


def _sum_line(device: str, part: _Part, budget: int) -> str:
    terms = (
        (part.weights, "weights"),
        (part.kv, "KV"),
        (part.state, "state"),
        (part.compute, "compute"),
        (part.base, "process" if device == "RAM" else "driver"),
    )
    text = " + ".join(f"{human_bytes(n)} {what}" for n, what in terms if n)
    return f"{device}: {text} = {human_bytes(sum(part))} of {human_bytes(budget)} after the margin"


def _why_not(basis: _Basis, n_ctx: int) -> str:
    wanted = basis.request.gpu_layers or 0
    layers = min(wanted, basis.shape.n_layers + 1)
    choice = _Choice(layers, 0, basis.request.kv_type or "q8_0", n_ctx)
    need = basis.need(choice)
    text = (
        f"the model needs {human_bytes(need.ram_bytes)} of RAM for a context of {n_ctx} tokens,"
        f" and {human_bytes(basis.ram_budget)} may be used"
    )
    if layers and basis.hardware.gpus:
        text += (
            f"; its {layers} GPU layers need {human_bytes(need.vram_bytes)} of VRAM, and"
            f" {human_bytes(basis.vram_budget)} may be used: lower engine.gpu_layers"
        )
    return f"{text}. Close other programs, lower engine.n_ctx, or take a smaller model"
