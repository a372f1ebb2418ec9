"""Best-first trees against the best of all closed sets, and the walk that verifies them."""

from functools import cache
from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.decode import test_verify as law
from tests.made_up import lattice_of
from volley.decode.sampling import PositionNoise, race, token_probs
from volley.decode.tree import coupled_logits, expand, expand_freely
from volley.decode.verify import verify_choices, verify_tree
from volley.decode.work import Proposal, Verdict
from volley.models.drafters.heads import Lattice
from volley.params import SamplingParams


def random_lattice(positions: int, width: int, seed: int, *, sequential: bool, flatness: float = 1.0) -> Lattice:
    generator = np.random.default_rng(seed)
    tokens = np.stack([generator.permutation(50)[:width] for _ in range(positions)])
    scores = generator.normal(size=(positions, width if sequential else 1, width)) * flatness
    return Lattice(tokens, scores.astype(np.float32))


def path_logprob(lattice: Lattice, path: tuple[int, ...], temperature: float = 1.0) -> float:
    """Log-probability of a path of candidates, by the definition of a lattice."""
    total = 0.0
    for position, (before, after) in enumerate(pairwise((0, *path))):
        row = lattice.scores[position, before if lattice.scores.shape[1] > 1 else 0].astype(float) / temperature
        total += row[after] - np.log(np.exp(row).sum())
    return float(total)


def best_closed_set(lattice: Lattice, num_nodes: int, temperature: float) -> float:
    """Expected accepted tokens of the best tree: every set of paths that holds their beginnings is tried."""
    positions, width = lattice.tokens.shape
    paths = [path for length in range(1, positions + 1) for path in product(range(width), repeat=length)]
    worth = {path: np.exp(path_logprob(lattice, path, temperature)) for path in paths}
    closed = (
        chosen
        for chosen in combinations(paths, min(num_nodes, len(paths)))
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    )
    return max(sum(worth[path] for path in chosen) for chosen in closed)


def paths_of(lattice: Lattice, tree: Proposal) -> list[tuple[int, ...]]:
    """The candidates along the path to every node."""
    assert tree.parents is not None
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        before = paths[parent]
        paths.append((*before, lattice.tokens[len(before)].tolist().index(token)))
    return paths[1:]


@pytest.mark.parametrize("seed", range(12))
def test_a_tree_whose_candidates_are_asked_for_is_the_lattices(seed: int) -> None:
    lattice = random_lattice(4, 5, seed, sequential=seed % 2 == 1)

    def candidates(path: list[int]) -> list[tuple[int, float]]:
        position = len(path)
        family = lattice.tokens[position - 1].tolist().index(path[-1]) if path and seed % 2 else 0
        costs = -torch.from_numpy(lattice.scores[position, family]).log_softmax(dim=-1)
        return sorted(zip(lattice.tokens[position].tolist(), costs.tolist(), strict=True), key=lambda pair: pair[1])

    tree, free = expand(lattice, 17), expand_freely(candidates, 17, 4)
    assert (free.token_ids, free.parents) == (tree.token_ids, tree.parents)
    assert free.confidence == pytest.approx(tree.confidence, rel=1e-4)


@given(
    shape=st.sampled_from([(1, 4), (2, 2), (2, 3), (3, 2)]),
    num_nodes=st.integers(1, 5),
    sequential=st.booleans(),
    flatness=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(0, 10_000),
)
def test_best_first_finds_the_best_closed_set(
    shape: tuple[int, int], num_nodes: int, sequential: bool, flatness: float, temperature: float, seed: int
) -> None:
    lattice = random_lattice(*shape, seed, sequential=sequential, flatness=flatness)
    tree = expand(lattice, num_nodes, temperature)
    paths = paths_of(lattice, tree)
    assert len(set(paths)) == len(paths) == min(num_nodes, sum(shape[1] ** i for i in range(1, shape[0] + 1)))
    worth = sum(np.exp(path_logprob(lattice, path, temperature)) for path in paths)
    assert worth == pytest.approx(best_closed_set(lattice, num_nodes, temperature), rel=1e-5)


