"""Formats of drafter checkpoints: detect the format of a folder, read it, write it.

z-lab's layout is volley's own (``DrafterConfig.from_json``, ``to_json``) and SGLang's; ``variants.py`` reads DFlash 2 and other
variants of it. To read the other formats, volley maps their config to z-lab's and their tensor names to its own; to write them,
it maps back. No weight is changed.

speculators   ``transformer_layer_config`` holds the layers' shape, ``aux_hidden_state_layer_ids`` are the taps + 1, and with a
              reduced vocabulary ``d2t [N]`` (target id − draft id) and ``t2d [V]`` (whether a token is in it) are stored
transformers  the class that ``generate(speculation_type="dflash")`` drives: no embedding, no head, two other names
dspark        DeepSpec's: z-lab's with ``markov_rank`` and, unless that is 0, two more tensors; read, and written in the
              speculators format
eagle3        EAGLE-3 drafters, as their authors publish them and as speculators writes them (``eagle_format.py``); read only
gguf          llama.cpp's file (``gguf/drafter.py``)
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from volley.errors import CheckpointError, ConfigError
from volley.files import BUNDLED_DRAFTERS, read_json, weight_files, write_atomically
from volley.models.checkpoints.checkpoint import Checkpoint, DrafterConfig
from volley.models.checkpoints.eagle_format import from_eagle, is_eagle
from volley.models.checkpoints.eagle_format import own_name as eagle_name
from volley.models.checkpoints.gguf_drafter import obstacles_in_gguf, read_gguf, write_gguf
from volley.models.checkpoints.variants import (
    ANCHOR_KEYS,
    CONVOLUTION_KEYS,
    SELECTOR_KEYS,
    drafts_from_anchor,
    markov_head,
)
from volley.models.checkpoints.variants import own_name as variant_name
from volley.models.gguf.file import is_gguf
from volley.tensors import load_tensors, save_tensors

Format = Literal["zlab", "speculators", "sglang", "transformers", "dspark", "eagle3", "gguf"]

TITLES: Mapping[Format, str] = {
    "zlab": "z-lab's format",
    "speculators": "the speculators format",
    "sglang": "SGLang's format",
    "transformers": "transformers' format",
    "dspark": "DeepSpec's format (DSpark)",
    "eagle3": "EAGLE-3's format",
    "gguf": "GGUF",
}
_TRANSFORMERS_TYPE = "muse_glimmer_assistant"  # the only DFlash assistant class that transformers has
_MARKOV_NAMES = {f"head.markov_{name}.weight": f"markov_head.markov_{name}.weight" for name in ("w1", "w2")}
_MARKOV_KEYS = {
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "use_aux_hidden_state",
    *ANCHOR_KEYS,
}  # fmt: skip
_CONFIDENCE = "confidence_head.proj."
CONFIDENCE_BIAS = f"{_CONFIDENCE}bias"
"""Bias that may be missing."""
_TRANSFORMERS_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
_SHAPE_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_parameters", "max_position_embeddings", "hidden_act", "sliding_window", "layer_types",
    "attention_bias",
)  # fmt: skip
_DFLASH2_KEYS = (*CONVOLUTION_KEYS, *SELECTOR_KEYS)
_SPECULATORS_KEYS = {
    "architectures", "speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config",
    "draft_vocab_size", "block_size", "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id",
    "sliding_window_non_causal", "num_target_layers", "max_anchors", "tie_word_embeddings", "dtype",
    "torch_dtype", "transformers_version", "auto_map", "model_type", "target_fingerprint", "draft_window",
    *_MARKOV_KEYS,
}  # fmt: skip


def detect(raw: Mapping[str, Any]) -> Format:
    """Detect the format of a ``config.json``; an error if it is not a drafter's."""
    if is_eagle(raw):
        return "eagle3"
    if "speculators_model_type" in raw or "speculators_config" in raw:
        return "speculators"
    if raw.get("model_type") == _TRANSFORMERS_TYPE:
        return "transformers"
    architectures = str(raw.get("architectures") or raw.get("model_type") or "nothing known")
    if "markov_rank" in raw:
        return "dspark"
    if "dflash_config" in raw or "DFlashDraftModel" in architectures:
        return "zlab"
    raise CheckpointError(
        f"this is no DFlash drafter: config.json is of {architectures} and has neither 'dflash_config' nor "
        "'speculators_model_type'; give a drafter in z-lab's, the speculators or transformers' format"
    )


