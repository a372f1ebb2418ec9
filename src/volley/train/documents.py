"""Define documents, the token ids of training rows, and divide them into batches."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """``token_ids [n]`` (int32) of prompt and response; the response starts at ``response_start``."""

    token_ids: Tensor
    response_start: int

    def __len__(self) -> int:
        return len(self.token_ids)


def fingerprint(documents: Sequence[Document]) -> str:
    """Return a digest of all tokens and response starts."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.token_ids.numpy().tobytes())
        digest.update(f"/{document.response_start};".encode())
    return digest.hexdigest()[:32]


def response_counts(documents: Sequence[Document], vocab_size: int) -> Tensor:
    """Count the occurrences ``[V]`` of each token in the responses."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for document in documents:
        counts += torch.bincount(document.token_ids[document.response_start :].long(), minlength=vocab_size)
    return counts


def plan_epoch(lengths: Sequence[int], tokens_per_batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of one epoch, as document indices, in random order; ``rows × longest ≤ tokens_per_batch``.

    Documents are shuffled, then sorted by length inside pools of about fifty batches. So padding stays small, and neighbours
    differ from epoch to epoch. A document longer than the budget is a separate batch. The result depends only on the arguments.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    while order:
        pool, tokens = [], 0
        while order and tokens < 50 * tokens_per_batch:
            pool.append(order.pop())
            tokens += lengths[pool[-1]]
        pool.sort(key=lambda index: lengths[index])
        batches += split_batches(pool, lengths, tokens_per_batch)
    rng.shuffle(batches)
    return batches


def split_batches(indices: Sequence[int], lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Cut ``indices``, ascending in length, where the padded batch would exceed the budget."""
    batches: list[list[int]] = []
    for index in indices:
        if not batches or (len(batches[-1]) + 1) * lengths[index] > tokens_per_batch:
            batches.append([])
        batches[-1].append(index)
    return batches


def pad(documents: Sequence[Document]) -> Tensor:
    """Return the token ids ``[D, S]`` (int64), right-padded with 0. The models are causal, and no anchor reaches the padding."""
    rows = [document.token_ids.long() for document in documents]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
