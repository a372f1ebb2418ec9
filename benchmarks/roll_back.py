"""What roll-back of recurrent states costs at the shape of a 0.6B model: a share of each cycle, against computing tokens again.

    python benchmarks/roll_back.py --requests 1,4 --dtype bfloat16

A hybrid of random weights (gated delta nets in three of four layers) decodes what it wrote before. A script drafts that, one
token of seven wrong, in blocks of 8. After every pass volley takes the states of the accepted prefix out of what the pass kept
of each token. The alternative is to go back to the states before the block and to compute the accepted tokens again: the
seconds of such a pass are measured as well. Nothing is kept of single tokens' states: the table says how large they were.
Figures are means: a cycle that leaves a snapshot for the prefix cache writes the states twice, and a median would hide it.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import mean
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from volley import Engine, SamplingParams, Target
from volley.decode.work import Work
from volley.engine.recurrent import RecurrentStates
from volley.engine.step import Step
from volley.models.layers.accelerate import accelerate
from volley.proposers.scripted import ScriptedProposer

BLOCK, PROMPT = 8, 64
SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
}


def random_target(layers: int, vocab_size: int, dtype: torch.dtype) -> Target:
    """A target that computes as a loaded one does: in bf16 with the kernels for CPUs, where they run."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**{**SHAPE, "num_hidden_layers": layers, "vocab_size": vocab_size}, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    accelerate(model, release=True)
    return Target(model)


class TimedKeep:
    """Times the recurrent states' part of keeping a step's verdicts."""

    def __init__(self, engine: Engine) -> None:
        self.state = next(state for state in engine.sequences.states if isinstance(state, RecurrentStates))
        self._keep = self.state.keep
        self.seconds, self.left_snapshot = 0.0, False
        """Of the last step."""
        self.state.keep = self  # type: ignore[method-assign, assignment]

    def __call__(self, step: Step) -> None:
        before, started = set(self.state.snapshots), time.perf_counter()
        self._keep(step)
        self.seconds, self.left_snapshot = time.perf_counter() - started, set(self.state.snapshots) != before


class Cycle(NamedTuple):
    seconds: float
    kept: float
    """Seconds of roll-back."""
    left_snapshot: bool


def share(cycles: Sequence[Cycle]) -> str:
    """Roll-back's milliseconds in the mean, and their part of all time; how many cycles."""
    if not cycles:
        return "–"
    kept, whole = sum(cycle.kept for cycle in cycles), sum(cycle.seconds for cycle in cycles)
    return f"{kept / len(cycles) * 1e3:.2f} ms, {kept / whole:.1%} ({len(cycles)})"


def measure(target: Target, prompts: Sequence[list[int]], tokens: int) -> list[object]:
    """A row of the table for so many requests at once."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    sizes: dict[str, Any] = {"num_pages": 512, "max_running": len(prompts), "num_states": 2 * len(prompts) + 2}
    answers = {
        tuple(p): r.token_ids for p, r in zip(prompts, Engine(target, **sizes).generate(prompts, params), strict=True)
    }

    def script(work: Work[Any]) -> list[int]:
        request = work.request
        known = answers[tuple(request.token_ids[: request.num_prompt])][request.num_output :][: BLOCK - 1]
        return [token if (request.num_output + i) % 7 else token + 1 for i, token in enumerate(known)]

    engine = Engine(target, proposer=ScriptedProposer(script, BLOCK), policy=f"fixed:{BLOCK}", **sizes)
    kept = TimedKeep(engine)
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    cycles: list[Cycle] = []
    while engine.has_work:
        started = time.perf_counter()
        engine.step()
        if all(request.num_output > 1 for request in requests):
            cycles.append(Cycle(time.perf_counter() - started, kept.seconds, kept.left_snapshot))
    differing = sum(
        request.result().token_ids != answers[tuple(request.token_ids[: request.num_prompt])] for request in requests
    )
    assert not differing or target.dtype != torch.float32, "not lossless"
    lengths = [n for request in requests for n in request.stats.accepted_lengths]
    accepted = mean(lengths)
    again = engine.runner.seconds(round(accepted) * len(prompts), len(prompts))
    cycle = mean(cycle.seconds for cycle in cycles)
    return [
        len(prompts),
        f"{accepted:.1f}",
        f"{cycle * 1e3:.1f}",
        share(cycles),
        share([cycle for cycle in cycles if not cycle.left_snapshot]),
        share([cycle for cycle in cycles if cycle.left_snapshot]),
        f"{again / cycle:.0%}",
        differing,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,4")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--vocab-size", type=int, default=SHAPE["vocab_size"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = random_target(options.layers, options.vocab_size, getattr(torch, options.dtype))
    state = target.recurrent.bytes_per_state(target.dtype) / 2**20
    print(f"one state: {state:.1f} MiB; states of every token of a block would be {BLOCK * state:.0f} MiB\n")
    columns = (
        "requests",
        "tokens kept",
        "cycle ms",
        "roll-back, of all time (cycles)",
        "without a snapshot",
        "with one",
    )
    print("| " + " | ".join((*columns, "computing again", "answers that differ")) + " |\n|" + "---|" * 8)
    generator = torch.Generator().manual_seed(1)
    for count in map(int, options.requests.split(",")):
        prompts = torch.randint(options.vocab_size - 1, (count, PROMPT), generator=generator).tolist()
        print("| " + " | ".join(map(str, measure(target, prompts, options.tokens))) + " |", flush=True)


if __name__ == "__main__":
    main()
