"""The sequential head corrects a slot's logits once the token before it is known, so that a block's tokens fit together.

The slots of a block are predicted in one pass, independently of each other. The head corrects a slot's final state h after
token c with embedding e: ``h + Q·silu(P·e + A·h)``, of rank r. With the target's head E this adds to the logit of token j
``u(c, h) · O_j`` with ``u = silu(P·e_c + A·h)`` and ``O = E·Q``, so a table for ``P·e`` and one for O make every transition a
product of two short rows. The head has no tensor of the vocabulary's size.

Without A it knows the token before and nothing else: a logit bias ``W1_c · W2_j`` with ``W1 = silu(P·e)`` and ``W2 = E·Q``. That
is DSpark's Markov head. Other programs keep these two tables (:class:`MarkovTables`) instead of P and Q, perhaps with a gate on
the first (:class:`GatedMarkovTables`). DFlash 2 keeps two tables as well, and multiplies their product with the state
(:class:`Selector`).
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from volley.errors import ConfigError
from volley.memory.upload import upload_indices, upload_together
from volley.models.drafters.frequent import FIRST, SEEN, FrequentHead
from volley.models.layers.accelerate import accelerate
from volley.native.sampling import Added, Tables, allowed_best, can_choose, draw_after, follow
from volley.types import Lattice

Projection = Callable[[Tensor], Tensor]
_TOKENS_AT_ONCE, _COLUMNS_AT_ONCE = 1024, 16
CHAIN_CANDIDATES, PAIRED_CANDIDATES = 512, 128
"""Tokens of the largest logits before the head's correction among which a greedy chain chooses, one by one and by pairs: the head
of a drafter that was trained for minutes corrects so much that few of them are not enough."""


class ResidualHead(nn.Module):
    def __init__(self, hidden_size: int, rank: int, *, with_context: bool = True) -> None:
        super().__init__()
        self.previous = nn.Linear(hidden_size, rank, bias=False)
        self.context = nn.Linear(hidden_size, rank, bias=False) if with_context else None
        self.output = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.output.weight)  # training starts from DFlash

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Corrected states ``[R, H]``, which the target's head turns into logits; ``embeddings`` of the tokens before."""
        inner = self.rows(embeddings)
        if self.context is not None:
            inner = inner + self.context(hidden)
        corrected: Tensor = hidden + self.output(silu(inner))
        return corrected

    def rows(self, embeddings: Tensor) -> Tensor:
        """``P·e`` ``[R, r]``."""
        rows: Tensor = self.previous(rms_norm(embeddings, embeddings.shape[-1:]))
        return rows

    def tables(self, embed: Projection, output: Projection, vocab_size: int) -> tuple[Tensor, Tensor]:
        """``P·e`` (without a context ``W1``) and ``W2``, ``[V, r]`` each, for a target's embedding and head.

        Neither matrix of the target is needed whole: W2 is what the head makes of Q's columns.
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
        """Of the tables, what tokens with ``embeddings [n, H]`` and rows ``weights [n, H]`` of the target's head have there."""
        own = self.rows(embeddings)
        return (own if self.context is not None else silu(own)), linear(weights, self.output.weight.T)

    def mix(self, rows: Tensor, own: Tensor | None) -> Tensor:
        """What is multiplied with the outputs' table: ``rows`` of the tokens before, the states' share ``own``."""
        return rows if own is None else silu(rows + own)

    def _vocabulary(self, size: int) -> tuple[Tensor, ...]:
        return torch.split(torch.arange(size, device=self.output.weight.device), _TOKENS_AT_ONCE)


