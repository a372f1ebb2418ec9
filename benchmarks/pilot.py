"""BlockPilot's ablations: what a pilot sees, how far it may go, how large it is; against every fixed block and the best of each.

    python scripts/reference/make_prompts.py --data DIR --out prompts.jsonl
    python scripts/reference/make_prompts.py --data DIR --out held-out.jsonl --held-out report
    python benchmarks/pilot.py --prompts prompts.jsonl --limit 512 --test held-out.jsonl --test-limit 96 --out pilot

Both files are labelled with every block size of the drafter, which is kept in ``--out`` and goes on from there; then each
variant is trained on the first and judged on the second. Speeds are modelled: τ over the seconds of a cycle, which are measured
apart, against plain decoding. Prints a Markdown table; Ctrl-C prints what there is.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="what is trained on")
    parser.add_argument("--test", required=True, help="what is judged by")
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--test-limit", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=2, help="pilots trained of each kind; their mean is shown")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at once that are made fastest")
    parser.add_argument("--only", default="", help="only pilots whose name has this in it")
    parser.add_argument("--out", type=Path, default=Path("pilot"), help="folder of the labels")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="cost in CPU seconds; for a machine with other work")
    return parser.parse_args()


ARGS = arguments()
if ARGS.cpu_time:
    time.perf_counter = time.process_time

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from volley import Engine  # noqa: E402
from volley.models.drafters.pilot import PilotConfig, features  # noqa: E402
from volley.models.layers.fingerprint import drafter_fingerprint  # noqa: E402
from volley.train.options import PilotOptions  # noqa: E402
from volley.train.pilot import Labelled, cycle_seconds, fit, inputs_of, label_all  # noqa: E402

PAPER = PilotOptions(prompts=("-",), input="logits", width=2048, layers=2, radius=2, epochs=ARGS.epochs)
VARIANTS = {
    "logits, radius 2, 2 layers of 2048 (the paper's)": PAPER,
    "softmax": replace(PAPER, input="softmax"),
    "normalised": replace(PAPER, input="normalised"),
    "hidden": replace(PAPER, input="hidden"),
    "top": replace(PAPER, input="top"),
    "radius 1": replace(PAPER, radius=1),
    "radius 3": replace(PAPER, radius=3),
    "radius 6": replace(PAPER, radius=6),
    "1 layer": replace(PAPER, layers=1),
    "3 layers": replace(PAPER, layers=3),
    "width 1024": replace(PAPER, width=1024),
    "width 4096": replace(PAPER, width=4096),
    "top, radius 1": replace(PAPER, input="top", radius=1),
    "top, radius 3": replace(PAPER, input="top", radius=3),
    "top, radius 6": replace(PAPER, input="top", radius=6),
    "top, radius 6, width 64": replace(PAPER, input="top", radius=6, width=64),
    "top, radius 6, 1 layer": replace(PAPER, input="top", radius=6, layers=1),
    "top, radius 6, 3 layers": replace(PAPER, input="top", radius=6, layers=3),
}


@dataclass
class Scale:
    """What speeds and sizes are measured by."""

    sizes: tuple[int, ...]
    seconds: Tensor
    plain: float
    """Seconds of a plain cycle."""

    def row(self, name: str, found: Labelled, choices: list[Tensor], milliseconds: float | None = None) -> str:
        """``choices``: places in ``sizes``, by one pilot each."""
        best = found.rates(self.seconds).argmax(dim=1)
        cells = []
        for temperature in found.temperature.unique().tolist():
            own = found[rows := found.temperature == temperature]
            taus, speeds = zip(*(self._measure(own, choice[rows]) for choice in choices), strict=True)
            oracle = self._measure(own, best[rows])[1]
            speed = sum(speeds) / len(speeds)
            agreement = sum(float((choice == best)[rows].float().mean()) for choice in choices) / len(choices)
            mean = float(sum(self.tensor[choice[rows]].mean() for choice in choices)) / len(choices)
            cells += [f"{agreement:.0%}", f"{mean:.1f}", f"{sum(taus) / len(taus):.2f}"]
            cells += [f"{speed:.3f}", f"{speed / oracle - 1:+.1%}"]
        cells.append("" if milliseconds is None else f"{milliseconds:.2f}")
        return f"| {name} | {' | '.join(cells)} |"

    @property
    def tensor(self) -> Tensor:
        return torch.tensor(self.sizes, dtype=torch.float)

    def _measure(self, found: Labelled, choice: Tensor) -> tuple[float, float]:
        """τ, and speed against plain decoding; every token counts once."""
        rows = torch.arange(len(found))
        tokens, cycles = found.tokens[rows, choice], found.cycles[rows, choice]
        spent = (cycles * self.seconds[choice]).sum()
        return float(tokens.sum() / cycles.sum()), float(tokens.sum() / spent) * self.plain


def train(
    engine: Engine, options: PilotOptions, kept: Labelled, found: Labelled, scale: Scale
) -> tuple[list[Tensor], float]:
    """Choices for ``found`` of a pilot for each seed, and milliseconds that one decision takes."""
    assert engine.drafter is not None
    sizes = options.block_sizes(engine.drafter.config.block_size)
    places = torch.tensor([scale.sizes.index(size) for size in sizes])
    config = PilotConfig(
        drafter=drafter_fingerprint(engine.drafter),
        input=options.input,  # type: ignore[arg-type]
        block_sizes=sizes,
        width=options.width,
        layers=options.layers,
    )
    choices = []
    for seed in range(ARGS.seeds):
        rates = kept.rates(scale.seconds)[:, places]
        net = fit(config, engine.drafter, kept, rates, replace(options, seed=seed))
        choices.append(places[net(inputs_of(config, found)).argmax(dim=1)])
    one = found[torch.arange(1)]
    times = []
    with torch.inference_mode():
        for _ in range(30):
            started = time.perf_counter()
            int(net(features(config.input, one.temperature, one.logits, one.hidden)).argmax())
            times.append(time.perf_counter() - started)
    return choices, 1e3 * sorted(times)[len(times) // 2]


def rows(engine: Engine, kept: Labelled, found: Labelled, scale: Scale) -> Iterator[str]:
    temperatures = found.temperature.unique().tolist()
    names = ("best size", "mean size", "τ", "speed", "to the best")
    yield f"| pilot | {' | '.join(f'T={t:g}: {name}' for t in temperatures for name in names)} | ms |"
    yield "|---" * (2 + len(names) * len(temperatures)) + "|"
    for place, size in enumerate(scale.sizes):
        yield scale.row(f"blocks of {size} for all", found, [torch.full((len(found),), place)])
    for name, options in ((name, options) for name, options in VARIANTS.items() if ARGS.only in name):
        yield scale.row(name, found, *train(engine, options, kept, found, scale))
    yield scale.row("the best of each", found, [found.rates(scale.seconds).argmax(dim=1)])


def labelled(engine: Engine, source: str, limit: int, file: str, sizes: tuple[int, ...]) -> Labelled:
    settings: dict[str, Any] = {"limit": limit, "max_tokens": ARGS.max_tokens, "labels": ARGS.out / file}
    options = PilotOptions(prompts=(source,), **settings)
    return label_all(engine, options, sizes, lambda done, total: print(f"{file}: {done}/{total}", flush=True))


def main() -> None:
    torch.set_num_threads(ARGS.threads)
    engine = Engine.from_pretrained(policy="fixed")
    assert engine.drafter is not None
    sizes = tuple(range(2, engine.drafter.config.block_size + 1))
    plain, *rest = cycle_seconds(engine, (1, *sizes), ARGS.concurrency).tolist()
    seconds = torch.tensor(rest)
    kept = labelled(engine, ARGS.prompts, ARGS.limit, "train.safetensors", sizes)
    found = labelled(engine, ARGS.test, ARGS.test_limit, "test.safetensors", sizes)
    print(
        f"{len(kept)} examples to train on, {len(found)} to judge by; a plain cycle takes {1e3 * plain:.1f} ms, one of"
    )
    print(", ".join(f"{size}: {1e3 * float(own):.1f}" for size, own in zip(sizes, seconds, strict=True)) + " ms\n")
    try:
        for row in rows(engine, kept, found, Scale(sizes, seconds, plain)):
            print(row, flush=True)
    except KeyboardInterrupt:
        print("interrupted; the rows above are complete")


if __name__ == "__main__":
    main()
