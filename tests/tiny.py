"""Tiny random models, what the target alone would write, and a drafter that is often right."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config

from volley import Engine, GenerationResult, SamplingParams
from volley.decode.work import Works
from volley.memory.batch import RaggedBatch
from volley.memory.graphs import static_passes
from volley.models.checkpoints.checkpoint import DrafterConfig
from volley.models.drafters.drafter import Drafter
from volley.models.targets.target import Target
from volley.procedures.request import Request
from volley.proposers.block import BlockProposer

VOCAB = 50
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Pair(NamedTuple):
    target: Target
    drafter: Drafter
    hf: PreTrainedModel
    """Return the model with the same weights under transformers' own attention."""


def target_config(**changes: Any) -> Qwen3Config:
    values = {
        **SHAPE,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "num_hidden_layers": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Qwen3Config(**{**values, **changes})


def drafter_config(**changes: Any) -> DrafterConfig:
    values = {
        **SHAPE,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "block_size": 6,
        "mask_token_id": 3,
        "target_layer_ids": (0, 2),
    }
    return DrafterConfig(**{**values, **changes})


def eager_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()


def random_drafter(seed: int = 1, **changes: Any) -> Drafter:
    torch.manual_seed(seed)
    drafter = Drafter(drafter_config(**changes)).eval()
    for name, weight in drafter.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return drafter.requires_grad_(False)


def make_pair(seed: int = 0, drafter: Mapping[str, Any] | None = None, **changes: Any) -> Pair:
    hf = eager_model(target_config(**changes), seed)
    return Pair(Target(copy.deepcopy(hf)), random_drafter(seed + 1, **(drafter or {})), hf)


_WRITTEN: WeakKeyDictionary[PreTrainedModel, dict[tuple[tuple[int, ...], int], list[int]]] = WeakKeyDictionary()
"""Answers of ``greedy`` by model; no test changes the weights of one."""


def greedy(hf: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return the answer of transformers' own ``generate``."""
    found, asked = _WRITTEN.setdefault(hf, {}), (tuple(prompt), count)
    if asked not in found:
        ids = torch.tensor([asked[0]])
        with torch.inference_mode():
            output = hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        found[asked] = output[0, ids.shape[1] :].tolist()
    return list(found[asked])


def tokens(results: Iterable[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


def answered(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[GenerationResult]:
    """Return the results, once it is checked that no page is lost."""
    results = list(engine.generate(list(prompts), params))
    engine.check_integrity()
    assert engine.snapshot().pages_used == 0
    assert not engine.has_work
    return results


def finish(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Runs all to their end; their tokens. The pages are counted again after each step."""
    while any(request.finish_reason is None for request in requests):
        engine.step()
        engine.check_integrity()
    assert engine.snapshot().pages_used == 0
    return [request.result().token_ids for request in requests]


def random_prompts(count: int, *, longest: int = 40, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


def answers_and_drafts(
    engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> tuple[list[GenerationResult], list[list[list[int]]]]:
    """Answer of each request, and all proposals for it."""
    seen: dict[int, list[list[int]]] = {}

    def listen(request: Any, proposal: Any, verdict: Any) -> None:
        seen.setdefault(request.request_id, []).append(proposal.token_ids)

    engine.on_verified.append(listen)
    results = list(engine.generate(prompts, params))
    engine.on_verified.remove(listen)
    return results, [seen[request_id] for request_id in sorted(seen)]


def drafts_of(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    """All proposals of each request: they show any change of draft weights or of their context."""
    return answers_and_drafts(engine, prompts, params)[1]


Answers = Mapping[tuple[int, ...], Sequence[int]]


class Taught(BlockProposer):
    """Lets the drafter run as it is, then makes it know four of five tokens of each prompt's ``answers``."""

    def __init__(self, inner: BlockProposer, answers: Answers) -> None:
        super().__init__(inner.model, inner.config)
        self.inner, self.answers = inner, answers

    def position_logits(self, works: Works, blocks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        logits, hidden = self.inner.position_logits(works, blocks)
        logits = logits.clone()
        row = 0
        for work in works:
            request = work.request
            answer = self.answers[tuple(request.token_ids[: request.num_prompt])]
            for position in range(work.spec.positions):
                index = request.num_output + position
                if index < len(answer) and (index + request.num_prompt) % 5:
                    logits[row, answer[index]] = 100.0 + position
                row += 1
        return logits, hidden


def block_proposer(engine: Engine) -> BlockProposer:
    assert isinstance(engine.core.proposer, BlockProposer)
    return engine.core.proposer


def teach(engine: Engine, answers: Answers) -> None:
    """A random drafter is never right, so without this no test would see a long acceptance."""
    engine.core.proposer = Taught(block_proposer(engine), answers)


class Placed(BlockProposer):
    """Lets the drafter run as it is, then makes it know what stands at some positions, whatever is before them.

    It looks at the positions that the pass itself has, so they are right in fixed memory too.
    """

    def __init__(self, inner: BlockProposer, tokens: Mapping[int, int], page_size: int) -> None:
        super().__init__(inner.model, inner.config)
        assert inner.passes is not None, "the engine has a page that no request has"
        self.known = torch.zeros(max(tokens) + 1, inner.model.drafter.config.vocab_size)
        for position, token in tokens.items():
            self.known[position, token] = 100.0
        self.known = self.known.to(inner.model.device)
        self.drafts_on_device = True
        self.use_fixed_memory(page_size)

    def use_fixed_memory(self, page_size: int) -> None:
        model = self.model

        def forward(batch: RaggedBatch, rows: Tensor) -> list[Tensor]:
            states = model.block_states(batch, model.store)[rows]
            places = batch.positions.index_select(0, rows).clamp(max=len(self.known) - 1)
            return [model.logits(states) + self.known.index_select(0, places), states]

        self.passes = static_passes(forward, model.store, page_size, model.device, self.block_size)


def place(engine: Engine, texts: Sequence[Sequence[int]]) -> None:
    """Let the drafter know three tokens of ``texts`` in turn, each a prompt and its answer."""
    end = max(map(len, texts))
    each = ((position, texts[position // 3 % len(texts)]) for position in range(end))
    tokens = {position: text[position] for position, text in each if position < len(text)}
    placed = Placed(block_proposer(engine), tokens, engine.capacity.page_size)
    engine.core.proposer = engine.core.async_launch.proposer = placed
    engine.core.pacing.costs.drafts_on_device = True
