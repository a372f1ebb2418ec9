"""Diffusion requests among others in one engine: answers, pages and prefixes do not depend on who else is there."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

from tests import tiny
from tests.conftest import byte_tokenizer
from tests.procedures.test_denoising import BOTH_WAYS, MASK, Masked, masked_model
from tests.tiny import finish
from volley import DiffusionParams, Engine, SamplingParams
from volley.decode.rules import TokenRule
from volley.errors import CapacityError, CheckpointError, ConfigError, InputError, UnsupportedModelError
from volley.models.drafters.backlog import Backlog
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.models.targets.families import FAST_DLLM, JOINT, SDAR
from volley.models.targets.target import Target
from volley.procedures.denoising import Denoising
from volley.results import CanvasDraft

CANVAS = DiffusionParams(canvas_length=8, threshold=0.3)
PROMPTS = [[*range(20, 20 + size)] for size in (3, 8, 13, 21)]
BLOCKS = {"page_size": 8}


@pytest.fixture(scope="module", params=["sdar", "fast_dllm"])
def model(request: pytest.FixtureRequest) -> Masked:
    family = {"sdar": BOTH_WAYS, "fast_dllm": FAST_DLLM}[request.param]
    return masked_model(replace(family, defaults=replace(family.defaults, canvas_length=8)))


def params(index: int = 0, **changes: Any) -> SamplingParams:
    values: dict[str, Any] = {"temperature": 0.8, "seed": index, "max_tokens": 21, "diffusion": CANVAS}
    return SamplingParams(**{**values, **changes})


def alone(target: Target, prompt: list[int], own: SamplingParams) -> list[int]:
    (result,) = Engine(target, prefix_caching=False, **BLOCKS).generate([prompt], own)
    return result.token_ids


def mixed(index: int, canvas: DiffusionParams = CANVAS) -> SamplingParams:
    """Requests of three modes, one after the other."""
    mode = ("diffusion", "autoregressive", "self")[index % 3]
    own = replace(canvas, mode=mode, canvas_length=8)  # type: ignore[arg-type]
    if mode == "self":
        own = replace(own, canvas_length=4, max_steps=None)  # the number of passes is measured
    return params(index, diffusion=own)


@pytest.mark.slow
def test_a_drafter_serves_the_autoregressive_requests_beside_canvases() -> None:
    pair = tiny.make_pair()
    target = Target(pair.hf, None, replace(BOTH_WAYS, mask_token_id=MASK))
    engine = Engine(target, pair.drafter, policy="fixed", **BLOCKS)
    plain = params(diffusion=DiffusionParams(mode="autoregressive"))
    each = [plain if index % 2 else params(index) for index in range(4)]
    requests = [engine.add_request(prompt, own) for prompt, own in zip(PROMPTS, each, strict=True)]
    expected = [alone(target, prompt, own) for prompt, own in zip(PROMPTS, each, strict=True)]
    assert finish(engine, requests) == expected
    assert all(sum(request.stats.block_sizes) > len(request.stats.block_sizes) for request in requests[1::2])


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(("family", "is_followed"), [(BOTH_WAYS, False), (JOINT, True)])
def test_a_drafter_keeps_up_with_canvases_whose_pages_it_may_meet_again(
    family: BlockDiffusion, is_followed: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K/V made both ways are found by no request that a drafter serves."""
    kept, keep = list[int](), Backlog.add

    def note(self: Backlog, features: Tensor, runs: list[Any], counts: list[int]) -> None:
        kept.append(sum(counts))
        keep(self, features, runs, counts)

    monkeypatch.setattr(Backlog, "add", note)
    pair = tiny.make_pair()
    target = Target(pair.hf, None, replace(family, mask_token_id=MASK))
    engine = Engine(target, pair.drafter, policy="fixed", draft_window=window, **BLOCKS)
    assert len(next(engine.generate([PROMPTS[2]], params())).token_ids) == 21
    assert (sum(kept) > 0) == is_followed
    plain = params(diffusion=DiffusionParams(mode="autoregressive"))
    expected = alone(target, PROMPTS[2], plain)
    before = sum(kept)
    assert next(engine.generate([PROMPTS[2]], plain)).token_ids == expected
    assert sum(kept) > before
    engine.check_integrity()


