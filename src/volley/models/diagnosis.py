"""Diagnosis of a folder with a drafter or a target, from its config and the headers of its weight files."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from volley.errors import VolleyError
from volley.files import find_target, read_json, weight_files
from volley.models.checkpoints.checkpoint import DrafterConfig
from volley.models.checkpoints.eagle_format import is_eagle
from volley.models.checkpoints.formats import (
    CONFIDENCE_BIAS,
    TITLES,
    Format,
    detect,
    drafter_folder,
    obstacles,
    own_name,
    parse_config,
    read_checkpoint,
    vocabulary_problem,
    width_problem,
    with_mask_number,
    with_stored,
)
from volley.models.description import Diagnosis, memory_of, shape_of, weights_of
from volley.models.drafters.eagle import drafter_class
from volley.models.drafters.export import TargetShape
from volley.models.gguf.file import GGUFFile, is_gguf
from volley.models.layers.empty_weights import empty_weights
from volley.models.quantised.scheme import Quantisation, check_packages, quantisation_of
from volley.models.quantised.stored_codes import agreeing
from volley.models.targets.canvases import canvases
from volley.models.targets.folders import file_problems
from volley.models.targets.loading import drafter_path, load_config
from volley.models.targets.target import check_config


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: str
    """Name in safetensors, such as ``BF16``."""


def diagnose(path: Path, target: str | None = None) -> Diagnosis:
    """Check a checkpoint as a whole, and whether it fits ``target``; every problem is a line, none is raised."""
    found, path = Diagnosis(), drafter_folder(Path(find_target(path)))
    config: DrafterConfig | None = None
    if is_gguf(path):
        return _diagnose_target(path) if _is_gguf_target(path) else _diagnose_gguf(path, target)
    try:
        raw = read_json(path / "config.json")
        if is_target(raw):
            return _diagnose_target(path)
        form = detect(raw)
        found.title = "an EAGLE-3 drafter" if form == "eagle3" else f"a DFlash drafter in {TITLES[form]}"
        config = parse_config(with_mask_number(raw, path))
    except VolleyError as error:
        found.problems.append(str(error))
    tensors = _stored_tensors(path, found.problems)
    if tensors:
        size = sum(file.stat().st_size for file in weight_files(path))
        dtypes = ", ".join(sorted({tensor.dtype for tensor in tensors.values()}))
        found.facts["weights"] = f"{len(tensors)} tensors, {dtypes}, {size / 2**20:.1f} MiB"
    if config is not None:
        if config.head is not None and form == "zlab":
            found.title += ", with a sequential head that volley adds"
        config = with_stored(config, {name: tensor.shape for name, tensor in tensors.items()})
        engines = "volley, and what else reads EAGLE-3" if config.eagle else _engines(config)
        found.facts = {**_describe(config), **found.facts, "loads in": engines}
        if tensors:
            found.problems += [problem for problem in (width_problem(config),) if problem]
            found.problems += _weight_problems(config, tensors) + _vocabulary_problems(config, path, tensors)
        if target is not None:
            found.problems += _pair_problems(config, target)
    return found


def is_target(raw: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` is that of a language model, not of a drafter."""
    named = raw.get("architectures")
    kinds = [str(kind) for kind in named] if isinstance(named, list) else []
    ends = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForBlockDiffusion")
    return canvases(raw) is not None or (
        bool(kinds)
        and kinds[0].endswith(ends)
        and not {"dflash_config", "markov_rank", "speculators_config"} & set(raw)
        and not is_eagle(raw)
    )


def holds_target(path: str | Path) -> bool:
    """Return whether a folder, GGUF file or hub name is that of a language model, not of a drafter."""
    folder = drafter_folder(drafter_path(find_target(path)))
    return _is_gguf_target(folder) if is_gguf(folder) else is_target(read_json(folder / "config.json"))


def _is_gguf_target(path: Path) -> bool:
    """Return whether the file is not a drafter's. A file that cannot be opened counts as a drafter, whose diagnosis says why."""
    try:
        return GGUFFile(path).architecture not in _DRAFTERS
    except VolleyError:
        return False


_DRAFTERS = {"dflash", "eagle3"}  # architectures of GGUF files


def _diagnose_target(path: Path) -> Diagnosis:
    found = Diagnosis("a target", of_target=True)
    kind = None if is_gguf(path) else canvases(read_json(path / "config.json"))
    if kind is not None:
        found.facts["canvases"] = kind
    try:
        if is_gguf(path):
            found.title = f"a target of architecture {GGUFFile(path).architecture}"
        config = load_config(path)
        text = config.get_text_config()
        found.title = f"a target of type {config.model_type}"
        found.facts |= shape_of(text.hidden_size, text.vocab_size, text.num_hidden_layers, drafts=kind is None)
        check_config(config)
        if is_gguf(path):
            file = GGUFFile(path)
            found.facts |= {"weights": weights_of(file), "memory of its weights": memory_of(file)}
        quantisation = quantisation_of(config)
        if quantisation is not None:
            found.facts |= _describe_quantisation(quantisation)
            check_packages(quantisation)
    except VolleyError as error:
        found.problems.append(str(error))
    except Exception as error:  # transformers raises many kinds for a wrong config
        found.problems.append(f"{path}: the config cannot be read ({error}); fetch the checkpoint again")
    found.problems += file_problems(path)
    return found


