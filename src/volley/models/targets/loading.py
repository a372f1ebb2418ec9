"""Loaders of models, configs and tokenizers from a Hugging Face folder, the hub, a GGUF file, or volley's bundle."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import __version__ as transformers_version
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as logs

from volley import native
from volley.errors import CheckpointError, UnsupportedModelError, VolleyError
from volley.files import find_target, read_json
from volley.models.gguf.codes import codes_for
from volley.models.gguf.file import GGUFFile, is_gguf
from volley.models.gguf.model import load_model as load_gguf
from volley.models.gguf.model import open_model
from volley.models.gguf.target import read_config
from volley.models.gguf.tokenizer import load_gguf_tokenizer
from volley.models.layers.accelerate import Fill, filled
from volley.models.layers.empty_weights import empty_weights
from volley.models.layers.products import check_weights
from volley.models.quantised.decoded import Twins
from volley.models.quantised.packed import folder_of, open_tensors
from volley.models.quantised.scheme import load_model, quantisation_of, take_generation_config
from volley.models.quantised.small_floats import keep_small_floats
from volley.models.quantised.stored_codes import attach
from volley.models.targets.canvases import check_causal, config_values, kind_of, read_kind
from volley.models.targets.families import family_of
from volley.models.targets.folders import HUB_NAME, check_config_file
from volley.native import TargetWeights, Weights

_CPU = torch.device("cpu")
log = logging.getLogger("volley")


@contextmanager
def reading(
    path: str | Path, what: str, remedy: str = "give a hub name or a folder with config.json"
) -> Iterator[None]:
    """Turn the many errors of transformers and safetensors into a CheckpointError: ``what`` cannot be read."""
    try:
        yield
    except VolleyError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: {what} cannot be read ({reason}); {remedy}") from error


def load_config(path: str | Path, *, causal: bool = False) -> PretrainedConfig:
    """Load the config of a target without its weights. A diffusion language model gets the config of its weights' architecture.

    With ``causal`` a target that no drafter can serve is refused (:func:`check_causal`).
    """
    path = find_target(path)
    if is_gguf(path):
        return read_config(GGUFFile(path))
    check_config_file(path)
    values, kind = read_kind(path)
    if causal:
        check_causal(path, kind)
    family = family_of(kind)
    if family is not None and family.architecture is not None:
        named = ("auto_map", "model_type", "architectures")
        return AutoConfig.for_model(
            family.architecture, **{name: own for name, own in values.items() if name not in named}
        )
    try:
        with _unknown_refused(path, _known_type(path) or "a model whose type transformers knows"):
            config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except OSError as error:
        if Path(path).exists():
            raise
        raise _not_given("target", path, error) from error
    return config


def _known_type(path: str | Path) -> str | None:
    """Return the remedy for a config whose type transformers does not know, but whose class it does, such as Kimi-K2's."""
    file = Path(path) / "config.json"
    named: list[Any] = (read_json(file).get("architectures") if file.exists() else None) or []
    kind = next((own for own, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if named == [name]), None)
    return kind and f"it model_type {kind!r} in its config.json, which {named[0]} is the class of"


@contextmanager
def _unknown_refused(path: str | Path, remedy: str) -> Iterator[None]:
    """Turn transformers' errors about unknown types, and about a checkpoint's own code, into UnsupportedModelError."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" in str(error):
            what = "needs Python code of its own (auto_map), which volley does not run"
        elif "does not recognize this architecture" in str(error):
            what = f"is of a type that transformers {transformers_version} does not know"
        else:
            raise
        raise UnsupportedModelError(
            f"{path} {what}; give {remedy}, or install a newer transformers if that has it"
        ) from None


def auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' auto class for a config: causal LMs, or vision-language models, which are used for their text."""
    kinds: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return next((kind for kind in kinds if type(config) in kind._model_mapping), AutoModelForCausalLM)


def load_causal_lm(
    path: str | Path,
    dtype: torch.dtype | str,
    attention: str | None = None,
    device: torch.device = _CPU,
) -> PreTrainedModel:
    """Load a causal LM in ``dtype`` on ``device``, quantised weights decoded, with ``attention`` or transformers' default."""
    path = find_target(path)
    with bar_of_a_long_load():
        if is_gguf(path):
            kind = torch.float32 if isinstance(dtype, str) else dtype
            return load_gguf(path, kind, attention).to(device)
        config = load_config(path, causal=True)
        kind = auto_class(config)
        if device.type == "cpu" and (model := _mapped(kind, path, config, dtype, attention)):
            return model
        loaded = load_model(kind, path, config, dtype, attn_implementation=attention, **straight_to(device))
        return loaded.to(device)


def _mapped(
    kind: Any, path: str | Path, config: PretrainedConfig, dtype: torch.dtype | str, attention: str | None
) -> PreTrainedModel | None:
    """Load a model whose weights are the tensors of mapped files; ``None`` if transformers must convert them.

    transformers' loader would give the same model, but imports a compiler for it.
    """
    classes = [kind._model_mapping[type(config)].__name__] if type(config) in kind._model_mapping else []
    is_plain = config.architectures == classes and quantisation_of(config) is None and isinstance(dtype, torch.dtype)
    if not is_plain or not Path(path).is_dir():
        return None
    with empty_weights():
        options = {} if attention is None else {"attn_implementation": attention}
        model: PreTrainedModel = kind.from_config(config, dtype=dtype, **options)
    model.tie_weights()
    files = open_tensors(path)
    wanted = {name: own.shape for name, own in model.state_dict().items() if name not in model.all_tied_weights_keys}
    shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name, file in files.items()}
    if shapes != wanted or model._keep_in_fp32_modules_strict or get_model_conversion_mapping(model, add_legacy=False):
        return None
    stored = {name: file.get_tensor(name) for name, file in files.items()}
    placed = {name: own.to(dtype) if own.is_floating_point() else own for name, own in stored.items()}
    model.load_state_dict(placed, strict=False, assign=True)
    model.tie_weights()
    take_generation_config(model, path)
    return model.eval()