def test_the_last_canvas_needs_room_though_it_is_cut(model: Masked) -> None:
    engine = Engine(model.target, num_pages=3, **BLOCKS)
    assert len(next(engine.generate([PROMPTS[1]], params(max_tokens=9))).token_ids) == 9
    with pytest.raises(CapacityError, match="raise kv_mib or num_pages"):
        engine.add_request(PROMPTS[1], params(max_tokens=17))


@pytest.mark.parametrize("limit", ["context", "pages"])
def test_an_answer_ends_with_the_last_canvas_that_fits(limit: str) -> None:
    target = masked_model(SDAR, max_position_embeddings=30 if limit == "context" else 500).target
    engine = Engine(target, page_size=6, num_pages=5 if limit == "pages" else None)
    for own in (params(max_tokens=100 if limit == "context" else 27), params(max_tokens=22)):
        assert engine.room(3, own) == 21
        (result,) = engine.generate([PROMPTS[0]], own)
        assert (len(result.token_ids), result.finish_reason) == (21, "length"), (
            "a canvas more would end behind the last page"
        )
    assert engine.room(24, params()) == 0
    with pytest.raises(InputError, match="smaller canvas_length"):
        engine.add_request([1] * 24, params(max_tokens=4))


def test_a_canvas_that_does_not_fit_in_a_pass_is_refused() -> None:
    target = masked_model(BOTH_WAYS).target
    engine = Engine(target, max_batch_tokens=8, **BLOCKS)
    for mode in ("diffusion", "self"):
        with pytest.raises(ConfigError, match="max_batch_tokens is 8; use a smaller canvas_length"):
            engine.add_request([1], params(diffusion=DiffusionParams(mode=mode, canvas_length=9)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"a canvas of 4 tokens does not fit.*raise it"):
        Engine(target, max_batch_tokens=3)


# -- prefixes ----------------------------------------------------------------------------------------------------------


def cached(engine: Engine, own: SamplingParams) -> int:
    (result,) = engine.generate([list(range(40))], own)
    return result.stats.cached_tokens


def test_a_prefix_is_shared_among_blocks_of_one_length_only(model: Masked) -> None:
    engine = Engine(model.target, page_size=8)
    causal = params(diffusion=DiffusionParams(mode="autoregressive"))
    first, again, shorter = params(), params(), params(diffusion=replace(CANVAS, canvas_length=4))
    assert [cached(engine, own) for own in (causal, first, shorter)] == [0, 0, 0]
    assert cached(engine, causal) == 32
    assert cached(engine, again) >= 32
    assert cached(engine, shorter) >= 32
    (hit,) = engine.generate([list(range(40))], params())
    assert hit.token_ids == alone(model.target, list(range(40)), params())


class SharesWithCausal(Denoising):
    """Planted: pages of blocks have the root of causal ones."""

    def prefix_root(self, params: SamplingParams, page_size: int) -> bytes:
        return b""


def test_sharing_pages_of_causal_passes_would_be_seen(model: Masked) -> None:
    engine, prompt = Engine(model.target, page_size=8), list(range(40))
    assert model.target.diffusion is not None
    cached(engine, params(diffusion=DiffusionParams(mode="autoregressive")))
    _, own = engine.procedures.choose(params(temperature=0.0))
    request = engine.add_request(prompt, own, SharesWithCausal(model.target, model.target.diffusion))
    assert finish(engine, [request]) != [alone(model.target, prompt, params(temperature=0.0))]
    assert request.stats.cached_tokens > 0


@pytest.mark.parametrize(("family", "size"), [(FAST_DLLM, 32), (SDAR, 16), (JOINT, 16)])
def test_pages_end_where_blocks_do_unless_their_size_is_given(family: BlockDiffusion, size: int) -> None:
    target = masked_model(family).target
    engine = Engine(target)
    assert (engine.capacity.page_size, Engine(target, page_size=4).capacity.page_size) == (size, 4)
    own = params(diffusion=None)
    assert [cached(engine, own) for _ in range(2)] == [0, 32]


def test_pages_that_end_inside_a_block_are_not_shared(model: Masked) -> None:
    engine = Engine(model.target, page_size=4)
    assert [cached(engine, params()) for _ in range(2)] == [0, 0]
    assert [cached(engine, params(diffusion=replace(CANVAS, canvas_length=4))) for _ in range(2)][1] >= 32


# -- ends --------------------------------------------------------------------------------------------------------------


class OwnRule(TokenRule):
    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        return logits

    def take(self, token_id: int) -> None:
        pass


def test_a_bias_forbids_a_token_and_an_own_rule_is_refused(model: Masked) -> None:
    whole = alone(model.target, PROMPTS[0], params(temperature=0.0))
    bias = {whole[4]: -100.0}
    assert whole[4] not in alone(model.target, PROMPTS[0], params(temperature=0.0, logit_bias=tuple(bias.items())))
    with pytest.raises(ConfigError, match="mode='autoregressive'"):
        Engine(model.target).add_request(PROMPTS[0], params(rules=(lambda *_: OwnRule(),)))


def test_opening_the_next_canvas_with_the_commit_saves_a_pass_a_block() -> None:
    target = masked_model(SDAR).target
    (result,) = Engine(target, **BLOCKS).generate([PROMPTS[1]], params(max_tokens=24))
    stats = result.stats
    assert (stats.canvases, stats.commit_passes) == (3, 0)
    assert stats.tokens_per_pass == stats.tokens_per_forward == 24 / stats.denoising_steps
    shifted = masked_model(FAST_DLLM).target
    (result,) = Engine(shifted, **BLOCKS).generate([PROMPTS[1]], params(max_tokens=24))
    assert (result.stats.canvases, result.stats.commit_passes) == (3, 2), "slot 0 is known only after the commit"


def test_the_speed_of_decoding_is_behind_the_first_canvas() -> None:
    engine = Engine(masked_model(SDAR).target, **BLOCKS)
    one, three = (next(engine.generate([PROMPTS[1]], params(max_tokens=count))).stats for count in (8, 24))
    assert (one.first_tokens, three.first_tokens) == (8, 8)
    assert one.decode_tokens_per_second == 8 / one.total_seconds, "all came at once"
    assert three.decode_tokens_per_second == 16 / (three.total_seconds - three.time_to_first_token)


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["diffusion", "self", "autoregressive"])
def test_drafts_of_a_canvas_are_streamed_if_asked_for(model: Masked, mode: Any) -> None:
    asked = replace(CANVAS, mode=mode, max_steps=4, strategy="low_confidence_static")
    expected = alone(model.target, PROMPTS[2], params(diffusion=asked))
    engine = Engine(model.target, **BLOCKS)
    request = engine.add_request(PROMPTS[2], params(diffusion=replace(asked, stream_drafts=True)))
    taken, drafts = list[int](), list[tuple[int, CanvasDraft]]()
    while request.finish_reason is None:
        engine.step()
        for chunk in request.take_chunks():
            taken += chunk.token_ids
            if chunk.draft is not None:
                assert (chunk.text, chunk.token_ids) == ("", [])
                drafts.append((len(taken), chunk.draft))
    assert taken == request.result().token_ids == expected
    stats = request.stats
    finished = [(place, own) for place, own in drafts if None not in own.token_ids]
    if mode == "diffusion":
        assert len(drafts) <= stats.denoising_steps - stats.canvases, "what a canvas became is text at once"
        assert len({(place, *own.token_ids) for place, own in drafts}) == len(drafts), "each shows something new"
        assert all(place + len(own.token_ids) == 21 for place, own in finished), "what is cut off may still be masked"
        for (place, draft), (other, later) in pairwise(drafts):
            pairs = zip(draft.token_ids, later.token_ids, strict=True) if place == other else ()
            assert all(before in (None, after) for before, after in pairs), "what is revealed stays"
        for place, draft in drafts:
            pairs = zip(draft.token_ids, expected[place:], strict=False)
            assert all(token in (None, real) for token, real in pairs)
    elif mode == "self":
        assert finished
    else:
        assert not drafts
    assert finish(engine, [engine.add_request(PROMPTS[2], params(diffusion=asked))]) == [expected]
    assert request.take_chunks() == []