class MarkovTables(nn.Module):
    """DSpark's Markov head as others train it: ``markov_w1 [V, r]`` and ``markov_w2 [N, r]`` of N drafted tokens."""

    context: Projection | None = None

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab_size, rank), nn.Embedding(draft_vocab_size, rank)

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        raise ConfigError(
            "the drafter's Markov head is two tables, which volley does not train; train with --head markov"
        )

    def tables(self, embed: Projection, output: Projection, vocab_size: int) -> tuple[Tensor, Tensor]:
        """``W1 [V, r]`` and ``W2 [N, r]``."""
        return self.markov_w1.weight, self.markov_w2.weight

    def entries(self, token_ids: Tensor, embeddings: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return self.markov_w1.weight[token_ids], self.markov_w2.weight[token_ids]

    def mix(self, rows: Tensor, own: Tensor | None) -> Tensor:
        return rows


class GatedMarkovTables(MarkovTables):
    """DSpark's gated head: the logit of token j after token c grows by ``(sigmoid(G·[h; W1_c]) ∘ W1_c) · W2_j``."""

    def __init__(self, hidden_size: int, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__(vocab_size, draft_vocab_size, rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def context(self, hidden: Tensor) -> Tensor:
        """The states' share of the gate."""
        return linear(hidden, self.gate_proj.weight[:, : hidden.shape[-1]], self.gate_proj.bias)

    def mix(self, rows: Tensor, own: Tensor | None) -> Tensor:
        assert own is not None, "a gate has a context"
        return rows * (own + linear(rows, self.gate_proj.weight[:, -rows.shape[-1] :])).sigmoid()


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
        """A and B, ``[V, r]`` each."""
        return self.predecessor_codebook, self.successor_codebook

    def entries(self, token_ids: Tensor, embeddings: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return self.predecessor_codebook[token_ids], self.successor_codebook[token_ids]

    def mix(self, rows: Tensor, own: Tensor | None) -> Tensor:
        assert own is not None, "a selector has a context"
        return rows * own


class ConfidenceHead(nn.Module):
    """DSpark's: how likely a position's token is accepted if those before it are, ``sigmoid(w·[h; W1_c] + b)``.

    ``W1_c`` is the Markov head's row of the token before, and may be left out.
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


class BoundHead:
    """A head with the tables it makes of its target's embeddings and head."""

    pairwise = True
    """A position depends on the token before it alone: a block's candidates are a lattice."""

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
        """``embed`` gives the target's input embeddings ``[T, H]`` of tokens ``[T]``, ``output`` its logits ``[T, V]`` of states.

        ``drafted [N]`` are the tokens of a reduced vocabulary; a head's table may have rows for these alone. Where drafts
        come from a ``frequent`` head, the tables have a row for each of its places.
        """
        self.head, self._embed, self._frequent, self._reduced = head, embed, frequent, drafted
        size = vocab_size if self.drafted is None else len(self.drafted)
        self.candidates = min(candidates, size)
        self.most = self.candidates if isinstance(head, Selector) else min(max(candidates, CHAIN_CANDIDATES), size)
        with torch.no_grad():
            if frequent is not None:
                self._changes = frequent.changes
                self.rows, self.outputs = self._entries(frequent.tokens)
                spare = self.outputs.new_zeros(FIRST + SEEN - size, self.outputs.shape[1])
                self.rows, self.outputs = torch.cat([self.rows, spare]), torch.cat([self.outputs, spare])
                return
            self.rows, self.outputs = head.tables(embed, output, vocab_size)
            if drafted is not None and len(self.outputs) < len(self.rows):
                self.outputs = self.outputs.new_zeros(self.rows.shape).index_copy(0, drafted, self.outputs)

    @property
    def drafted(self) -> Tensor | None:
        """The tokens of a reduced vocabulary; ``None``: all are drafted."""
        return self._reduced if self._frequent is None else self._frequent.tokens

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Take over which tokens the frequent head drafts now."""
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
        """The rows of the tables that are tokens'."""
        return token_ids if self._frequent is None else self._frequent.places[token_ids]

    @cached_property
    def product(self) -> nn.Linear:
        """With the outputs' table, of which it may hold a copy laid out anew: chosen tokens after each other need it whole.

        Of a frequent head's, the part that never changes.
        """
        outputs = self.outputs if self._frequent is None else self.outputs[:FIRST]
        product = nn.Linear(outputs.shape[1], len(outputs), bias=False, device="meta")
        product.weight = nn.Parameter(outputs, requires_grad=False)
        accelerate(product)
        return product

    def transitions(self, hidden: Tensor, logits: Tensor, _: Sequence[int]) -> Callable[..., Tensor]:
        """A function (slots, tokens, among) → logits ``[n, V]`` of these slots after these tokens, or of ``among [m]`` alone.

        ``hidden [k, H]`` and ``logits [k, V]`` are those of all slots.
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
            return self._correct(corrected, mixed, self._frequent.tokens[FIRST:])

        return after

    def drafted_transitions(self, hidden: Tensor, logits: Tensor) -> tuple[Callable[..., Tensor], Tensor | None]:
        """:meth:`transitions` with logits ``[n, m]`` of the tokens ``[m]`` that are drafted alone, and these; ``None``: all."""
        if self._frequent is None:
            return self.transitions(hidden, logits, ()), None
        own, tokens, few = self._context(hidden), *self._drafted_logits(logits)

        def after(rows: list[int], token_ids: list[int] | Tensor) -> Tensor:
            where, mixed = self._mixed(own, rows, token_ids, logits.device)
            return self._correct(few[where], mixed, slice(FIRST, None))

        return after, tokens

    def _drafted_logits(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens ``[m]`` that are drafted now, and their logits ``[k, m]`` of all ``[k, V]``."""
        assert self._frequent is not None
        tokens = self._frequent.tokens.clone()  # these change
        return tokens, torch.cat([logits[:, :FIRST], logits[:, tokens[FIRST:]]], dim=1)

    def drawn(
        self, hidden: Tensor, logits: Tensor, anchor: int, uniforms: Sequence[float], temperature: float
    ) -> tuple[list[int], Tensor, Tensor | None] | None:
        """A chain of which each token is drawn after the one before it, by one of ``uniforms [k]``; the distributions ``[k, m]``
        at a ``temperature`` above 0; and the tokens ``[m]`` that these are over, ``None`` for all.

        ``None`` where tensors are not in bf16 on a CPU. The reference is :func:`volley.decode.propose.walk_sampled`.
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
        """Indices ``[n]`` of slots, and what the outputs' table is multiplied by there, after tokens: ``[n, r]``."""
        where, before = (upload_indices(indices, device) for indices in (rows, token_ids))
        return where, self.head.mix(embedding(self._places(before), self.rows), None if own is None else own[where])

    def _correct(self, logits: Tensor, mixed: Tensor, seen: Tensor | slice) -> Tensor:
        """Add the head's share, in place, to logits of the frequent head, whose columns ``seen`` are of the tokens seen last."""
        assert self._frequent is not None
        logits[:, :FIRST] += self.product(mixed)
        logits[:, seen] += linear(mixed, self.outputs[FIRST : len(self._frequent.tokens)])
        return logits

    def chooser(
        self, hidden: Tensor, logits: Tensor
    ) -> Callable[[int, int, NDArray[np.uint8]], tuple[int, float] | None] | None:
        """A function (slot, token, allowed) → the likeliest token of that slot after this token among those with a bit in
        ``allowed``, and its probability among them; ``None`` if none can be drafted. It goes by the logits of
        :meth:`transitions`, unrounded.

        ``None`` instead of a function where it cannot be made. ``hidden [k, H]`` and ``logits [k, V]`` are those of all slots.
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
        """Logits and tokens of the ``count`` candidates ``[k, c]`` of each position, the best first."""
        drafted = self.drafted
        if drafted is None:
            best, tokens = logits.topk(count, dim=-1)
            return best, tokens
        if self._frequent is None:
            best, places = logits.index_select(1, drafted).topk(count, dim=-1)
            return best, drafted[places]
        best, tokens = logits[:, :FIRST].topk(count, dim=-1)
        seen = drafted[FIRST:]
        if len(seen):  # columns are picked only here: to pick all takes longer than to find the best of them
            best = torch.cat([best, logits.index_select(1, seen)], dim=1)
            tokens = torch.cat([tokens, seen.expand(len(tokens), -1)], dim=1)
            best, places = best.topk(count, dim=-1)
            tokens = tokens.gather(1, places)
        return best, tokens

    def chains(
        self, hidden: Tensor, logits: Tensor, anchors: Sequence[int], sizes: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """Greedy chains: the likeliest token of every slot after the one before it, and its probability among the candidates.

        The arguments are those of :meth:`lattices`. On a CPU one token is chosen after the other. A device would make the host
        wait for each, and is asked for all pairs of fewer candidates. DFlash 2 defines their number.
        """
        if logits.device.type != "cpu":
            return self.paired_chains(hidden, logits, anchors, sizes)
        is_plain = isinstance(self.head, ResidualHead) or type(self.head) is MarkovTables
        if not is_plain or not can_choose(logits, self.rows, self.outputs):
            return self._chains(hidden, logits, anchors, sizes)
        places, own = self._places(torch.tensor(anchors)).tolist(), self._context(hidden)
        tables = Tables(self.rows, self.outputs, own)
        return follow(logits, tables, places, sizes, self.most, self.drafted, by_place=self._frequent is not None)

    def _chains(
        self, hidden: Tensor, logits: Tensor, anchors: Sequence[int], sizes: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """The reference of :meth:`chains`, for any head and data type."""
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
        """:meth:`chains` on a device: the best token of each slot after every candidate of the slot before, in one copy."""
        scores, candidates = self._pairs(hidden, logits, anchors, sizes, min(self.most, PAIRED_CANDIDATES))
        chances, best = scores.float().softmax(-1).max(-1)
        found = torch.stack([candidates.float(), best.float(), chances], dim=1).cpu().numpy()  # ids below 2²⁴ are exact
        tokens, sure, slots = list[int](), list[float](), iter(found)
        for size in sizes:
            place = 0  # all are alike behind an anchor
            for own_tokens, own_best, own_chances in islice(slots, size):
                sure.append(float(own_chances[place]))
                place = int(own_best[place])
                tokens.append(int(own_tokens[place]))
        return tokens, sure

    def lattices(self, hidden: Tensor, logits: Tensor, anchors: Sequence[int], sizes: Sequence[int]) -> list[Lattice]:
        """A lattice for each of several blocks, from ``hidden [Σk, H]`` and ``logits [Σk, V]`` of their slots.

        ``sizes`` are the numbers of slots, ``anchors`` the tokens before the first of them. All transitions are one product.
        """
        scores, tokens = self._pairs(hidden, logits, anchors, sizes, self.candidates)
        found = torch.cat([scores.float(), tokens[:, None].float()], dim=1).cpu().numpy()  # ids below 2²⁴ are exact
        every_token, every_score = found[:, -1].astype(np.int64), found[:, :-1]
        return [
            Lattice(every_token[end - size : end], every_score[end - size : end])
            for end, size in zip(accumulate(sizes), sizes, strict=True)
        ]

    def _pairs(
        self, hidden: Tensor, logits: Tensor, anchors: Sequence[int], sizes: Sequence[int], count: int
    ) -> tuple[Tensor, Tensor]:
        """Logits ``[Σk, c, c]`` of each candidate after each one of the slot before, and the ``count`` candidates ``[Σk, c]``."""
        base, tokens = self._best(logits, count)
        starts = np.array(sizes, dtype=np.int64).cumsum() - np.array(sizes)
        firsts, first_tokens = upload_together([starts, np.array(anchors, dtype=np.int64)], tokens.device)
        before = tokens.roll(1, dims=0)
        before[firsts] = first_tokens[:, None]
        own = self._context(hidden)
        mixed = self.head.mix(embedding(self._places(before), self.rows), None if own is None else own[:, None])
        outputs = embedding(self._places(tokens), self.outputs)
        scores = torch.baddbmm(base[:, None], mixed.to(base.dtype), outputs.mT.to(base.dtype))  # noise makes base fp32
        return scores, tokens