@contextmanager
def bar_of_a_long_load() -> Iterator[None]:
    """Show transformers' progress bar of weights on a terminal, after two seconds, until they are loaded."""

    def bar(make: Any, arguments: Any, options: Any) -> Any:
        return make(*arguments, **{**options, "delay": 2.0, "leave": False, "disable": None})

    before = logs.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logs.set_tqdm_hook(before)


def choose_weights(path: str | Path, weights: TargetWeights, device: torch.device, dtype: torch.dtype) -> Weights:
    """Return the format of a target's weights: for "auto" that of a quantised GGUF file if the kernels run here."""
    if weights == "auto":
        usable = native.available and device.type == "cpu" and dtype == torch.bfloat16
        return codes_for(GGUFFile(path)) if usable and is_gguf(path) else "bf16"
    check_weights(weights, device, dtype)
    return weights


def load_for_codes(
    path: str | Path, dtype: torch.dtype, weights: Weights, device: torch.device
) -> tuple[PreTrainedModel, Fill]:
    """Load a causal LM whose ``weights`` will be quantised or bf16, and a function that reads the weights not read yet."""
    if is_gguf(path) and device.type == "cpu" and dtype == torch.bfloat16:
        model, unread = open_model(path, dtype, weights)
        return model, unread.fill
    model = load_causal_lm(path, dtype, device=device)
    quantisation = None if weights == "bf16" else quantisation_of(load_config(path))
    if quantisation is not None:
        known = attach(model, folder_of(path), quantisation, weights)
        log.warning("%s: %s layers compute with their stored codes; others are rounded anew", path, known or "no")
    return model, filled


def keep_codes(model: PreTrainedModel, path: str | Path, twins: Twins | None = None) -> int:
    """Keep the FP8 or NVFP4 codes of a loaded diffusion model that will run in bf16 on a CPU; return the number of modules.

    Its passes over whole canvases hide what it costs to widen codes.
    """
    if model.device.type != "cpu" or model.dtype != torch.bfloat16 or is_gguf(path):
        return 0
    quantisation = quantisation_of(load_config(path))
    kept = 0 if quantisation is None else keep_small_floats(model, folder_of(path), quantisation, twins)
    if kept:
        log.warning("%s: %d modules keep their codes, which become the decoded weights in a matmul", path, kept)
    return kept


def straight_to(device: torch.device) -> dict[str, Any]:
    """Return options of ``from_pretrained`` that read weights directly onto ``device``.

    transformers needs accelerate for this; without it the weights go through the CPU's memory.
    """
    return {"device_map": device} if device.type != "cpu" and find_spec("accelerate") else {}


_TARGET_FILES = ["model*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_DRAFTER_FILES = ["*.json", "*.safetensors"]


def announce_download(name: str | Path, files: Sequence[str] = _TARGET_FILES) -> None:
    """Log the size of a hub model's download before it begins; nothing for a path or for a cached model.

    If the hub cannot be reached, the loader of the model reports it.
    """
    if Path(name).exists() or is_gguf(name) or not HUB_NAME.fullmatch(str(name)):
        return
    try:
        found = snapshot_download(str(name), allow_patterns=list(files), dry_run=True)
    except Exception:  # the hub's client raises its own kinds, and those of the network
        return
    size = sum(file.file_size or 0 for file in found if file.will_download)
    if size:
        log.warning(
            "%s: fetching %s from the hub", name, f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
        )


def drafter_path(name: str | Path) -> Path:
    """Return the folder or file of a drafter: a path as it is, or a hub name's snapshot, which is fetched unless cached."""
    path = Path(name)
    if path.exists() or is_gguf(path) or "/" not in str(name) or not HUB_NAME.fullmatch(str(name)):
        return path
    announce_download(name, _DRAFTER_FILES)
    try:
        return Path(snapshot_download(str(name), allow_patterns=_DRAFTER_FILES))
    except Exception as error:  # the hub's client raises its own kinds, and those of the network
        raise _not_given("drafter", name, error) from error


def _not_given(what: str, name: str | Path, error: Exception) -> CheckpointError:
    """Return the error for a name that may be a hub name, or a missing folder."""
    reason = shorten(str(error), 120, placeholder=" …")
    return CheckpointError(
        f"{what} {str(name)!r} is no folder here and the hub does not give it ({reason}); check the name and the network, "
        "or fetch it where there is one and give its folder"
    )


def auto_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a target; for a diffusion language model the saved one, not that of the weights' architecture."""
    path = find_target(path)
    if is_gguf(path):
        return load_gguf_tokenizer(path)
    family = family_of(kind_of(config_values(path)))
    config = PretrainedConfig() if family is not None and family.architecture is not None else None
    with _unknown_refused(path, "one with a tokenizer.json"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, config=config, trust_remote_code=False)
    return tokenizer
