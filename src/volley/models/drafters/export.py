"""Export a drafter to another program's format, and transform its checkpoint for that. No weight changes."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from volley.errors import CheckpointError, ConfigError
from volley.files import find_target, write_atomically
from volley.models.checkpoints.certificate import read_certificate
from volley.models.checkpoints.checkpoint import Checkpoint, DrafterConfig
from volley.models.checkpoints.formats import (
    Format,
    drafter_folder,
    read_checkpoint,
    without_confidence,
    write_checkpoint,
)
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.heads import ResidualHead
from volley.models.gguf.file import is_gguf
from volley.models.layers.fingerprint import drafter_fingerprint
from volley.models.targets.loading import auto_tokenizer, load_causal_lm, load_config, reading
from volley.tensors import check_weights


def export(
    drafter: Path,
    out: Path,
    to: Format,
    *,
    target: str | None = None,
    with_embeddings: bool = False,
    draft_vocab_size: int | None = None,
    counts: Sequence[int] | None = None,
    drop_head: bool = False,
) -> Checkpoint:
    """Write the drafter in ``drafter`` to ``out`` (a folder; GGUF: a file). ``counts [V]`` of tokens choose a reduced vocabulary.

    ``target`` is a folder or hub name: weights are copied from it, and the drafter is checked against it.
    """
    if target is None and (with_embeddings or draft_vocab_size is not None):
        raise ConfigError(
            "with_embeddings and draft_vocab_size copy weights of the target; give target (--target MODEL)"
        )
    if out.resolve() == drafter.resolve():
        raise ConfigError(f"out is the drafter's own folder {drafter}; choose another")
    checkpoint = read_checkpoint(drafter)
    head = checkpoint.config.head
    to_tables = to in ("speculators", "gguf") and head is not None and head.type == "markov" and not drop_head
    if target is None and (to_tables or to == "gguf"):
        what = (
            "the Markov head becomes tables of the target's tokens"
            if to_tables
            else "the file names the target's tokens"
        )
        raise ConfigError(f"{what}; give target (--target MODEL)")
    drafted = checkpoint.config.draft_vocab_size
    check_weights(drafter, Drafter(checkpoint.config).state_dict(), checkpoint.tensors)
    if drop_head:
        checkpoint = without_head(checkpoint)
    if target is None:
        write_checkpoint(out, checkpoint, to)
        _copy_certificate(drafter, out, to, is_same=not drop_head)
        return checkpoint
    target = str(find_target(target))
    shape = TargetShape.from_pretrained(target)
    shape.check(checkpoint.config)
    brings = checkpoint.config.own_embedding or checkpoint.config.draft_vocab_size
    if brings or with_embeddings or draft_vocab_size is not None or to_tables:
        ends = TargetEnds.from_pretrained(target)
        if to_tables:
            checkpoint = with_tables(checkpoint, ends)
        if draft_vocab_size is not None:
            checkpoint = with_vocabulary(checkpoint, ends, counts or (), draft_vocab_size)
        if with_embeddings:
            checkpoint = with_ends(checkpoint, ends)
        elif to in ("sglang", "transformers"):
            checkpoint = without_ends(checkpoint, ends)
    tokenizer = None if to != "gguf" or is_gguf(target) else auto_tokenizer(target)
    write_checkpoint(out, checkpoint, to, target, shape.architectures, tokenizer)
    drafts_the_same = with_embeddings or checkpoint.config.draft_vocab_size == drafted
    is_same = drafts_the_same and draft_vocab_size is None and not drop_head
    _copy_certificate(drafter, out, to, is_same=is_same)
    return checkpoint


def _copy_certificate(drafter: Path, out: Path, to: Format, *, is_same: bool) -> None:
    """Copy the drafter's certificate if the written drafter drafts the same."""
    inside = drafter_folder(drafter)
    run = [inside.parent] if inside.name == "drafter" else []
    found = [
        folder / "certificate.json" for folder in (drafter, inside, *run) if (folder / "certificate.json").exists()
    ]
    if not found or not is_same or to == "gguf":
        return
    problem = _problem_with(found[0], drafter)
    if problem is None:
        write_atomically(out / "certificate.json", found[0].read_bytes())
    else:
        warnings.warn(f"no certificate comes along: {problem}", stacklevel=3)


def _problem_with(certificate: Path, drafter: Path) -> str | None:
    """Return why a certificate does not apply to the drafter in a folder; ``None`` if it does."""
    try:
        certified = read_certificate(certificate).get("subject", {}).get("drafter")
    except CheckpointError as error:
        return str(error)
    if certified is None:
        return f"{certificate} names no drafter; run volley certify --target TARGET --drafter {drafter}"
    if certified != drafter_fingerprint(Drafter.from_pretrained(drafter)):
        return f"{certificate} is of other weights; run volley certify again"
    return None


@dataclass(frozen=True)
class TargetShape:
    """Sizes from a target's ``config.json`` that a drafter must fit."""

    name: str
    architectures: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def from_pretrained(cls, name: str | Path) -> Self:
        """Read the config of a folder or of a model on the hub, without weights."""
        with reading(name, "the target's config"):
            config = load_config(name)
            text = config.get_text_config()
            architectures = tuple(config.architectures or ())
            return cls(str(name), architectures, text.hidden_size, text.vocab_size, text.num_hidden_layers)

    def check(self, config: DrafterConfig) -> None:
        """Refuse a drafter for another target."""
        config.check_target(hidden_size=self.hidden_size, vocab_size=self.vocab_size, num_layers=self.num_layers)


