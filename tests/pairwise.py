"""Covering arrays: few rows in which every two values of different dimensions meet."""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
_CANDIDATES = 40


def pairwise(dimensions: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Row]:
    """Rows that have every pair of values. Greedy: of some random rows with an open pair, the one with the most."""
    chance, names = random.Random(seed), list(dimensions)
    open_pairs = {
        ((a, one), (b, other))
        for a, b in combinations(names, 2)
        for one, other in product(dimensions[a], dimensions[b])
    }
    rows: list[Row] = []
    while open_pairs:
        needed = sorted(open_pairs, key=str)
        candidates = [_row(dimensions, dict(chance.choice(needed)), open_pairs, chance) for _ in range(_CANDIDATES)]
        rows.append(max(candidates, key=lambda row: len(open_pairs.intersection(pairs_of(row)))))
        open_pairs.difference_update(pairs_of(rows[-1]))
    return rows


def pairs_of(row: Row) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    yield from combinations(row.items(), 2)


def _row(dimensions: Mapping[str, Sequence[Any]], chosen: Row, open_pairs: set[Any], chance: random.Random) -> Row:
    """A row with the values ``chosen``; each of the others closes as many pairs with those before it as one can."""
    for name in chance.sample([one for one in dimensions if one not in chosen], len(dimensions) - len(chosen)):

        def closed(value: Any, name: str = name) -> int:
            trial = {one: {**chosen, name: value}[one] for one in dimensions if one in chosen or one == name}
            return len(open_pairs.intersection(pairs_of(trial)))

        chosen[name] = max(chance.sample(list(dimensions[name]), len(dimensions[name])), key=closed)
    return {name: chosen[name] for name in dimensions}
