"""volley and llama.cpp on the same files: same tokens of text, same greedy answers, same drafts taken, with numbers in fp32."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.llamacpp.running import EXACT, SERVER, SOURCE, LlamaAnswer, ask, convert, llama_server, quantise
from tests.models.gguf.files import write_model
from volley import Engine, SamplingParams
from volley.files import REFERENCE, find_smollm2
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.export import export
from volley.models.gguf.tokenizer import load_gguf_tokenizer
from volley.tensors import load_tensors, save_tensors

pytestmark = [
    pytest.mark.llamacpp,
    pytest.mark.skipif(not SERVER.exists(), reason="llama.cpp is not built; run make peers"),
]
QUESTIONS = [
    "Write a Python function that sorts a list.",
    "What is the capital of France?",
    "If I have 3 apples and buy 5 more, how many are there?",
]
MAX_TOKENS = 64
VOCABULARIES = [
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35",
    "refact", "starcoder",
]  # fmt: skip
DRAFTED = 1024  # tokens of a reduced vocabulary
CANDIDATES = 2048  # so many that the walk over the best of each position is the walk over all; 256 are too few


class Files(NamedTuple):
    target: Path
    drafters: dict[str, Path]
    """``dflash``, one with a Markov head as ``dspark``, and both with a reduced vocabulary."""
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The bundled target and two of its drafters in fp32."""
    folder = tmp_path_factory.mktemp("files")
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "target")
    model = AutoModelForCausalLM.from_pretrained(REFERENCE / "target", dtype=torch.float32)
    target = write_model(folder / "target.gguf", model, "qwen3", tokenizer=tokenizer)
    for name, source in (("dflash", "drafter-dflash"), ("dspark", "drafter-markov")):
        (folder / name).mkdir()
        tensors = load_tensors(REFERENCE / source / "model.safetensors")
        save_tensors(folder / name / "model.safetensors", {key: tensor.float() for key, tensor in tensors.items()})
        shutil.copy(REFERENCE / source / "config.json", folder / name)
    drafters, counts = {}, range(8192, 0, -1)  # a tokenizer's first tokens are its most frequent
    for name in ("dflash", "dspark"):
        for ending, size in (("", None), ("-reduced", DRAFTED)):
            drafters[name + ending] = file = folder / f"{name}{ending}.gguf"
            export(folder / name, file, "gguf", target=str(target), draft_vocab_size=size, counts=counts)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    engine = Engine.from_pretrained(target, dtype=torch.float32)
    return Files(target, drafters, [engine.encode(chat) for chat in chats])


def volley_answers(target: Path, drafter: Path | None, depth: int, prompts: Sequence[list[int]]) -> list[LlamaAnswer]:
    """With the counts that llama.cpp keeps: draft tokens sent to the target, and those of them that it kept."""
    loaded = None if drafter is None else Drafter.from_pretrained(drafter, torch.float32)
    if loaded is not None and loaded.config.head is not None:
        head = replace(loaded.config.head, candidates=CANDIDATES)
        loaded.config = replace(loaded.config, head=head)
    engine = Engine.from_pretrained(target, drafter=loaded, dtype=torch.float32, policy=f"fixed:{depth + 1}")
    answers = []
    for prompt in prompts:
        (result,) = engine.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS))
        blocks, lengths = result.stats.block_sizes, result.stats.accepted_lengths
        drafted, accepted = sum(size - 1 for size in blocks), sum(length - 1 for length in lengths)
        answers.append(LlamaAnswer(result.token_ids, drafted, accepted))
    return answers


