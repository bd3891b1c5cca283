"""Who holds which page of a KV cache. Plain Python: no device is needed to test it.

Pages are counted references. A page that is full and was computed with every token before it present (a dense prefix)
can be published under a hash of all tokens up to its end; others with the same beginning then share it. When nobody
holds it any more it stays, and is the more likely to be given to somebody else the longer it has not been used.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from specprefill_jax.config import check_integer
from specprefill_jax.models.paged import PAGE

NOBODY = 0
"""The page that is never given out: padding is written there."""


def page_hashes(tokens: np.ndarray) -> list[bytes]:
    """A hash for each whole page of `tokens` (int32 [M]), each of everything up to the page's end."""
    data = np.ascontiguousarray(tokens, np.int32)
    hashes, last = [], b""
    for start in range(0, len(data) // PAGE * PAGE, PAGE):
        last = hashlib.blake2b(last + data[start : start + PAGE].tobytes(), digest_size=16).digest()
        hashes.append(last)
    return hashes


class BlockManager:
    """The pages of one cache."""

    def __init__(self, num_pages: int):
        """Manage `num_pages` pages, page 0 included, which is never given out."""
        self.num_pages = check_integer("num_pages", num_pages, 2)
        self._free = list(range(num_pages - 1, NOBODY, -1))
        self._holders: dict[int, int] = {}
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, held by nobody, least recently used first

    @property
    def available(self) -> int:
        """Pages that `take` could give out now."""
        return len(self._free) + len(self._idle)

    @property
    def usage(self) -> float:
        """Share of the pages that somebody holds."""
        return len(self._holders) / (self.num_pages - 1)

    def take(self, count: int) -> list[int] | None:
        """Give out `count` pages, or None, and nothing, if there are not so many."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if not self._free:
                oldest, _ = self._idle.popitem(last=False)
                del self._page_of[self._hash_of.pop(oldest)]
                self._free.append(oldest)
            pages.append(self._free.pop())
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest beginning of `hashes` that is published; the caller holds them, too, from now on."""
        pages = []
        for key in hashes:
            page = self._page_of.get(key)
            if page is None:
                break
            self._holders[page] = self._holders.get(page, 0) + 1
            self._idle.pop(page, None)
            pages.append(page)
        return pages

    def count_published(self, hashes: Iterable[bytes]) -> int:
        """How many pages `match` would find; nobody holds them for that."""
        count = 0
        for key in hashes:
            if key not in self._page_of:
                break
            count += 1
        return count

    def publish(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Let others share these held pages; one whose hash is published already stays the caller's own."""
        for page, key in zip(pages, hashes, strict=False):
            if key not in self._page_of and page not in self._hash_of:
                self._page_of[key], self._hash_of[page] = page, key

    def release(self, pages: Iterable[int]) -> None:
        """Hold these pages no more. The last of them, as a rule the least useful to others, is the first to go."""
        for page in reversed(list(pages)):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._hash_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Publish nothing any more: what the pages hold is lost. Holders keep theirs."""
        self._free += self._idle
        self._idle.clear()
        self._page_of.clear()
        self._hash_of.clear()

    def check(self) -> None:
        """Assert that every page is in exactly one place."""
        held, idle, free = set(self._holders), set(self._idle), set(self._free)
        assert held | idle | free == set(range(1, self.num_pages))
        assert len(held) + len(idle) + len(self._free) == self.num_pages - 1
        assert all(count > 0 for count in self._holders.values())
        assert idle <= set(self._hash_of)
        assert {page: key for key, page in self._page_of.items()} == self._hash_of
