"""The prefix index: which block holds the keys and values of which tokens, after which tokens.

What a layer writes for a token depends on all tokens before it. So the content of a full block is named by its own
tokens *and* its whole past, and that past is named by the node of the block before it. A node is therefore

    (parent node, the S token ids of the block, media items that touch it)

and a prompt is looked up by walking from the root, block by block. The root is the *namespace*: (salt, adapter), for
the same tokens under another adapter have other keys and values. `None` is not `""`: the values sit in a tuple as they
are, nothing is joined into one string.

The index is exact. Two different prefixes are different keys of a dict, compared in full; the Rust version finds its
candidates by a hash and then compares the same things. Node ids are never used twice, so the children of a node that
was dropped can't be reached through a newer node in its place.
"""

from dataclasses import dataclass
from typing import TypeAlias

Namespace: TypeAlias = tuple[str | None, str | None]  # (salt, adapter)
Item: TypeAlias = tuple[int, int, str]  # (start, stop, key): positions start..stop-1 stand for the medium `key`
Key: TypeAlias = tuple["Namespace | int", tuple[int, ...], tuple[Item, ...]]

ROOT: Namespace = (None, None)


@dataclass(slots=True)
class Node:
    """A full, committed block, findable by its content."""

    node_id: int
    key: Key
    parent: "Node | None"  # None below a root
    block: int
    num_children: int = 0


def items_of_block(items: tuple[Item, ...], start: int, stop: int) -> tuple[Item, ...]:
    """The items that touch positions `start`..`stop`-1, relative to `start` and not clipped to the block.

    The same placeholder tokens may stand for another part of the same image, or for the image begun anew: the first
    position of the item, even when it lies in an earlier block, tells them apart.
    """
    return tuple((first - start, last - start, key) for first, last, key in items if first < stop and start < last)


def clip_items(items: tuple[Item, ...], length: int) -> tuple[Item, ...]:
    """What is left of the items in the first `length` tokens."""
    return tuple((start, min(stop, length), key) for start, stop, key in items if start < length)


class PrefixIndex:
    """Nodes by key and by block. Each operation is one look into a dict."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def blocks(self) -> list[int]:
        """The indexed blocks."""
        return list(self._by_block)

    def node_of(self, block: int) -> Node:
        """The node that names `block`."""
        return self._by_block[block]

    def has_children(self, block: int) -> bool:
        """Whether a node continues that of `block`."""
        return block in self._by_block and self._by_block[block].num_children > 0

    def find(self, parent: Namespace | Node, tokens: tuple[int, ...], items: tuple[Item, ...]) -> Node | None:
        """The node with this content."""
        return self._by_key.get(_key(parent, tokens, items))

    def insert(self, parent: Namespace | Node, tokens: tuple[int, ...], items: tuple[Item, ...], block: int) -> Node:
        """Name `block` by its content, which no other block has."""
        node = Node(self._next_id, _key(parent, tokens, items), parent if isinstance(parent, Node) else None, block)
        self._next_id += 1
        self._by_key[node.key] = self._by_block[block] = node
        if node.parent is not None:
            node.parent.num_children += 1
        return node

    def drop(self, block: int) -> None:
        """Forget the content of `block`. Nothing continues it, so nothing is cut off."""
        node = self._by_block.pop(block)
        del self._by_key[node.key]
        if node.parent is not None:
            node.parent.num_children -= 1

    def clear(self) -> None:
        """Forget everything; ids go on from where they are."""
        self._by_key.clear()
        self._by_block.clear()


def _key(parent: Namespace | Node, tokens: tuple[int, ...], items: tuple[Item, ...]) -> Key:
    return (parent.node_id if isinstance(parent, Node) else parent, tokens, items)
