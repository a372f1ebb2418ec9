"""Output of the ``generate`` and ``demo`` commands: streamed answers, their statistics, and a comparison with plain decoding."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from volley.errors import ConfigError
from volley.params import SamplingParams
from volley.prompts import Message
from volley.results import GenerationResult

if TYPE_CHECKING:
    from volley.engine.engine import Engine
    from volley.train.collect import Progress

DEMO_PROMPTS = {
    "math": "A baker makes 4 trays of 12 rolls each morning and sells 35 of them. The rest are packed in bags of 13. "
    "How many bags does she fill?",
    "code": "Write a function to find the largest number in a list and return it together with its index.",
    "command help": "How do I use `tar`?",
}
SMOLLM2_PROMPTS = {
    "question": "What is the difference between weather and climate?",
    "code": "Write a Python function that tells whether a word is a palindrome, and explain it.",
    "editing": "Correct the spelling of this text and repeat it: Yesterday I went to the libary to borow a book about "
    "the histry of trains. The libarian was very helpfull and showed me three diferent books.",
}
DEMO_TOKENS = 128
DEMO_TURNS = 3
WARM_UP = SamplingParams(max_tokens=16)
"""Parameters of a first call that absorbs one-time costs before anything is timed."""
DRAFTED = "green"


def stream(engine: "Engine", prompt: Any, params: SamplingParams, out: Console) -> GenerationResult:
    """Print an answer as it arrives."""
    chunks = engine.stream(prompt, params)
    while True:
        try:
            chunk = next(chunks)
        except StopIteration as end:
            out.print()
            out.file.flush()
            result: GenerationResult = end.value
            return result
        show(out, chunk.text, drafted=chunk.from_draft)


def show(out: Console, text: str, *, drafted: bool) -> None:
    """Print a part of an answer; on a terminal, drafted text is coloured."""
    out.print(Text(text, style=DRAFTED if drafted else ""), end="", soft_wrap=True)
    out.file.flush()


def describe(result: GenerationResult) -> str:
    """Return one line about an answer."""
    stats = result.stats
    gain = f"{stats.tokens_per_pass:.2f} tokens a pass" if stats.denoising_steps else f"τ {stats.acceptance_length:.2f}"
    return (
        f"{gain} · {stats.decode_tokens_per_second:.1f} tokens/s · "
        f"{stats.output_tokens} tokens · first after {1000 * stats.time_to_first_token:.0f} ms · {result.finish_reason}"
    )


@dataclass(frozen=True)
class Comparison:
    """Results of one prompt decoded both ways, one after the other."""

    speculative: GenerationResult
    plain: GenerationResult

    @property
    def identical(self) -> bool:
        return self.speculative.token_ids == self.plain.token_ids

    @property
    def speedup(self) -> float:
        plain = self.plain.stats.decode_tokens_per_second
        return self.speculative.stats.decode_tokens_per_second / plain if plain else 0.0


BUG = "The tokens were NOT identical to plain decoding's: this is a bug, please report it."


def explain_difference(engine: "Engine", compared: Comparison, prompt: Any) -> str | None:
    """Return why greedy tokens differ if the two tokens' logits tie, else ``None``."""
    from volley.bench.ties import first_difference, tied_logits  # an answer alone is not compared

    mine, answer = compared.speculative.token_ids, compared.plain.token_ids
    at = first_difference(mine, answer)
    if at is None or at == min(len(mine), len(answer)):
        return None
    tie = tied_logits(engine, [*engine.encode(prompt), *answer[:at]], engine.target.dtype, (mine[at], answer[at]))
    if tie is None:
        return None
    return (
        f"The tokens were identical up to token {at}, where the target's logits of both tokens ({tie[0]:.4g} and {tie[1]:.4g}) "
        "tie to within rounding; float32 tells them apart."
    )


def check_comparable(engine: "Engine", params: SamplingParams) -> None:
    """Refuse a comparison whose outputs need not be equal."""
    if engine.procedures.mode(params) == "diffusion":
        verified = "add --diffusion mode=self to verify them, or " if "self" in engine.procedures.by_mode else ""
        raise ConfigError(
            f"--compare is with plain decoding, whose text canvases do not write; {verified}leave --compare out"
        )


