"""A tiny random DiffusionGemma, and what transformers does with it step by step."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DiffusionGemmaTextConfig
from transformers.generation.streamers import BaseStreamer

from volley import DiffusionParams, Engine, SamplingParams
from volley.decode.sampling import PositionNoise
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import make_store
from volley.models.targets.diffusion_gemma import DiffusionGemma
from volley.procedures.request import Request

VOCAB = 99
CANVAS = 16
WINDOW = 8


def random_model(
    seed: int = 0, *, is_sharp: bool = False, wide: bool = False, num_layers: int = 2, expert_size: int = 32
) -> DiffusionGemmaForBlockDiffusion:
    """Every layer has a scalar of its own in each mode; the full layer has other heads. A wide one has room for groups of codes.

    A sharp one has distributions of so little entropy that canvases settle; it computes in fp64.
    """
    text = DiffusionGemmaTextConfig(
        vocab_size=VOCAB,
        hidden_size=64 if wide else 32,
        intermediate_size=64 if wide else 32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32 if wide else 8,
        layer_types=["sliding_attention"] * (num_layers - 1) + ["full_attention"],
        sliding_window=WINDOW,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=expert_size if wide else 8,
        per_layer_config={num_layers - 1: {"head_dim": 64 if wide else 16, "num_key_value_heads": 2}},
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "intermediate_size": 37,
        "patch_size": 5,
    }
    torch.manual_seed(seed)
    config = DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=CANVAS)
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_((15 if is_sharp else 5) if weight.dim() > 1 else 1)
    for layer in [*model.model.encoder.language_model.layers, *model.model.decoder.layers]:
        layer.layer_scalar.uniform_(0.4, 1.2)
    return in_fp64(model) if is_sharp else model


def in_fp64(model: DiffusionGemmaForBlockDiffusion) -> DiffusionGemmaForBlockDiffusion:
    """Convert ``model`` in place: in fp32 two orders of summation draw another token in one sharp answer of ten."""
    model.set_experts_implementation("eager")  # the grouped products have no fp64
    model.double()
    return model


def made_up(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a prompt, a canvas behind it, and the logits of the canvas's last pass."""
    torch.manual_seed(1)
    return torch.randint(VOCAB, (length,)), torch.randint(VOCAB, (CANVAS,)), torch.randn(CANVAS, VOCAB)


def logits_of(target: DiffusionGemma, prompt: Tensor, canvas: Tensor, last: Tensor) -> Tensor:
    """Return the canvas's logits of one pass over both."""
    store = make_store("auto", target.kv_shapes, 40, target.dtype, torch.device("cpu"))
    groups = (1,) * len(prompt) + (CANVAS,)
    segment = Segment(BlockTable(4, range(10)), 0, len(prompt) + CANVAS, groups=groups, feedback=target.feedback(last))
    with torch.inference_mode():
        batch = RaggedBatch([segment], torch.cat([prompt, canvas]))
        return target.forward(batch, store, torch.arange(len(prompt), len(batch)))


class TorchNoise(PositionNoise):
    """Draws from torch's global generator, in the order of transformers' calls."""

    def __init__(self) -> None:
        super().__init__(0)

    def choose(self, probs: Tensor, start: int, step: int) -> Tensor:
        return torch.multinomial(probs, 1)[:, 0]

    def canvas_uniforms(self, start: int, step: int, length: int) -> None:
        return None

    def tokens(self, start: int, step: int, length: int, vocab_size: int) -> Tensor:
        return torch.randint(0, vocab_size, (1, length))[0]


class Trace(NamedTuple):
    """Every pass over a canvas, and the answer."""

    canvases: list[list[int]]
    """Inputs of all passes."""
    bests: list[list[int]]
    """The likeliest tokens of each pass."""
    answer: list[int]
    tokens_per_forward: float = 0.0


class _Drafts(BaseStreamer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.bests: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        pass

    def put_draft(self, value: Tensor) -> None:
        self.bests.append(value[0].tolist())

    def end(self) -> None:
        pass


def by_transformers(
    hf: DiffusionGemmaForBlockDiffusion, prompt: list[int], canvases: int, seed: int, **options: Any
) -> Trace:
    drafts, inputs = _Drafts(), list[list[int]]()

    def note(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        inputs.append(kwargs["decoder_input_ids"][0].tolist())

    handle = hf.model.register_forward_pre_hook(note, with_kwargs=True)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what it imports of torch's compiler
        output = hf.generate(torch.tensor([prompt]), max_new_tokens=canvases * CANVAS, streamer=drafts, **options)
    handle.remove()
    answer = output.sequences[0, len(prompt) :].tolist()
    return Trace(inputs, drafts.bests, answer, float(output.tokens_per_forward[0]))


def by_volley(
    engine: Engine, prompt: list[int], params: SamplingParams, seed: int, procedure: Any = None
) -> tuple[Trace, Request]:
    request = engine.add_request(prompt, params, procedure)
    request.noise = TorchNoise()
    trace, passes = Trace([], [], []), 0
    torch.manual_seed(seed)
    while request.finish_reason is None:
        canvas = request.canvas
        before = canvas and canvas.tokens.tolist()
        engine.step()
        if request.stats.denoising_steps > passes:
            passes = request.stats.denoising_steps
            # a canvas that was opened in this pass shows only what it became
            trace.canvases.append(before if before is not None else [])
            done = request.canvas is None
            last = request.token_ids[-CANVAS:] if done else request.canvas.history[-1].tolist()  # type: ignore[union-attr]
            trace.bests.append(last)
    trace.answer.extend(request.token_ids[len(prompt) :])
    return trace, request


def same(mine: Trace, theirs: Trace) -> bool:
    """Return whether both took the same passes: canvases (only the outcome of the first pass of each), bests and answer."""
    return (
        len(mine.canvases) == len(theirs.canvases)
        and all(not own or own == other for own, other in zip(mine.canvases, theirs.canvases, strict=True))
        and mine.bests == theirs.bests
        and mine.answer == theirs.answer
    )


def settings(**changes: Any) -> tuple[SamplingParams, dict[str, Any]]:
    """Settings for volley and for transformers: few steps, and some canvases settle before."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    own = {"t_min": 0.4, "t_max": 0.8, "stability_threshold": 1, "confidence_threshold": 2.0, **changes}
    params = SamplingParams(
        temperature=1.0,
        max_tokens=3 * CANVAS,
        diffusion=DiffusionParams(max_steps=6, entropy_bound=2.0, **own),
    )
    sampler = EntropyBoundSamplerConfig(entropy_bound=2.0)
    return params, {"max_denoising_steps": 6, "sampler_config": sampler, **own}
