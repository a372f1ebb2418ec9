"""Make the draft model and the proposer for each type of drafter."""

from typing import cast

from volley.config import DecodingConfig, DraftingConfig, check_undrafted, read_by_drafters
from volley.errors import ConfigError
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
    drafter: Drafter, store: KVStore, target: Target, window: int | None, config: DecodingConfig | None = None
) -> DraftModel:
    """Bind ``drafter`` to ``target``, with its K/V in ``store``; it sees ``window`` tokens of context, or all.

    ``config`` says with which attention it runs, and whether it is compiled.
    """
    config, attention = config or DecodingConfig(), target.attention
    if config.draft_attention != "target":
        attention = attention_named(config.draft_attention, target.device)
    borrowed = (attention, target.embed, target.head)
    if isinstance(drafter, EagleDrafter):
        if config.compile:
            raise ConfigError("an EAGLE-3 drafter is not compiled; leave compile out")
        return EagleModel(drafter, store, *borrowed, window, target.num_layers)
    if target.world > 1:
        from volley.models.drafters.divided import DividedModel, DrafterPart
        from volley.models.targets.sharded import ShardedTarget

        if isinstance(drafter, DrafterPart):
            if config.compile:
                raise ConfigError("a drafter that is divided over processes is not compiled; leave compile out")
            return DividedModel(drafter, store, attention, cast(ShardedTarget, target), config.draft_kv_dtype, window)
    return DraftModel(drafter, store, *borrowed, window, compiled=config.compile)


def make_proposer(model: DraftModel, config: DraftingConfig, page_size: int) -> Proposer:
    """Make the proposer for ``model``. Unless ``page_size`` is 0 it uses static buffers; its store's last page must then
    belong to no request."""
    if isinstance(model, EagleModel):
        return EagleProposer(model, config)
    proposer = BlockProposer(model, config)
    if page_size:
        proposer.use_fixed_memory(page_size)
    return proposer


def check_settings(config: DecodingConfig, proposer: Proposer | None, *, can_grow_trees: bool) -> None:
    """Refuse draft settings that nothing uses: all of them without a ``proposer``, and those of trees if it cannot draft
    trees."""
    if proposer is None:
        check_undrafted(read_by_drafters(config))
    elif config.tree_nodes is not None and not can_grow_trees:
        raise ConfigError(
            f"tree_nodes is {config.tree_nodes}, and this drafter grows no tree: its head has a state; use None"
        )