@dataclass(frozen=True)
class TargetEnds:
    """Input embeddings and LM head ``[V, H]`` of a target."""

    embedding: Tensor
    head: Tensor

    @classmethod
    def from_pretrained(cls, name: str | Path) -> Self:
        with reading(name, "the target"):
            model = load_causal_lm(name, "auto")
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if type(embedding) is not nn.Embedding or getattr(head, "bias", None) is not None:
            raise ConfigError(
                f"{name} scales its embeddings or has a bias in its head, so its matrices alone do not stand for them; "
                "export without embeddings and with the whole vocabulary"
            )
        return cls(embedding.weight.detach(), head.weight.detach())


def without_head(checkpoint: Checkpoint) -> Checkpoint:
    """Return the plain DFlash drafter without its sequential head."""
    plain = without_confidence(checkpoint)
    tensors = {name: tensor for name, tensor in plain.tensors.items() if not name.startswith("head.")}
    return Checkpoint(replace(plain.config, head=None), tensors)


def with_tables(checkpoint: Checkpoint, target: TargetEnds) -> Checkpoint:
    """Replace the Markov head by DSpark's two tables, in the dtype of the drafter's weights."""
    config = checkpoint.config
    assert config.head is not None
    head = ResidualHead(config.hidden_size, config.head.rank, with_context=False)
    own = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith("head.")}
    head.load_state_dict({name.removeprefix("head."): tensor.float() for name, tensor in own.items()})
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in own}
    output = target.head.float()
    if "d2t" in tensors:
        output = output[tensors["d2t"] + torch.arange(len(tensors["d2t"]))]
    embedding = target.embedding
    with torch.no_grad():
        before, after = head.tables(lambda ids: embedding[ids].float(), lambda x: x @ output.T, len(embedding))
    dtype = tensors["fc.weight"].dtype
    tensors |= {"head.markov_w1.weight": before.to(dtype), "head.markov_w2.weight": after.to(dtype)}
    return Checkpoint(replace(config, head=replace(config.head, type="dspark")), tensors)


def with_ends(checkpoint: Checkpoint, target: TargetEnds) -> Checkpoint:
    """Add the target's embedding and head (its rows for a reduced vocabulary) if the drafter has none of its own."""
    config = checkpoint.config
    tensors = {"embed_tokens.weight": target.embedding, **checkpoint.tensors}
    if config.draft_vocab_size is None:
        is_tied = target.head.data_ptr() == target.embedding.data_ptr()
        tensors["lm_head.weight"] = target.head.clone() if is_tied else target.head  # files hold no tensor twice
    rows = config.draft_vocab_size or config.vocab_size
    return Checkpoint(replace(config, own_embedding=True, draft_vocab_size=rows), tensors)


def without_ends(checkpoint: Checkpoint, target: TargetEnds) -> Checkpoint:
    """Leave out the drafter's own embedding and head if they equal the target's bit for bit."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    if config.own_embedding and _equal(tensors["embed_tokens.weight"], target.embedding):
        del tensors["embed_tokens.weight"]
        config = replace(config, own_embedding=False)
    if config.draft_vocab_size is not None:
        d2t = tensors.get("d2t", torch.zeros(config.vocab_size, dtype=torch.long))
        if _equal(tensors["lm_head.weight"], target.head[d2t + torch.arange(len(d2t))]):
            del tensors["lm_head.weight"]
            tensors.pop("d2t", None)
            config = replace(config, draft_vocab_size=None)
    return Checkpoint(config, tensors)


def check_vocabulary(size: int, vocab_size: int) -> None:
    """Refuse a size that does not reduce the vocabulary."""
    if not 0 < size < vocab_size:
        raise ConfigError(f"draft_vocab_size is {size}; it must be between 1 and {vocab_size - 1}")


def with_vocabulary(checkpoint: Checkpoint, target: TargetEnds, counts: Sequence[int], size: int) -> Checkpoint:
    """Draft only the ``size`` most frequent tokens by ``counts [V]``, with the target's rows for them as head.

    A text may still hold any token; tokens outside the reduced vocabulary are only never drafted.
    """
    config = checkpoint.config
    if config.draft_vocab_size is not None:
        raise ConfigError(
            "the drafter has a head of its own already; reduce the vocabulary of the one it was made from"
        )
    if len(counts) != config.vocab_size:
        raise ConfigError(f"there are counts of {len(counts)} tokens for a vocabulary of {config.vocab_size}")
    check_vocabulary(size, config.vocab_size)
    token_ids = torch.tensor(counts).argsort(descending=True, stable=True)[:size].sort().values
    outputs = {
        name: checkpoint.tensors[name][token_ids] for name in ("head.markov_w2.weight",) if name in checkpoint.tensors
    }
    tensors = {
        **checkpoint.tensors,
        **outputs,
        "lm_head.weight": target.head[token_ids],
        "d2t": token_ids - torch.arange(size),
    }
    return Checkpoint(replace(config, draft_vocab_size=size), tensors)


def _equal(own: Tensor, of_target: Tensor) -> bool:
    return own.shape == of_target.shape and torch.equal(own, of_target.to(own.device, own.dtype))
