"""Make the draft model and the proposer for each type of drafter."""

from typing import cast

from volley.config import DecodingConfig, DraftingConfig, check_undrafted, read_by_drafters
from volley.errors import ConfigError
from volley.memory.attention import Attention
from volley.memory.kernels import attention_named
from volley.memory.kv_store import KVStore
from volley.models.drafters.draft_model import DraftModel
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.eagle import EagleDrafter
from volley.models.drafters.eagle_model import EagleModel
from volley.models.targets.target import Target
from volley.proposers.base import Proposer
from volley.proposers.block import BlockProposer
from volley.proposers.eagle import EagleProposer


def make_draft_model(
    drafter: Drafter, store: KVStore, target: Target, window: int | None, block_size: int, config: DecodingConfig
) -> DraftModel:
    """Bind ``drafter`` to ``target``, with its K/V in ``store``; it sees ``window`` tokens of context, or all, and drafts blocks
    of up to ``block_size``.

    ``config`` says with which attention it runs, and whether it is compiled.
    """
    attention = target.attention
    if config.draft_attention != "target":
        attention = attention_named(config.draft_attention, target.device)
    borrowed = (attention, target.embed, target.head)
    if isinstance(drafter, EagleDrafter):
        if config.compile:
            raise ConfigError("an EAGLE-3 drafter is not compiled; leave compile out")
        model: DraftModel = EagleModel(drafter, store, *borrowed, window, target.num_layers)
    elif target.world > 1 and (divided := _divided(drafter, store, attention, target, window, config)) is not None:
        model = divided
    else:
        model = DraftModel(drafter, store, *borrowed, window, compiled=config.compile)
    model.block_size = block_size
    return model


def _divided(
    drafter: Drafter, store: KVStore, attention: Attention, target: Target, window: int | None, config: DecodingConfig
) -> DraftModel | None:
    """Bind a drafter that is divided over processes; return ``None`` if it is not."""
    from volley.models.drafters.divided import DividedModel, DrafterPart
    from volley.models.targets.sharded import ShardedTarget

    if not isinstance(drafter, DrafterPart):
        return None
    if config.compile:
        raise ConfigError("a drafter that is divided over processes is not compiled; leave compile out")
    return DividedModel(drafter, store, attention, cast(ShardedTarget, target), config.draft_kv_dtype, window)


def make_proposer(model: DraftModel, config: DraftingConfig, page_size: int) -> Proposer:
    """Make the proposer for ``model``. Unless ``page_size`` is 0 it uses static buffers; its store's last page must then
    belong to no request."""
    if isinstance(model, EagleModel):
        return EagleProposer(model, config)
    proposer = BlockProposer(model, config)
    if page_size:
        proposer.use_fixed_memory(page_size)
    return proposer


def check_settings(config: DecodingConfig, proposer: Proposer | None) -> None:
    """Refuse draft settings that nothing uses: all of them without a ``proposer``, and those of trees if it grows none."""
    if proposer is None:
        check_undrafted(read_by_drafters(config))
    elif config.tree_nodes is not None and not proposer.can_grow_trees:
        raise ConfigError(
            f"tree_nodes is {config.tree_nodes}, and this drafter grows no tree: its head has a state, or it is of EAGLE-3 "
            "with a window; use None"
        )
