"""Sequential heads, which correct a position's logits by the previous token, so that a block's tokens fit together.

One pass predicts the positions of a block independently of each other. The head corrects a position's final state h after
token c with embedding e: ``h + Q·silu(P·e + A·h)``, of rank r. With the target's head E this adds ``u(c, h) · O_j`` to the logit
of token j, with ``u = silu(P·e_c + A·h)`` and ``O = E·Q``. So a table for ``P·e`` and one for O make every transition a dot
product of two short rows. The head has no tensor of the vocabulary's size.

Without A the correction depends on the previous token alone: a logit bias ``W1_c · W2_j`` with ``W1 = silu(P·e)`` and
``W2 = E·Q``. This is DSpark's Markov head. Other programs store these two tables (:class:`MarkovTables`) instead of P and Q.
DFlash 2 stores two tables as well, and multiplies their product by the state (:class:`Selector`).
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from volley.errors import ConfigError
from volley.memory.upload import upload_indices, upload_together
from volley.models.drafters.frequent import SEEN, FrequentHead
from volley.models.layers.accelerate import accelerate
from volley.native.sampling import Added, Tables, allowed_best, can_choose, draw_after, follow

Projection = Callable[[Tensor], Tensor]
_TOKENS_AT_ONCE, _COLUMNS_AT_ONCE = 1024, 16
CHAIN_CANDIDATES, PAIRED_CANDIDATES = 512, 128
"""Number of tokens with the largest uncorrected logits among which a greedy chain chooses, one by one and by pairs. A drafter
that was trained for minutes needs this many, because its head corrects much."""


class ResidualHead(nn.Module):
    def __init__(self, hidden_size: int, rank: int, *, with_context: bool = True) -> None:
        super().__init__()
        self.previous = nn.Linear(hidden_size, rank, bias=False)
        self.context = nn.Linear(hidden_size, rank, bias=False) if with_context else None
        self.output = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.output.weight)  # training starts from DFlash

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Return corrected states ``[R, H]`` for the target's head; ``embeddings`` are those of the previous tokens."""
        inner = self.rows(embeddings)
        if self.context is not None:
            inner = inner + self.context(hidden)
        corrected: Tensor = hidden + self.output(silu(inner))
        return corrected

    def rows(self, embeddings: Tensor) -> Tensor:
        """Return ``P·e`` ``[R, r]``."""
        rows: Tensor = self.previous(rms_norm(embeddings, embeddings.shape[-1:]))
        return rows

    def tables(self, embed: Projection, output: Projection, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return ``P·e`` (``W1`` without a context) and ``W2``, ``[V, r]`` each, for a target's embedding and head.

        Both are computed in parts. ``W2`` is the target's head applied to Q's columns.
        """
        columns = self.output.weight.T.contiguous()
        rows = columns.new_empty(vocab_size, len(columns))
        for tokens in self._vocabulary(vocab_size):
            own = self.rows(embed(tokens))
            rows[tokens] = own if self.context is not None else silu(own)
        outputs: Tensor | None = None
        for place, part in enumerate(torch.split(columns, _COLUMNS_AT_ONCE)):
            own = output(part).T
            outputs = own.new_empty(len(own), len(columns)) if outputs is None else outputs
            outputs[:, place * _COLUMNS_AT_ONCE :][:, : len(part)] = own
        assert outputs is not None
        return rows, outputs

    def entries(self, token_ids: Tensor, embeddings: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return both tables' rows for tokens with ``embeddings [n, H]`` and rows ``weights [n, H]`` of the target's head."""
        own = self.rows(embeddings)
        return (own if self.context is not None else silu(own)), linear(weights, self.output.weight.T)

    def mix(self, rows: Tensor, own: Tensor | None) -> Tensor:
        """Return the factor of the output table from ``rows`` of the previous tokens and the states' share ``own``."""
        return rows if own is None else silu(rows + own)

    def _vocabulary(self, size: int) -> tuple[Tensor, ...]:
        return torch.split(torch.arange(size, device=self.output.weight.device), _TOKENS_AT_ONCE)


class MarkovTables(nn.Module):
    """DSpark's Markov head as other programs train it: ``markov_w1 [V, r]`` and ``markov_w2 [N, r]`` of N draft tokens."""

    context: Projection | None = None

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab_size, rank), nn.Embedding(draft_vocab_size, rank)

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        raise ConfigError(
            "the drafter's Markov head is two tables, which volley does not train; train with --head markov"
        )

    def tables(self, embed: Projection, output: Projection, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return ``W1 [V, r]`` and ``W2 [N, r]``."""
        return self.markov_w1.weight, self.markov_w2.weight

    def entries(self, token_ids: Tensor, embeddings: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return self.markov_w1.weight[token_ids], self.markov_w2.weight[token_ids]

    def mix(self, rows: Tensor, own: Tensor | None) -> Tensor:
        return rows


class Selector(nn.Module):
    """DFlash 2's candidate selector: the logit of token j after token c grows by ``(A_c ∘ P·h) · B_j``."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.context = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        raise ConfigError(
            "the drafter has DFlash 2's selector, which volley does not train; train with --head residual"
        )

    def tables(self, embed: Projection, output: Projection, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return A and B, ``[V, r]`` each."""
        return self.predecessor_codebook, self.successor_codebook

    def entries(self, token_ids: Tensor, embeddings: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return self.predecessor_codebook[token_ids], self.successor_codebook[token_ids]

    def mix(self, rows: Tensor, own: Tensor | None) -> Tensor:
        assert own is not None, "a selector has a context"
        return rows * own


class ConfidenceHead(nn.Module):
    """DSpark's confidence head: a token's acceptance probability, given the tokens before it, ``sigmoid(w·[h; W1_c] + b)``.

    ``W1_c`` is the Markov head's row of the previous token, and may be left out.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Probabilities ``[R]`` in fp32 for states ``[R, H]`` and rows ``[R, r]``."""
        features = torch.cat([hidden, rows], dim=-1)[:, : self.proj.in_features].float()
        bias = self.proj.bias.float()
        return linear(features, self.proj.weight.float(), bias)[:, 0].sigmoid()


SequentialHead = ResidualHead | MarkovTables | Selector


class Lattice(NamedTuple):
    """Candidates at every position of one block, and each one's logit after every candidate at the position before.

    ``tokens [k, C]`` are distinct within a position. ``scores [k, C, C]``: ``scores[i, c, j]`` is the drafter's logit of
    ``tokens[i, j]`` after ``tokens[i − 1, c]``; at position 0, which follows the anchor, it is equal for all c. The shape is
    ``[k, 1, C]`` if no position depends on the one before.
    """

    tokens: NDArray[np.int64]
    scores: NDArray[np.float32]


class BoundHead:
    """Sequential head with the tables made from its target's embedding and head."""

    pairwise = True
    """True: a position depends only on the previous token, so a block's candidates form a lattice."""

    def __init__(
        self,
        head: SequentialHead,
        candidates: int,
        embed: Projection,
        output: Projection,
        vocab_size: int,
        drafted: Tensor | None = None,
        frequent: FrequentHead | None = None,
    ) -> None:
        """Bind a head to the target's input embeddings ``embed`` (``[T] -> [T, H]``) and its head ``output``.

        ``drafted [N]`` are the tokens of a reduced vocabulary; a head's table may have rows for these alone. If drafts come from
        a ``frequent`` head, the tables have a row for each of its rows.
        """
        self.head, self._embed, self._frequent, self._reduced = head, embed, frequent, drafted
        size = vocab_size if self.drafted is None else len(self.drafted)
        self.candidates = min(candidates, size)
        self.most = self.candidates if isinstance(head, Selector) else min(max(candidates, CHAIN_CANDIDATES), size)
        with torch.no_grad():
            if frequent is not None:
                self._changes = frequent.changes
                self.rows, self.outputs = self._entries(frequent.tokens)
                spare = self.outputs.new_zeros(frequent.first + SEEN - size, self.outputs.shape[1])
                self.rows, self.outputs = torch.cat([self.rows, spare]), torch.cat([self.outputs, spare])
                return
            self.rows, self.outputs = head.tables(embed, output, vocab_size)
            if drafted is not None and len(self.outputs) < len(self.rows):
                self.outputs = self.outputs.new_zeros(self.rows.shape).index_copy(0, drafted, self.outputs)

    @property
    def drafted(self) -> Tensor | None:
        """Tokens of a reduced vocabulary; ``None``: all are drafted."""
        return self._reduced if self._frequent is None else self._frequent.tokens

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Update the tables' rows to the tokens that the frequent head drafts now."""
        if self._frequent is None or self._changes == self._frequent.changes:
            return
        places, self._changes = self._frequent.changed_since(self._changes), self._frequent.changes
        self.rows[places], self.outputs[places] = self._entries(self._frequent.tokens[places])

    def _entries(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of both tables, ``[n, r]`` each, for tokens of the frequent head."""
        assert self._frequent is not None
        weights = self._frequent.weights
        parts = [
            self.head.entries(some, self._embed(some), weights(some))
            for some in torch.split(token_ids, _TOKENS_AT_ONCE)
        ]
        rows, outputs = zip(*parts, strict=True)
        return torch.cat(rows), torch.cat(outputs)

    def _places(self, token_ids: Tensor) -> Tensor:
        """Return the table rows of tokens."""
        return token_ids if self._frequent is None else self._frequent.places[token_ids]

    @cached_property
    def product(self) -> nn.Linear:
        """Linear layer with the output table as its weight, which may be a repacked copy.

        With a frequent head it covers the rows that never change.
        """
        outputs = self.outputs if self._frequent is None else self.outputs[: self._frequent.first]
        product = nn.Linear(outputs.shape[1], len(outputs), bias=False, device="meta")
        product.weight = nn.Parameter(outputs, requires_grad=False)
        accelerate(product)
        return product

    def transitions(self, hidden: Tensor, logits: Tensor, _: Sequence[int]) -> Callable[..., Tensor]:
        """Return a function (positions, tokens, among) → logits ``[n, V]`` at these positions after these tokens.

        With ``among [m]`` the logits are of these tokens alone. ``hidden [k, H]`` and ``logits [k, V]`` cover all positions.
        """
        own = self._context(hidden)

        def after(rows: list[int], token_ids: list[int] | Tensor, among: Tensor | None = None) -> Tensor:
            where, mixed = self._mixed(own, rows, token_ids, logits.device)
            if among is not None:
                among = among.to(logits.device)
                return logits[where][:, among] + linear(mixed, self.outputs[self._places(among)])
            corrected: Tensor = logits[where]
            if self._frequent is None:
                return corrected + self.product(mixed)  # type: ignore[no-any-return]
            return self._correct(corrected, mixed, self._frequent.tokens[self._frequent.first :])

        return after

    def drafted_transitions(self, hidden: Tensor, logits: Tensor) -> tuple[Callable[..., Tensor], Tensor | None]:
        """Return :meth:`transitions` with logits ``[n, m]`` of the draft tokens ``[m]``, and these tokens (``None``: all)."""
        if self._frequent is None:
            return self.transitions(hidden, logits, ()), None
        own, tokens, few, first = self._context(hidden), *self._drafted_logits(logits), self._frequent.first

        def after(rows: list[int], token_ids: list[int] | Tensor) -> Tensor:
            where, mixed = self._mixed(own, rows, token_ids, logits.device)
            return self._correct(few[where], mixed, slice(first, None))

        return after, tokens

    def _drafted_logits(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens ``[m]`` that are drafted now, and their logits ``[k, m]`` from ``logits [k, V]``."""
        assert self._frequent is not None
        first, tokens = self._frequent.first, self._frequent.tokens.clone()  # the frequent head changes them in place
        return tokens, torch.cat([logits[:, :first], logits[:, tokens[first:]]], dim=1)

    def drawn(
        self, hidden: Tensor, logits: Tensor, anchor: int, uniforms: Sequence[float], temperature: float
    ) -> tuple[list[int], Tensor, Tensor | None] | None:
        """Sample a chain token by token with ``uniforms [k]`` at a ``temperature`` above 0.

        Return the tokens, their distributions ``[k, m]``, and the tokens ``[m]`` these are over (``None``: all). Return ``None``
        if tensors are not in bf16 on a CPU. The reference is :func:`volley.decode.propose.walk_sampled`.
        """
        if not can_choose(logits, self.rows, self.outputs):
            return None
        own, drafted, few = self._context(hidden), None, logits
        if self._frequent is not None:
            drafted, few = self._drafted_logits(logits)
        tokens, before, probs = list[int](), anchor, torch.empty(few.shape, dtype=torch.float32)
        for slot, uniform in enumerate(uniforms):
            _, mixed = self._mixed(own, [slot], [before], logits.device)
            place = draw_after(few[slot], self.outputs, mixed[0], temperature, uniform, probs[slot])
            before = place if drafted is None else int(drafted[place])
            tokens.append(before)
        return tokens, probs, drafted

    def _mixed(
        self, own: Tensor | None, rows: list[int], token_ids: list[int] | Tensor, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return indices ``[n]`` of positions, and the factors ``[n, r]`` of the output table there after tokens."""
        where, before = (upload_indices(indices, device) for indices in (rows, token_ids))
        return where, self.head.mix(embedding(self._places(before), self.rows), None if own is None else own[where])

    def _correct(self, logits: Tensor, mixed: Tensor, seen: Tensor | slice) -> Tensor:
        """Add the correction in place to logits of the frequent head, whose columns ``seen`` are the tokens seen last."""
        assert self._frequent is not None
        first = self._frequent.first
        logits[:, :first] += self.product(mixed)
        logits[:, seen] += linear(mixed, self.outputs[first : len(self._frequent.tokens)])
        return logits

    def chooser(
        self, hidden: Tensor, logits: Tensor
    ) -> Callable[[int, int, NDArray[np.uint8]], tuple[int, float] | None] | None:
        """Return a function (position, token, allowed) → the likeliest token after ``token`` with a bit in ``allowed``.

        The function also returns the token's probability among the allowed ones, and ``None`` if none can be drafted. It uses
        the logits of :meth:`transitions`, unrounded. ``hidden [k, H]`` and ``logits [k, V]`` cover all positions. Return
        ``None`` if the kernels do not support the tensors.
        """
        if not can_choose(logits, self.outputs):
            return None
        own, places = self._context(hidden), None if self._frequent is None else self._frequent.places

        def best(slot: int, token: int, allowed: NDArray[np.uint8]) -> tuple[int, float] | None:
            row = self.rows[token if places is None else int(places[token])]
            mixed = self.head.mix(row[None], None if own is None else own[slot : slot + 1])
            return allowed_best(logits[slot], allowed, Added(self.outputs, mixed.float(), places), with_chance=True)

        return best

    def _context(self, hidden: Tensor) -> Tensor | None:
        return None if self.head.context is None else self.head.context(hidden)

    def _best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return logits and tokens ``[k, c]`` of the ``count`` best candidates of each position, best first."""
        drafted = self.drafted
        if drafted is None:
            best, tokens = logits.topk(count, dim=-1)
            return best, tokens
        if self._frequent is None:
            best, places = logits.index_select(1, drafted).topk(count, dim=-1)
            return best, drafted[places]
        best, tokens = logits[:, : self._frequent.first].topk(count, dim=-1)
        seen = drafted[self._frequent.first :]
        if len(seen):  # only these columns are gathered: gathering all takes longer than the top-k
            best = torch.cat([best, logits.index_select(1, seen)], dim=1)
            tokens = torch.cat([tokens, seen.expand(len(tokens), -1)], dim=1)
            best, places = best.topk(count, dim=-1)
            tokens = tokens.gather(1, places)
        return best, tokens

    def chains(
        self, hidden: Tensor, logits: Tensor, anchors: Sequence[int], sizes: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """Return greedy chains: the likeliest token of every position after the previous one, and its probability.

        Probabilities are among the candidates. The arguments are those of :meth:`lattices`. A CPU chooses token by token. On a
        GPU the host would wait for each token, so the GPU computes all pairs of fewer candidates. DFlash 2 defines their number.
        """
        if logits.device.type != "cpu":
            return self.paired_chains(hidden, logits, anchors, sizes)
        if isinstance(self.head, Selector) or not can_choose(logits, self.rows, self.outputs):
            return self._chains(hidden, logits, anchors, sizes)
        places, own = self._places(torch.tensor(anchors)).tolist(), self._context(hidden)
        tables = Tables(self.rows, self.outputs, own)
        if self._frequent is None:
            return follow(logits, tables, places, sizes, self.most, self.drafted)
        drafted, few = self._drafted_logits(logits)
        chosen, sure = follow(few, tables, places, sizes, self.most)
        return drafted[chosen].tolist(), sure

    def _chains(
        self, hidden: Tensor, logits: Tensor, anchors: Sequence[int], sizes: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """Reference of :meth:`chains`, for any head and dtype."""
        after, (_, candidates) = self.transitions(hidden, logits, sizes), self._best(logits, self.most)
        tokens, sure, slots = list[int](), list[float](), iter(range(sum(sizes)))
        for anchor, size in zip(anchors, sizes, strict=True):
            token = anchor
            for slot in islice(slots, size):
                among = candidates[slot]
                chance, place = after([slot], [token], among)[0].float().softmax(-1).max(-1)
                token = int(among[place])
                tokens.append(token)
                sure.append(float(chance))
        return tokens, sure

    def paired_chains(
        self, hidden: Tensor, logits: Tensor, anchors: Sequence[int], sizes: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """Compute :meth:`chains` on a GPU: the best token after every candidate of the previous position, in one copy."""
        scores, candidates = self._pairs(hidden, logits, anchors, sizes, min(self.most, PAIRED_CANDIDATES))
        chances, best = scores.float().softmax(-1).max(-1)
        found = torch.stack([candidates.float(), best.float(), chances], dim=1).cpu().numpy()  # ids below 2²⁴ are exact
        tokens, sure, slots = list[int](), list[float](), iter(found)
        for size in sizes:
            place = 0  # all rows are equal after an anchor
            for own_tokens, own_best, own_chances in islice(slots, size):
                sure.append(float(own_chances[place]))
                place = int(own_best[place])
                tokens.append(int(own_tokens[place]))
        return tokens, sure

    def chains_unread(self, hidden: Tensor, logits: Tensor, anchors: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Compute :meth:`paired_chains` of n blocks of ``size`` positions, and leave all on the device: tokens ``[n · size]``
        and probabilities ``[n, size]``, in double precision. ``anchors [n]`` are on the device as well."""
        count, most = len(anchors), min(self.most, PAIRED_CANDIDATES)
        scores, candidates = self._pairs(hidden, logits, anchors, [size] * count, most)
        chances, best = (x.view(count, size, most) for x in scores.float().softmax(-1).max(-1))
        places, found = best[:, 0, :1], list[Tensor]()  # all rows are equal after an anchor
        sure = [chances[:, 0, :1]]
        for position in range(1, size):
            sure.append(chances[:, position].gather(1, places))
            found.append(places)
            places = best[:, position].gather(1, places)
        chosen = torch.cat([*found, places], dim=1)[:, :, None]
        tokens = candidates.view(count, size, most).gather(2, chosen)
        return tokens.flatten(), torch.cat(sure, dim=1).double()

    def lattices(self, hidden: Tensor, logits: Tensor, anchors: Sequence[int], sizes: Sequence[int]) -> list[Lattice]:
        """Return a lattice for each block, from ``hidden [Σk, H]`` and ``logits [Σk, V]`` of the blocks' positions.

        ``sizes`` are the numbers of positions, ``anchors`` the tokens before the first ones. One matmul computes all transitions.
        """
        scores, tokens = self._pairs(hidden, logits, anchors, sizes, self.candidates)
        found = torch.cat([scores.float(), tokens[:, None].float()], dim=1).cpu().numpy()  # ids below 2²⁴ are exact
        every_token, every_score = found[:, -1].astype(np.int64), found[:, :-1]
        return [
            Lattice(every_token[end - size : end], every_score[end - size : end])
            for end, size in zip(accumulate(sizes), sizes, strict=True)
        ]

    def _pairs(
        self, hidden: Tensor, logits: Tensor, anchors: Sequence[int] | Tensor, sizes: Sequence[int], count: int
    ) -> tuple[Tensor, Tensor]:
        """Return logits ``[Σk, c, c]`` of each candidate after each previous one, and the ``count`` candidates ``[Σk, c]``."""
        base, tokens = self._best(logits, count)
        starts = np.array(sizes, dtype=np.int64).cumsum() - np.array(sizes)
        if isinstance(anchors, Tensor):
            firsts, first_tokens = upload_indices(starts.tolist(), tokens.device), anchors
        else:
            firsts, first_tokens = upload_together([starts, np.array(anchors, dtype=np.int64)], tokens.device)
        before = tokens.roll(1, dims=0)
        before[firsts] = first_tokens[:, None]
        own = self._context(hidden)
        mixed = self.head.mix(embedding(self._places(before), self.rows), None if own is None else own[:, None])
        outputs = embedding(self._places(tokens), self.outputs)
        scores = torch.baddbmm(base[:, None], mixed.to(base.dtype), outputs.mT.to(base.dtype))  # noise makes base fp32
        return scores, tokens
