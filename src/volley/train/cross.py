"""Train a drafter that attends to the target's K/V, by the trainer of block drafters."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from volley.errors import ConfigError
from volley.models.drafters.cross import MASK, CrossDrafter
from volley.models.targets.taps import decoder_layers
from volley.train.anchors import Blocks
from volley.train.attention import Layout
from volley.train.begin import MLP, Attention, begin_at_head
from volley.train.data import TrainingData
from volley.train.documents import Document, pad
from volley.train.features import Features, FrozenTarget, RememberedFeatures
from volley.train.learner import Learner
from volley.train.loop import Trainer, train
from volley.train.options import TrainConfig
from volley.train.shape import drafter_config
from volley.train.step import BlockForward, StepFunction

_KV = -3
"""Number under which layer 0's K/V are remembered; layer i has ``_KV - i``."""


def train_cross(config: TrainConfig) -> Path:
    """Train in ``config.out``; return the folder of the drafter. ``reveal`` is the share of blocks at random timesteps."""
    if config.init is not None or config.head != "none" or config.features == "cache":
        raise ConfigError(
            "a drafter that attends to the target's K/V has no init, head or feature cache; leave them out"
        )
    return train(replace(config, draft_vocab_size=0, eval_prompts=0, loss_decay="decay"), CrossTrainer)


class CrossForward(BlockForward):
    """Runs the drafter over all blocks of a step. They attend to their documents' K/V ``[D, S, layers · 2 · kv_heads · d]``."""

    drafter: CrossDrafter

    def denoise(
        self, kv: Tensor, anchors: Tensor, embeddings: Tensor, masked: Tensor, positions: Tensor, window: int | None
    ) -> Tensor:
        """Return states ``[D·A, B, H]``; the other arguments are those of :meth:`CrossDrafter.denoise`."""
        (documents, length), size, dim = kv.shape[:2], positions.shape[-1], self.drafter.config.head_dim
        seen = ~Layout(anchors, length, size, window).context_mask()
        seen[..., 0] |= ~seen.any(-1)  # padding blocks, which have no weight in the loss
        seen = seen.repeat_interleave(size, dim=1)[:, None]
        both = [x.view(documents, length, -1, dim).transpose(1, 2) for x in kv.chunk(2 * len(self.drafter.layers), -1)]

        def attend(layer: int, queries: Tensor) -> Tensor:
            rows = queries.reshape(documents, -1, *queries.shape[2:]).transpose(1, 2)
            keys, values = both[2 * layer : 2 * layer + 2]
            mixed = scaled_dot_product_attention(rows, keys, values, seen, enable_gqa=True)
            return mixed.transpose(1, 2).reshape(queries.shape)

        return self.drafter.denoise(embeddings, masked, positions, attend)


class CrossStep(StepFunction):
    model: CrossForward

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.mask_token_id = MASK

    def states(self, blocks: Blocks, features: Features, window: int | None) -> Tensor:
        device = self.target.device
        token_ids, positions = (x.flatten(0, 1).to(device) for x in (blocks.token_ids, blocks.positions))
        embeddings = self.target.embed(token_ids.clamp(min=0))
        rows = embeddings, token_ids == MASK, positions, window
        return self.model.denoise(features.taps.to(device), blocks.anchors.to(device), *rows).flatten(0, 1)


class CrossLearner(Learner):
    def new_model(self, config: TrainConfig, target: FrozenTarget, data: TrainingData) -> BlockForward:
        shape = drafter_config(config, target.model, mask_token_id=0)
        count, wanted = shape.num_hidden_layers, shape.target_layer_ids
        drafter = CrossDrafter(
            replace(shape, target_layer_ids=wanted[-count:], num_hidden_layers=min(count, len(wanted)))
        )
        begin_from_layers(drafter, target)
        return CrossForward(drafter, "sdpa")


@torch.no_grad()
def begin_from_layers(drafter: CrossDrafter, target: FrozenTarget) -> None:
    """Copy to each layer the weights of the target's layer whose K/V it reads; weights of other shapes stay random."""
    begin_at_head(drafter, target.model)
    layers, config = decoder_layers(target.model), drafter.config
    drafter.mask.mul_(target.embed(torch.arange(len(drafter.mask), device=target.device)).float().std() / 0.02)
    for own, number in zip(drafter.cross_layers, config.target_layer_ids, strict=True):
        attention = Attention.of(layers[number], config.head_dim, target.text_config.num_attention_heads)
        mlp = MLP.of(layers[number])
        if attention is not None:
            attention.copy_to(own.self_attn)
            own.cross_attn.load_state_dict(own.self_attn.state_dict(), strict=False)
            for norm in (own.self_attn_norm, own.cross_attn_norm):
                norm.weight.copy_(attention.norm)
        if mlp is not None:
            mlp.copy_to(own.mlp)
            own.mlp_norm.weight.copy_(mlp.norm)


class TargetKV:
    """Runs the target, and takes the K/V of its layers from the cache that it fills."""

    def __init__(self, target: FrozenTarget, layer_ids: Sequence[int], with_final: bool) -> None:
        self.target, self.layer_ids, self.with_final = target, tuple(layer_ids), with_final

    @torch.no_grad()
    def __call__(self, documents: Sequence[Document], indices: Sequence[int]) -> Features:
        token_ids = pad(documents).to(self.target.device)
        output = self.target.model.get_decoder()(input_ids=token_ids, use_cache=True)
        filled = [output.past_key_values.layers[layer] for layer in self.layer_ids]
        both = [x.transpose(1, 2).flatten(2) for layer in filled for x in (layer.keys, layer.values)]
        if any(x.shape[:2] != token_ids.shape for x in both):
            raise ConfigError(
                f"not all layers of {list(self.layer_ids)} keep the K/V of a whole text; name others as taps"
            )
        return Features(torch.cat(both, dim=-1), output.last_hidden_state if self.with_final else None)


class RememberedKV(RememberedFeatures):
    def __init__(self, target: FrozenTarget, layer_ids: Sequence[int], with_final: bool) -> None:
        super().__init__(target, [_KV - layer for layer in layer_ids], with_final)
        self.online = TargetKV(target, layer_ids, with_final)


class CrossTrainer(Trainer):
    learner_class, step_class, online_class, remembered_class = CrossLearner, CrossStep, TargetKV, RememberedKV
