"""A bare decode loop over the binding, as the yardstick for everything built around it.

Run as `python -m node.engine.bare`; reads one JSON command a line on stdin, answers with one JSON
line on stdout. Commands: {"load": {…}} once, which answers with what is known of the model, then
{"prefill": n} and {"decode": n_tokens, "streams": k}, which answer with seconds, and
{"tokenize": [text, …], "add_bos": true}; {"fill": folder, "blocks": n} fills an SSD tier.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvcache import BLOCK_TOKENS, DiskLimits, DiskTier
from kvcache.blockfile import Entry
from kvcache.keys import Namespace, child_hash, root_hash
from node.engine.llama import LlamaContext, LlamaModel
from node.engine.messages import Load

__all__ = ["BareLoop"]

_PROMPT_TOKENS = 16
_FILLING = np.zeros(1000, np.uint8)


class BareLoop:
    """Nothing but `llama_decode` and the largest logit."""

    def __init__(self, load: Load) -> None:
        assert load.threads is not None, "the bare loop needs a number of threads"
        self._model = LlamaModel(load)
        self._context = LlamaContext(self._model, load, load.threads)
        self._vocabulary = self._model.n_vocab
        self._random = np.random.default_rng(1)

    def info(self) -> dict[str, Any]:
        info = self._model.info(self._context.n_ctx, self._context.threads)
        return {"info": msgspec.to_builtins(info)}

    def tokenize(self, parts: list[str], add_bos: bool) -> dict[str, list[int]]:
        """Tokens of a prompt given in parts, as the engine would read it."""
        tokens = [self._model.bos] if self._model.adds_bos and add_bos else []
        for part in parts:
            tokens += self._model.tokenize(part, add_special=False, parse_special=True).tolist()
        return {"tokens": tokens[1:] if tokens[:2] == [self._model.bos] * 2 else tokens}

    def prefill(self, n_tokens: int) -> dict[str, float]:
        """Seconds from the prompt's tokens to the first new token."""
        self._context.seq_rm(0)
        started = time.perf_counter()
        self._read(0, n_tokens)
        return {"first_token_s": time.perf_counter() - started}

    def decode(self, n_tokens: int, streams: int) -> dict[str, float]:
        """Seconds for n tokens in each stream, behind short prompts."""
        last = []
        for stream in range(streams):
            self._context.seq_rm(stream)
            last.append(self._read(stream, _PROMPT_TOKENS))
        started = time.perf_counter()
        for i in range(n_tokens):
            self._context.decode(
                [
                    (s, _PROMPT_TOKENS + i, np.array([token], np.int32), True)
                    for s, token in enumerate(last)
                ]
            )
            last = [int(self._context.logits(s).argmax()) for s in range(streams)]
        return {"decode_s": time.perf_counter() - started}

    def _read(self, stream: int, n_tokens: int) -> int:
        position, size = 0, self._context.n_batch
        tokens = self._random.integers(100, self._vocabulary - 100, n_tokens).astype(np.int32)
        while position < n_tokens:
            chunk = tokens[position : position + size]
            position += len(chunk)
            run = (stream, position - len(chunk), chunk, position == n_tokens)
            self._context.decode([run])
        return int(self._context.logits(-1).argmax())


def fill(folder: Path, n_blocks: int) -> None:
    """Blocks of a namespace that no model has, of 1 kB each."""
    disk = DiskTier(folder, DiskLimits(10**12))
    namespace = Namespace("f" * 32)
    parent = root_hash(namespace)
    for i in range(n_blocks):
        tokens = np.arange(i, i + BLOCK_TOKENS, dtype=np.int32)
        name = child_hash(namespace, parent, tokens)
        start = i * BLOCK_TOKENS
        disk.write(Entry(namespace, name, parent, "block", start, tokens, 1000), _FILLING)
        parent = name
    disk.close()


def main() -> int:
    loop: BareLoop | None = None
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        answer: dict[str, Any] = {}
        if "load" in command:
            loop = BareLoop(msgspec.convert(command["load"], Load))
            answer = loop.info()
        elif loop is None:
            answer = {"error": "load first"}
        elif "fill" in command:
            fill(Path(command["fill"]), command["blocks"])
        elif "tokenize" in command:
            answer = loop.tokenize(command["tokenize"], command["add_bos"])
        elif "prefill" in command:
            answer = loop.prefill(command["prefill"])
        else:
            answer = loop.decode(command["decode"], command["streams"])
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