def compare(engine: "Engine", plain: "Engine", prompt: Any, params: SamplingParams, turns: int = 1) -> Comparison:
    """Decode with both engines, one after the other, with nothing cached. Return the turn with the median speedup."""

    def once() -> Comparison:
        results = []
        for own, asked in ((plain, replace(params, diffusion=None)), (engine, params)):
            own.reset_prefix_cache()
            results += list(own.generate([prompt], asked))
        return Comparison(speculative=results[1], plain=results[0])

    return median_turn([once() for _ in range(turns)])


def median_turn(turns: Sequence[Comparison]) -> Comparison:
    """Return the turn with the median speedup, or one whose tokens differ, if there is one."""
    ordered = sorted(turns, key=lambda turn: turn.speedup)
    return next((turn for turn in ordered if not turn.identical), ordered[len(ordered) // 2])


def comparison_table(rows: dict[str, Comparison]) -> Table:
    table = Table()
    table.add_column("prompt")
    gain = "tokens a pass" if any(row.speculative.stats.denoising_steps for row in rows.values()) else "τ"
    for name in ("tokens", gain, "plain tokens/s", "volley tokens/s", "speedup", "identical"):
        table.add_column(name, justify="right")
    for name, row in rows.items():
        speculative, plain = row.speculative.stats, row.plain.stats
        table.add_row(
            name,
            str(speculative.output_tokens),
            f"{speculative.tokens_per_pass:.2f}",
            f"{plain.decode_tokens_per_second:.1f}",
            f"{speculative.decode_tokens_per_second:.1f}",
            f"{row.speedup:.2f}×",
            "yes" if row.identical else "NO",
        )
    return table


def demo(engine: "Engine", out: Console, prompts: Mapping[str, str] = DEMO_PROMPTS) -> bool:
    """Stream three answers and measure both ways of decoding on each. Return False if tokens differed without a tie."""
    from volley.bench.run import without_drafter

    rows, params, plain = dict[str, Comparison](), SamplingParams(max_tokens=DEMO_TOKENS), without_drafter(engine)
    for name, text in prompts.items():
        prompt: list[Message] = [{"role": "user", "content": text}]
        if not rows:
            compare(engine, plain, prompt, WARM_UP)
        out.print(Text(f"\n{text}", style="bold"), soft_wrap=True)
        stream(engine, prompt, params, out)
        rows[name] = compare(engine, plain, prompt, params, DEMO_TURNS)
    out.print()
    if out.is_terminal:
        out.print(Text.assemble("Text in ", ("this colour", DRAFTED), " was drafted, the rest is the target's own.\n"))
    return _report(engine, prompts, rows, out)


def _report(engine: "Engine", prompts: Mapping[str, str], rows: dict[str, Comparison], out: Console) -> bool:
    """Print the demo's results as a table. Return False if tokens differed without a tie."""
    out.print(comparison_table(rows))
    out.print(f"Each row is the median of {DEMO_TURNS} turns by its speedup.")
    explained = True
    for name, row in rows.items():
        if not row.identical:
            prompt = [{"role": "user", "content": prompts[name]}]
            explanation = explain_difference(engine, row, prompt)
            explained = explained and explanation is not None
            out.print(f"{name}: {explanation or BUG}")
    if all(row.identical for row in rows.values()):
        out.print("The tokens were identical to plain decoding's.")
    return explained


def progress(out: Console) -> Callable[["Progress"], None]:
    """Return a function that prints the progress of a collection at intervals: on a terminal in place, elsewhere line by line."""
    between, end = (0.2, "\r") if out.is_terminal else (10.0, "\n")
    shown = -between

    def show(now: "Progress") -> None:
        nonlocal shown
        if now.seconds - shown >= between:
            shown = now.seconds
            out.print(now.describe(), end=end)

    return show


def stdout() -> Console:
    """Return a console for answers on standard output, without markup, emoji codes or highlighting."""
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False, markup=False, emoji=False)