@pytest.mark.parametrize("max_tokens", [1, 3, 8, 9, 11])
def test_no_draft_repeats_or_goes_beyond_the_answer(max_tokens: int) -> None:
    """The last canvas ends where all is revealed that the answer has of it, and what is complete is text at once."""
    target = masked_model(JOINT).target
    asked = replace(CANVAS, strategy="sequential", max_steps=8, stream_drafts=True)
    chunks = list(Engine(target, **BLOCKS).stream([1], params(max_tokens=max_tokens, diffusion=asked)))
    whole = [token for chunk in chunks for token in chunk.token_ids]
    assert len(whole) == max_tokens
    drafts = [chunk.draft.token_ids for chunk in chunks if chunk.draft is not None]
    first, last = min(max_tokens, 8), max_tokens - 8
    expected = [[*whole[:known], *[None] * (first - known)] for known in range(1, first)]
    expected += [[*whole[8 : 8 + known], *[None] * (last - known)] for known in range(1, last)]
    assert drafts == expected, "one token a pass, from left to right"


# -- admission ---------------------------------------------------------------------------------------------------------


class Short(Denoising):
    """Says that its canvases need no pages, so that it is admitted where they do not fit."""

    def reach(self, num_prompt: int, max_length: int, params: SamplingParams) -> int:
        return max_length


