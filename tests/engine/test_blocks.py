"""Who holds which page: no page in two hands but by its hash, none lost, and what is published is what was computed."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specprefill_jax.engine.blocks import NOBODY, BlockManager, page_hashes
from specprefill_jax.models.paged import PAGE

# Four prompts' hashes: the second branches off the first after two pages, the fourth is a beginning of the third.
FIRST = np.arange(6 * PAGE, dtype=np.int32)
SECOND = np.concatenate([FIRST[: 2 * PAGE], FIRST[: 4 * PAGE] + 7])
THIRD = FIRST + 1000
PROMPTS = [page_hashes(prompt) for prompt in (FIRST, SECOND, THIRD, THIRD[: 3 * PAGE])]


class Holders(RuleBasedStateMachine):
    """Requests that take, match, publish and release, beside a model that remembers what was written where."""

    def __init__(self):
        super().__init__()
        self.size = 9
        self.manager = BlockManager(self.size)
        self.requests: list[tuple[int, list[int]]] = []  # prompt and pages
        self.written: dict[int, bytes] = {}  # what each page holds
        self.published: dict[bytes, int] = {}

    def holders(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for _, pages in self.requests:
            for page in pages:
                counts[page] = counts.get(page, 0) + 1
        return counts

    @rule(prompt=st.integers(0, 3), extra=st.integers(0, 2), publish=st.booleans())
    def begin(self, prompt, extra, publish):
        """As the scheduler does: what is there, then fresh pages; all or nothing."""
        hashes = PROMPTS[prompt]
        count = self.manager.count_published(hashes)
        before = self.manager.available
        found = self.manager.match(hashes)
        assert len(found) == count
        assert [self.written[page] for page in found] == hashes[:count]
        need = len(hashes) - count + extra
        room = self.manager.available
        rest = self.manager.take(need)
        if rest is None:
            assert need > room
            self.manager.release(found)
            assert self.manager.available == before
            return
        assert need <= room
        assert len(set(rest)) == need
        assert NOBODY not in rest
        assert not set(rest) & set(self.holders()), "a page that somebody holds"
        assert not set(rest) & set(found)
        for page in rest:  # what it held is gone, and so is its hash
            key = self.written.pop(page, None)
            if key is not None and self.published.get(key) == page:
                del self.published[key]
        pages = found + rest
        self.requests.append((prompt, pages))
        for page, key in zip(pages, hashes, strict=False):
            self.written[page] = key
        if publish:
            self.publish(len(self.requests) - 1, len(hashes))

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 99), count=st.integers(0, 6))
    def publish(self, index, count):
        prompt, pages = self.requests[index % len(self.requests)]
        hashes = PROMPTS[prompt][:count]
        self.manager.publish(pages, hashes)
        for page, key in zip(pages, hashes, strict=False):
            self.published.setdefault(key, page)

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 99))
    def release(self, index):
        _, pages = self.requests.pop(index % len(self.requests))
        self.manager.release(pages)

    @rule()
    def forget(self):
        self.manager.forget()
        self.published.clear()
        assert all(self.manager.count_published(hashes) == 0 for hashes in PROMPTS)

    @invariant()
    def nothing_is_lost(self):
        self.manager.check()
        held = self.holders()
        assert self.manager.available == self.size - 1 - len(held)
        assert self.manager.usage == len(held) / (self.size - 1)
        for page, count in held.items():
            assert count == 1 or self.published.get(self.written[page]) == page or self._was_published(page)

    def _was_published(self, page: int) -> bool:
        # After `forget`, those who shared a page still do; it must be the same page of the same tokens for all.
        return len({PROMPTS[prompt][pages.index(page)] for prompt, pages in self.requests if page in pages}) == 1

    @invariant()
    def what_is_published_is_found(self):
        for hashes in PROMPTS:
            count = next((i for i, key in enumerate(hashes) if key not in self.published), len(hashes))
            assert self.manager.count_published(hashes) == count


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_hashes_are_of_everything_before():
    first, second = page_hashes(FIRST), page_hashes(SECOND)
    assert len(first) == 6
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    # The same page after another beginning is another page.
    moved = page_hashes(np.concatenate([FIRST[PAGE : 2 * PAGE], FIRST[PAGE:]]))
    assert not set(moved) & set(first)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 0), (31, 0), (32, 1), (33, 1), (95, 2), (96, 3)])
def test_only_whole_pages_have_hashes(tokens, pages):
    assert page_hashes(np.arange(tokens)) == page_hashes(FIRST)[:pages]


def test_hashes_do_not_depend_on_the_width_of_integers():
    assert page_hashes(FIRST.astype(np.int64)) == page_hashes(FIRST.tolist()) == page_hashes(FIRST)


def test_takes_all_or_nothing():
    manager = BlockManager(4)
    assert manager.take(4) is None
    assert manager.available == 3
    assert sorted(manager.take(3)) == [1, 2, 3]
    assert manager.take(1) is None
    assert manager.take(0) == []
    assert manager.usage == 1.0


def test_the_least_recently_used_goes_first_and_the_end_of_a_prompt_before_its_beginning():
    manager = BlockManager(7)
    first, third = PROMPTS[0][:3], PROMPTS[2][:3]
    for hashes in (first, third):
        pages = manager.take(3)
        manager.publish(pages, hashes)
        manager.release(pages)
    manager.release(manager.match(first))  # used again: now the others are older
    manager.take(1)
    assert (manager.count_published(first), manager.count_published(third)) == (3, 2)
    manager.take(2)
    assert (manager.count_published(first), manager.count_published(third)) == (3, 0)
    manager.take(1)
    assert manager.count_published(first) == 2
    manager.check()


def test_a_page_is_published_once():
    """Two that computed the same keep a page each; the first is everybody's, the other goes with its holder."""
    manager = BlockManager(5)
    one, other = manager.take(1), manager.take(1)
    for pages in (one, other):
        manager.publish(pages, PROMPTS[0][:1])
    assert manager.match(PROMPTS[0]) == one
    manager.release(other)
    manager.release(one)
    manager.release(one)
    manager.check()
    assert manager.available == 4
    assert manager.match(PROMPTS[0]) == one


def test_after_forget_holders_keep_theirs_and_return_them():
    manager = BlockManager(5)
    pages = manager.take(2)
    manager.publish(pages, PROMPTS[0])
    manager.match(PROMPTS[0])
    manager.forget()
    manager.check()
    assert manager.available == 2
    for _ in range(2):
        manager.release(pages)
        manager.check()
    assert manager.available == 4
    assert manager.match(PROMPTS[0]) == []


@pytest.mark.parametrize("pages", [1, 0, -3, 2.5, True])
def test_needs_a_page_to_give_out(pages):
    with pytest.raises(ValueError, match="num_pages"):
        BlockManager(pages)
