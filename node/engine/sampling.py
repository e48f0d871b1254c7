"""Chooses the next token of one request: greedy, or drawn by a counter-based generator.

The draw for the n-th token depends on seed and n alone, so it is the same whatever else is in the
batch, and a request that is resumed after a crash goes on as if nothing had happened.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from node.engine.llama import LlamaModel
from node.engine.llama_sampling import Candidates, Grammar, GrammarError, SamplerChain
from node.engine.messages import Constraint, Sampling, TokenLogprob

__all__ = ["ConstraintState", "TokenSampler", "token_logprob"]

Logits = npt.NDArray[np.float32]


class ConstraintState:
    """A compiled constraint and the output's position in it.

    With `after`, output is free until that marker has been written; end-of-generation tokens are
    forbidden until then, so that the constrained part always comes.
    """

    def __init__(self, model: LlamaModel, constraint: Constraint) -> None:
        self._model = model
        self._marker = constraint.after
        self._free_text = ""
        self._refused: list[int] = []
        self._grammar = Grammar(model, constraint.gbnf)

    @property
    def active(self) -> bool:
        return self._marker is None

    def mask(self, candidates: Candidates) -> None:
        if self.active:
            self._grammar.mask(candidates)
        else:
            forbidden = np.append(self._model.eog, self._refused)
            candidates.logits[np.isin(candidates.ids, forbidden)] = -np.inf

    def allows(self, token: int, scratch: Candidates) -> bool:
        """Whether the token may come next; one refused here stays so until a token is accepted.

        A token that holds the marker and more would begin the constrained part unchecked.
        """
        if not self.active and self._beyond_marker(token).strip():
            self._refused.append(token)
        scratch.fill_one(token)
        self.mask(scratch)
        return bool(np.isfinite(scratch.logits[0]))

    def accept(self, token: int) -> None:
        if self.active:
            self._grammar.accept(token)
            return
        assert self._marker is not None
        self._refused.clear()
        # Longer than the marker, so that one which straddles tokens is found.
        self._free_text = (self._free_text + self._text(token))[-len(self._marker) - 256 :]
        if self._marker in self._free_text:
            self._marker = None

    def _beyond_marker(self, token: int) -> str:
        assert self._marker is not None
        return (self._free_text + self._text(token)).partition(self._marker)[2]

    def _text(self, token: int) -> str:
        return self._model.piece(token, special=True).decode("utf-8", errors="replace")

    def close(self) -> None:
        self._grammar.close()


class TokenSampler:
    """Sampler state of one request.

    Args:
        prompt: tokens that penalties look back on.
        scratch: candidate array of n_vocab, shared by all requests of a worker.

    Raises:
        GrammarError: the constraint does not compile.
    """

    def __init__(
        self,
        model: LlamaModel,
        sampling: Sampling,
        prompt: Sequence[int],
        constraint: Constraint | None,
        ignore_eos: bool,
        render_special: bool,
        scratch: Candidates,
    ) -> None:
        self._model = model
        self._render_special = render_special
        self._sampling = sampling
        self._scratch = scratch
        self._position = 0
        self._ignore_eos = ignore_eos
        self._constraint = ConstraintState(model, constraint) if constraint else None
        self._chain = SamplerChain(model, sampling) if _needs_chain(sampling) else None
        if self._chain is not None and _looks_back(sampling):
            self._chain.accept(prompt)

    def sample(self, logits: Logits) -> int:
        """The next token, not yet accepted.

        A constrained token is first drawn freely; only if the grammar refuses it is the grammar
        applied to the whole vocabulary, which costs a hundred times more.
        """
        token = self._draw(logits, masked=False)
        while self._constraint and not self._constraint.allows(token, self._scratch):
            token = self._draw(logits, masked=True)
        return token

    def accept(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._position += 1
            if self._constraint is not None:
                self._constraint.accept(token)
            if self._chain is not None:
                self._chain.accept((token,))

    def piece(self, token: int) -> bytes:
        """The bytes of a token that belong into the output text."""
        return self._model.piece(token, special=self._render_special)

    def close(self) -> None:
        if self._chain is not None:
            self._chain.close()
        if self._constraint is not None:
            self._constraint.close()

    def _draw(self, logits: Logits, masked: bool) -> int:
        if self._chain is None and not masked and not self._ignore_eos:
            return int(logits.argmax())
        candidates = self._scratch
        candidates.fill(logits)
        if self._ignore_eos and not masked:
            candidates.logits[self._model.eog] = -np.inf
        if masked:
            assert self._constraint is not None
            self._constraint.mask(candidates)
            _check_any(candidates)
        if self._chain is not None:
            self._chain.apply(candidates)
            if masked:
                _check_any(candidates)  # penalties may have ruled out what the grammar allows
        ids, remaining = candidates.ids, candidates.logits
        if self._sampling.temperature <= 0:
            return int(ids[remaining.argmax()])
        # Sorted by token, so that the draw does not hang on the order that top-k left behind.
        order = np.argsort(ids, kind="stable")
        return int(ids[order][_pick(remaining[order], self._uniform())])

    def _uniform(self) -> float:
        """Uniform in [0, 1) from seed and position (splitmix64)."""
        mask = (1 << 64) - 1
        z = (self._sampling.seed * 0x9E3779B97F4A7C15 + self._position * 0xD1B54A32D192ED03) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return ((z ^ (z >> 31)) >> 11) / (1 << 53)


def token_logprob(model: LlamaModel, logits: Logits, token: int, n_top: int) -> TokenLogprob:
    """Log-probabilities before any sampler: of the token and of the `n_top` best."""
    n_top = min(n_top, len(logits))
    largest = float(logits.max())
    log_total = largest + math.log(float(np.exp(logits - largest).sum(dtype=np.float64)))
    best = np.argpartition(logits, -n_top)[-n_top:] if n_top else np.empty(0, np.int64)
    best = best[np.argsort(-logits[best], kind="stable")]
    return TokenLogprob(
        model.piece(token, special=True),
        float(logits[token]) - log_total,
        tuple((model.piece(int(t), special=True), float(logits[t]) - log_total) for t in best),
    )


def _check_any(candidates: Candidates) -> None:
    if not np.isfinite(candidates.logits).any():
        raise GrammarError("the grammar allows no token of this model's vocabulary here")


def _pick(logits: Logits, uniform: float) -> int:
    weights = np.exp((logits - logits.max()).astype(np.float64))
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(index, len(logits) - 1)


def _needs_chain(s: Sampling) -> bool:
    return s.temperature > 0 or bool(s.logit_bias) or _looks_back(s)


def _looks_back(s: Sampling) -> bool:
    penalties = (s.repeat_penalty, s.frequency_penalty, s.presence_penalty)
    return penalties != (1.0, 0.0, 0.0) or s.dry_multiplier > 0
