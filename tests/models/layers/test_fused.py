"""Fused layers and decoders of many families against transformers' own forward in bf16, and models that are not fused."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from tests.models.families import COMMON, FUSED, OTHERS
from tests.models.test_families import COUNT, answers_of
from tests.tiles import needs_kernels
from tests.tiny import eager_model, random_drafter, random_prompts
from volley import Engine, SamplingParams
from volley.config import KVDtype
from volley.memory.attention import paged_attention
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import make_store
from volley.models.drafters.draft_model import DraftModel
from volley.models.layers.accelerate import accelerate
from volley.models.layers.fused import CosineTable, FusedDecoder, FusedLayer, turns_of
from volley.models.targets.taps import Taps
from volley.models.targets.target import Target
from volley.native import Product, Weights

pytestmark = needs_kernels
LENGTH, PAGE = 40, 4
ROUTED = {"qwen3_moe", "olmoe", "mixtral", "gpt_oss", "qwen2_moe"}
ALL: dict[str, Callable[[], Any]] = {
    **FUSED,
    **OTHERS,
    "windows": lambda: tf.Qwen3Config(
        **COMMON,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
}


@functools.cache
def plain(name: str) -> tf.PreTrainedModel:
    model = eager_model(ALL[name]())
    nn.Module.to(model, torch.bfloat16)
    for parameter_name, parameter in model.named_parameters():
        if "bias" in parameter_name or "sinks" in parameter_name:
            nn.init.normal_(parameter, 0.0, 0.3)
        elif "norm" in parameter_name:
            nn.init.normal_(parameter, 0.0 if "gemma" in name else 1.0, 0.2)
    return model.requires_grad_(False)


def accelerated(name: str, weights: Weights = "bf16", *, release: bool = False) -> tf.PreTrainedModel:
    model = copy.deepcopy(plain(name))
    assert accelerate(model, weights, release=release)
    return model


TOKENS = torch.randint(1, 60, (LENGTH,), generator=torch.Generator().manual_seed(5))
TAPS = (-1, 0, 2)


@torch.inference_mode()
def forward(target: Target, lengths: list[int], kind: KVDtype = "auto") -> tuple[Tensor, Tensor]:
    """Logits ``[LENGTH, V]`` and taps ``[LENGTH, 3 · H]``, read in chunks of such lengths on scattered pages."""
    store = make_store(kind, target.kv_shapes, LENGTH, torch.bfloat16, torch.device("cpu"))
    table, found, done = BlockTable(PAGE, [3, 9, 0, 5, 1, 7, 2, 4, 8, 6]), [], 0
    with Taps(target.model, TAPS) as taps:
        for length in lengths:
            batch = RaggedBatch([Segment(table, done, length)], TOKENS[done : done + length])
            logits = target.forward(batch, store, torch.arange(length), taps)
            found.append((logits, taps.take()[0]))
            done += length
    logits, states = (torch.cat(parts) for parts in zip(*found, strict=True))
    return logits, states


@functools.cache
def expected(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """transformers' own."""
    return by_transformers(copy.deepcopy(plain(name)).to(dtype))


