"""The bundled pair does what it is bundled for: real text, several tokens a pass, the target's own tokens."""

import zlib

import pytest
import torch
from transformers import AutoModelForCausalLM

from volley import Engine, SamplingParams
from volley.engine.engine import REFERENCE

QUESTIONS = [
    "Tom has 5 boxes with 8 pencils each. He gives away 12 pencils. How many pencils are left?",
    "Write a function to check whether a number is even.",
    "How do I use `grep`?",
    "Explain “Ownership” in Rust.",
]
TAU_PROMPTS = [  # written for this test: no setting was chosen on them
    "A baker makes 14 trays of 12 rolls each and sells 95 rolls. How many rolls are left?",
    "Nina reads 18 pages on Monday and twice as many on Tuesday. How many pages does she read in both days?",
    "A train travels 60 miles per hour for 3 hours and then 45 miles per hour for 2 hours. How far does it go?",
    "Four friends share a bill of $72 equally and each adds a tip of $3. How much does each of them pay?",
    "Write a function that returns the largest number of a list.",
    "Write a function to reverse the words of a sentence.",
    "Write a Python function `count_vowels`. Count the vowels of a string.",
    "Write a Python program. Topic: sorting: bubble sort",
    "How do I use `curl`?",
    "Explain the command `find` with examples.",
    "Explain “Lifetimes” in Rust.",
    "What should I know about “Backwards Compatibility” in a PEP?",
]
TAU = 4.620  # 137 cycles, as docs/benchmarks/bundled-pair.md has it
CHATS = [[{"role": "user", "content": text}] for text in QUESTIONS]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(dtype=torch.float32)


@pytest.mark.slow
def test_tokens_are_those_of_transformers(engine: Engine) -> None:
    model = AutoModelForCausalLM.from_pretrained(REFERENCE / "target", dtype=torch.float32).eval()
    results = list(engine.generate(CHATS, SamplingParams(max_tokens=40)))
    for chat, result in zip(CHATS, results, strict=True):
        prompt = torch.tensor([engine.encode(chat)])
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
        assert result.token_ids == output[0, prompt.shape[1] :].tolist()


@pytest.mark.slow
def test_acceptance_length_is_the_published_one(engine: Engine) -> None:
    """fp32, greedy, chains of 8: nothing random. A worse drafter or a wrong feature shows, rounding of another CPU does not."""
    fixed = Engine(engine.target, engine.drafter, policy="fixed")
    chats = [[{"role": "user", "content": text}] for text in TAU_PROMPTS]
    results = fixed.generate(chats, SamplingParams(max_tokens=64))
    lengths = [length for result in results for length in result.stats.accepted_lengths]
    assert sum(lengths) / len(lengths) == pytest.approx(TAU, rel=0.03)


@pytest.mark.slow
def test_the_markov_drafter_has_its_name_and_lies_between_the_others(engine: Engine) -> None:
    """The head that other programs know: better than none, and no answer changes."""
    chats = [[{"role": "user", "content": text}] for text in TAU_PROMPTS]
    tau, answers = [], []
    for name in ("reference-dflash", "reference-markov", "reference"):
        each = Engine.from_pretrained(engine.target, drafter=name, policy="fixed")
        results = list(each.generate(chats, SamplingParams(max_tokens=48)))
        lengths = [length for result in results for length in result.stats.accepted_lengths]
        tau.append(sum(lengths) / len(lengths))
        answers.append([result.token_ids for result in results])
    assert answers[0] == answers[1] == answers[2]
    assert tau[1] > 1.03 * tau[0]
    assert tau[1] > 0.85 * tau[2]


@pytest.mark.slow
def test_a_seed_gives_the_tokens_of_plain_decoding(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24)
    matching = Engine(engine.target, engine.drafter, verification="coupled")
    plain = Engine(engine.target, block_size=1)
    for chat in CHATS[:2]:
        (mine,), (theirs,) = matching.generate(chat, params), plain.generate(chat, params)
        assert mine.token_ids == theirs.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("tree_nodes", [None, 12])
def test_penalties_work_in_bf16(tree_nodes: int | None) -> None:
    engine = Engine.from_pretrained(tree_nodes=tree_nodes)
    params = SamplingParams(max_tokens=24, ignore_eos=True, presence_penalty=0.5)
    results = list(engine.generate(CHATS[:2], params))
    assert [len(result.token_ids) for result in results] == [24, 24]
    assert sum(result.stats.acceptance_length for result in results) > 2


def test_all_that_is_bundled_is_small_enough_to_ship() -> None:
    """Package indexes take wheels of up to 100 MB, which are compressed."""
    assert sum(len(zlib.compress(file.read_bytes(), 1)) for file in REFERENCE.rglob("*.safetensors")) <= 96_000_000
    assert all((folder / "README.md").exists() for folder in REFERENCE.iterdir() if folder.is_dir())
