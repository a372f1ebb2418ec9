"""Tiny quantised checkpoints: by the compressed-tensors library, and, of formats whose files are simple, by hand."""

import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.conftest import byte_tokenizer
from tests.tiny import eager_model, target_config

Save = Callable[[PreTrainedModel, Path], None]
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 4}


def compressed(scheme: str) -> Save:
    return lambda model, folder: save_compressed(model, scheme, folder)


def saved(folder: Path, save: Save) -> Path:
    """Save a wide model with a tokenizer."""
    save(eager_model(target_config(**WIDE, vocab_size=300)).requires_grad_(False), folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


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


def save_compressed(model: PreTrainedModel, scheme: str, folder: Path) -> None:
    """Quantise the linear layers of ``model`` but its head by one of the library's presets, and save it."""
    quantise(model, scheme, [torch.arange(12)[None]], folder)


def save_compressed_but(model: PreTrainedModel, scheme: str, folder: Path, ignore: list[str]) -> None:
    """Save a checkpoint quantised without calibration, except layers whose names match ``ignore``."""
    quantise(model, scheme, [], folder, ignore)


class _OneByOne(nn.Module):
    """Experts as released checkpoints have them: linear layers ``N.gate_proj``, ``N.up_proj`` and ``N.down_proj``."""

    def __init__(self, stacked: nn.Module) -> None:
        super().__init__()
        for place, (both, down) in enumerate(zip(stacked.gate_up_proj, stacked.down_proj, strict=True)):  # type: ignore[arg-type]
            gate, up = both.chunk(2)
            own = nn.ModuleDict({"gate_proj": _linear(gate), "up_proj": _linear(up), "down_proj": _linear(down)})
            self.add_module(str(place), own)


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    return layer


def save_by_expert(model: PreTrainedModel, scheme: str, folder: Path, ignore: list[str]) -> dict[str, Tensor]:
    """Quantise linear layers and single experts; returns the decoded weights by the names of an unquantised checkpoint."""
    from compressed_tensors.compressors import ModelCompressor

    for name in [name for name, module in model.named_modules() if hasattr(module, "gate_up_proj")]:
        model.set_submodule(name, _OneByOne(model.get_submodule(name)))
    save_compressed_but(model, scheme, folder, ignore)
    ModelCompressor.from_pretrained_model(model).decompress_model(model)
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, _OneByOne):
            parts = [{part: layer.weight for part, layer in own.items()} for own in module.children()]  # type: ignore[operator]
            weights[f"{name}.gate_up_proj"] = torch.stack(
                [torch.cat([own["gate_proj"], own["up_proj"]]) for own in parts]
            )
            weights[f"{name}.down_proj"] = torch.stack([own["down_proj"] for own in parts])
        elif isinstance(module, nn.Linear) and ".experts." not in name:
            weights[f"{name}.weight"] = module.weight
    return {name: value.detach().float() for name, value in weights.items()}


def _save(
    model: PreTrainedModel, folder: Path, settings: dict[str, Any], replaced: dict[str, dict[str, Tensor]]
) -> None:
    """Save ``model`` with the parts of some of its weights in their place."""
    tensors = {name: value for name, value in model.state_dict().items() if name not in replaced}
    model.save_pretrained(folder)
    for name, parts in replaced.items():
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    edit_config(folder, quantization_config=settings)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def linear_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The matrices of the decoder's layers by name."""
    return {
        f"{name}.weight": module.weight.detach()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }


