"""Choose the shape of a new drafter: its target's, changed by the options."""

import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from volley.errors import ConfigError
from volley.models.checkpoints.checkpoint import DrafterConfig, HeadConfig
from volley.models.checkpoints.formats import read_checkpoint
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.export import without_ends
from volley.models.drafters.tap_layers import choose_taps, parse_taps
from volley.models.targets.taps import decoder_layers
from volley.train.documents import Document
from volley.train.features import target_ends
from volley.train.options import TrainConfig, filled

_MASK_NAME = re.compile(r"^\W*mask\W*$", re.IGNORECASE)
_UNUSED_NAME = re.compile(r"reserved|unused", re.IGNORECASE)


def choose_mask_token(
    tokenizer: PreTrainedTokenizerBase, embedding: Tensor, documents: Iterable[Document], explicit: int | None
) -> int:
    """Choose the token that marks empty slots: one with a row in the target's ``embedding [V, H]``.

    In order of preference: the one asked for, the tokenizer's mask token or one named like it, an embedding row beyond the
    tokenizer's vocabulary, a reserved or unused special token, or the rarest token of the data. A text token is lossless too,
    because masks occur only in drafts. An anchor may be this token too, since an anchor is always the first of its block.
    """
    rows = len(embedding)
    used = torch.zeros(rows, dtype=torch.long)
    for document in documents:
        used += torch.bincount(document.token_ids.long(), minlength=rows)
    if explicit is not None:
        if not 0 <= explicit < rows:
            raise ConfigError(f"mask_token_id {explicit} is outside the target's {rows} embedding rows")
        if used[explicit]:
            raise ConfigError(f"mask_token_id {explicit} occurs in the data; choose a token that no text uses")
        return explicit
    special: dict[str, int] = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    ends = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    named = [tokenizer.mask_token_id] if tokenizer.mask_token_id is not None else []
    named += [index for name, index in special.items() if _MASK_NAME.match(name)]
    unused = [index for name, index in special.items() if _UNUSED_NAME.search(name)]
    sizes = embedding.detach().float().norm(dim=-1)
    has_direction = (sizes > 1e-3 * sizes.median()).tolist()  # a row of zeros would make all slots alike
    for candidate in [*named, *range(len(tokenizer), rows), *unused]:
        if candidate < rows and not used[candidate] and candidate not in ends and has_direction[candidate]:
            return int(candidate)
    rest = [token for token in range(rows) if token not in ends and has_direction[token]]
    if not rest:
        raise ConfigError("the target's embedding has no row that could be a mask token; give --mask-token-id")
    return min(rest, key=lambda token: int(used[token]))


def drafter_config(config: TrainConfig, target: PreTrainedModel, mask_token_id: int) -> DrafterConfig:
    """Return the drafter's config: the target's layer shape, unless an option differs."""
    text: Any = target.config.get_text_config()
    num_layers = len(decoder_layers(target))
    heads = text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    layers = filled(config.num_layers)
    return DrafterConfig(
        hidden_size=text.hidden_size,
        intermediate_size=config.intermediate_size or getattr(text, "intermediate_size", 3 * text.hidden_size),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab_size=target.get_input_embeddings().weight.shape[0],
        num_target_layers=num_layers,
        block_size=filled(config.block_size),
        mask_token_id=mask_token_id,
        target_layer_ids=choose_taps(parse_taps(config.taps), num_layers),
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or 10_000.0),
        max_position_embeddings=text.max_position_embeddings,
        sliding_window=config.window,
        layer_types=("sliding_attention" if config.window else "full_attention",) * layers,
        head=None if config.head == "none" else HeadConfig(type=config.head, rank=config.head_rank),
    )


def drafter_to_train_on(path: str, target: PreTrainedModel) -> Drafter:
    """Load the drafter in ``path`` in fp32. Raise an error if it was trained for another target."""
    drafter = Drafter.from_pretrained(path, torch.float32)
    text = target.config.get_text_config()
    vocab_size = target.get_input_embeddings().weight.shape[0]
    num_layers = len(decoder_layers(target))
    drafter.config.check_target(hidden_size=text.hidden_size, vocab_size=vocab_size, num_layers=num_layers)
    if drafter.config.untrained is not None:
        raise ConfigError(
            f"the drafter in {path} has {drafter.config.untrained}, which volley does not train; name another"
        )
    if not drafter.config.is_trained_here:
        what = "drafts from the anchor's slot" if drafter.head is None else "has a Markov head in tables"
        raise ConfigError(f"the drafter in {path} {what}, which volley does not train; name another")
    check_ends(path, target)
    return drafter


def check_ends(path: str, target: PreTrainedModel) -> None:
    """Refuse a drafter whose embedding or head differs from the target's (or rows of it), because training uses the target's."""
    left = without_ends(read_checkpoint(Path(path)), target_ends(target)).config
    if left.own_embedding or left.draft_vocab_size:
        raise ConfigError(
            f"the drafter in {path} has an embedding or a head of its own, and training uses the target's; name the "
            "drafter that it was exported from"
        )


def start_from(drafter: Drafter, path: str, target: PreTrainedModel) -> None:
    """Copy the weights of the drafter in ``path`` to ``drafter``. A sequential head that only ``drafter`` has is unchanged.

    A Markov head takes the weights of a residual head, without those of its context.
    """
    found = Drafter.from_pretrained(path, torch.float32)
    check_ends(path, target)
    ends = {"own_embedding": False, "draft_vocab_size": None, "draft_window": None, "target_fingerprint": None}
    wanted, have = asdict(drafter.config), {**asdict(found.config), **ends}
    if have["head"] is None:
        wanted["head"] = None
    elif wanted["head"] is not None and (wanted["head"]["type"], have["head"]["type"]) == ("markov", "residual"):
        have["head"]["type"] = "markov"
    different = [f"{name} {have[name]!r}, not {wanted[name]!r}" for name in wanted if wanted[name] != have[name]]
    if different:
        raise ConfigError(
            f"the drafter in {path} has another shape than the run asks for ({'; '.join(different)}); give its shape as "
            "options, or train without --init"
        )
    drafter.load_state_dict(found.state_dict(), strict=False)
