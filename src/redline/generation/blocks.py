"""Allocates the blocks of the paged key-value cache: counts references, names blocks by content, and evicts blocks.

The name of a full block is a hash of its tokens and of all tokens before them, so that requests with the same prefix
share blocks. A block that no request uses keeps its name and its content until the block is needed for other tokens.
Among such blocks, the one that was given back first is evicted first.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from hashlib import sha256

from redline.errors import RedlineError


def root_name(*extras: str) -> bytes:
    """Returns the name that `block_name` takes as the parent of a text's first block.

    Texts whose `extras` (a salt, an adapter) differ share no blocks.
    """
    digest = sha256()
    for extra in extras:
        encoded = extra.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def block_name(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the name of the block with these tokens after the block named `parent`.

    Uses SHA-256, because a hash collision would give one text the keys and values of another.
    """
    return sha256(parent + array("q", tokens).tobytes()).digest()


class Blocks:
    """Manages the blocks 0 to `count - 1`, each of which holds up to `size` tokens."""

    def __init__(self, count: int, size: int) -> None:
        if count < 1 or size < 1:
            raise RedlineError(f"a key-value cache needs at least 1 block of 1 token, not {count} of {size}.")
        self.count, self.size = count, size
        self._references = [0] * count
        self._names: list[bytes | None] = [None] * count
        self._by_name: dict[bytes, int] = {}
        self._free = deque(range(count))
        # The named blocks that no text uses, in the order in which they will be evicted.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """The number of blocks that can be taken, including those whose content would be evicted."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.count - self.available

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self) -> int:
        """Returns a block for new content. The caller has made sure that one is available."""
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            self._unname(block)
        self._references[block] = 1
        return block

    def find(self, name: bytes) -> int | None:
        return self._by_name.get(name)

    def is_idle(self, block: int) -> bool:
        """Returns whether the block has a name and no text uses it."""
        return block in self._idle

    def share(self, block: int) -> None:
        """Increments the reference count of a block that `find` returned."""
        self._references[block] += 1
        self._idle.pop(block, None)

    def name(self, block: int, name: bytes) -> None:
        """Names a full block, unless another block has the same content already."""
        if self._names[block] is None and name not in self._by_name:
            self._names[block] = name
            self._by_name[name] = block

    def give_back(self, blocks: Sequence[int]) -> None:
        """Decrements the reference count of each block of a text.

        Frees the last block first, so that it is evicted first: the first blocks of a text are the most likely to be
        shared.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._names[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def forget(self, blocks: Iterable[int]) -> None:
        """Removes the names of blocks whose content is not valid, so that no other request shares them."""
        for block in blocks:
            if self._names[block] is not None:
                self._unname(block)
                if block in self._idle:
                    del self._idle[block]
                    self._free.append(block)

    def _unname(self, block: int) -> None:
        name, self._names[block] = self._names[block], None
        if name is not None:
            del self._by_name[name]

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the reference counts agree with the block tables of all running texts."""
        users = [0] * self.count
        for table in tables:
            assert len(set(table)) == len(table), "a table holds a block twice"
            for block in table:
                users[block] += 1
        assert users == self._references, "references differ from tables"
        used = {block for block, count in enumerate(users) if count}
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free) and not free & idle and not (free | idle) & used
        assert len(free) + len(idle) + len(used) == self.count, "a block was lost"
        assert {block for block, name in enumerate(self._names) if name is not None} == set(self._by_name.values())
        assert all(self._names[block] is not None for block in idle)
        assert not any(self._names[block] for block in free)