def _pack(codes: Tensor, bits: int) -> Tensor:
    """int32 ``[rows, columns · bits / 32]``, lowest bits first: one number after the other, as the formats are defined."""
    rows, columns = codes.shape
    packed = torch.zeros(rows, columns * bits // 32, dtype=torch.int64)
    for column in range(columns):
        packed[:, column * bits // 32] |= codes[:, column].long() << (column * bits % 32)
    return packed.where(packed < 2**31, packed - 2**32).to(torch.int32)


def _affine(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[out, in]``, zeros and scales ``[out, groups]``, found from the least and the largest weight of a group."""
    parts = weight.float().view(len(weight), -1, group)
    low, high = parts.amin(-1).clamp_max(0), parts.amax(-1).clamp_min(0)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1).long()
    codes = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1).long()
    return codes.view(weight.shape), zeros, scales


def save_gptq(
    model: PreTrainedModel, folder: Path, bits: int = 4, *, act_order: bool = False, version: str = "gptq"
) -> None:
    """Quantise the linear layers as GPTQ stores them, without its calibration, groups of 32 inputs in their order or another.

    The weights of ``model`` become what the file says.
    """
    replaced = {}
    for name, weight in linear_weights(model).items():
        order = torch.randperm(weight.shape[1]) if act_order else torch.arange(weight.shape[1])
        codes, zeros, scales = _affine(weight[:, order], bits, 32)
        groups = torch.arange(len(order)) // 32
        weight[:, order] = ((codes - zeros[:, groups]) * scales.float()[:, groups]).to(weight.dtype)
        back = order.argsort()
        replaced[name] = {
            "qweight": _pack(codes[:, back], bits).T,
            "qzeros": _pack(zeros.T - int(version == "gptq"), bits),
            "scales": scales.T,
            "g_idx": groups[back].to(torch.int32),
        }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": act_order, "sym": False}
    _save(model, folder, {**settings, "checkpoint_format": version}, replaced)


def save_symmetric_gptq(model: PreTrainedModel, folder: Path, bits: int, group: int) -> None:
    """Save GPTQ without zero points, and without an order of inputs; ``group`` −1 is a scale for each output."""
    replaced = {}
    for name, weight in linear_weights(model).items():
        size, half = weight.shape[1] if group == -1 else group, 2 ** (bits - 1)
        parts = weight.float().view(len(weight), -1, size)
        scales = (parts.abs().amax(-1) / (half - 1)).half()
        codes = (parts / scales[..., None].float()).round().clamp(-half, half - 1)
        weight.copy_((codes * scales[..., None].float()).view(weight.shape).to(weight.dtype))
        zeros = torch.full((scales.shape[1], len(weight)), half - 1)  # the older format stores zeros less one
        replaced[name] = {
            "qweight": _pack(codes.view(weight.shape).long() + half, bits).T,
            "qzeros": _pack(zeros, bits),
            "scales": scales.T,
        }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True}
    _save(model, folder, settings, replaced)


def save_awq(model: PreTrainedModel, folder: Path) -> None:
    """Quantise the linear layers as AutoAWQ stores them, without its calibration; ``model`` becomes what the file says."""
    replaced = {}
    for name, weight in linear_weights(model).items():
        codes, zeros, scales = _affine(weight, 4, 32)
        weight.copy_(
            ((codes - zeros.repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)).to(weight.dtype)
        )
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        packed = [_pack(part.T.reshape(-1, 8)[:, order].view(part.shape[1], -1), 4) for part in (codes, zeros)]
        replaced[name] = {"qweight": packed[0], "qzeros": packed[1], "scales": scales.T}
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    _save(model, folder, settings, replaced)


def save_fp8(model: PreTrainedModel, folder: Path) -> None:
    """Quantise the linear layers as DeepSeek does: a scale for every block of 128 × 128, smaller at the edges.

    ``model`` becomes what the file says.
    """
    replaced = {}
    for name, weight in linear_weights(model).items():
        codes = torch.zeros_like(weight, dtype=torch.float8_e4m3fn)
        scales = torch.zeros([-(-size // 128) for size in weight.shape])
        for row, column in itertools.product(*map(range, scales.shape)):
            place = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scales[row, column] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            weight[place] = codes[place].to(weight.dtype) * scales[row, column]
        replaced[name] = {"weight": codes, "weight_scale_inv": scales}
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    _save(model, folder, settings, replaced)


def save_whole_fp8(model: PreTrainedModel, folder: Path, scale: str, inputs: str) -> None:
    """Save FP8 with one scale for a matrix and one for inputs, under the names of Mistral's or AutoFP8's files."""
    replaced = {}
    for name, weight in linear_weights(model).items():
        factor = weight.abs().max() / 448
        codes = (weight / factor).to(torch.float8_e4m3fn)
        weight.copy_(codes.to(weight.dtype) * factor)
        replaced[name] = {"weight": codes, scale: factor, inputs: torch.tensor(0.01)}
    _save(model, folder, {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, replaced)


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def save_mxfp4(model: PreTrainedModel, folder: Path) -> None:
    """Quantise the experts of a GPT-OSS model; ``model`` becomes what the file says."""
    replaced: dict[str, dict[str, Tensor]] = {}
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weight = tensors.pop(name)
        groups = weight.transpose(1, 2).float().unflatten(-1, (-1, 32))  # [experts, out, in / 32, 32]
        exponents = (groups.abs().amax(-1) / 6).log2().ceil()
        codes = (groups / 2 ** exponents[..., None]).unsqueeze(-1).sub(FP4).abs().argmin(-1)
        weight.copy_((FP4[codes] * 2 ** exponents[..., None]).flatten(-2).transpose(1, 2).to(weight.dtype))
        pairs = codes.unflatten(-1, (16, 2)).to(torch.uint8)
        replaced[name] = {"blocks": pairs[..., 0] | pairs[..., 1] << 4, "scales": (exponents + 127).to(torch.uint8)}
    model.save_pretrained(folder)
    for name, parts in replaced.items():
        tensors |= {f"{name}_{part}": value for part, value in parts.items()}
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    edit_config(
        folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "lm_head"]}
    )
