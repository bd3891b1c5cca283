"""Stop strings in text that arrives in pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import cut

from specprefill_jax.errors import ArgumentError
from specprefill_jax.stop_strings import StopStrings


class TestStopStrings:
    def test_boundary_by_boundary(self) -> None:
        stops = StopStrings(["\n\nUser:"])
        assert [stops.push(piece) for piece in ("a\n", "b\n\nUs", "e", "rs", "\n\nUser", ":", "x")] == [
            *("a", "\nb", "", "\n\nUsers", "", "", "")
        ]
        assert stops.stopped
        assert stops.flush() == ""

    def test_earliest_in_the_text_wins_even_when_it_is_complete_later(self) -> None:
        stops = StopStrings(["abcd", "bc"])
        assert stops.push("xabc") == "x"  # "bc" is complete, but "abcd" would begin before it
        assert not stops.stopped
        assert (stops.push("d"), stops.stopped) == ("", True)
        stops = StopStrings(["abcd", "bc"])
        assert stops.push("xabc") + stops.push("e") == "xa"
        assert stops.stopped
        stops = StopStrings(["abcd", "bc"])
        assert stops.push("xabc") + stops.flush() == "xa"
        assert stops.stopped

    def test_nothing_is_lost_without_a_stop(self) -> None:
        stops = StopStrings("END")
        assert [stops.push("EN"), stops.push("EN"), stops.flush(), stops.flush()] == ["", "EN", "EN", ""]
        assert not stops.stopped

    @pytest.mark.parametrize("stop", ["", [""], ["a", 3]])
    def test_empty_stop(self, stop: object) -> None:
        with pytest.raises(ArgumentError, match="stop="):
            StopStrings(stop)

    @given(
        st.lists(st.text("ab", max_size=5), max_size=20),
        st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    )
    @settings(max_examples=200, deadline=None)
    def test_property(self, pieces: list[str], stop: list[str]) -> None:
        stops, text, shown = StopStrings(stop), "", ""
        for piece in pieces:
            text += piece
            shown += stops.push(piece)
            assert cut(text, stop).startswith(shown)
            longest = max(map(len, stop), default=1)
            assert stops.stopped or len(text) - len(shown) < 2 * longest  # no more is held than may be a stop
        assert shown + stops.flush() == cut(text, stop)
        assert stops.stopped == any(one in text for one in stop)

    def test_work_is_linear(self) -> None:
        # A suffix comparison at every character would need 10 ** 11 steps here.
        stops = StopStrings("a" * 100_000 + "b")
        assert sum(len(stops.push("a" * 1000)) for _ in range(300)) == 200_000
