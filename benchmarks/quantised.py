"""What quantisation costs the bundled pair: perplexity, greedy tokens, and τ of the unquantised target's drafter.

Needs compressed-tensors (`pip install 'volley-llm[quant]'`), which quantises weights without calibration; static scales of inputs
come from the first prompts, and the figures from others.

python benchmarks/quantised.py --data DIR   (a folder with gsm8k_test.jsonl)
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from volley import Engine, GenerationResult, SamplingParams
from volley.chat import encode_chat
from volley.files import REFERENCE
from volley.models.quantised.scheme import quantisation_of
from volley.models.targets.loading import load_causal_lm, load_config
from volley.prompts import read_jsonl

SCHEMES = ("W8A16", "W8A8", "FP8_DYNAMIC", "FP8", "W4A16", "NVFP4A16", "NVFP4", "MXFP4A16")
CALIBRATION = 40  # prompts that figures are not taken from


def quantise(
    model: PreTrainedModel, scheme: str, texts: Sequence[Tensor], folder: Path, ignore: Sequence[str] = ()
) -> None:
    """Quantise the linear layers of ``model`` but its head by one of the library's presets, and save it.

    The largest inputs are those of a pass over each of ``texts`` (token ids ``[1, T]``). ``ignore`` names further layers, or
    patterns of their names (``re:…``), that stay as they are.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    largest = _largest_inputs(model, texts)
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head", *ignore]))
    for name, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            _set_scales(module, largest.get(name, 1.0))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def _largest_inputs(model: PreTrainedModel, texts: Sequence[Tensor]) -> dict[str, float]:
    """The largest size of each linear layer's inputs."""
    found: dict[str, float] = {}

    def note(name: str) -> Any:
        def hook(_: Any, inputs: tuple[Tensor, ...]) -> None:
            found[name] = max(found.get(name, 0.0), inputs[0].abs().max().item())

        return hook

    with ExitStack() as hooks, torch.inference_mode():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                hooks.callback(module.register_forward_pre_hook(note(name)).remove)
        for text in texts:
            model(text)
    return found


def _set_scales(layer: Any, largest_input: float) -> None:
    """Fill in the scales of a layer, from the least and the largest weight of each group."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments, weight = layer.quantization_scheme.weights, layer.weight.detach().float()
    if arguments.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif arguments.strategy == "channel":
        parts = weight[:, None]
    elif arguments.strategy == "block":
        rows, columns = arguments.block_structure
        parts = weight.unfold(0, rows, rows).unfold(1, columns, columns).flatten(-2)
    else:
        parts = weight.view(len(weight), -1, arguments.group_size)
    low, high = parts.amin(-1), parts.amax(-1)
    whole = None
    if hasattr(layer, "weight_global_scale"):
        whole = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
        layer.weight_global_scale.data.copy_(whole)
    scale, zero = calculate_qparams(low, high, arguments, global_scale=whole)
    layer.weight_scale.data.copy_(scale.view_as(layer.weight_scale))
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.data.copy_(zero.view_as(layer.weight_zero_point))
    limit = torch.tensor([largest_input])
    if hasattr(layer, "input_scale"):
        layer.input_scale.data.fill_(largest_input / 448)
    if hasattr(layer, "input_global_scale"):
        layer.input_global_scale.data.copy_(generate_gparam(-limit, limit))


def perplexity(model: PreTrainedModel, texts: Sequence[tuple[Tensor, int]]) -> float:
    """Of what follows the first tokens, as many as is said, of each text ``[1, T]``."""
    loss, count = 0.0, 0
    with torch.inference_mode():
        for text, given in texts:
            logits = model(text).logits[0, given - 1 : -1].float()
            loss += torch.nn.functional.cross_entropy(logits, text[0, given:], reduction="sum").item()
            count += text.shape[1] - given
    return float(torch.tensor(loss / count).exp())


def shared(mine: Sequence[GenerationResult], theirs: Sequence[GenerationResult]) -> tuple[int, float]:
    """Answers that are the same, and the share of tokens before the first difference."""
    same = common = total = 0
    for a, b in zip(mine, theirs, strict=True):
        pairs = [x == y for x, y in zip(a.token_ids, b.token_ids, strict=False)]
        same += a.token_ids == b.token_ids
        common += pairs.index(False) if False in pairs else len(pairs)
        total += len(b.token_ids)
    return same, common / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    options = parser.parse_args()
    logging.disable_progress_bar()
    source = REFERENCE / "target"
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = [row for _, row in read_jsonl(options.data / "gsm8k_test.jsonl")][: CALIBRATION + options.num_prompts]
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    prompts = [encode_chat(tokenizer, chat) for chat in chats]
    texts = [
        (torch.tensor([p + tokenizer(row["answer"])["input_ids"]]), len(p))
        for p, row in zip(prompts, rows, strict=True)
    ]
    asked, params = prompts[CALIBRATION:], SamplingParams(max_tokens=options.max_tokens)

    def answers(target: Path) -> list[GenerationResult]:
        return list(
            Engine.from_pretrained(target, drafter=REFERENCE / "drafter", policy="fixed").generate(asked, params)
        )

    whole = answers(source)
    print(
        "| weights | inputs | perplexity | answers the same | tokens before a difference | τ |\n|---|---|---|---|---|---|"
    )

    def row(scheme: str, inputs: str, model: PreTrainedModel, results: list[GenerationResult]) -> None:
        same, common = shared(results, whole)
        lengths = [n for result in results for n in result.stats.accepted_lengths]
        facts = f"{perplexity(model, texts[CALIBRATION:]):.3f} | {same} of {len(whole)} | {common:.0%}"
        print(f"| {scheme} | {inputs} | {facts} | {sum(lengths) / len(lengths):.2f} |", flush=True)

    row("bf16", "", load_causal_lm(source, torch.bfloat16, "sdpa"), whole)
    for scheme in options.schemes:
        with tempfile.TemporaryDirectory() as folder:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
            quantise(model, scheme, [text for text, _ in texts[:CALIBRATION]], Path(folder))
            tokenizer.save_pretrained(folder)
            loaded = load_causal_lm(folder, torch.bfloat16, "sdpa")
            found = quantisation_of(load_config(folder))
            assert found is not None
            row(f"{scheme}: {found.weights}", found.inputs, loaded, answers(Path(folder)))


if __name__ == "__main__":
    main()