@torch.inference_mode()
def by_transformers(model: tf.PreTrainedModel) -> tuple[Tensor, Tensor]:
    with Taps(model, TAPS) as taps:
        return model(TOKENS[None], use_cache=False).logits[0], taps.take()[0]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def usual_error(found: Tensor, wanted: Tensor) -> float:
    """Half of the tokens are no further off."""
    errors = (found.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
    return float(errors.median())


def assert_as_exact(name: str, found: tuple[Tensor, Tensor]) -> None:
    """Logits and taps are about as far from those in fp32 as transformers' own in bf16 are.

    Where scores of experts are nearly equal, a rounding gives a token others.
    """
    compare = usual_error if name in ROUTED else error
    for mine, theirs, exact in zip(found, expected(name), expected(name, torch.float32), strict=True):
        assert compare(mine, exact) <= 1.5 * compare(theirs, exact)


def fused_layers(model: tf.PreTrainedModel) -> list[nn.Module]:
    return [layer for layer in model.get_decoder().layers if isinstance(vars(layer).get("forward"), FusedLayer)]


# -- what is fused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_logits_and_taps_are_those_of_transformers(name: str, release: bool) -> None:
    model = accelerated(name, release=release)
    assert len(fused_layers(model)) == 3
    assert_as_exact(name, by_transformers(model))  # under its own attention still
    target = Target(model)
    assert target.fused is not None
    for lengths in ([LENGTH], [7, 1, 1, 20, 11]):
        found = forward(target, lengths)
        assert_as_exact(name, found)
        assert torch.equal(found[1][:, :64], expected(name)[1][:, :64]), "embeddings are not rounded"


@pytest.mark.parametrize("name", FUSED)
def test_all_layers_at_once_and_one_by_one_agree_to_the_bit(name: str) -> None:
    """Without taps, with them, and by transformers' own loop over fused layers."""
    target = Target(accelerated(name))
    whole = forward(target, [LENGTH])
    target.fused = None
    for found, wanted in zip(forward(target, [13, 1, 26]), whole, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("weights", ["bf16", "int4"])
@pytest.mark.parametrize("name", FUSED)
def test_drafted_answers_are_plain_ones(name: str, weights: Weights) -> None:
    """Several requests at once, in chunks, with drafts that are wrong in one token of five."""
    target = Target(accelerated(name, weights, release=True))
    prompts, params = random_prompts(3, seed=4, vocab=60, longest=20), SamplingParams(max_tokens=COUNT)
    engine = Engine(target, block_size=1, exact=True)
    plainly = [next(engine.generate([prompt], params)).token_ids for prompt in prompts]
    assert len({token for answer in plainly for token in answer}) > 8, "or this would prove little"
    assert answers_of(target, prompts, plainly) == plainly


@pytest.mark.parametrize("threads", [1, 3])
def test_tapped_states_are_those_of_fewer_layers(threads: int) -> None:
    """To the bit, whatever order they are asked for in."""
    layers = list(accelerated("qwen3").model.layers)
    batch = RaggedBatch([Segment(BlockTable(PAGE, range(LENGTH // PAGE)), 0, LENGTH)], TOKENS)
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(LENGTH, 64, generator=generator).bfloat16()
    turns = tuple(torch.randn(LENGTH, 32, generator=generator).bfloat16() for _ in range(2))

    def run(count: int, tapped: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        store = make_store("auto", [(2, 32)] * count, LENGTH, torch.bfloat16, torch.device("cpu"))
        decoder = FusedDecoder.of_layers(layers[:count])
        assert decoder is not None
        return decoder(states, [turns], batch, store, tapped)  # type: ignore[list-item]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        final, features = run(3, (1, -1, 2, 0, 1))
    finally:
        torch.set_num_threads(before)
    after = [states, *(run(count)[0] for count in (1, 2, 3))]
    assert torch.equal(final, after[3])
    assert torch.equal(features, torch.cat([after[layer + 1] for layer in (1, -1, 2, 0, 1)], dim=1))
    assert run(3)[1].shape == (LENGTH, 0)


@pytest.mark.parametrize("parameter", ["self_attn.k_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"])
def test_a_changed_weight_is_found(parameter: str) -> None:
    """A fortieth of one layer's weights is another."""
    model = copy.deepcopy(plain("qwen3"))
    weight = model.model.layers[1].get_parameter(parameter)
    weight.view(-1)[::40] += 0.5
    accelerate(model)
    with pytest.raises(AssertionError):
        assert_as_exact("qwen3", forward(Target(model), [LENGTH]))


def test_a_window_is_seen() -> None:
    """Layers of a model without the window's say so in their logits."""
    model = copy.deepcopy(plain("mistral"))
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    model.config.sliding_window = None
    accelerate(model)
    with pytest.raises(AssertionError):
        assert_as_exact("mistral", forward(Target(model), [LENGTH]))


def test_layers_may_differ_in_their_windows() -> None:
    target = Target(accelerated("windows"))
    assert target.fused is not None
    assert_as_exact("windows", forward(target, [9, 31]))


# -- what is not --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_are_not_fused_and_agree(name: str) -> None:
    model = accelerated(name, release=True)
    assert not fused_layers(model)
    target = Target(model)
    assert target.fused is None
    for lengths in ([LENGTH], [7, 1, 1, 20, 11]):
        assert_as_exact(name, forward(target, lengths))


def test_a_model_that_does_something_else_with_its_states_keeps_its_own_loop() -> None:
    """Its layers are fused; it multiplies embeddings by another number than its config says."""
    assert Target(accelerated("granite")).fused is not None
    model = accelerated("granite")
    model.model.embedding_multiplier = 2.0
    target = Target(model)
    assert len(fused_layers(model)) == 3
    assert target.fused is None


def test_layers_of_several_shapes_run_one_by_one() -> None:
    model = copy.deepcopy(plain("llama"))
    for norm in (model.model.layers[1].input_layernorm, model.model.layers[1].post_attention_layernorm):
        norm.variance_epsilon = 0.1
    accelerate(model)
    assert len(fused_layers(model)) == 3
    assert FusedDecoder.of_layers(list(model.model.layers)) is None


def test_mlps_may_differ_in_their_width() -> None:
    model = copy.deepcopy(plain("llama"))
    narrow = tf.LlamaConfig(**{**COMMON, "intermediate_size": 64})
    model.model.layers[0].mlp = tf.models.llama.modeling_llama.LlamaMLP(narrow).bfloat16()
    wanted = by_transformers(copy.deepcopy(model))
    accelerate(model)
    target = Target(model)
    assert target.fused is not None
    for found, own in zip(forward(target, [9, 31]), wanted, strict=True):
        assert error(found, own) < 2**-5


# -- weights that are given up ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_tied"])
def test_embedding_and_head_outlive_their_weights(name: str, weights: Weights) -> None:
    original, model = plain(name), accelerated(name, weights, release=True)
    on_meta = {parameter_name for parameter_name, parameter in model.named_parameters() if parameter.is_meta}
    linear = {f"{module_name}.weight" for module_name, module in original.named_modules() if type(module) is nn.Linear}
    looked_up = {"model.embed_tokens.weight"} if name == "qwen3_tied" or weights != "bf16" else set()
    assert on_meta == {parameter_name for parameter_name, _ in model.named_parameters()} & (linear | looked_up)
    target = Target(model)
    assert (target.vocab_size, target.hidden_size) == (60, 64)
    head = original.get_output_embeddings().weight
    assert torch.equal(target.kept_head[: target.vocab_size], Product(head, None, weights).weight())
    if weights == "bf16":
        assert torch.equal(target.kept_head[: target.vocab_size], head)
    own = Product(original.get_input_embeddings().weight, None, "int8" if weights != "bf16" else "bf16").weight()
    wanted = target.kept_head[: target.vocab_size] if name == "qwen3_tied" else own
    assert torch.equal(target.embed(TOKENS), wanted[TOKENS])


def test_weights_stay_unless_they_are_to_be_released() -> None:
    model = accelerated("qwen3")
    for found, wanted in zip(model.parameters(), plain("qwen3").parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", FUSED)
def test_targets_of_codes(name: str, weights: Weights) -> None:
    """About the logits of transformers with the weights that the codes stand for, and exactly the same in any chunks."""
    target = Target(accelerated(name, weights, release=True))
    assert target.fused is not None
    whole = forward(target, [LENGTH])
    decoded = copy.deepcopy(plain(name))
    for module in decoded.modules():
        matrices = [module.weight] if isinstance(module, nn.Linear) else []
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            experts = (*module.gate_up_proj, *module.down_proj)
            matrices = [matrix.T if module.is_transposed else matrix for matrix in experts]
        for matrix in matrices:
            matrix.copy_(Product(matrix.contiguous(), None, weights).weight())
    embedding = decoded.get_input_embeddings().weight
    if embedding is not decoded.get_output_embeddings().weight:
        embedding.copy_(Product(embedding, None, "int8").weight())
    wanted, _ = by_transformers(decoded)
    compare = usual_error if name in ROUTED else error
    assert compare(whole[0], wanted) < (0.2 if name == "gemma2" else 2**-3)  # its logits are capped
    assert compare(whole[0], expected(name)[0]) > compare(whole[0], wanted)
    for found, again in zip(forward(target, [7, 1, 1, 20, 11]), whole, strict=True):
        assert torch.equal(found, again)


# -- pools that the kernels do not read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_pools_take_the_layers_one_by_one(kind: KVDtype) -> None:
    target = Target(accelerated("qwen3", release=True))
    unfused = Target(copy.deepcopy(plain("qwen3")))
    found, wanted = forward(target, [17, 23], kind), forward(unfused, [17, 23], kind)
    assert error(found[0], wanted[0]) < (2**-4 if kind == "int8" else 2**-2)
    assert error(wanted[0], expected("qwen3")[0]) > error(forward(target, [17, 23])[0], expected("qwen3")[0])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_answers_from_quantised_pools(kind: KVDtype) -> None:
    """A decoder in one call would read them wrongly; without it the tokens are the same."""
    params = SamplingParams(max_tokens=24)
    answers = []
    for with_decoder in (True, False):
        target = Target(accelerated("qwen3", release=True))
        if not with_decoder:
            target.fused = None
        engine = Engine(target, page_size=PAGE, num_pages=40, kv_dtype=kind)
        answers.append([next(engine.generate([TOKENS[:n].tolist()], params)).token_ids for n in (5, 18, 30)])
    assert answers[0] == answers[1]


@torch.inference_mode()
def test_a_drafter_with_biases() -> None:
    """As gpt-oss drafters have them."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    drafter = random_drafter(attention_bias=True, **shape).bfloat16()
    fused, unbiased = copy.deepcopy(drafter), copy.deepcopy(drafter)
    fused.fuse()
    assert fused.fused is not None
    for name, parameter in unbiased.named_parameters():
        if "bias" in name:
            parameter.zero_()
    batch = RaggedBatch([Segment(BlockTable(PAGE, [0, 1]), 0, 6, causal=False)], torch.arange(6))
    table, found = torch.randn(6, 64).bfloat16(), []
    for own in (drafter, fused, unbiased):
        store = make_store("auto", own.kv_shapes, 2 * PAGE, torch.bfloat16, torch.device("cpu"))
        model = DraftModel(own, store, paged_attention, lambda ids: table[ids], lambda states: states)
        found.append(model.block_states(batch, store))
    assert error(found[1], found[0]) < 0.05
    assert error(found[2], found[0]) > 0.1


@pytest.mark.parametrize(
    "scaling", [{}, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}]
)
def test_a_table_has_the_models_own_cosines(scaling: dict[str, Any]) -> None:
    """Those of dynamic frequencies depend on the longest position, so none are kept."""
    config = tf.LlamaConfig(
        **COMMON
        | {"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **scaling}}
    )
    rotary, slow = (tf.models.llama.modeling_llama.LlamaRotaryEmbedding(config) for _ in range(2))
    table, states = CosineTable(rotary, None), torch.zeros(3, 8).bfloat16()
    for positions in ([0, 1, 2], [900, 3, 1500], [1023, 1024, 5], [4, 4, 4]):
        places = torch.tensor(positions)
        expected = turns_of(slow, None, states[None], places[None])
        for found, own in zip(table(states, places, max(positions) + 1), expected, strict=True):
            assert torch.equal(found, own[0])
