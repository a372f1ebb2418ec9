"""Values that the host reads together; ``engine/test_on_device.py`` tests drafts that stay on the device."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.made_up import decoding
from volley.decode.on_device import Reading, count_accepted, draft_tokens, proposals_on_device, read_drafts
from volley.decode.verify import verify_choices
from volley.decode.work import DraftSpec, Proposal, Rule, Shape, Work
from volley.procedures.request import Request

CHAIN = DraftSpec(Shape.CHAIN, Rule.GREEDY, 3, 3)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=5), st.booleans())
def test_one_copy_brings_choices_and_drafts(sizes: list[tuple[int, bool]], with_confidence: bool) -> None:
    """Some works' drafts are on the device and some were read before; later ones are taken later."""
    works = [Work[Request](decoding([1, 2]), replace(CHAIN, size=size, positions=size)) for size, _ in sizes]
    on_device, tokens, sure = list[Work[Request]](), list[int](), list[float]()
    for index, (work, (size, is_on_device)) in enumerate(zip(works, sizes, strict=True)):
        own = list(range(10 * index, 10 * index + size))
        tokens += own
        if not is_on_device:
            work.proposal = Proposal(own)
            continue
        on_device.append(work)
        (work.proposal,) = proposals_on_device([work], torch.tensor(own, dtype=torch.int64))
        assert work.proposal.on_device is not None
        if with_confidence:
            sure += (own_sure := [1 / (2 + token) for token in own])
            work.proposal.on_device.confidence = torch.tensor(own_sure, dtype=torch.float64)
    assert draft_tokens(works, torch.device("cpu")).tolist() == tokens
    taken: list[list[int]] = []
    reading = Reading()
    reading.add_drafts(works)
    reading.add(torch.arange(3), lambda values: taken.append([*values, *works[0].proposal.token_ids]))
    reading.read()
    assert taken == [[0, 1, 2, *range(sizes[0][0])]]
    assert [token for work in works for token in work.proposal.token_ids] == tokens
    assert [value for work in on_device for value in work.proposal.confidence] == sure
    assert all(work.proposal.on_device is None for work in works)
    reading.read()
    assert len(taken) == 1


def test_every_work_gets_its_part_of_tokens_and_distributions() -> None:
    works = [Work[Request](decoding([1, 2]), replace(CHAIN, size=size, positions=size)) for size in (2, 1)]
    probs = torch.eye(3)
    for work, proposal in zip(works, proposals_on_device(works, torch.tensor([5, 6, 7]), probs), strict=True):
        work.proposal = proposal
    assert [work.proposal.token_ids for work in works] == [[0, 0], [0]]
    read_drafts(works)
    assert [work.proposal.token_ids for work in works] == [[5, 6], [7]]
    first, second = (work.proposal.draft_probs for work in works)
    assert first is not None
    assert second is not None
    assert torch.equal(torch.cat([first, second]), probs)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(0, 4), st.booleans(), st.booleans()),
        min_size=1,
    ),
    st.integers(0, 3),
)
def test_what_is_kept_is_counted_without_the_host(each: list[tuple[list[int], int, bool, bool]], before: int) -> None:
    """As the host counts it, of drafts of several lengths, some on the device and some read, one of them at least not empty.

    Of some the device has counted it before.
    """
    works, chosen, expected = list[Work[Request]](), [7] * before, list[tuple[int, int]]()
    for choices, bits, on_device, is_counted in [*each, ([0, 1], 1, True, False)]:
        draft = [bits >> place & 1 for place in range(len(choices) - 1)]
        work = Work[Request](decoding([1, 2]), replace(CHAIN, size=len(draft), positions=len(draft)))
        work.proposal = proposals_on_device([work], torch.tensor(draft))[0] if on_device else Proposal(draft)
        verdict = verify_choices(choices, draft)
        expected.append((verdict.accepted, verdict.token_ids[-1]))
        if is_counted:
            work.kept, choices = len(chosen), list(expected[-1])
        work.choices = len(chosen) + is_counted
        chosen += choices
        works.append(work)
    accepted, behind = count_accepted(works, torch.tensor(chosen))
    assert list(zip(accepted.tolist(), behind.tolist(), strict=True)) == expected
