"""Real vLLM on the reference pair: plain, with its own dflash, and with volley's proposer, all in this process.

``make test-vllm`` runs these in an environment with vLLM; elsewhere they are skipped.
"""

import gc
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chi_square import chi_square_p
from volley import Engine, SamplingParams
from volley.decode.sampling import token_probs
from volley.errors import MismatchError, UnsupportedModelError
from volley.files import REFERENCE, read_json, write_atomically
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.pilot import PilotConfig, net_for, save_pilot
from volley.models.layers.fingerprint import drafter_fingerprint
from volley.vllm import PluginOptions, engine_args

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine, its worker and the proposer in this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
vllm = pytest.importorskip("vllm")
rejection_sampler = pytest.importorskip("vllm.v1.sample.rejection_sampler")

PROMPTS = [
    "Question: Tom has 3 apples and buys 5 more. How many apples does he have?\nAnswer:",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "import numpy as np\n\n",
    "The `match` statement lets you compare a value against patterns.\n\n" * 6,
    "<|im_start|>user\nWrite a function to find the largest of a list.<|im_end|>\n<|im_start|>assistant\n",
    "The `match` statement lets you compare a value against patterns.\n\n" * 6 + "For example,",
    "# Lists\n\n- List all files in a directory:\n\n",
    "class Graph:\n    def __init__(self):\n        self.edges = {}\n\n" * 5,
]
LENGTH = 40


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The plain DFlash drafter, its layers' key norms made the same.

    vLLM 0.32 normalises all layers' context keys with the first layer's weights on a CPU, so that its own dflash runs another
    drafter than the one it is given unless these are equal.
    """
    folder = tmp_path_factory.mktemp("drafter")
    drafter = Drafter.from_pretrained(REFERENCE / "drafter-dflash", dtype=torch.float32)
    first, *others = (layer.self_attn.k_norm for layer in drafter.layers)
    for norm in others:
        norm.load_state_dict(first.state_dict())
    drafter.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def expected(drafter: str) -> dict[str, Any]:
    return by_volley(REFERENCE / "target", drafter)


def by_volley(target: Path, drafter: str | Path) -> dict[str, Any]:
    """Return volley's own text, and how many draft tokens it accepts and makes in as many cycles as vLLM runs.

    vLLM drafts whole blocks to the end and counts what it accepts beyond it.
    """
    engine = Engine.from_pretrained(target, drafter=drafter, dtype=torch.float32, policy="fixed", prefix_caching=False)
    params = SamplingParams(max_tokens=LENGTH + 8, ignore_eos=True)
    tokens, drafts, accepted = [], 0, 0
    for result in engine.generate(PROMPTS, params):
        tokens.append(result.token_ids[:LENGTH])
        written = 1
        for length in result.stats.accepted_lengths:
            if written < LENGTH:
                written, drafts, accepted = written + length, drafts + 1, accepted + length - 1
    return {"tokens": tokens, "drafts": drafts, "accepted": accepted}


class Run:
    """One vLLM engine and its answers to the prompts, all at once."""

    def __init__(self, target: Path = REFERENCE / "target", **options: Any) -> None:
        options = {"enforce_eager": True, "max_model_len": 1024, "block_size": 32, **options}
        self.llm = vllm.LLM(
            str(target),
            dtype="float32",
            seed=0,
            disable_log_stats=False,
            distributed_executor_backend="uni",
            kv_cache_memory_bytes=2**27,
            **options,
        )

    def answer(self, prompts: Sequence[str] = PROMPTS, **params: Any) -> list[list[int]]:
        params = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, **params}
        outputs = self.llm.generate(list(prompts), vllm.SamplingParams(**params), use_tqdm=False)
        return [list(choice.token_ids) for output in outputs for choice in output.outputs]

    def count(self, name: str) -> int:
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == f"vllm:{name}")

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def proposer(self) -> Any:
        return self.runner.drafter


@pytest.fixture(autouse=True)
def _clean_up() -> Iterator[None]:
    yield
    gc.collect()


def plugin(drafter: str, **options: Any) -> dict[str, Any]:
    return engine_args(PluginOptions(drafter=drafter, **options))


def test_vllm_alone(expected: dict[str, Any]) -> None:
    assert Run().answer() == expected["tokens"]


def test_vllms_own_dflash(expected: dict[str, Any], drafter: str) -> None:
    run = Run(speculative_config={"method": "dflash", "model": drafter, "num_speculative_tokens": 7})
    assert run.answer() == expected["tokens"]
    assert run.count("spec_decode_num_drafts") == expected["drafts"]
    assert run.count("spec_decode_num_accepted_tokens") == expected["accepted"]


def test_the_proposer_drafts_what_volley_drafts(expected: dict[str, Any], drafter: str) -> None:
    run = Run(**plugin(drafter, policy="fixed"))
    assert run.answer() == expected["tokens"]
    assert run.count("spec_decode_num_drafts") == expected["drafts"]
    assert run.count("spec_decode_num_accepted_tokens") == expected["accepted"]
    assert_near_the_last_position(run, expected)


def test_a_pilot_chooses_as_it_does_in_volley(expected: dict[str, Any], drafter: str) -> None:
    loaded = Drafter.from_pretrained(drafter, dtype=torch.float32)
    shape = {"input": "normalised", "block_sizes": (2, 3, 5, 8), "width": 16, "layers": 2}
    config = PilotConfig(drafter=drafter_fingerprint(loaded), **shape)
    torch.manual_seed(1)
    net = net_for(config, loaded)
    net[-1].bias.data.zero_()  # so that prompts differ in what is chosen
    save_pilot(Path(drafter), config, net)
    engine = Engine.from_pretrained(REFERENCE / "target", drafter=drafter, dtype=torch.float32, policy="pilot")
    requests = [engine.add_request(prompt, SamplingParams(max_tokens=LENGTH, ignore_eos=True)) for prompt in PROMPTS]
    while any(request.num_output == 0 for request in requests):
        engine.step()
    wanted = [engine.core.pacing.policy.positions[request.request_id] for request in requests]  # type: ignore[attr-defined]
    assert len(set(wanted)) > 1

    run = Run(**plugin(drafter, policy="pilot"))
    chosen: dict[int, int] = {}
    prefilled = run.proposer.policy.prefilled

    def watched(request_id: int, *shown: Any) -> None:
        prefilled(request_id, *shown)
        chosen[request_id] = run.proposer.policy.positions[request_id]

    run.proposer.policy.prefilled = watched
    assert run.answer() == expected["tokens"]
    assert sorted(chosen.values()) == sorted(wanted)
    run.answer(PROMPTS[:1])
    assert not [size for name, size in run.proposer.policy.positions.items() if name < max(chosen)], (
        "kept after their requests"
    )


def distribution_of_three(temperature: float, rare: float = 0.004) -> dict[tuple[int, ...], float]:
    """The target's probabilities of what may follow the second prompt, as far as they are above ``rare``."""
    engine = Engine.from_pretrained(REFERENCE / "target", drafter=None, dtype=torch.float32, block_size=1)
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown = {}
        for path, weight in paths.items():
            logits = engine.next_logits([*engine.encode(PROMPTS[1]), *path])[None]
            probs = weight * token_probs(logits, SamplingParams(temperature=temperature))[0]
            for token in (probs > rare).nonzero().flatten().tolist():
                grown[*path, token] = float(probs[token])
        paths = grown
    return paths