@given(
    positions=st.integers(1, 7),
    width=st.integers(1, 6),
    num_nodes=st.integers(0, 40),
    sequential=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_trees_are_in_preorder_with_the_likeliest_path_first(
    positions: int, width: int, num_nodes: int, sequential: bool, seed: int
) -> None:
    lattice = random_lattice(positions, width, seed, sequential=sequential)
    tree = expand(lattice, num_nodes)
    assert tree.parents is not None
    paths = paths_of(lattice, tree)
    assert len(paths) <= num_nodes
    assert all(parent <= node for node, parent in enumerate(tree.parents))
    worth = {path: path_logprob(lattice, path) for path in paths}
    for node, (before, path) in enumerate(pairwise(paths), start=1):
        if tree.parents[node] != node:  # not the child of the node before it: then that one is a leaf
            assert not any(len(other) > len(before) and other[: len(before)] == before for other in paths)
        for rival in paths[node + 1 :]:
            if rival[:-1] == path[:-1]:
                assert worth[rival] <= worth[path]


def test_a_chain_is_the_tree_of_a_certain_drafter() -> None:
    logits = torch.full((5, 30), -40.0)
    best = [3, 7, 7, 0, 29]
    logits[range(5), best] = 0.0
    tree = expand(lattice_of(logits), 5)
    assert (tree.token_ids, tree.parents) == (best, (0, 1, 2, 3, 4))


def test_impossible_tokens_are_never_proposed() -> None:
    scores = torch.full((2, 9), -torch.inf)
    scores[0, [4, 5]] = torch.tensor([0.6, 0.4]).log()
    scores[1, 2] = 0.0
    tree = expand(lattice_of(scores), 20)
    assert (tree.token_ids, tree.parents) == ([4, 2, 5, 2], (0, 1, 0, 3))


def test_infinite_scores_raise_no_warning() -> None:
    """A rule may make a token certain, or leave none."""
    scores = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    scores[0, 4], scores[1, [2, 5]], scores[2] = torch.inf, torch.inf, -torch.inf
    tree = expand(lattice_of(scores), 20)
    assert (tree.token_ids[0], {*tree.token_ids[1:]}, tree.parents) == (4, {2, 5}, (0, 1, 1))
    assert tree.confidence == pytest.approx([1.0, 0.5, 0.5])


def test_sampled_scores_put_the_race_of_the_target_first() -> None:
    """A drafter that knows the target's law exactly has the target's draw on the first path."""
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.8, top_p=0.9)
    noise = PositionNoise(5)
    tree = expand(lattice_of(coupled_logits(logits, params, noise, range(10, 10 + len(logits)))), 4)
    drawn = race(token_probs(logits, params), noise.exponentials(range(10, 14), 20))
    assert tree.token_ids[0] == drawn[0]
    wide = expand(lattice_of(coupled_logits(logits, params, noise, range(10, 10 + len(logits)))), 60)
    assert wide.token_ids[:4] == drawn.tolist()


# -- the walk ----------------------------------------------------------------------------------------------------------


@given(
    choices=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    draft=st.lists(st.integers(0, 3), max_size=5),
)
def test_a_tree_of_one_branch_is_verified_like_a_chain(choices: list[int], draft: list[int]) -> None:
    walked = verify_tree(lambda node, depth: choices[node], draft, range(len(draft)))
    chain = verify_choices(choices, draft)
    assert (walked.accepted, walked.token_ids) == (chain.accepted, chain.token_ids)
    assert walked.path == tuple(range(1, chain.accepted + 1))


@given(seed=st.integers(0, 10_000), width=st.integers(1, 4), num_nodes=st.integers(1, 30))
def test_the_walk_follows_the_choices_as_far_as_the_tree_goes(seed: int, width: int, num_nodes: int) -> None:
    lattice = random_lattice(5, width, seed, sequential=True)
    tree = expand(lattice, num_nodes)
    assert tree.parents is not None
    text = [int(row[seed % width]) for row in lattice.tokens] + [99]
    asked: list[tuple[int, int]] = []

    def choose(node: int, depth: int) -> int:
        asked.append((node, depth))
        return text[depth]

    verdict = verify_tree(choose, tree.token_ids, tree.parents)
    held = {tuple(int(lattice.tokens[i, c]) for i, c in enumerate(path)) for path in paths_of(lattice, tree)}
    depth = max((n for n in range(1, 6) if tuple(text[:n]) in held), default=0)
    assert verdict.accepted == depth
    assert verdict.token_ids == text[: depth + 1]
    assert asked == list(zip((0, *verdict.path), range(depth + 1), strict=True))


