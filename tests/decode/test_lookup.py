"""Tokens found in the text against a search of all of it."""

from hypothesis import given
from hypothesis import strategies as st

from volley.decode.lookup import Lookup


def searched(text: list[int], most: int) -> tuple[list[int], int]:
    """Return the tokens after the place that agrees furthest, of the last eight with the same three tokens before them."""
    found = [(0, 0)]
    places = [place for place in range(3, len(text)) if text[place - 3 : place] == text[-3:]]
    for place in places[-8:]:
        agreed = 3
        while agreed < min(16, place) and text[place - agreed - 1] == text[-agreed - 1]:
            agreed += 1
        found.append((agreed, place))
    agreed, place = max(found)
    if not agreed or not most:
        return [], 0
    longer = list(text)
    while len(longer) < len(text) + most:
        longer.append(longer[place + len(longer) - len(text)])
    return longer[len(text) :], agreed


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12), st.integers(0, 20))
def test_what_is_found_is_what_a_search_finds(pieces: list[list[int]], most: int) -> None:
    lookup, text = Lookup(), []
    for piece in pieces:
        text += piece
        assert lookup.find(text, most) == searched(text, most)


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert Lookup().find([7, 1, 2, 3, 4, 1, 2, 3], 9) == ([4, 1, 2, 3, 4, 1, 2, 3, 4], 3)
    assert Lookup().find([5] * 40, 4) == ([5] * 4, 16)
    assert Lookup().find([1, 2, 3, 9, 0, 2, 3], 4) == ([], 0), "two tokens say too little"


def test_of_several_places_the_one_that_agrees_furthest_is_continued() -> None:
    assert Lookup().find([5, 1, 2, 3, 8, 6, 1, 2, 3, 9, 5, 1, 2, 3], 2) == ([8, 6], 4)
    assert Lookup().find([1, 2, 3, 8, 6, 1, 2, 3, 9, 5, 1, 2, 3], 2) == ([9, 5], 3), "of equal ones the last"
