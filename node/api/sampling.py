"""Sampling settings of one choice from the request, the node's defaults and the vocabulary."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from node.api.schemas import GenerateBody
from node.config import SamplingConfig
from node.engine.messages import Sampling
from node.errors import InvalidRequest

__all__ = ["check_text_size", "check_tokens", "sampling_for"]

_SEED_MASK = 2**63 - 1


def sampling_for(
    body: GenerateBody, defaults: SamplingConfig, n_vocab: int, choices: int
) -> list[Sampling]:
    """One `Sampling` a choice; they differ in the seed only, which counts up from the first."""
    seed = secrets.randbits(63) if body.seed is None else body.seed
    bias = tuple((_token(key, n_vocab), value) for key, value in body.logit_bias.items())
    return [_sampling(body, defaults, bias, (seed + i) & _SEED_MASK) for i in range(choices)]


def check_tokens(tokens: Sequence[int], n_vocab: int, param: str) -> None:
    """Ids outside the vocabulary must not reach the model: it indexes with them."""
    if tokens and (min(tokens) < 0 or max(tokens) >= n_vocab):
        raise InvalidRequest(f"{param}: token ids must be from 0 to {n_vocab - 1}", param=param)


def check_text_size(segments: Sequence[str], limit_bytes: int, param: str) -> None:
    size_bytes = sum(len(segment.encode()) for segment in segments)
    if size_bytes > limit_bytes:
        raise InvalidRequest(
            f"{param}: {size_bytes} bytes of text; this node reads at most {limit_bytes}",
            param=param,
        )


def _token(key: str, n_vocab: int) -> int:
    token = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else -1
    if not 0 <= token < n_vocab:
        raise InvalidRequest(
            f"logit_bias: keys must be token ids from 0 to {n_vocab - 1}", param="logit_bias"
        )
    return token


def _sampling(
    body: GenerateBody,
    defaults: SamplingConfig,
    bias: tuple[tuple[int, float], ...],
    seed: int,
) -> Sampling:
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return Sampling(
        temperature=given(body.temperature, defaults.temperature),
        top_k=max(0, defaults.top_k if body.top_k is None else body.top_k),
        top_p=given(body.top_p, defaults.top_p),
        min_p=given(body.min_p, defaults.min_p),
        typical_p=body.typical_p,
        repeat_penalty=body.repeat_penalty,
        repeat_last_n=body.repeat_last_n,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        dry_multiplier=body.dry_multiplier,
        dry_base=body.dry_base,
        dry_allowed_length=body.dry_allowed_length,
        dry_penalty_last_n=body.dry_penalty_last_n,
        seed=seed,
        logit_bias=bias,
    )