def test_sampled_answers(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens at temperature 1, of which two are verified drafts, have the target's distribution, because volley's plugin
    has repaired vLLM's verification; with the CPU build's own function they do not."""
    args = engine_args(PluginOptions(drafter=drafter, policy="fixed"))
    args["speculative_config"]["num_speculative_tokens"] = 2
    run = Run(**args, max_num_seqs=100)
    exact = distribution_of_three(1.0)
    assert len(exact) > 8
    place = {path: index for index, path in enumerate(exact)}
    distribution = torch.tensor([*exact.values(), 1 - sum(exact.values())], dtype=torch.float64)

    def p_value(draws: int) -> float:
        drawn = run.answer([PROMPTS[1]], temperature=1.0, max_tokens=3, n=draws)
        cells = torch.tensor([place.get(tuple(path), len(place)) for path in drawn])
        return chi_square_p(torch.bincount(cells, minlength=len(distribution)), distribution)

    before = run.count("spec_decode_num_accepted_tokens")
    assert p_value(1000) > 1e-4
    assert run.count("spec_decode_num_accepted_tokens") > before + 50, "some of them were drafts"
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", vllms_own)
    assert p_value(300) < 1e-9


def assert_near_the_last_position(run: Run, expected: dict[str, Any]) -> None:
    """vLLM asks for no drafts while any request is near its last position; the others draft afterwards, having seen all."""
    tokenizer = run.llm.get_tokenizer()
    text = PROMPTS[7] * 20
    long = tokenizer.decode(tokenizer.encode(text)[: 1024 - 6])
    before = run.count("spec_decode_num_accepted_tokens")
    answers = run.answer([PROMPTS[2], long])
    assert answers[0] == expected["tokens"][2]
    assert len(answers[1]) <= 6
    assert run.count("spec_decode_num_accepted_tokens") > before


def test_goodput_under_pressure(expected: dict[str, Any]) -> None:
    """Prompts in chunks, prefix caching, preemption, and a drafter with a head."""
    run = Run(
        **plugin(str(REFERENCE / "drafter")),
        num_gpu_blocks_override=14,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_model_len=256,
    )
    for _ in range(2):
        assert run.answer() == expected["tokens"]
    assert run.count("num_preemptions") > 0
    assert run.count("prefix_cache_hits") > 0
    assert run.count("spec_decode_num_accepted_tokens") > 0
    proposer = run.proposer
    run.answer(PROMPTS[:1])
    assert len(proposer.request_at) <= 1
    assert len(proposer.pacing.known) <= 1, "nothing is kept of requests that ended"


def test_feedback_with_two_steps_and_a_window(expected: dict[str, Any], drafter: str) -> None:
    run = Run(
        **plugin(drafter, policy="feedback", denoising_steps=2, draft_window=48),
        max_num_batched_tokens=96,
        max_num_seqs=4,
    )
    assert run.answer() == expected["tokens"]
    cold = run.count("spec_decode_num_accepted_tokens")
    assert cold > 0
    assert run.answer() == expected["tokens"]
    assert run.count("prefix_cache_hits") > 0
    assert run.count("spec_decode_num_accepted_tokens") >= 1.9 * cold, "a prefix hit costs no acceptance"


def test_positions_it_has_not_seen_are_not_drafted_from(expected: dict[str, Any], drafter: str) -> None:
    run = Run(**plugin(drafter, policy="fixed"))
    run.answer()
    run.proposer.slots.token_ids[:] = -1  # as if vLLM had got their K/V from elsewhere
    before = run.count("spec_decode_num_drafts")
    assert run.answer([PROMPTS[3]]) == [expected["tokens"][3]]
    assert run.count("prefix_cache_hits") > 0
    assert run.count("spec_decode_num_drafts") == before
    assert run.answer([PROMPTS[2]]) == [expected["tokens"][2]]
    assert run.count("spec_decode_num_drafts") > before


def test_hooks_that_do_not_fire_stop_drafting(expected: dict[str, Any], drafter: str, caplog: Any) -> None:
    run = Run(**plugin(drafter, policy="fixed"))
    run.proposer.taps.take = lambda: None
    assert run.answer(PROMPTS[:2]) == expected["tokens"][:2]
    assert run.count("spec_decode_num_drafts") == 0


def test_a_drafter_of_another_target(tmp_path: Path) -> None:
    config = read_json(REFERENCE / "drafter-dflash" / "config.json")
    write_atomically(tmp_path / "model.safetensors", (REFERENCE / "drafter-dflash/model.safetensors").read_bytes())
    write_atomically(tmp_path / "config.json", json.dumps({**config, "num_target_layers": 36}))
    with pytest.raises(MismatchError, match="number of target layers is 36, this target's is 20"):
        Run(**plugin(str(tmp_path)))


def vllms_own(
    x: torch.Tensor, ends: torch.Tensor, total: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Spread values over draft tokens as vLLM 0.32's CPU build does by itself: the kernel writes to a copy."""
    output = x.new_empty(total)
    torch.ops._C.expand_kernel_impl(
        output.to(torch.int64), x.to(torch.int64), ends.to(torch.int64), replace_from, replace_to
    )
    return output


def test_top_k_in_passes_without_drafts(drafter: str) -> None:
    run = Run(**plugin(drafter, policy="fixed"))
    (answer,) = run.answer(PROMPTS[:1], temperature=1.0, top_k=5)
    assert len(answer) == LENGTH


def test_a_vllm_that_verifies_at_wrong_temperatures(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(**plugin(drafter))
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", vllms_own)
    with pytest.raises(UnsupportedModelError, match="verifies drafts at wrong temperatures"):
        type(run.proposer)(run.llm.llm_engine.vllm_config)


def test_compiled_passes_are_refused_at_start_up(drafter: str) -> None:
    with pytest.raises(RuntimeError, match="enforce_eager=True"):
        Run(**{**plugin(drafter), "enforce_eager": False})
