"""Finding stop strings in text that arrives in pieces."""

from collections.abc import Sequence

from specprefill_jax.errors import argument_error


class StopStrings:
    """Passes text on up to the first stop string, holding back whatever may still turn out to begin one.

    "First" is by where a stop string begins in the text, however the text is cut into pieces. Each stop string is
    followed by a Knuth-Morris-Pratt automaton, so the work is linear in the text, whatever the strings are.
    """

    def __init__(self, stop: str | Sequence[str] = ()) -> None:
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop)
        for text in self._stops:
            if not isinstance(text, str) or not text:
                raise argument_error("stop", text, "non-empty strings")
        self._borders = [_borders(text) for text in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text so far ends with
        self._held = ""
        self._length = 0  # characters seen, those held included
        self._found: int | None = None  # where the first complete stop string begins
        self.stopped = False

    def push(self, text: str) -> str:
        """Take the next piece and return what may be shown; "" for good once `stopped`."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        for character in text:
            self._length += 1
            for index, stop in enumerate(self._stops):
                self._advance(index, stop, character)
        self._held += text
        pending = self._length - max(self._matched)
        if self._found is not None and self._found <= pending:
            return self._stop()
        return self._release(pending)

    def flush(self) -> str:
        """The text has ended: return what is held, cut at a stop string that was found in it."""
        if self._found is not None and not self.stopped:
            return self._stop()
        return self._release(self._length)

    def _advance(self, index: int, stop: str, character: str) -> None:
        borders, matched = self._borders[index], self._matched[index]
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        if matched == len(stop):
            start = self._length - matched
            self._found = start if self._found is None else min(self._found, start)
            matched = borders[-1]
        self._matched[index] = matched

    def _stop(self) -> str:
        assert self._found is not None
        self.stopped = True
        text = self._release(self._found)
        self._held = ""
        return text

    def _release(self, end: int) -> str:
        """Give out the held text up to position `end` of the whole text."""
        count = max(0, end - (self._length - len(self._held)))
        text, self._held = self._held[:count], self._held[count:]
        return text


def _borders(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        length += text[index] == text[length]
        borders[index] = length
    return borders
