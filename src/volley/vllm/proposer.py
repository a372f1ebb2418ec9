"""Proposer for vLLM, which creates it, gives it the target, and after every pass asks it for drafts to verify in the next.

vLLM verifies. It receives draft tokens without probabilities and treats each as a point mass: it accepts token d with the
target's probability of d, and otherwise samples from the target's distribution without d. That is lossless for any draft of any
length, because drafts are chosen before the target samples. Drafts are the drafter's likeliest tokens, which this rule accepts
most often.
"""

import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from volley.models.drafters.drafter import Drafter
from volley.models.drafters.pilot import largest_block
from volley.models.layers.accelerate import accelerate
from volley.policies.make import DEFAULT_POLICY, make_policy
from volley.vllm.drafting import SlotDrafter
from volley.vllm.options import LOGGER, PluginOptions, check_engine, check_sampler
from volley.vllm.pacing import PassPacing
from volley.vllm.passes import FINAL, IntArray, PassTaps, TargetPass, Tokens, decoder_layers


class PluginProposer:
    """Proposer for ``speculative_config={"method": "custom_class", "model": "volley.vllm.Proposer", "num_speculative_tokens":
    K}``."""

    def __init__(self, vllm_config: Any) -> None:
        import vllm

        check_engine(vllm_config, vllm.__version__)
        self.config = vllm_config
        self.options = PluginOptions.from_config(vllm_config.additional_config)
        check_sampler(vllm_config.device_config.device)
        self._max_length: int = vllm_config.model_config.max_model_len
        self.request_at: dict[int, int] = {}  # last slot filled by each request's last pass → the request
        self._request_ids = count()
        self._ended = 0.0
        self._warned = False

    # -- start-up ------------------------------------------------------------------------------------------------------
    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter, check that it was trained for this target, and tap the target."""
        model = self.config.model_config
        text = model.hf_config.get_text_config()
        drafter = Drafter.from_pretrained(Path(self.options.drafter), dtype=model.dtype)
        layers = len(decoder_layers(target_model))
        drafter.config.check_target(hidden_size=text.hidden_size, vocab_size=text.vocab_size, num_layers=layers)
        self.drafter = drafter.to(next(target_model.parameters()).device).requires_grad_(False)
        block_size = largest_block(self.options, drafter.config.block_size, drafter.folder)
        self.drafter.rotary.cover(self._max_length + block_size)
        accelerate(self.drafter)
        policy = self.options.policy or DEFAULT_POLICY
        self.policy = make_policy(policy, self.drafter)
        self._num_layers = layers
        self.taps = PassTaps(
            target_model,
            drafter.config.target_layer_ids,
            self.config.cache_config.block_size,
            self._inject_unread,
            self.policy.uses_prefill,
        )
        target: Any = target_model
        self._compute_logits = target.compute_logits
        self.slots = SlotDrafter(
            self.drafter,
            self.options,
            target.embed_input_ids,
            target.compute_logits,
            self.config.scheduler_config.max_num_seqs,
        )
        slots = self.config.speculative_config.num_speculative_tokens
        largest = min(block_size, 1 + slots)
        self.pacing = PassPacing(self.policy, largest, self._draft_seconds, self._target_seconds)
        LOGGER.info("volley drafts with %s, policy %s, blocks up to %d", self.options.drafter, policy, largest)

    # -- the loop ------------------------------------------------------------------------------------------------------
    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: Tokens,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Draft tokens for every row of the batch. vLLM passes the tokens that the last pass sampled."""
        started = time.perf_counter()
        done = self.taps.take()
        if done is None:
            self._warn(
                "volley: the target's layers did not call their forward hooks; nothing is drafted in such passes"
            )
            return [[] for _ in sampled_token_ids]
        lengths = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
        ids = self._follow(done, sampled_token_ids, lengths, started)
        self._inject(done, lengths, token_ids_cpu)
        drafts = self._draft(done, ids, lengths, token_ids_cpu)
        self._ended = time.perf_counter()
        return drafts

    def _follow(
        self, done: TargetPass, sampled: Sequence[Sequence[int]], lengths: Sequence[int], now: float
    ) -> dict[int, int]:
        """Return the request of each decoding row by the last slot filled before this pass, and report verdicts to the policy.

        A request does not share the block it writes to, so that slot identifies it. A request that missed a pass gets a new
        number: only the policy's knowledge of it is lost.
        """
        before, after, judged, ids, fresh = self.request_at, {}, {}, {}, {}
        for row, tokens in enumerate(sampled):
            if not tokens:
                continue  # its prompt continues in a later pass
            start, known = int(done.starts[row]), lengths[row] - 1
            request_id = before.get(done.slot(row, start - 1)) if start else None
            if request_id is None:
                request_id = fresh[row] = next(self._request_ids)
            else:
                judged[request_id] = (int(done.lengths[row]) - 1, len(tokens) - 1)
            ids[row] = request_id
            after[done.slot(row, known - 1)] = request_id
        self.request_at = after
        self.pacing.judge(judged)
        if fresh and self.policy.uses_prefill:
            self._show_prompts(done, fresh)
        if len(judged) == len(sampled):  # the pass read no prompt
            self.pacing.timed(int(done.offsets[-1]), len(sampled), now - self._ended)
        return ids

    @torch.inference_mode()
    def _show_prompts(self, done: TargetPass, fresh: dict[int, int]) -> None:
        """Show the policy the end of each prompt read in this pass. All requests count as greedy."""
        last = torch.from_numpy(done.offsets[[row + 1 for row in fresh]] - 1).to(done.states[FINAL].device)
        logits = self._compute_logits(done.states[FINAL][last])
        hidden = done.features(self.drafter.config.target_layer_ids)[last]
        for request_id, *shown in zip(fresh.values(), logits, hidden, strict=True):
            self.policy.prefilled(request_id, 0.0, *shown)

    def _inject(self, done: TargetPass, lengths: Sequence[int], token_ids: Tokens) -> None:
        """Inject the features of final positions: known tokens and accepted draft tokens."""
        last = np.array(lengths, dtype=np.int64) - 1  # the target has not processed the last token
        ends = np.minimum(done.ends, last)
        spans = zip(done.starts.tolist(), ends.tolist(), strict=True)
        tokens = [token_ids[row, start:end] for row, (start, end) in enumerate(spans)]
        self._inject_until(done, ends, np.concatenate(tokens))

    def _inject_until(self, done: TargetPass, ends: IntArray, token_ids: Tokens) -> None:
        self.slots.reserve(done.num_slots)
        kept, positions, slots = done.span(ends)
        features = done.features(self.drafter.config.target_layer_ids)
        rows = torch.from_numpy(kept).to(features.device)
        self.slots.inject(features[rows], positions, slots, token_ids)

    @torch.inference_mode()
    def _inject_unread(self, done: TargetPass) -> None:
        """Inject a pass after which vLLM requested no drafts. Rejected tokens are overwritten before they are read."""
        if done.token_ids is not None:
            token_ids = done.token_ids[: int(done.offsets[-1])].cpu().numpy()
            self._inject_until(done, done.ends, token_ids)

    def _draft(
        self, done: TargetPass, ids: dict[int, int], lengths: Sequence[int], token_ids: Tokens
    ) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in lengths]
        if not ids:
            return drafts
        requests, limits = [], []
        for index, (row, request_id) in enumerate(ids.items()):
            context, anchor = done.slots(row, 0, lengths[row] - 1), int(token_ids[row, lengths[row] - 1])
            requests.append(self.slots.request(index, request_id, context, anchor))
            room = max(0, self._max_length - lengths[row] - 1)
            limits.append(room if self.slots.has_seen(context, token_ids[row, : len(context)]) else 0)
        works = self.pacing.decide(requests, limits)
        drafting = [work for work in works if work.spec.positions]
        if drafting:
            started = time.perf_counter()
            self.slots.proposer.propose(drafting, with_confidence=self.policy.uses_confidence)
            tokens = len(drafting) + sum(work.spec.positions for work in drafting)
            self.pacing.costs.draft.observe(tokens, len(drafting), time.perf_counter() - started)
        self.pacing.trim(works)
        for row, work in zip(ids, works, strict=True):
            drafts[row] = work.proposal.token_ids
        return drafts

    # -- costs ---------------------------------------------------------------------------------------------------------
    def _draft_seconds(self, tokens: int, requests: int) -> float:
        return self.slots.proposer.seconds(tokens, requests)

    def _target_seconds(self, tokens: int, requests: int) -> float:
        """Estimate the seconds of a target pass, assuming that the target's layers are about as large as the drafter's."""
        layers, head = self.slots.proposer.timed_parts(tokens, requests)
        return layers * self._num_layers / self.drafter.config.num_hidden_layers + head

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            LOGGER.warning(message)
