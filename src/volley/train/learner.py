"""Make the module that a run trains: a drafter, new or started from another one."""

from collections.abc import Sequence

import torch
from torch import nn

from volley.errors import ConfigError
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.export import check_vocabulary
from volley.train.begin import begin_at_head, begin_from_target
from volley.train.data import TrainingData
from volley.train.documents import Document, response_counts
from volley.train.features import FrozenTarget
from volley.train.fused import fuse
from volley.train.options import RANDOM, TrainConfig
from volley.train.parallel import Ranks
from volley.train.shape import choose_mask_token, drafter_config, drafter_to_train_on, start_from
from volley.train.step import BlockForward
from volley.train.vocabulary import Vocabulary, choose_vocabulary


class Learner:
    """The trained drafter as ``model``, with fused operations."""

    def __init__(self, config: TrainConfig, target: FrozenTarget, data: TrainingData, ranks: Ranks) -> None:
        self.ranks = ranks
        torch.manual_seed(config.seed)
        self.model = self.new_model(config, target, data).to(ranks.device)
        self.shape = self.model.drafter.config
        self.vocabulary = _vocabulary(config, target, data.documents)
        fuse(self.model.drafter)

    def new_model(self, config: TrainConfig, target: FrozenTarget, data: TrainingData) -> BlockForward:
        """Make the module whose weights learn."""
        if not config.keep_shape:
            drafter = _new_drafter(config, target, data)
        else:
            assert config.init is not None, "TrainConfig has checked it"
            drafter = drafter_to_train_on(config.init, target.model)
        return BlockForward(drafter, choose_attention(config, self.ranks.device))

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def describe(self) -> str:
        """Describe the drafter in one line."""
        shape = self.shape
        drafted = "" if self.vocabulary is None else f", drafts {self.vocabulary.size} of {shape.vocab_size} tokens"
        return (
            f"drafter: {shape.num_hidden_layers} layers, {self.size / 1e6:.2f} M parameters to learn, "
            f"block size {shape.block_size}, taps {list(shape.target_layer_ids)} of {shape.num_target_layers}, "
            f"mask token {shape.mask_token_id}{drafted}"
        )

    def drafter(self) -> Drafter | None:
        """Return a copy of the current drafter on the first process; ``None`` on others."""
        if not self.ranks.first:
            return None
        weights = self.model.state_dict()
        copy = type(self.model.drafter)(self.shape)
        copy.load_state_dict({name.removeprefix("drafter."): tensor for name, tensor in weights.items()})
        return copy if self.vocabulary is None else self.vocabulary.reduce(copy)


def _new_drafter(config: TrainConfig, target: FrozenTarget, data: TrainingData) -> Drafter:
    texts = [*data.documents, *data.held_out]
    embedding = target.model.get_input_embeddings().weight
    mask = choose_mask_token(target.tokenizer, embedding, texts, config.mask_token_id)
    drafter = Drafter(drafter_config(config, target.model, mask))
    if config.init is None:
        begin_from_target(drafter, target.model)
    elif config.init == RANDOM:
        begin_at_head(drafter, target.model)
    else:
        start_from(drafter, config.init, target.model)
    return drafter


def _vocabulary(config: TrainConfig, target: FrozenTarget, documents: Sequence[Document]) -> Vocabulary | None:
    """Return the tokens that the drafter drafts, ``None`` for all. A kept shape keeps its tokens."""
    if config.keep_shape or config.draft_vocab_size == 0:
        return None
    ends, size = target.plain_ends, config.draft_vocab_size
    if ends is None:
        if size is not None:
            raise ConfigError(
                "draft_vocab_size copies rows of the target's head, and this target's logits take a bias, a scale or a cap "
                "as well; leave it out"
            )
        return None
    if size is None:
        vocab_size, width = ends.head.shape
        size = choose_vocabulary(documents, vocab_size, width, target.pass_weights)
    if size is None:
        return None
    check_vocabulary(size, len(ends.head))
    return Vocabulary(size, response_counts(documents, len(ends.head)), ends)


def choose_attention(config: TrainConfig, device: torch.device) -> str:
    """Return the name of the attention (``attention.py``) that a training uses on ``device``."""
    if config.attention == "flex" and device.type == "cpu":
        raise ConfigError(
            "PyTorch's FlexAttention has no backward pass on a CPU; train with attention='grouped' here, or on a GPU"
        )
    if config.attention != "auto":
        return config.attention
    return "sdpa" if device.type == "cuda" else "grouped"
