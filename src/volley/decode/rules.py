"""Change the logits of a request before tokens are chosen from them (logits processors).

A rule may depend on every token before a position. So each row of a verification is processed with its *path*, the draft
tokens that lead to it. The row then equals that of plain decoding, which keeps verification lossless. No rollback is needed,
because a rule's state takes final tokens only.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley import native
from volley.decode.sampling import best_tokens, token_probs
from volley.memory.upload import upload, upload_indices
from volley.native.sampling import allowed_best, allowed_softmax, can_choose, forbid
from volley.params import SamplingParams

_FEW_PLACES = 16  # words of 64 tokens


class TokenRule(ABC):
    """One rule of one request."""

    title = ""
    """Name of the rule in messages; if empty, its class name."""
    is_complete = False
    """True if the text is complete, so that the request ends."""

    @abstractmethod
    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return processed ``logits [R, V]`` (fp32), perhaps in place: row r follows the tokens taken so far and then
        ``paths[r]``."""

    @abstractmethod
    def take(self, token_id: int) -> None:
        """Take one more final token of the output."""


Bits = NDArray[np.uint8]
"""Set of tokens: token t is bit ``t % 8``, lowest first, of byte ``t // 8``."""


class Constraint(TokenRule):
    """A rule that forbids tokens and changes no other logit.

    Its mask depends on the whole path. So drafts under it are made token by token (``decode/constrained.py``).
    """

    @abstractmethod
    def mask(self, path: Sequence[int]) -> Bits | None:
        """Return the tokens that may follow ``path``, at least one; ``None`` if the path is forbidden or no token may follow
        it."""

    def allows(self, path: Sequence[int], token_id: int) -> bool:
        """Return True if ``token_id`` is in :meth:`mask`. A rule may check one token faster than all."""
        mask = self.mask(path)
        return mask is not None and is_in(token_id, mask)

    def forced(self, path: Sequence[int]) -> list[int]:
        """Return tokens that must follow ``path``, an allowed path. The list may be incomplete, and is empty if there is a
        choice."""
        mask = self.mask(path)
        token = None if mask is None else only_token(mask)
        return [] if token is None else [token]

    @abstractmethod
    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return the length of the longest prefix of ``token_ids`` that may follow."""

    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Mask ``logits`` in place. A row whose path has no mask stays unchanged, because its token is never used."""
        masks = [self.mask(path) for path in paths]
        if logits.device.type != "cpu":
            return _forbid_on_device(logits, masks)
        for row, mask in zip(logits, masks, strict=True):
            if mask is not None:
                _forbid(row, mask)
        return logits


def _forbid(row: Tensor, mask: Bits) -> None:
    """Set the logits in ``row [V]`` of all tokens outside ``mask`` to −∞."""
    if native.is_built and row.is_contiguous():
        forbid(row, mask)
        return
    forbidden = np.unpackbits(~mask, count=len(row), bitorder="little").view(np.bool_)
    row.masked_fill_(torch.from_numpy(forbidden), -torch.inf)


def _forbid_on_device(logits: Tensor, masks: Sequence[Bits | None]) -> Tensor:
    """Mask all rows of ``logits [R, V]`` on a GPU. Masks are uploaded packed, in one asynchronous copy."""
    known = [mask for mask in masks if mask is not None]
    if not known:
        return logits
    packed = upload(np.stack([np.full_like(known[0], 255) if mask is None else mask for mask in masks]), logits.device)
    bits = packed[:, :, None] & (2 ** torch.arange(8, dtype=torch.uint8, device=logits.device))
    return logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def constraints(rules: Sequence[TokenRule]) -> list[Constraint]:
    """Return the constraints among ``rules``."""
    return [rule for rule in rules if isinstance(rule, Constraint)]


def is_in(token_id: int, bits: Bits) -> bool:
    """Return True if a set holds a token."""
    return bool(bits[token_id >> 3] >> (token_id & 7) & 1)


