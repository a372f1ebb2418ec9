"""transformers' ``generate`` as a peer: plain, prompt lookup, and its DFlash speculation on the same weights.

transformers has no class for z-lab's checkpoints, but one of the same architecture with other names and layout. A drafter is
converted by building that class and renaming two weights.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from volley.bench.measure import Runner, TimedResults
from volley.bench.tasks import Case
from volley.config import DecodingConfig
from volley.models.checkpoints.formats import obstacles, transformers_config, transformers_names
from volley.models.drafters.drafter import Drafter
from volley.models.targets.loading import load_causal_lm
from volley.params import SamplingParams
from volley.results import FinishReason, GenerationResult, GenerationStats

LOOKUP_TOKENS = 10


class _Listener(BaseStreamer):  # type: ignore[misc]
    """Streamer that records the arrival of the first token and the size of each batch; ``generate`` sends the prompt first."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.first = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.sizes.append(value.numel())
        if len(self.sizes) == 2:
            self.first = time.perf_counter()

    def end(self) -> None: ...


def transformers_runners(
    path: str,
    drafter: Drafter | None,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[dict[Case, Runner], list[str]]:
    """Return runners for what transformers supports with these weights, and a note on each thing it does not."""
    model = load_causal_lm(path, dtype, "sdpa").to(device).eval()
    runners = {
        Case("transformers"): _runner(model, tokenizer, stop_token_ids, {}),
        Case("transformers-lookup"): _runner(
            model, tokenizer, stop_token_ids, {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        ),
    }
    if drafter is None:
        return runners, ["transformers-dflash: there is no drafter to hand over"]
    try:
        assistant = to_transformers(drafter).to(device=device, dtype=dtype).eval()
    except (ImportError, ValueError, RuntimeError) as error:
        return runners, [f"transformers-dflash: {error}"]
    dflash = _runner(model, tokenizer, stop_token_ids, {"assistant_model": assistant, "speculation_type": "dflash"})
    try:
        dflash([[0, 1]], SamplingParams(max_tokens=assistant.config.block_size + 2))
    except Exception as error:  # an error of another library is a result to report
        return runners, [f"transformers-dflash: generate failed on this target: {type(error).__name__}: {error}"]
    runners[Case("transformers-dflash", DecodingConfig(block_size=assistant.config.block_size))] = dflash
    return runners, []


def to_transformers(drafter: Drafter) -> PreTrainedModel:
    """Return the drafter as the class of transformers' DFlash generation. Raises ``ValueError`` if that is impossible."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    problems = obstacles(drafter.config, "transformers")
    if problems:
        raise ValueError("; ".join(problems))
    config = MuseGlimmerAssistantConfig.from_dict(transformers_config(drafter.config))
    config._attn_implementation = "sdpa"
    model = MuseGlimmerAssistantModel(config)
    model.load_state_dict(transformers_names(drafter.state_dict()))
    return model


def _runner(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int], how: dict[str, Any]
) -> Runner:
    def run(prompts: Sequence[list[int]], params: SamplingParams) -> TimedResults:
        assert len(prompts) == 1, "transformers speculates for one prompt at a time"
        input_ids = torch.tensor([prompts[0]], device=model.device)
        streamer = _Listener()
        torch.manual_seed(params.seed or 0)
        started = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=params.max_tokens,
                eos_token_id=None if params.ignore_eos else sorted(stop_token_ids) or None,
                pad_token_id=0,
                streamer=streamer,
                **_sampling(params),
                **how,
            )
        seconds = time.perf_counter() - started
        token_ids = output[0, len(prompts[0]) :].tolist()
        stats = GenerationStats(
            prompt_tokens=len(prompts[0]),
            output_tokens=len(token_ids),
            accepted_lengths=streamer.sizes[2:],
            time_to_first_token=(streamer.first or started + seconds) - started,
            total_seconds=seconds,
        )
        reason: FinishReason = "stop" if token_ids and token_ids[-1] in stop_token_ids else "length"
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        return TimedResults([GenerationResult(text, token_ids, reason, stats)], seconds)

    return run


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters as arguments of transformers."""
    if params.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
    return {
        "do_sample": True,
        "temperature": params.temperature,
        "top_k": params.top_k or None,
        "top_p": params.top_p,
        "min_p": params.min_p or None,
    }
