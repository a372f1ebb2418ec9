"""Decide with a pilot (BlockPilot): a small network reads the end of the prompt once and fixes the request's block size."""

from collections.abc import Sequence

from torch import Tensor, nn

from volley.decode.work import DraftSpec
from volley.models.drafters.pilot import PilotConfig, features
from volley.policies.base import Policy, View


class Pilot(Policy):
    """Fixes one block size for each request, from the target's distribution after the prompt."""

    uses_prefill = True

    def __init__(self, config: PilotConfig, net: nn.Sequential) -> None:
        self.config, self.net = config, net
        self.block_size = max(config.block_sizes)
        self.positions: dict[int, int] = {}

    def prefilled(self, request_id: int, temperature: float, logits: Tensor, hidden: Tensor) -> None:
        found = features(self.config.input, logits.new_tensor([temperature]), logits[None], hidden[None])
        self.positions[request_id] = self.config.block_sizes[int(self.net(found).argmax())] - 1

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        # Requests that were read before this policy was set use the largest block.
        return [view.draft(self.positions.get(view.request_id, self.block_size - 1)) for view in views]

    def end(self, request_id: int) -> None:
        self.positions.pop(request_id, None)
