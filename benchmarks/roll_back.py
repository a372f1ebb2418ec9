"""What roll-back of recurrent states costs at the shape of a 0.6B model: a share of each cycle, against computing tokens again.

    python benchmarks/roll_back.py --requests 1,4

A hybrid of random weights (gated delta nets in three of four layers) decodes what it wrote before. A script drafts that, one
token of seven wrong, in blocks of 8. After every pass volley takes the states of the accepted prefix out of what the pass kept
of each token. The alternative is to go back to the states before the block and to compute the accepted tokens again: the
seconds of such a pass are measured as well. Nothing is kept of single tokens' states: the table says how large they were.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from volley import Engine, SamplingParams, Target
from volley.decode.work import Work
from volley.engine.recurrent import RecurrentStates
from volley.engine.step import Step
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


def random_target(layers: int, vocab_size: int) -> Target:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**{**SHAPE, "num_hidden_layers": layers, "vocab_size": vocab_size}, eos_token_id=None)
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


class TimedKeep:
    """Counts the seconds of the recurrent states' part of keeping a step's verdicts."""

    def __init__(self, engine: Engine) -> None:
        state = next(state for state in engine.sequences.states if isinstance(state, RecurrentStates))
        self.seconds, self._keep = 0.0, state.keep
        state.keep = self  # type: ignore[method-assign, assignment]

    def __call__(self, step: Step) -> None:
        started = time.perf_counter()
        self._keep(step)
        self.seconds += time.perf_counter() - started


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
    cycles: list[tuple[float, float]] = []
    while engine.has_work:
        started, before = time.perf_counter(), kept.seconds
        engine.step()
        if all(request.num_output > 1 for request in requests):
            cycles.append((time.perf_counter() - started, kept.seconds - before))
    for request in requests:
        assert request.result().token_ids == answers[tuple(request.token_ids[: request.num_prompt])], "not lossless"
    lengths = [n for request in requests for n in request.stats.accepted_lengths]
    accepted = round(sum(lengths) / len(lengths))
    again = engine.runner.seconds(accepted * len(prompts), len(prompts))
    cycle, keeping = (median(values) for values in zip(*cycles, strict=True))
    share = median(keep / whole for whole, keep in cycles)
    ends = f"{min(k / w for w, k in cycles):.1%}–{max(k / w for w, k in cycles):.1%}"
    return [
        len(prompts),
        len(cycles),
        accepted,
        f"{cycle * 1e3:.1f}",
        f"{keeping * 1e3:.2f}",
        f"{share:.1%} ({ends})",
        f"{again / cycle:.0%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,4")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--vocab-size", type=int, default=SHAPE["vocab_size"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = random_target(options.layers, options.vocab_size)
    state = target.recurrent.bytes_per_state(target.dtype) / 2**20
    print(f"one state: {state:.1f} MiB; states of every token of a block would be {BLOCK * state:.0f} MiB\n")
    print(
        "| requests | cycles | tokens kept | cycle ms | roll-back ms | of a cycle | computing again |\n|" + "---|" * 7
    )
    generator = torch.Generator().manual_seed(1)
    for count in map(int, options.requests.split(",")):
        prompts = torch.randint(options.vocab_size - 1, (count, PROMPT), generator=generator).tolist()
        print("| " + " | ".join(map(str, measure(target, prompts, options.tokens))) + " |", flush=True)


if __name__ == "__main__":
    main()
