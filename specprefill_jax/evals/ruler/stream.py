"""Random draws that are the same in every version of Python."""

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import islice


class Stream:
    """A stream of draws that belongs to its names.

    Only seeding by text and `random.Random.random` are used: the standard library promises to keep these two, but not
    what its other methods draw.
    """

    def __init__(self, *names: object) -> None:
        """Begin the stream named by the texts of `names`."""
        self._random = random.Random(" ".join(map(str, names))).random

    def below(self, end: int) -> int:
        """An integer from 0 to `end` - 1."""
        return int(self._random() * end)

    def choice[T](self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def sample[T](self, items: Iterable[T], count: int) -> list[T]:
        """`count` of the items, no two from the same place, in random order."""
        left = list(items)
        for place in range(count):
            other = place + self.below(len(left) - place)
            left[place], left[other] = left[other], left[place]
        return left[:count]

    def shuffled[T](self, items: Iterable[T]) -> list[T]:
        """All the items in random order."""
        left = list(items)
        return self.sample(left, len(left))

    def distinct(self, draw: Callable[["Stream"], str], count: int, taken: set[str]) -> list[str]:
        """`count` texts that `draw` gives, none twice and none of `taken`, which they join."""

        def fresh() -> Iterable[str]:
            while True:
                text = draw(self)
                if text not in taken:
                    taken.add(text)
                    yield text

        return list(islice(fresh(), count))
