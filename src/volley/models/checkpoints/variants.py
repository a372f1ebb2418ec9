"""Variants of DFlash in z-lab's layout: map their keys to those of ``DrafterConfig``.

DFlash 2   ``conv_*`` (``convolution.py``) and ``selector_*`` (``heads.Selector``), all in ``dflash_config``
DSpark     SpecForge's: ``projector_type: dspark`` with ``markov_rank`` in ``dflash_config``
Domino     ``projector_type: domino`` with the head's sizes (``domino.py``)
anchor     any of :data:`ANCHOR_KEYS` in ``dflash_config``: the anchor's position drafts too, as in DeepSeek's DFlash drafters
causal     ``is_causal``, or ``dflash_config.causal``: every position sees only the positions before it
"""

from collections.abc import Mapping
from typing import Any

from volley.errors import ConfigError

SELECTOR_KEYS = ("selector_rank", "selector_top_k")
CONVOLUTION_KEYS = ("conv_kernel_size", "conv_group_size")
ANCHOR_KEYS = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
"""Keys that let every position predict the next token, so that the anchor's own position drafts the first token."""
_TENSORS = {
    "candidate_selector.predecessor_codebook": "head.predecessor_codebook",
    "candidate_selector.successor_codebook": "head.successor_codebook",
    "candidate_selector.hidden_projection.weight": "head.context.weight",
    **{f"markov_head.markov_{name}.weight": f"head.markov_{name}.weight" for name in ("w1", "w2")},
}
_HEAD_KEYS = {
    "projector_type", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "confidence_head_alpha", "attention_mode", *SELECTOR_KEYS, "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len",
}  # fmt: skip


def own_name(name: str) -> str:
    """Return volley's name of a tensor of a head."""
    return f"head.{name}" if name.startswith(("prefix_gru.", "embed_proj.")) else _TENSORS.get(name, name)


def markov_head(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the head that DSpark's keys in ``raw`` describe; ``None`` for rank 0, which is DFlash."""
    rank = raw["markov_rank"]
    if rank == 0 and not isinstance(rank, bool):
        return None
    kind = raw.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        raise ConfigError(f"markov_head_type is {kind!r}; volley reads 'vanilla'")
    return {"type": "dspark", "rank": rank}


def drafts_from_anchor(raw: Mapping[str, Any]) -> bool | None:
    """Return the value of :data:`ANCHOR_KEYS` in ``raw`` and in its ``dflash_config``; ``None`` if they are absent."""
    nested = raw.get("dflash_config")
    places = (raw, nested) if isinstance(nested, Mapping) else (raw,)
    said = {key: place[key] for place in places for key in ANCHOR_KEYS if place.get(key) is not None}
    for key, value in said.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r}; it must be true or false")
    if len(set(said.values())) > 1:
        raise ConfigError(f"{' and '.join(said)} contradict each other; each says whether the anchor's slot drafts")
    return next(iter(said.values()), None)


def plain(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in z-lab's layout without the variants' keys."""
    dflash = raw.get("dflash_config")
    if not isinstance(dflash, Mapping):
        return dict(raw)
    others = {*_HEAD_KEYS, *ANCHOR_KEYS, *CONVOLUTION_KEYS, "causal"}
    nested = {key: value for key, value in dflash.items() if key not in others}
    own = {key: value for key, value in raw.items() if key not in ("is_causal", "emb_dim", *ANCHOR_KEYS[1:])}
    own["dflash_config"] = nested
    own |= {key: dflash[key] for key in CONVOLUTION_KEYS if key in dflash}
    head = _head(dflash)
    if head is not None:
        own["head"] = head
    if drafts_from_anchor(
        {**raw, "sample_from_anchor": None}
    ):  # volley's own top-level key implies volley's block size
        size = nested.pop("block_size", raw.get("block_size"))  # number of positions, each of which drafts a token
        own |= {"sample_from_anchor": True, "block_size": size + 1 if isinstance(size, int) else size}
    causal, layers = raw.get("is_causal"), raw.get("num_hidden_layers")
    if dflash.get("causal") if causal is None else causal:
        own["causal_layers"] = [True] * layers if isinstance(layers, int) else layers
    return own


def _head(dflash: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = dflash.get("projector_type")
    if kind not in (None, "dflash", "dspark", "domino"):
        raise ConfigError(f"dflash_config.projector_type is {kind!r}; volley reads 'domino' and 'dspark', or none")
    if kind == "domino":
        sizes = {"rank": dflash.get("emb_dim"), "state": dflash.get("gru_hidden_dim")}
        return {"type": "domino", **sizes, "uncorrected": dflash.get("pure_draft_prefix_len", 0)}
    if kind == "dspark" and dflash.get("markov_rank"):
        return markov_head(dflash)
    if any(dflash.get(key) is not None for key in SELECTOR_KEYS):
        missing = [key for key in SELECTOR_KEYS if dflash.get(key) is None]
        if missing:
            raise ConfigError(f"dflash_config lacks {missing[0]!r}; a selector has a rank and a number of candidates")
        return {"type": "selector", "rank": dflash["selector_rank"], "candidates": dflash["selector_top_k"]}
    return None