def few_tokens(bits: Bits) -> NDArray[np.int64] | None:
    """Return the tokens of a set, in order; ``None`` if there are so many that the bits are faster."""
    words = (bits if len(bits) % 8 == 0 else np.pad(bits, (0, -len(bits) % 8))).view(np.uint64)
    (places,) = words.nonzero()
    if len(places) > max(_FEW_PLACES, len(words) // 8):
        return None
    row, bit = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(-1, 64).nonzero()
    tokens: NDArray[np.int64] = places[row] * 64 + bit
    return tokens


def only_token(bits: Bits) -> int | None:
    """Return the token of a set of one; otherwise ``None``."""
    tokens = few_tokens(bits)
    return int(tokens[0]) if tokens is not None and len(tokens) == 1 else None


def forced_tokens(rules: Sequence[TokenRule], path: Sequence[int], most: int) -> list[int]:
    """Return up to ``most`` tokens that must follow ``path``, because a constraint allows no other."""
    found: list[int] = []
    for rule in constraints(rules):
        while len(found) < most and (run := rule.forced([*path, *found])):
            found += run
    return found[:most]


def allowed_choice(bound: Sequence[Constraint], row: Tensor, best: int, path: Sequence[int]) -> int:
    """Return the most likely token of ``row [V]`` that ``bound`` allows after ``path``, the first of equal ones.

    ``best`` is the most likely token without rules. The result is the argmax after :func:`apply_rules`. Most rows allow their
    best token and need no mask. If few tokens are allowed, only these are compared.
    """
    if all(rule.allows(path, best) for rule in bound):
        return best
    masks = [mask for rule in bound if (mask := rule.mask(path)) is not None]
    if not masks:
        return best
    if len(masks) == 1 and can_choose(row):
        found = allowed_best(row, masks[0])
        return best if found is None else found[0]
    tokens = few_tokens(masks[0]) if len(masks) == 1 else None
    if tokens is None:
        return int(apply_rules(bound, row[None], [path]).argmax())
    return int(tokens[best_tokens(row[None, torch.from_numpy(tokens)])[0]])


def allowed_probs(
    bound: Sequence[Constraint], logits: Tensor, paths: Sequence[Sequence[int]], params: SamplingParams
) -> Tensor:
    """Return the distribution ``[R, V]`` that ``params`` makes of each row of ``logits [R, V]`` under ``bound``.

    It equals :func:`apply_rules` followed by :func:`token_probs`. If few tokens are allowed, a CPU reads only these. A row's
    result depends only on that row and its mask.
    """
    if logits.device.type != "cpu":
        return token_probs(apply_rules(bound, logits, paths), params)
    if len(bound) == 1 and params.temperature > 0 and params.is_whole and native.is_built:
        return _allowed_softmax(bound[0], logits, paths, params)
    few: dict[int, Tensor] = {}
    for row, path in enumerate(paths):
        masks = [mask for rule in bound if (mask := rule.mask(path)) is not None]
        if len(masks) == 1 and (tokens := few_tokens(masks[0])) is not None:
            few[row] = torch.from_numpy(tokens)
    others = [row for row in range(len(logits)) if row not in few]
    if not few:
        return token_probs(apply_rules(bound, logits, paths), params)
    probs = torch.zeros(logits.shape)
    if others:
        probs[others] = token_probs(apply_rules(bound, logits[others], [paths[row] for row in others]), params)
    for row, among in few.items():
        probs[row, among] = token_probs(logits[row, among][None], params)[0]
    return probs


def _allowed_softmax(
    rule: Constraint, logits: Tensor, paths: Sequence[Sequence[int]], params: SamplingParams
) -> Tensor:
    logits = logits.float().contiguous()
    probs = torch.empty_like(logits)
    for row, own, path in zip(logits, probs, paths, strict=True):
        if (mask := rule.mask(path)) is None:
            own.copy_(token_probs(row[None], params)[0])
        else:
            allowed_softmax(row, mask, own, params.temperature)
    return probs


class Penalties(TokenRule):
    """Repetition penalty (of prompt and output), then frequency and presence penalties (of the output)."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.params = params
        known = dict.fromkeys(prompt) if params.repetition_penalty != 1 else ()
        self._columns = {token: column for column, token in enumerate(known)}
        """Column in :attr:`_counts` of each token that may be penalised; few tokens of a vocabulary are."""
        self._counts = [0] * len(self._columns)
        """Number of occurrences of each in the output."""
        self._num_in_prompt = len(self._columns)

    def take(self, token_id: int) -> None:
        column = self._columns.setdefault(token_id, len(self._columns))
        if column == len(self._counts):
            self._counts.append(0)
        self._counts[column] += 1

    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Penalise ``logits`` in place."""
        columns = dict(self._columns)
        for path in paths:
            for token in path:
                columns.setdefault(token, len(columns))
        if not columns:
            return logits
        each = np.zeros((len(logits), len(columns)), dtype=np.float32)
        each[:, : len(self._counts)] = self._counts
        for row, path in zip(each, paths, strict=True):
            for token in path:
                row[columns[token]] += 1
        tokens, counts = upload_indices(list(columns), logits.device), upload(each, logits.device)
        params, chosen = self.params, logits.index_select(-1, tokens)
        if params.repetition_penalty != 1:
            repeated = torch.where(chosen > 0, chosen / params.repetition_penalty, chosen * params.repetition_penalty)
            of_prompt = torch.arange(len(columns), device=logits.device) < self._num_in_prompt
            chosen = torch.where(of_prompt | (counts > 0), repeated, chosen)
        if params.frequency_penalty or params.presence_penalty:
            chosen = chosen - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        return logits.index_copy_(-1, tokens, chosen)


class LogitBias(TokenRule):
    """Adds a constant to the logits of some tokens."""

    def __init__(self, bias: Sequence[tuple[int, float]], device: torch.device) -> None:
        tokens, values = zip(*bias, strict=True)
        self.tokens = torch.tensor(tokens, device=device)
        self.values = torch.tensor(values, dtype=torch.float32, device=device)

    def take(self, token_id: int) -> None:
        pass

    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        return logits.index_add(-1, self.tokens, self.values.expand(len(logits), -1))


class AtLeast(TokenRule):
    """Forbids the end tokens until the text has ``least`` tokens."""

    title = "min_tokens"

    def __init__(self, least: int, ends: Sequence[int], device: torch.device) -> None:
        self.left, self.ends = least, torch.tensor(ends, dtype=torch.long, device=device)

    def take(self, token_id: int) -> None:
        self.left -= 1

    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Mask ``logits`` in place."""
        rows = [row for row, path in enumerate(paths) if len(path) < self.left]
        if rows:
            logits[upload_indices(rows, logits.device)[:, None], self.ends] = -torch.inf
        return logits


def make_rules(
    params: SamplingParams, prompt: Sequence[int], vocab_size: int, device: torch.device
) -> tuple[TokenRule, ...]:
    """Make the rules of a request in the order in which they apply: penalties, biases, then the caller's rules."""
    rules: list[TokenRule] = []
    if params.is_penalised:
        rules.append(Penalties(params, prompt))
    if params.logit_bias:
        rules.append(LogitBias(params.logit_bias, device))
    return (*rules, *(make(prompt, vocab_size, device) for make in params.rules))


def apply_rules(rules: Sequence[TokenRule], logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """Return ``logits [R, V]`` after all ``rules``, in fp32; the argument is unchanged."""
    logits = logits.to(torch.float32, copy=True)
    for rule in rules:
        logits = rule.apply(logits, paths)
    return logits