def parse_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """Parse a config in any format; unknown, missing and unusable keys are errors that name them."""
    form = detect(raw)
    if form == "speculators":
        raw = _from_speculators(raw)
    elif form == "transformers":
        raw = _from_transformers(raw)
    elif form == "dspark":
        raw = _from_dspark(raw)
    elif form == "eagle3":
        raw = from_eagle(raw)
    return DrafterConfig.from_json(raw)


def read_raw(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` of a drafter's folder :func:`with_mask_number`."""
    return with_mask_number(read_json(folder / "config.json"), folder)


def with_mask_number(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``raw`` with the id of a mask token that it names by its text, from the tokenizer in ``folder``."""
    for place in (raw, raw.get("dflash_config")):
        name = place.pop("mask_token", None) if isinstance(place, dict) else None
        if name is None or not isinstance(place, dict) or place.get("mask_token_id") is not None:
            continue
        file = folder / "tokenizer.json"
        number = Tokenizer.from_file(str(file)).token_to_id(str(name)) if file.exists() else None
        if number is None:
            why = "tokenizer.json does not have it" if file.exists() else "there is no tokenizer.json"
            raise ConfigError(
                f"{folder}: the mask token is {name!r}, and {why}; put the target's tokenizer.json into the folder, or the "
                "token's number into config.json as mask_token_id"
            )
        place["mask_token_id"] = number
    return raw


def own_name(name: str) -> str:
    """Return volley's name of a tensor."""
    return {theirs: own for own, theirs in _TRANSFORMERS_NAMES.items()}.get(name, variant_name(eagle_name(name)))


def drafter_folder(path: Path) -> Path:
    """Return the drafter's own folder: ``path``, or ``path/drafter`` if ``path`` is the folder of a training run.

    The name of a bundled drafter gives its folder, unless a path of that name exists.
    """
    if not path.exists() and str(path) in BUNDLED_DRAFTERS:
        return BUNDLED_DRAFTERS[str(path)]
    if len(path.parts) == 1 and not path.exists():
        raise CheckpointError(
            f"there is no file or folder {path}; give one, or a bundled drafter ({', '.join(BUNDLED_DRAFTERS)})"
        )
    inside = path / "drafter"
    return inside if not (path / "config.json").exists() and (inside / "config.json").exists() else path


def with_stored(config: DrafterConfig, shapes: Mapping[str, tuple[int, ...]]) -> DrafterConfig:
    """Return ``config`` with the fields that depend on the stored tensors: the drafter's own embedding and head."""
    rows = shapes["lm_head.weight"][0] if shapes.get("lm_head.weight") else None
    reduced = config.draft_vocab_size if config.draft_vocab_size != config.vocab_size else None
    eagle = config.eagle and replace(config.eagle, qk_norm="layers.0.self_attn.q_norm.weight" in shapes)
    own_embedding = "embed_tokens.weight" in shapes
    width = shapes[f"{_CONFIDENCE}weight"][-1] if shapes.get(f"{_CONFIDENCE}weight") else None
    config = replace(config, eagle=eagle, confidence_width=width)
    return replace(config, own_embedding=own_embedding, draft_vocab_size=reduced or rows)


def width_problem(config: DrafterConfig) -> str | None:
    """Return the problem, if any, with embedding and head of a drafter whose width differs from its target's."""
    if config.target_hidden_size is None or (config.own_embedding and config.draft_vocab_size):
        return None
    return (
        f"the drafter's hidden size is {config.hidden_size} and its target's {config.target_hidden_size}, so it needs an "
        "embedding and a head of its own, and the weights lack them; fetch the checkpoint again"
    )


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a drafter's folder in any format, a training run's folder, or a GGUF file; ``check_weights`` checks the tensors."""
    if is_gguf(path):
        checkpoint = read_gguf(path)
        tensors = dict(checkpoint.tensors)
        check_vocabulary(path, checkpoint.config, tensors, None)
        return Checkpoint(checkpoint.config, tensors)
    path = drafter_folder(path)
    config = parse_config(read_raw(path))
    stored = (pair for file in weight_files(path) for pair in load_tensors(file).items())
    tensors = {own_name(name): tensor for name, tensor in stored}
    if f"{_CONFIDENCE}weight" in tensors:
        tensors.setdefault(CONFIDENCE_BIAS, tensors[f"{_CONFIDENCE}weight"].new_zeros(1))
    config = with_stored(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    in_vocabulary, problem = tensors.pop("t2d", None), width_problem(config)
    if problem:
        raise CheckpointError(f"{path}: {problem}")
    check_vocabulary(path, config, tensors, in_vocabulary)
    return Checkpoint(config, tensors)


def check_vocabulary(path: Path, config: DrafterConfig, tensors: dict[str, Tensor], t2d: Tensor | None) -> None:
    """Refuse wrong tables of a reduced vocabulary; a table of the whole vocabulary is removed from ``tensors``."""
    if "d2t" not in tensors:
        return
    problem = vocabulary_problem(config, tensors["d2t"], t2d)
    if problem:
        raise CheckpointError(f"{path}: {problem}; export the drafter again")
    if config.draft_vocab_size == config.vocab_size:
        del tensors["d2t"]


def vocabulary_problem(config: DrafterConfig, d2t: Tensor, t2d: Tensor | None) -> str | None:
    """Return the problem, if any, with the tables of a reduced vocabulary."""
    if d2t.dim() != 1 or d2t.is_floating_point():
        return f"d2t is {d2t.dtype} of shape {list(d2t.shape)}; it must be a list of integers"
    token_ids = d2t.long() + torch.arange(len(d2t))
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < config.vocab_size:
        return f"d2t names tokens outside the vocabulary of {config.vocab_size}"
    if len(set(token_ids.tolist())) != len(token_ids):
        return "d2t names a token twice"
    if t2d is not None:
        expected = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True)
        if t2d.shape != expected.shape or not torch.equal(t2d.bool(), expected):
            return "t2d and d2t do not name the same tokens"
    return None


def obstacles(config: DrafterConfig, form: Format) -> list[str]:
    """Return the parts of a drafter that ``form`` cannot store, each with the remedy."""
    found = []
    if config.untrained is not None:
        found.append(
            f"it has {config.untrained}, which volley reads and does not write; serve the checkpoint it came in"
        )
    elif config.head is not None and not (form in ("speculators", "gguf") and config.head.type in ("markov", "dspark")):
        others, hint = "; speculators and gguf hold it, with --target MODEL", ""
        if config.head.type == "residual":
            others, hint = "", ". A head trained with --head markov can go to llama.cpp and vLLM"
        found.append(
            f"its sequential head ({config.head.type}) has no place there{others}; --drop-head exports the plain drafter, "
            f"whose acceptance is lower{hint}"
        )
    if form in ("gguf", "transformers") and config.attention_bias:
        found.append(
            "its attention has biases (attention_bias), which have no place there; zlab and speculators hold them"
        )
    if form in ("transformers", "speculators") and config.final_logit_softcapping:
        found.append("its logits are capped (final_logit_softcapping), which has no place there; zlab and gguf hold it")
    if form == "gguf":
        found += obstacles_in_gguf(config)
    if form in ("sglang", "transformers", "gguf") and config.sample_from_anchor and config.head is None:
        found.append(
            "its anchor's slot drafts without a sequential head, which has no place there; speculators holds it"
        )
    if form in ("sglang", "transformers"):
        if -1 in config.target_layer_ids:
            found.append("decoder layers alone are tapped there, not the embedding (tap -1)")
        if config.own_embedding or config.draft_vocab_size:
            found.append(
                "it has an embedding or a head of its own, and the target's are used there; --target TARGET leaves out "
                "what equals the target's"
            )
    return found


def write_checkpoint(
    path: Path,
    checkpoint: Checkpoint,
    form: Format,
    verifier: str | None = None,
    architectures: tuple[str, ...] = (),
    tokenizer: Any = None,
) -> None:
    """Write ``config.json`` and ``model.safetensors``, or one file; ``verifier`` and its ``architectures`` name the target.

    A GGUF file has the tokens of the target's ``tokenizer``.
    """
    problems = obstacles(checkpoint.config, form)
    if problems:
        raise ConfigError(f"the drafter cannot be written in {TITLES[form]}: {'; '.join(problems)}")
    if form not in ("zlab", "speculators"):
        checkpoint = without_confidence(checkpoint)
    if form == "gguf":
        assert verifier is not None
        write_gguf(path, checkpoint, verifier, tokenizer)
        return
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    if form == "speculators":
        tensors = {_MARKOV_NAMES.get(name, name): tensor for name, tensor in tensors.items()}
        raw = _to_speculators(config, verifier, architectures)
        if "d2t" in tensors:
            token_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True)
    elif form == "transformers":
        raw, tensors = transformers_config(config), transformers_names(tensors)
    else:
        raw = config.to_json()
    raw["dtype"] = checkpoint.dtype
    write_atomically(path / "config.json", json.dumps(raw, indent=2) + "\n")
    save_tensors(path / "model.safetensors", tensors, {"format": "pt"})


def without_confidence(checkpoint: Checkpoint) -> Checkpoint:
    """Remove the confidence head; the drafter's confidence is then the probability of its tokens."""
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith(_CONFIDENCE)}
    return Checkpoint(replace(checkpoint.config, confidence_width=None), tensors)


def _shape(config: DrafterConfig) -> dict[str, Any]:
    own = config.to_json()
    return {key: own[key] for key in _SHAPE_KEYS}


def _to_speculators(config: DrafterConfig, verifier: str | None, architectures: tuple[str, ...]) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    is_dspark = config.head is not None or config.sample_from_anchor
    algorithm, architecture = ("dspark", "DSparkSpeculator") if is_dspark else ("dflash", "DFlashSpeculator")
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            "tie_word_embeddings": False,
            "use_sliding_window": config.sliding_window is not None,
            **_shape(config),
        },
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": config.block_size - config.sample_from_anchor,
        "target_hidden_size": config.hidden_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": True,
        "sample_from_anchor": config.sample_from_anchor,
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        **(_markov(config) if is_dspark else {}),
        **config.own_keys,
    }


def _markov(config: DrafterConfig) -> dict[str, Any]:
    width, rank = config.confidence_width, 0 if config.head is None else config.head.rank
    confidence = {} if width is None else {"confidence_head_with_markov": width > config.hidden_size}
    own = {"markov_rank": rank, "markov_head_type": "vanilla"}
    return {**own, "enable_confidence_head": width is not None, **confidence}


def _from_speculators(raw: Mapping[str, Any]) -> dict[str, Any]:
    kind = raw.get("speculators_model_type")
    if kind not in ("dflash", "dflash2", "dspark"):
        raise ConfigError(
            f"speculators_model_type is {kind!r}; volley reads 'dflash', 'dflash2', 'dspark' and 'eagle3'"
        )
    rank = raw.get("markov_rank")
    if rank is None if kind == "dspark" else rank:
        raise ConfigError(
            f"speculators_model_type is {kind!r} with markov_rank {rank!r}; only dspark has one, 0 for plain DFlash"
        )
    # Empty or disabled fields are accepted, because these files list every field of the program that wrote them.
    known = {*_SPECULATORS_KEYS, *(_DFLASH2_KEYS if kind == "dflash2" else ())}
    unread = sorted(key for key, value in raw.items() if key not in known and _switches_on(key, value))
    if unread:
        raise ConfigError(f"speculators config: {', '.join(unread)} are not supported; only plain DFlash drafters are")
    layers = raw.get("transformer_layer_config")
    required = ("transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id", "block_size")
    missing = [key for key in required if raw.get(key) is None]
    if missing or not isinstance(layers, Mapping):
        raise ConfigError(f"speculators config lacks {', '.join(map(repr, missing)) or 'a transformer_layer_config'}")
    taps = raw["aux_hidden_state_layer_ids"]
    if not isinstance(taps, list) or not all(isinstance(layer, int) for layer in taps):
        raise ConfigError(f"aux_hidden_state_layer_ids is {taps!r}; it must be a list of layer numbers")
    says_nothing = ("use_qk_norm", "head", "pretraining_tp")
    in_order = not raw.get("sliding_window_non_causal", kind == "dflash2")
    types = layers.get("layer_types") if in_order else None
    return {
        **{
            key: value
            for key, value in layers.items()
            if key not in says_nothing and (key, value) != ("mlp_bias", False)
        },
        **_head_and_block(raw, anchored=False),
        "draft_vocab_size": raw.get("draft_vocab_size"),
        "target_hidden_size": raw.get("target_hidden_size"),
        "num_target_layers": raw.get("num_target_layers"),
        "target_fingerprint": raw.get("target_fingerprint"),
        "draft_window": raw.get("draft_window"),
        "causal_layers": [one == "sliding_attention" for one in types] if isinstance(types, list) else None,
        "dflash_config": {
            **({key: raw.get(key) for key in _DFLASH2_KEYS} if kind == "dflash2" else {}),
            "mask_token_id": raw["mask_token_id"],
            "target_layer_ids": [layer - 1 for layer in taps],
        },
    }


def _head_and_block(raw: Mapping[str, Any], *, anchored: bool) -> dict[str, Any]:
    """Return z-lab's keys for a Markov head and for a block; ``anchored`` is the default of whether the anchor's position drafts.

    A block that drafts from the anchor has as many draft tokens as positions. volley also counts the anchor, so its block size is
    one more.
    """
    head = None if raw.get("markov_rank") is None else markov_head(raw)
    said, size = drafts_from_anchor(raw), raw.get("block_size")
    from_anchor = anchored if said is None else said
    larger = size + from_anchor if isinstance(size, int) else size
    return {"block_size": larger, "sample_from_anchor": from_anchor, **({} if head is None else {"head": head})}


def _from_dspark(raw: Mapping[str, Any]) -> dict[str, Any]:
    taps = {key: raw[key] for key in ("mask_token_id", "target_layer_ids") if key in raw}
    own = raw.get("dflash_config") or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"dflash_config is {own!r}; it must be an object")
    block = {"block_size": own.get("block_size", raw.get("block_size"))}
    nested = {key: value for key, value in {**taps, **own}.items() if key not in ("block_size", *ANCHOR_KEYS)}
    rest = {key: value for key, value in raw.items() if key not in (*taps, *_MARKOV_KEYS)}
    return {
        "num_target_layers": None, **rest, **_head_and_block({**raw, **block}, anchored=True), "dflash_config": nested
    }  # fmt: skip


def _switches_on(key: str, value: object) -> bool:
    """Return whether an extra field of a speculators config changes the drafter; sizes without their switch do not."""
    return value is True or (value not in (None, False) and not key.startswith(("dflash_", "dflash2_")))


def transformers_config(config: DrafterConfig) -> dict[str, Any]:
    """Return the config of transformers' assistant class, with the keys that volley needs to read it back."""
    return {
        **_shape(config),
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": _TRANSFORMERS_TYPE,
        "sliding_window": config.sliding_window or config.max_position_embeddings,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **config.own_keys,
    }


def transformers_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_TRANSFORMERS_NAMES.get(name, name): tensor for name, tensor in tensors.items()}


def _from_transformers(raw: Mapping[str, Any]) -> dict[str, Any]:
    taps = {key: raw[key] for key in ("mask_token_id", "target_layer_ids") if key in raw}
    rest = {key: value for key, value in raw.items() if key not in taps}
    return {"num_target_layers": None, **rest, "dflash_config": taps}
