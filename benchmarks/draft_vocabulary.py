"""What a draft pass takes when it drafts fewer tokens, and how much of a text so few tokens cover.

    python benchmarks/inflate.py runs/pair-0.6b
    python benchmarks/draft_vocabulary.py times runs/pair-0.6b --sizes 8192,16384,32768
    python benchmarks/draft_vocabulary.py coverage tokenizer.gguf text.jsonl more.jsonl

``times`` copies the first rows of the inflated head, which are those that the pair writes: τ stays and the times are those of
any choice of tokens. Beside them are the drafter as it is loaded, which drafts frequent tokens alone
(``models/drafters/frequent.py``), and one that drafts all tokens but the last. ``coverage`` cuts every string of the rows into
tokens, as responses of a target with that tokenizer. It prints what the first ids cover, with the tokens seen last and without,
and what ``volley train`` would choose for targets of several sizes.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from volley import Engine, native
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.export import TargetEnds
from volley.models.drafters.frequent import FIRST, SEEN, FrequentHead
from volley.models.targets.loading import auto_tokenizer
from volley.models.targets.target import Target
from volley.proposers.block import BlockProposer
from volley.train.documents import Document
from volley.train.vocabulary import Vocabulary, choose_vocabulary, coverage, response_counts

ROUNDS = 7
SHAPES = {"0.6B": (1024, 596_000_000), "1.7B": (2048, 1_720_000_000), "8B": (4096, 7_570_000_000)}
"""Width of the head, and weights that a pass reads, of Qwen3's models."""


def proposers(pair: Path, sizes: list[int], draft_weights: Any) -> dict[int, BlockProposer]:
    """What drafts so many tokens with the drafter of ``pair``; reduced drafters are left beside it."""
    target, whole = Target.from_pretrained(pair / "target"), Drafter.from_pretrained(pair / "drafter")
    vocab_size, found = whole.config.vocab_size, {}
    counts, ends = torch.arange(vocab_size, 0, -1), TargetEnds(torch.empty(0), target.head_weight)
    for size in [*sizes, vocab_size - 1, vocab_size]:
        folder = pair / ("drafter" if size == vocab_size else f"drafter-{size}")
        if not folder.exists():
            Vocabulary(size, counts, ends).reduce(whole).save_pretrained(folder)
        engine = Engine.from_pretrained(target, drafter=folder, draft_weights=draft_weights, num_pages=64)
        assert isinstance(engine.proposer, BlockProposer)
        found[size] = engine.proposer
    return found


def times(options: argparse.Namespace) -> None:
    """Milliseconds of the drafter's layers, and of logits and choice, each size in turn within a round."""
    torch.set_num_threads(options.threads)
    measured = proposers(options.pair, [int(size) for size in options.sizes.split(",")], options.draft_weights)
    rows = next(iter(measured.values())).block_size
    parts: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(ROUNDS):
        for size, proposer in measured.items():
            parts[size].append(proposer.timed_parts(rows, 1))
    as_loaded = max(parts)
    whole = statistics.median(map(sum, parts[as_loaded - 1]))
    print("| drafted tokens | layers, ms | logits and choice, ms | of the whole draft pass |\n|---|---|---|---|")
    for size, found in parts.items():
        layers, choice = (1000 * statistics.median(part) for part in zip(*found, strict=True))
        share = statistics.median(map(sum, found)) / whole
        print(f"| {'as loaded' if size == as_loaded else f'{size:,}'} | {layers:.2f} | {choice:.2f} | {share:.2f} |")


def strings(row: Any) -> Iterator[str]:
    if isinstance(row, str):
        yield row
    elif isinstance(row, dict | list):
        for part in row.values() if isinstance(row, dict) else row:
            yield from strings(part)


def covered_once_seen(documents: list[Document], vocab_size: int) -> float:
    """The share of all tokens that a head for frequent tokens drafts when they come, one text after the other."""
    narrow = torch.zeros(vocab_size, native.GROUP, dtype=torch.bfloat16)
    frequent = FrequentHead(native.Product(narrow, None, "bf16"), "bf16")
    for document in documents:
        for token in document.token_ids.tolist():
            frequent.see([token])
    return 1 - frequent.changes / sum(map(len, documents))


def cover(options: argparse.Namespace) -> None:
    """Tokens of the files, what the most frequent ones of one half cover of the other, and the choices."""
    tokenizer: Any = auto_tokenizer(options.tokenizer)
    lines = [line for file in options.files for line in file.read_text(encoding="utf-8").splitlines()[: options.rows]]
    texts = ["\n".join(strings(json.loads(line))) for line in lines]
    token_ids = [
        torch.tensor(ids, dtype=torch.int32) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]
    ]
    documents, vocab_size = [Document(ids, 0) for ids in token_ids], len(tokenizer)
    halves = [response_counts(documents[part::2], vocab_size) for part in (0, 1)]
    print(
        f"{sum(map(len, documents)):,} tokens, {int((halves[0] + halves[1] > 0).sum()):,} of {vocab_size:,} different ones"
    )
    for size in (8192, 16_384, 32_768, 65_536):
        print(f"{size:,}: {min(coverage(*halves, size), coverage(*halves[::-1], size)):.4f}")
    if vocab_size > FIRST:
        print(
            f"the first {FIRST:,}: {float((halves[0] + halves[1])[:FIRST].sum()) / sum(map(len, documents)):.4f}; "
            f"with the {SEEN:,} seen last: {covered_once_seen(documents, vocab_size):.4f}"
        )
    for name, (width, weights) in SHAPES.items():
        print(f"{name}: {choose_vocabulary(documents, vocab_size, width, weights) or 'all'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    timing = commands.add_parser("times")
    timing.add_argument("pair", type=Path)
    timing.add_argument("--sizes", default="8192,16384,32768,65536")
    timing.add_argument("--draft-weights", default="bf16")
    timing.add_argument("--threads", type=int, default=2)
    timing.set_defaults(run=times)
    covering = commands.add_parser("coverage")
    covering.add_argument("tokenizer", help="folder or GGUF file")
    covering.add_argument("files", type=Path, nargs="+", help="JSONL")
    covering.add_argument("--rows", type=int, help="of each file")
    covering.set_defaults(run=cover)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
