"""Which sequences share which tokens from their start: a radix tree over the resident ones.

An edge holds the tokens that all its holders have in common and is split where they part, so a
match is exact to the token and costs no more than the tokens it compares.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["RadixTree", "common_prefix"]

Tokens = npt.NDArray[np.int32]


class _Node:
    """The tokens from its parent to here, and the keys whose tokens go on to its end or further;
    so many of them are locked."""

    __slots__ = ("_buffer", "_n", "children", "holders", "locks", "parent")

    def __init__(self, edge: Tokens, parent: _Node | None) -> None:
        self._buffer, self._n = edge, len(edge)
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.holders: set[int] = set()
        self.locks = 0

    @property
    def edge(self) -> Tokens:
        return self._buffer[: self._n]

    def append(self, tokens: Tokens) -> None:
        end = self._n + len(tokens)
        if end > len(self._buffer):
            self._buffer = np.resize(self._buffer, max(end, 2 * self._n, 64))
        self._buffer[self._n : end] = tokens
        self._n = end


class RadixTree:
    """Keys are chosen by the caller. Not thread-safe."""

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.int32), None)
        self._ends: dict[int, _Node] = {}  # where the tokens of a key end: never inside an edge
        self._locked: set[int] = set()

    def __repr__(self) -> str:
        return f"RadixTree(keys={len(self._ends)}, nodes={sum(1 for _ in self._nodes()) - 1})"

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, key: int) -> bool:
        return key in self._ends

    def add(self, key: int, *, locked: bool) -> None:
        """A key without tokens."""
        assert key not in self._ends
        if locked:
            self._locked.add(key)
        self._ends[key] = self._root
        self._hold(self._root, key)

    def grow(self, key: int, tokens: Tokens) -> None:
        """The key's tokens go on with these."""
        node = before = self._ends[key]
        at = 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                node = self._grow_alone(node, key, tokens[at:])
                break
            n = common_prefix(child.edge, tokens[at:])
            node = child if n == len(child.edge) else self._split(child, n)
            self._hold(node, key)
            at += n
        self._ends[key] = node
        self._heal(before)

    def cut(self, key: int, n_tokens: int) -> None:
        """Keep the first n tokens of the key."""
        node = before = self._ends[key]
        start = self._depth(node) - len(node.edge)
        while start >= n_tokens and node is not self._root:
            parent = node.parent
            assert parent is not None
            self._release(node, key)
            node = parent
            start -= len(node.edge)
        if node is not self._root and n_tokens - start < len(node.edge):
            upper = self._split(node, n_tokens - start)
            self._release(node, key)
            node = upper
        self._ends[key] = node
        self._heal(before)

    def remove(self, key: int) -> None:
        self.cut(key, 0)
        self._release(self._root, key)
        del self._ends[key]
        self._locked.discard(key)

    def lock(self, key: int) -> None:
        if key not in self._locked:
            self._locked.add(key)
            for node in self._path_up(key):
                node.locks += 1

    def unlock(self, key: int) -> None:
        if key in self._locked:
            self._locked.discard(key)
            for node in self._path_up(key):
                node.locks -= 1

    @property
    def locked_tokens(self) -> int:
        """Distinct tokens that some locked key has."""
        return sum(len(node.edge) for node in self._nodes() if node.locks)

    def match(self, tokens: Tokens) -> Iterator[tuple[int, list[int]]]:
        """Lengths of common prefixes, longest first, each with the keys that have so much of
        `tokens`; a key comes again with every shorter length."""
        found: list[tuple[int, _Node]] = []
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            n = common_prefix(child.edge, tokens[at:])
            found.append((at + n, child))
            if n < len(child.edge):
                break
            node, at = child, at + n
        for length, holder in reversed(found):
            yield length, sorted(holder.holders)

    def check_integrity(self) -> None:
        for node in self._nodes():
            below: set[int] = set()
            for first, child in node.children.items():
                assert child.parent is node and len(child.edge), "a broken edge"
                assert int(child.edge[0]) == first, "a child under the wrong token"
                assert child.holders and child.holders <= node.holders, "a holder is lost"
                below |= child.holders
            ends = self._ends_at(node)
            assert not below & ends and below | ends == node.holders, "ends and holders disagree"
            assert node.locks == len(node.holders & self._locked), "locks are miscounted"
            if node is not self._root:
                alone = len(node.children) == 1 and not ends
                assert not alone, "an edge that should be one with its child"
        assert self._root.holders == set(self._ends)

    def _grow_alone(self, node: _Node, key: int, tokens: Tokens) -> _Node:
        """Where nobody else goes."""
        if node is not self._root and not node.children and node.holders == {key}:
            node.append(tokens)
            return node
        child = _Node(tokens.astype(np.int32), node)  # a copy
        node.children[int(tokens[0])] = child
        self._hold(child, key)
        return child

    def _hold(self, node: _Node, key: int) -> None:
        node.holders.add(key)
        node.locks += key in self._locked

    def _release(self, node: _Node, key: int) -> None:
        node.holders.discard(key)
        node.locks -= key in self._locked
        if not node.holders and node.parent is not None:
            del node.parent.children[int(node.edge[0])]

    def _split(self, node: _Node, n: int) -> _Node:
        """A new node for the first n tokens of the edge; the old one keeps the rest."""
        upper = _Node(node.edge[:n].copy(), node.parent)
        upper.holders, upper.locks = set(node.holders), node.locks
        assert node.parent is not None
        node.parent.children[int(node.edge[0])] = upper
        rest = node.edge[n:].copy()
        node._buffer, node._n, node.parent = rest, len(rest), upper
        upper.children[int(rest[0])] = node
        return upper

    def _heal(self, node: _Node | None) -> None:
        """From `node` up: what no longer parts is one edge again."""
        while node is not None and node is not self._root:
            if node.holders and len(node.children) == 1:
                [child] = node.children.values()
                if child.holders == node.holders:
                    self._join(node, child)
            node = node.parent

    def _ends_at(self, node: _Node) -> set[int]:
        return {key for key in node.holders if self._ends[key] is node}

    def _join(self, node: _Node, child: _Node) -> None:
        node.append(child.edge)
        node.children = child.children
        for grandchild in child.children.values():
            grandchild.parent = node
        for key in child.holders:
            if self._ends[key] is child:
                self._ends[key] = node

    def _path_up(self, key: int) -> Iterator[_Node]:
        node: _Node | None = self._ends[key]
        while node is not None:
            yield node
            node = node.parent

    def _depth(self, node: _Node | None) -> int:
        depth = 0
        while node is not None:
            depth += len(node.edge)
            node = node.parent
        return depth

    def _nodes(self) -> Iterator[_Node]:
        stack = [self._root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that are equal."""
    n = min(len(a), len(b))
    # Most sequences differ in the first tokens: look at a few before comparing everything.
    if n > 32 and not np.array_equal(a[:32], b[:32]):
        n = 32
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n
