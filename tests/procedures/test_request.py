"""The state of a request between steps, how it takes tokens, and where it ends."""

from typing import Any

import pytest

from tests.made_up import decoding, request
from volley.decode.detokenize import Detokenizer
from volley.decode.sampling import Score
from volley.decode.work import NO_DRAFT, Phase, Rule
from volley.memory.batch import Segment
from volley.params import SamplingParams
from volley.procedures.request import Procedure, Request


class Letters:
    """Token i is the i-th letter."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def lettered(**params: Any) -> Request:
    own = SamplingParams(**{"max_tokens": 20, **params})
    return decoding([9, 9, 0], own, detokenizer=Detokenizer(Letters()))  # type: ignore[arg-type]


def test_a_request_is_read_then_decodes_then_is_read_again_after_a_preemption() -> None:
    own = request([5, 6, 7, 8])
    assert (own.prefill_end, own.is_decoding, own.num_output) == (4, False, 0)
    own.computed = 4
    own.append([1], 0)
    assert (own.anchor, own.num_output, own.is_decoding) == (1, 1, True)
    own.append([2, 3], 1)
    own.computed = 6
    assert own.is_decoding
    own.computed = 0
    assert (own.prefill_end, own.is_decoding) == (6, False), "all but the anchor"


def test_length_ends_a_request_inside_a_block() -> None:
    own = request([1, 2], SamplingParams(max_tokens=3))
    assert own.append([4, 5, 6, 7, 8], 4) == 3
    assert own.token_ids == [1, 2, 4, 5, 6]
    assert own.result().finish_reason == "length"
    assert own.result().token_ids == [4, 5, 6]


def test_a_stop_token_ends_a_request_and_belongs_to_it() -> None:
    own = request([1, 2], SamplingParams(max_tokens=9, stop_token_ids=(5,)))
    assert own.append([4, 5, 6], 2) == 2
    assert own.result().finish_reason == "stop"
    assert own.num_output == 2


@pytest.mark.parametrize("end", [{"max_tokens": 9}, {"stop_token_ids": (8,)}, {"stop": ("i",)}])
def test_a_request_that_nobody_streams_has_the_same_text_and_no_chunks(end: dict[str, Any]) -> None:
    """Chunks are made where a stop string is looked for: it may end the request after any token."""
    texts = set[str]()
    for is_streamed in (True, False):
        own = lettered(**end)
        own.writer.is_streamed = is_streamed
        for tokens in ([0], [1, 2], [3, 4, 5, 6, 7, 8, 9]):
            own.append(tokens, 0)
            own.write()
        assert own.finish_reason is not None
        assert bool(own.writer.chunks) == (is_streamed or "stop" in end)
        texts.add(own.result().text)
    assert len(texts) == 1


def test_a_stop_string_is_cut_off_and_what_may_begin_one_waits() -> None:
    own = lettered(stop=("cde",))
    own.append([1, 2], 0)
    assert "".join(chunk.text for chunk in own.writer.chunks) == "b"
    own.append([3, 5], 0)
    assert "".join(chunk.text for chunk in own.writer.chunks) == "bcdf"
    assert own.append([2, 3, 4, 6], 0) == 3
    assert own.result().text == "bcdf"
    assert "".join(chunk.text for chunk in own.writer.chunks) == "bcdf"


def test_chunks_tell_which_tokens_were_drafted() -> None:
    own = lettered()
    own.append([1, 2, 3], 2)
    assert own.writer.chunks == []
    own.write()
    assert [(chunk.text, chunk.token_ids, chunk.from_draft) for chunk in own.writer.chunks] == [
        ("b", [1], True),
        ("c", [2], True),
        ("d", [3], False),
    ]


@pytest.mark.parametrize("asked", [False, True])
def test_log_probabilities_are_in_the_result_if_they_were_asked_for(asked: bool) -> None:
    own = request([1], SamplingParams(max_tokens=1, logprobs=asked, top_logprobs=2 * asked))
    own.scores = [Score(-0.5, 1, [(4, -0.5), (3, -1.0)])]
    own.append([4], 0)
    result = own.result()
    assert result.logprobs == ([-0.5] if asked else None)
    assert result.top_logprobs == ([[(4, -0.5), (3, -1.0)]] if asked else None)


def test_every_rule_takes_every_final_token() -> None:
    class Noting:
        is_complete = False

        def __init__(self) -> None:
            self.taken: list[int] = []

        def take(self, token_id: int) -> None:
            self.taken.append(token_id)

    one, other = Noting(), Noting()
    own = request([1], SamplingParams(max_tokens=2), rules=(one, other))
    own.append([4, 5, 6], 2)
    assert one.taken == other.taken == [4, 5], "and none behind the end"


class Bare(Procedure):
    """No more than what every procedure must say."""

    next_work = segment = num_rows = verify = None  # type: ignore[assignment]


def test_a_procedure_drafts_nothing_unless_it_shows_the_policy_something() -> None:
    own = request([1, 2, 3], procedure=Bare())
    assert own.procedure.view(own, 8) is None
    work = own.procedure.read(own, 2)
    assert (work.phase, work.spec, work.num_known) == (Phase.PREFILL, NO_DRAFT, 2)


def test_a_prompt_is_read_without_a_draft_by_the_rule_its_token_will_need() -> None:
    own = request([1, 2, 3], SamplingParams(temperature=1.0))
    work = own.procedure.read(own, 3)
    assert (work.spec.size, work.spec.positions, work.spec.rule) == (0, 0, Rule.REJECTION)
    tokens, segment = own.procedure.segment(work)
    assert tokens == [1, 2, 3]
    assert segment == Segment(own.table, 0, 3)