# -- the law: a table of targets, as in test_verify ------------------------------------------------------------------------

NODES = 12


@cache
def law_after(text: tuple[int, ...]) -> np.ndarray:
    return law.TARGET[len(text)][int(law.code(torch.tensor([text], dtype=torch.long)))].numpy()


def target_laws(tree: Proposal) -> list[np.ndarray]:
    """The target's law after the anchor and after every node."""
    assert tree.parents is not None
    texts: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        texts.append((*texts[parent], token))
    return [law_after(text) for text in texts]


def matched(trees: list[Proposal], noise: torch.Tensor) -> list[Verdict]:
    """Sample-and-match on each tree with ``noise [N, LENGTH, V]``."""
    verdicts = []
    for tree, exponentials in zip(trees, noise.numpy(), strict=True):
        rows = target_laws(tree)
        assert tree.parents is not None
        verdicts.append(
            verify_tree(
                lambda node, depth, rows=rows, e=exponentials: int((rows[node] / e[depth]).argmax()),
                tree.token_ids,
                tree.parents,
            )
        )
    return verdicts


def marginal_tree() -> Proposal:
    return expand(lattice_of(law.DRAFT.log()), NODES)


def coupled_trees(noise: torch.Tensor) -> list[Proposal]:
    """A tree for each draw, by scores that know its noise; equal trees are one object."""
    return [expand(lattice_of(own), NODES) for own in (law.DRAFT / noise[:, : law.K]).log()]


def mean_accepted(verdicts: list[Verdict]) -> float:
    return sum(verdict.accepted for verdict in verdicts) / len(verdicts)


@pytest.mark.slow
def test_matching_on_a_tree_has_the_targets_law() -> None:
    noise = law.exponentials(law.BIASED_DRAWS, law.LENGTH, law.V, seed=30)
    verdicts = matched([marginal_tree()] * law.BIASED_DRAWS, noise)
    assert law.p_value(verdicts, noise) > 1e-3
    assert law.p_value(verdicts) > 1e-3  # the tree knows nothing of the noise, so fresh noise will do as well
    assert {verdict.accepted for verdict in verdicts} >= {1, 2, 3}


@pytest.mark.slow
def test_matching_on_coupled_trees_has_the_targets_law_and_accepts_more() -> None:
    noise = law.exponentials(law.BIASED_DRAWS, law.LENGTH, law.V, seed=31)
    verdicts = matched(coupled_trees(noise), noise)
    assert law.p_value(verdicts, noise) > 1e-3
    assert mean_accepted(verdicts) > mean_accepted(matched([marginal_tree()] * len(noise), noise)) + 0.2


@pytest.mark.slow
def test_scoring_a_best_first_tree_like_sampled_drafts_is_seen() -> None:
    """``min(1, p / q)`` down the branches, and the residual once all children are rejected: the tree was never drawn from q."""
    tree = marginal_tree()
    assert tree.parents is not None
    laws = target_laws(tree)
    draft = law.DRAFT.numpy()
    generator = np.random.default_rng(34)

    def verify() -> Verdict:
        node, emitted = 0, list[int]()
        while True:
            p, depth = laws[node], len(emitted)
            children = [child for child, parent in enumerate(tree.parents or (), start=1) if parent == node]
            for child in children:
                token = tree.token_ids[child - 1]
                if generator.random() * draft[depth, token] < p[token]:
                    break
            else:
                residual = np.maximum(p - draft[depth], 0) if children else p
                emitted.append(int(generator.choice(law.V, p=residual.astype(float) / residual.astype(float).sum())))
                return Verdict(depth, emitted)
            emitted.append(token)
            node = child

    assert law.p_value([verify() for _ in range(law.BIASED_DRAWS)]) < 1e-9
