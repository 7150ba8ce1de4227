"""Stop strings over token borders, against a search in the whole text (cases S-02, S-33)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.frontend.stop import StopMatcher


def naive(text: str, stops: list[str], include: bool, first: int = 0) -> tuple[str, str | None]:
    """The match that ends first, behind character `first`; the longest of those that end there."""
    for end in range(first + 1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False, quiet: int = 0) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    shown = ""
    for i, piece in enumerate(pieces):
        text, matched = matcher.push(piece, looking=i >= quiet)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + matcher.flush(), None


def test_public_case_s02() -> None:
    pieces = [" 7", " 8", " 9", "foo", "bar!baz"]
    assert run(pieces, ["8 9f"]) == (" 7 ", "8 9f")
    assert run(pieces, ["bar!"]) == (" 7 8 9foo", "bar!")
    assert run(pieces, ["bar!"], include=True) == (" 7 8 9foobar!", "bar!")
    assert run(pieces, ["obar"]) == (" 7 8 9fo", "obar")
    assert run(pieces, ["9foo", "foob"]) == (" 7 8 ", "9foo")


def test_first_token_is_the_stop() -> None:
    assert run(["\n"], ["\n"]) == ("", "\n")


def test_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["###"])
    assert matcher.push("a#") == ("a", None)
    assert matcher.push("#") == ("", None)
    assert matcher.push("b") == ("##b", None)
    assert matcher.push("##") == ("", None)
    assert matcher.flush() == "##"


def test_a_match_that_may_not_count_yet_goes_on() -> None:
    assert run(["a", "a", "a", "a"], ["a"], quiet=3) == ("aaa", "a")
    assert run(["ab", "ab", "c"], ["abab"], quiet=1) == ("", "abab")
    assert run(["abab", "ab", "c"], ["abab"], quiet=1)[1] == "abab"


letters = st.text(alphabet="ab!", min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab!", max_size=40), stops=st.lists(letters, min_size=1, max_size=4), include=st.booleans()
)
def test_every_cut_gives_what_a_search_gives(text: str, stops: list[str], include: bool) -> None:
    wanted = naive(text, stops, include)
    for cut in range(len(text) + 1):
        assert run([text[:cut], text[cut:]], stops, include) == wanted
    assert run(list(text), stops, include) == wanted


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=30), stops=st.lists(letters, min_size=1, max_size=3), quiet=st.integers(0, 10)
)
def test_matches_end_behind_min_tokens(text: str, stops: list[str], quiet: int) -> None:
    assert run(list(text), stops, True, quiet) == naive(text, stops, True, first=quiet)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab!", max_size=30), stops=st.lists(letters, min_size=1, max_size=3))
def test_nothing_shown_is_ever_taken_back(text: str, stops: list[str]) -> None:
    """Each prefix shown so far is a prefix of the result, so that streaming equals not streaming."""
    wanted, _ = naive(text, stops, False)
    matcher, shown = StopMatcher(stops), ""
    for char in text:
        piece, matched = matcher.push(char)
        shown += piece
        assert wanted.startswith(shown)
        if matched is not None:
            break
