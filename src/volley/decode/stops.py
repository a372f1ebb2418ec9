"""Find stop strings in a growing text, and how much of the text can be shown."""

from collections.abc import Collection, Mapping, Sequence
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

_ADDED: WeakKeyDictionary[PreTrainedTokenizerBase, dict[int, tuple[str, bool]]] = WeakKeyDictionary()


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, tuple[str, bool]]:
    """Return the text of each added token, and whether it is special. The result is cached, because some tokenizers have
    thousands."""
    if tokenizer not in _ADDED:
        special = set(tokenizer.all_special_ids)
        added = tokenizer.added_tokens_decoder.items()
        _ADDED[tokenizer] = {token: (own.content, own.special or token in special) for token, own in added}
    return _ADDED[tokenizer]


def hidden_tokens(
    tokenizer: PreTrainedTokenizerBase | None, ends: Collection[int], *, skip_special_tokens: bool
) -> dict[int, str]:
    """Return the texts of added tokens that the output does not show: ``ends``, and with ``skip_special_tokens`` all special
    ones."""
    if tokenizer is None:
        return {}
    each = _added_tokens(tokenizer).items()
    return {token: name for token, (name, special) in each if token in ends or (special and skip_special_tokens)}


class StopFinder:
    """Finds stop strings in the text of one request, token by token.

    A stop string that contains the text of a hidden token is searched in the *spelled* text, which includes the texts of all
    hidden tokens. Other stop strings are searched in the text that is shown.
    """

    def __init__(self, stops: Sequence[str], hidden: Mapping[int, str]) -> None:
        self._spelling = [stop for stop in stops if any(name in stop for name in hidden.values())]
        self._plain = [stop for stop in stops if stop not in self._spelling]
        self._hidden, self._spelled = hidden, ""
        self._names: list[tuple[int, int]] = []
        """Position and length of each hidden token in the spelled text."""

    def find(self, text: str, known: int, token: int) -> int | None:
        """Return the position of the first stop string that ``token`` completes; ``text`` from ``known`` on is the token's."""
        found = _find(self._plain, text, known)
        if self._spelling:
            before = len(self._spelled)
            self._spelled += text[known:]
            if (name := self._hidden.get(token)) is not None:
                self._names.append((len(self._spelled), len(name)))
                self._spelled += name
            found += map(self._shown, _find(self._spelling, self._spelled, before))
        return min(found, default=None)

    def ready(self, text: str) -> int:
        """Return how much of ``text`` can be shown: all but an end that may begin a stop string."""
        ready = _ready(self._plain, text)
        return min(ready, self._shown(_ready(self._spelling, self._spelled))) if self._spelling else ready

    def _shown(self, at: int) -> int:
        """Return the position in the shown text of a position in the spelled text."""
        return at - sum(min(length, max(0, at - start)) for start, length in self._names)


def _find(stops: Sequence[str], text: str, known: int) -> list[int]:
    """Return the positions of ``stops`` that do not end within the first ``known`` characters."""
    places = (text.find(stop, max(0, known - len(stop) + 1)) for stop in stops)
    return [at for at in places if at >= 0]


def _ready(stops: Sequence[str], text: str) -> int:
    ready = len(text)
    for stop in stops:
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        ready = ready if at < 0 else min(ready, at)
    return ready
