from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.radix import RadixTree, common_prefix

tokens = st.lists(st.integers(0, 2), max_size=12)


def array(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_an_edge_is_split_where_two_sequences_part_and_healed_again() -> None:
    tree = RadixTree()
    for key, values in ((1, [5, 6, 7, 8]), (2, [5, 6, 9])):
        tree.add(key, locked=False)
        tree.grow(key, array(values))
    assert repr(tree) == "RadixTree(keys=2, nodes=3)"
    assert list(tree.match(array([5, 6, 9, 9]))) == [(3, [2]), (2, [1, 2])]
    assert list(tree.match(array([5, 1]))) == [(1, [1, 2])]
    tree.remove(2)
    assert repr(tree) == "RadixTree(keys=1, nodes=1)"
    tree.check_integrity()


def test_locks_count_every_token_of_a_running_sequence_once() -> None:
    tree = RadixTree()
    for key, values in ((1, [5, 6, 7, 8]), (2, [5, 6, 9])):
        tree.add(key, locked=key == 1)
        tree.grow(key, array(values))
    assert tree.locked_tokens == 4
    tree.lock(2)
    tree.lock(2)
    assert tree.locked_tokens == 5
    tree.unlock(1)
    assert tree.locked_tokens == 3
    tree.check_integrity()


class Against(RuleBasedStateMachine):
    """The tree against a dictionary of lists."""

    @initialize()
    def begin(self) -> None:
        self.tree = RadixTree()
        self.model: dict[int, list[int]] = {}
        self.locked: set[int] = set()
        self.next_key = 0

    def pick(self, which: int) -> int:
        return sorted(self.model)[which % len(self.model)]

    @rule(locked=st.booleans(), values=tokens)
    def add(self, locked: bool, values: list[int]) -> None:
        key = self.next_key
        self.next_key += 1
        self.tree.add(key, locked=locked)
        self.tree.grow(key, array(values))
        self.model[key] = values
        self.locked |= {key} if locked else set()

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 9), values=tokens)
    def grow(self, which: int, values: list[int]) -> None:
        key = self.pick(which)
        self.tree.grow(key, array(values))
        self.model[key] = self.model[key] + values

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 9), n=st.integers(0, 20))
    def cut(self, which: int, n: int) -> None:
        key = self.pick(which)
        n = min(n, len(self.model[key]))
        self.tree.cut(key, n)
        self.model[key] = self.model[key][:n]

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 9))
    def remove(self, which: int) -> None:
        key = self.pick(which)
        self.tree.remove(key)
        del self.model[key]
        self.locked.discard(key)

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 9), on=st.booleans())
    def lock(self, which: int, on: bool) -> None:
        key = self.pick(which)
        (self.tree.lock if on else self.tree.unlock)(key)
        (self.locked.add if on else self.locked.discard)(key)

    @rule(values=tokens)
    def match(self, values: list[int]) -> None:
        shared = {k: common_prefix(array(v), array(values)) for k, v in self.model.items()}
        found = list(self.tree.match(array(values)))
        best = max(shared.values(), default=0)
        assert [n for n, _ in found] == sorted({n for n, _ in found}, reverse=True)
        assert (found[0][0] if found else 0) == best
        for n, keys in found:
            assert keys == sorted(k for k, length in shared.items() if length >= n)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check_integrity()
        prefixes = {
            tuple(self.model[k][: i + 1]) for k in self.locked for i in range(len(self.model[k]))
        }
        assert self.tree.locked_tokens == len(prefixes)


TestRadixTree = Against.TestCase
TestRadixTree.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