@pytest.mark.parametrize(
    ("name", "depth"),
    [("dflash", 3), ("dflash", 7), ("dspark", 3), ("dspark", 7), ("dflash-reduced", 7), ("dspark-reduced", 7)],
)
def test_answers_and_accepted_drafts_are_equal(files: Files, tmp_path: Path, name: str, depth: int) -> None:
    drafter, (method, *reduced) = files.drafters[name], name.split("-")
    options = ["-md", str(drafter), "--spec-type", f"draft-{method}", "--spec-draft-n-max", str(depth)]
    with llama_server(tmp_path / "log", "-m", str(files.target), *options, *EXACT) as client:
        theirs = [ask(client, prompt, MAX_TOKENS) for prompt in files.prompts]
    own = volley_answers(files.target, drafter, depth, files.prompts)
    assert own == theirs
    assert sum(answer.accepted for answer in own) > 20
    if name != "dflash":
        other = files.drafters[method if reduced else "dflash"]
        without = volley_answers(files.target, other, depth, files.prompts)
        assert [answer.accepted for answer in own] != [answer.accepted for answer in without], (
            "another drafter, other drafts"
        )


def test_the_published_pair(tmp_path: Path) -> None:
    """SmolLM2's file, which llama.cpp's quantiser widens to fp32, with the drafter that volley ships for it."""
    published = find_smollm2()
    if published is None or published[1] is None:
        pytest.skip("SmolLM2 is not installed; run make demo")
    target = quantise(Path(published[0]), tmp_path / "target.gguf", "F32")
    tensors = load_tensors(Path(published[1]) / "model.safetensors")
    (tmp_path / "drafter").mkdir()
    save_tensors(tmp_path / "drafter" / "model.safetensors", {key: tensor.float() for key, tensor in tensors.items()})
    shutil.copy(Path(published[1]) / "config.json", tmp_path / "drafter")
    export(tmp_path / "drafter", tmp_path / "drafter.gguf", "gguf", target=str(target))
    engine = Engine.from_pretrained(target, dtype=torch.float32, drafter=None)
    prompts = [engine.encode([{"role": "user", "content": question}]) for question in QUESTIONS]
    own = volley_answers(target, tmp_path / "drafter.gguf", 3, prompts)
    options = ["-md", str(tmp_path / "drafter.gguf"), "--spec-type", "draft-dspark", "--spec-draft-n-max", "3"]
    with llama_server(tmp_path / "log", "-m", str(target), *options, *EXACT) as client:
        theirs = [ask(client, prompt, MAX_TOKENS) for prompt in prompts]
    for answer, other in zip(own, theirs, strict=True):
        assert replace(answer, accepted=0) == replace(other, accepted=0)
        assert abs(answer.accepted - other.accepted) <= 1, (
            "the last draft is counted otherwise if the answer ends within it"
        )
    assert sum(answer.accepted for answer in own) > 20


def test_files_of_llama_cpps_own_tools(files: Files, tmp_path: Path) -> None:
    """Its converter's file, and what it quantises, some rows of which are Q6_K: read, and answered as volley answers."""
    converted = convert(REFERENCE / "target", tmp_path / "bf16.gguf")
    target = Engine.from_pretrained(converted, dtype=torch.float32).target
    expected = AutoModelForCausalLM.from_pretrained(REFERENCE / "target", dtype=torch.float32).state_dict()
    for name, weight in target.model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    pair = Engine.from_pretrained()
    text_end = pair.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert target.stop_token_ids == pair.target.stop_token_ids | {text_end}, "llama.cpp ends there by the token's text"
    for kind in ("Q8_0", "Q4_K_M"):
        quantised = quantise(converted, tmp_path / f"{kind}.gguf", kind)
        (own,) = volley_answers(quantised, files.drafters["dflash"], 3, files.prompts[:1])
        plain = volley_answers(quantised, None, 0, files.prompts[:1])
        assert own.token_ids == plain[0].token_ids
        assert own.accepted > 5


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_text_is_cut_as_llama_cpp_cuts_it(vocabulary: str) -> None:
    """Vocabularies of real models, with texts and their tokens, that come with llama.cpp's source."""
    file = SOURCE / "models" / f"ggml-vocab-{vocabulary}.gguf"
    tokenizer = load_gguf_tokenizer(file)
    texts = file.with_name(f"{file.name}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = file.with_name(f"{file.name}.out").read_text().split("\n")
    assert len(texts) == len(lines) > 40
    for text, line in zip(texts, lines, strict=True):
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert token_ids == [int(token) for token in line.split()], text
        assert tokenizer.decode(token_ids) == text