@pytest.mark.parametrize("kind", [Denoising, Short])
def test_a_request_whose_canvas_finds_no_pages_waits_until_others_end(kind: type[Denoising]) -> None:
    """Its text fits in the four pages that are free, but not the canvas behind it. The engine once admitted it for ever."""
    target = masked_model(JOINT).target
    assert target.diffusion is not None
    engine = Engine(target, num_pages=8, prefix_caching=False, **BLOCKS)
    plain = params(diffusion=DiffusionParams(mode="autoregressive"))
    first = engine.add_request(PROMPTS[3] + PROMPTS[0], replace(plain, max_tokens=6))
    engine.step()
    _, own = engine.procedures.choose(params(1, max_tokens=8))
    prompt = [*range(20, 50)]
    second = engine.add_request(prompt, own, kind(target, target.diffusion))
    engine.step()
    assert (first.num_output, second.computed) == (2, 0)
    assert (second.stats.preemptions > 0) == (kind is Short), "it is admitted when there is room for all of it"
    assert finish(engine, [first, second])[1] == alone(target, prompt, own)


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.eager_model(tiny.target_config(vocab_size=260, num_hidden_layers=2)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def rename(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def save_fast_dllm(folder: Path) -> None:
    model = masked_model(FAST_DLLM).hf
    model.config.layer_types = model.config.layer_types[:2]  # as many as layers, or it cannot be saved
    model.save_pretrained(folder)


def test_a_family_is_recognised_by_its_model_type(folder: Path) -> None:
    rename(folder, model_type="sdar", architectures=["SDARForCausalLM"], mask_token_id=3, block_size=8)
    engine = Engine.from_pretrained(folder, dtype=torch.float32)
    assert engine.target.diffusion is not None
    assert engine.target.diffusion.mask_token_id == 3
    assert engine.target.diffusion.defaults.canvas_length == 8
    (result,) = engine.generate("Hello", SamplingParams(max_tokens=10))
    assert result.stats.canvases == 2
    assert 3 not in result.token_ids


def test_a_drafter_for_rows_in_place_is_refused_before_anything_is_loaded(folder: Path) -> None:
    rename(folder, model_type="sdar", mask_token_id=3)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="with mode 'self'"):
        Engine.from_pretrained(folder, drafter="reference-dflash", dtype=torch.float32)


def test_fast_dllm_and_mixtures_are_recognised_too(tmp_path: Path) -> None:
    save_fast_dllm(tmp_path / "fast")
    shape = {name: value for name, value in tiny.SHAPE.items() if name != "head_dim"}
    mixture = Qwen3MoeConfig(
        **shape, vocab_size=260, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    tiny.eager_model(mixture).save_pretrained(tmp_path / "mixture")
    for name, model_type, family in (("fast", "Fast_dLLM_Qwen", FAST_DLLM), ("mixture", "sdar_moe", SDAR)):
        byte_tokenizer().save_pretrained(tmp_path / name)
        rename(tmp_path / name, model_type=model_type, mask_token_id=3, auto_map={"AutoModelForCausalLM": "modeling.X"})
        engine = Engine.from_pretrained(tmp_path / name, dtype=torch.float32)
        assert engine.target.diffusion == replace(family, mask_token_id=3)
        (result,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=10))
        assert len(result.token_ids) == 10
        assert result.stats.canvases > 0


@pytest.mark.parametrize(
    ("model_type", "remedy"),
    [("llada", "sdar"), ("Dream", "sdar"), ("llada2_moe", "Register a class for it")],
)
def test_models_without_an_exact_cache_are_refused(folder: Path, model_type: str, remedy: str) -> None:
    rename(folder, model_type=model_type)
    for divided in (False, True):
        with pytest.raises(UnsupportedModelError, match=remedy):
            Engine.from_pretrained(folder, tensor_parallel=divided)


@pytest.mark.parametrize("model_type", ["sdar", "diffusion_gemma"])
def test_canvases_are_not_divided(folder: Path, model_type: str) -> None:
    rename(folder, model_type=model_type)
    with pytest.raises(UnsupportedModelError, match="leave tensor_parallel out"):
        Engine.from_pretrained(folder, tensor_parallel=True)


@pytest.mark.parametrize("model_type", ["sdar", "Fast_dLLM_Qwen", "diffusion_gemma"])
@pytest.mark.parametrize(("pattern", "remedy"), [("tokenizer*", "no tokenizer files"), ("*.safetensors", "fetch the")])
def test_a_folder_that_lacks_files_is_refused(folder: Path, model_type: str, pattern: str, remedy: str) -> None:
    rename(folder, model_type=model_type, mask_token_id=3)
    for file in folder.glob(pattern):
        file.unlink()
    with pytest.raises(CheckpointError, match=remedy):
        Engine.from_pretrained(folder)


def test_prompts_are_read_by_the_tokenizer_that_was_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not by that of Qwen2 with the same vocabulary, which would lose the spaces. A short load has no bar."""
    save_fast_dllm(tmp_path)
    alphabet = {letter: place for place, letter in enumerate(["<unk>", "▁", *"Helothr"])}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    saved.save_pretrained(tmp_path)
    rename(tmp_path, model_type="Fast_dLLM_Qwen", mask_token_id=3)
    capfd.readouterr()
    engine = Engine.from_pretrained(tmp_path)
    assert capfd.readouterr().err == ""
    prompt = engine.encode("Hello there")
    assert prompt == saved("Hello there").input_ids
    assert engine.tokenizer.decode(prompt) == "Hello there"


def test_a_mask_that_is_no_token_is_refused(folder: Path) -> None:
    rename(folder, model_type="sdar", block_size=8)  # neither config nor tokenizer names one, and SDAR's own is 151669
    with pytest.raises(CheckpointError, match=r"vocabulary has 260 tokens.*mask_token_id"):
        Engine.from_pretrained(folder)
