"""Valid requests, and the errors for bad input and bad options."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import TinyPair
from tests.tiny import Pair, block_proposer, random_drafter
from volley import Engine, SamplingParams
from volley.errors import CapacityError, ConfigError, InputError, VolleyError

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
PARAMS = SamplingParams(max_tokens=5)


@pytest.fixture(scope="module")
def engine(tiny_pair: TinyPair) -> Engine:
    return Engine.from_pretrained(tiny_pair.target, tiny_pair.drafter, dtype=torch.float32, num_pages=100)


def test_encoding(engine: Engine) -> None:
    ids = engine.encode("hi there")
    assert engine.tokenizer.decode(ids) == "hi there"
    assert len(ids) == 8
    assert engine.encode(ids) == ids
    chat = engine.encode(CHAT)
    assert engine.tokenizer.decode(chat) == RENDERED
    assert chat[0] == engine.tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_generate_takes_one_or_many_of_every_kind(engine: Engine) -> None:
    ids = engine.encode("hi there")
    alone = {kind: next(engine.generate(prompt, PARAMS)) for kind, prompt in (("text", "hi there"), ("chat", CHAT))}
    assert next(engine.generate(ids, PARAMS)).token_ids == alone["text"].token_ids
    mixed = list(engine.generate(["hi there", ids, CHAT], PARAMS))
    expected = [alone["text"], alone["text"], alone["chat"]]
    assert [r.token_ids for r in mixed] == [r.token_ids for r in expected]
    assert [r.text for r in mixed] == [r.text for r in expected]
    assert [len(list(engine.generate(kind, PARAMS))) for kind in (["a", "b"], [[5], [6]], [CHAT, CHAT])] == [2, 2, 2]
    assert list(engine.generate([], PARAMS)) == []
    assert len(list(engine.generate((text for text in ("a", "b")), PARAMS))) == 2


def test_every_prompt_may_have_its_own_parameters(engine: Engine) -> None:
    results = engine.generate(["a", "b"], [SamplingParams(max_tokens=2, ignore_eos=True), PARAMS])
    assert next(results).stats.output_tokens == 2
    with pytest.raises(InputError, match="2 prompts came with 3 sampling parameters; give one, or one each"):
        engine.generate(["a", "b"], [PARAMS] * 3)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty; give at least one token"),
        ([[]], "the prompt is empty"),
        ([1, 260], "token id 260 is outside the target's vocabulary of 260"),
        ([1, -1], "token id -1 is outside"),
        ([1, "a"], "this is a mixture"),
        ("caf\udce9", "not valid Unicode: it has a lone surrogate"),
        ([{"role": "user", "content": "caf\udce9"}], "not valid Unicode: it has a lone surrogate"),
        ([[1, "a"]], "this is a mixture"),
        ([{"role": "user", "content": "x"}, 3], "this is a mixture"),
        ([{"role": "user"}], r"a chat message has 'role' and 'content'; this one has \['role'\]"),
        ([{"content": "x"}], r"this one has \['content'\]"),
        ([[1.5]], "this is a mixture"),
        ("x" * 1024, "the prompt has 1024 tokens and the target's context is 1024; shorten the prompt"),
    ],
)
def test_bad_prompts(engine: Engine, prompt: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine.generate(prompt, PARAMS)
    with pytest.raises(InputError, match=message):
        next(engine.stream(prompt[0] if isinstance(prompt, list) and isinstance(prompt[0], list) else prompt, PARAMS))
    assert not engine.core.scheduler.has_work


def test_a_prompt_that_is_none(engine: Engine) -> None:
    for answer in (lambda: engine.generate([None], PARAMS), lambda: next(engine.stream(None, PARAMS))):  # type: ignore[list-item, arg-type]
        with pytest.raises(InputError, match="a list of token ids, or a list of chat messages, not None"):
            answer()


def test_text_needs_a_tokenizer_and_a_chat_of_turns_a_template(pair: Pair, engine: Engine) -> None:
    with pytest.raises(InputError, match="loaded without a tokenizer; pass prompts as lists of token ids"):
        Engine(pair.target, num_pages=4).generate("hi")
    target = copy.copy(engine.target)
    target.tokenizer = copy.deepcopy(target.tokenizer)
    assert target.tokenizer is not None
    target.tokenizer.chat_template = None
    with pytest.raises(InputError, match="has no chat template, so it takes single prompts"):
        Engine(target, num_pages=4).generate([*CHAT, {"role": "assistant", "content": "a"}, *CHAT])


def test_a_request_larger_than_the_pool(pair: Pair) -> None:
    engine = Engine(pair.target, num_pages=2, page_size=4)
    with pytest.raises(
        CapacityError, match=r"9 tokens needs 3 pages .* has 2; raise kv_mib or num_pages or lower max_tokens"
    ):
        engine.generate([1, 2, 3, 4], PARAMS)
    (result,) = engine.generate([1, 2, 3], PARAMS)
    assert len(result.token_ids) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verification": "strict"}, "verification 'strict' is unknown; use auto, rejection or coupled"),
        ({"verification": "rejection", "denoising_steps": 2}, "use verification='coupled' or denoising_steps=1"),
        ({"denoising_steps": 0}, "denoising_steps is 0; it must be at least 1"),
        ({"denoising_schedule": "sin"}, "unknown denoising schedule 'sin'"),
        ({"draft_temperature": -1.0}, "draft_temperature is -1.0; give a finite number"),
        ({"block_size": 0}, "block_size 0 cannot be used"),
        ({"max_batch_tokens": 0}, "max_batch_tokens and max_running must be at least 1"),
        ({"max_running": 0}, "max_batch_tokens and max_running must be at least 1"),
        ({"draft_window": -1}, "draft_window is -1; give at least 1 token, 0 for"),
        ({"num_pages": 0}, "a pool of 0 pages of 16 tokens is empty; raise kv_mib or num_pages"),
        ({"page_size": 0}, "page_size is 0; a page holds at least 1 token"),
        ({"page_size": 0, "num_pages": 4}, "page_size is 0; a page holds at least 1 token"),
    ],
)
def test_bad_options(pair: Pair, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(pair.target, pair.drafter, **options)


def test_an_unknown_option_names_the_nearest(tiny_pair: TinyPair) -> None:
    with pytest.raises(ConfigError, match="unknown engine option 'blocksize'; did you mean 'block_size'"):
        Engine.from_pretrained(tiny_pair.target, blocksize=4)


def test_settings_are_checked_when_they_are_changed(pair: Pair) -> None:
    engine = Engine(pair.target, random_drafter(block_size=4), num_pages=4, verification="rejection")
    assert engine.block_size == 4
    changes: list[tuple[str, int, str]] = [
        ("block_size", 5, "beyond the 4"),
        ("block_size", 0, "cannot be used"),
        ("denoising_steps", 0, "at least 1"),
        ("denoising_steps", 2, "use verification='coupled'"),
    ]
    for name, value, message in changes:
        with pytest.raises(ConfigError, match=message):
            engine.reconfigure(replace(engine.config, **{name: value}))
    assert (engine.block_size, engine.config.denoising_steps) == (4, 1)
    with pytest.raises(ConfigError, match=r"block_size 2 cannot be used; it is 1 .* with a drafter"):
        Engine(pair.target, num_pages=4).block_size = 2


def test_errors_at_the_boundary_are_volleys_and_where_fitting_value_errors() -> None:
    for kind in (ConfigError, InputError):
        assert issubclass(kind, VolleyError)
        assert issubclass(kind, ValueError)
    assert not issubclass(CapacityError, ValueError)


@pytest.mark.parametrize("load", [lambda pair: pair.target, lambda pair: str(pair.target)])
def test_a_target_alone_decodes_plainly(tiny_pair: TinyPair, load: Callable[[TinyPair], Any]) -> None:
    engine = Engine.from_pretrained(load(tiny_pair), dtype=torch.float32, num_pages=10)
    assert engine.drafter is None
    assert engine.block_size == 1


def test_the_default_pool_holds_a_whole_context(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter)
    assert engine.core.pool.num_pages * engine.core.pool.page_size >= 512
    assert engine.core.runner.store.nbytes + block_proposer(engine).model.store.nbytes <= 2**30