def _describe_quantisation(quantisation: Quantisation) -> dict[str, str]:
    kernels = agreeing(quantisation)
    kept = (
        f"the kernels of --weights {kernels} compute with them as they are" if kernels else "rounded anew by --weights"
    )
    return {
        "its codes": kept,
        "quantised by": quantisation.method,
        "its weights": f"{quantisation.weights}; decoded when loaded",
        "its inputs": f"{quantisation.inputs}; rounded so in every pass" if quantisation.inputs else "not rounded",
        "not quantised": ", ".join(quantisation.left_out) or "not said",
    }


def _diagnose_gguf(path: Path, target: str | None) -> Diagnosis:
    found = Diagnosis("no GGUF file that volley can read")
    try:
        config, tensors = vars(read_checkpoint(path)).values()
    except VolleyError as error:
        found.problems.append(str(error))
        return found
    stored = {name: StoredTensor(tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    found.title = f"a DFlash drafter in {TITLES['gguf']}"
    found.facts = {**_describe(config), "weights": f"{len(stored)} tensors", "loads in": "volley, llama.cpp"}
    found.problems = _weight_problems(config, stored) + ([] if target is None else _pair_problems(config, target))
    return found


def _stored_tensors(path: Path, problems: list[str]) -> dict[str, StoredTensor]:
    """Read shapes by volley's names. Opening a file checks its length against its header."""
    tensors: dict[str, StoredTensor] = {}
    try:
        files = weight_files(path)
    except VolleyError as error:
        problems.append(str(error))
        return {}
    for file in files:
        if not file.exists():
            problems.append(f"{file} does not exist; fetch or save the checkpoint again")
            continue
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118
                    part = stored.get_slice(name)
                    tensors[own_name(name)] = StoredTensor(tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            problems.append(f"{file} is truncated or damaged ({error}); fetch or save the checkpoint again")
            return {}
    return tensors


def _weight_problems(config: DrafterConfig, tensors: Mapping[str, StoredTensor]) -> list[str]:
    try:
        with empty_weights():
            expected = {
                name: tuple(tensor.shape) for name, tensor in drafter_class(config)(config).state_dict().items()
            }
    except VolleyError as error:
        return [str(error)]
    optional = {"t2d"} | ({"d2t"} if config.draft_vocab_size == config.vocab_size else set())
    problems = [f"{name} is missing" for name in sorted(set(expected) - set(tensors) - {CONFIDENCE_BIAS})]
    problems += [f"{name} belongs to no part of a drafter" for name in sorted(set(tensors) - set(expected) - optional)]
    for name in sorted(set(expected) & set(tensors)):
        if tensors[name].shape != expected[name]:
            problems.append(f"{name} has shape {list(tensors[name].shape)}, config.json says {list(expected[name])}")
    return problems


def _vocabulary_problems(config: DrafterConfig, path: Path, tensors: Mapping[str, StoredTensor]) -> list[str]:
    if "d2t" not in tensors:
        return []
    tables: dict[str, Any] = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as stored:
            tables |= {name: stored.get_tensor(name) for name in {"d2t", "t2d"} & set(stored.keys())}
    problem = vocabulary_problem(config, tables["d2t"], tables.get("t2d"))
    return [problem] if problem else []


def _pair_problems(config: DrafterConfig, target: str) -> list[str]:
    try:
        shape = TargetShape.from_pretrained(target)
    except VolleyError as error:
        return [str(error)]
    return config.mismatches(hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, num_layers=shape.num_layers)


def _describe(config: DrafterConfig) -> dict[str, str]:
    heads = f"{config.num_attention_heads} heads ({config.num_key_value_heads} for K/V) of {config.head_dim}"
    slides = f", window {config.sliding_window}" if config.sliding_window else ""
    taps = ", ".join(map(str, config.target_layer_ids))
    own = config.draft_vocab_size
    reduced = f", drafts {own} of them" if own and own < config.vocab_size else ""
    brings = ["embedding"] * config.own_embedding + ["head"] * bool(own)
    depth = "an unknown number of layers" if config.num_target_layers is None else f"{config.num_target_layers} layers"
    facts = {
        "layers": f"{config.num_hidden_layers} of hidden size {config.hidden_size}, MLP {config.intermediate_size}, "
        f"{heads}{slides}",
        "block size": f"{config.block_size}, anchor included",
        "taps": f"{taps} (0-based)",
        "for a target of": f"{depth}, hidden size {config.hidden_size}, {config.vocab_size} tokens",
        "vocabulary": f"{config.vocab_size} tokens{reduced}; mask token {config.mask_token_id}",
        "sequential head": f"{config.head.type}, rank {config.head.rank}" if config.head else "none",
        **({"confidence": "a head of its own"} if config.confidence_width else {}),
        "brings its own": " and ".join(brings) or "neither embedding nor head: they are the target's",
    }
    if config.eagle is None:
        return facts
    on = ", ".join(name for name, value in asdict(config.eagle).items() if value)
    return facts | {
        "block size": f"{config.block_size} at most, anchor included: a pass for each token",
        "taps": f"{taps} (0-based)" if taps else "three, as the target's depth decides",
        "vocabulary": f"{config.vocab_size} tokens{reduced}",
        "as published": f"with {on}" if on else "by the authors",
    }


_ENGINES: Mapping[str, Format] = {
    "vLLM": "speculators",
    "llama.cpp": "gguf",
    "SGLang": "sglang",
    "transformers": "transformers",
}


def _engines(config: DrafterConfig) -> str:
    able, unable = ["volley"], dict[str, list[str]]()
    for engine, form in _ENGINES.items():
        reasons = obstacles(config, form)
        if not reasons:
            able.append(engine)
        for reason in reasons:
            unable.setdefault(reason, []).append(engine)
    return ", ".join(able) + "".join(f"; not in {', '.join(names)}: {reason}" for reason, names in unable.items())
