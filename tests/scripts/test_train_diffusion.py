"""The training of a diffusion language model: its masks and losses against slow ones, and a tiny run from text to engine."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen3ForCausalLM

from tests import tiny
from volley import DiffusionParams, Engine, SamplingParams
from volley.files import REFERENCE
from volley.models.targets.diffusion import load_target
from volley.tensors import load_tensors

SCRIPTS = Path(__file__).parents[2] / "scripts" / "reference"
sys.path.append(str(SCRIPTS))

import bundle  # noqa: E402
import corpus  # noqa: E402
import train_diffusion as training  # noqa: E402

MASK = 3


def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = tiny.target_config(
        vocab_size=8192,
        num_hidden_layers=2,
        initializer_range=0.02,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few rows of every file, some of which are held out."""
    folder = tmp_path_factory.mktemp("data")
    long = "She packs five boxes and sells three of them. " * 40
    texts: dict[str, Any] = {
        "gsm8k_train": lambda n: {"question": f"How many are {n} boxes?", "answer": long if n > 60 else f"{n} boxes."},
        "mbpp": lambda n: {"text": "Add.", "code": f"def add(a):\n    return a + {n}", "task_id": 600 + n},
        "python_functions": lambda n: {"name": "f", "doc": "Adds.", "source": f"def f(a):\n    return a + {n}"},
        "python_algorithms": lambda n: {"path": "sums/add.py", "text": f"print({n})"},
        "tldr_pages": lambda n: {"command": f"c{n}", "text": "# c\n\n> A command."},
        "peps": lambda n: {"title": "Adding", "section": f"{n}", "text": "Text of a proposal."},
        "rust_book": lambda n: {"section": f"{n}", "text": "Ownership is a rule."},
    }
    for name, make in texts.items():
        count = 8
        if name == "gsm8k_train":
            count = 61 + next(n for n in range(1000) if corpus.is_held_out(name, 61 + n))
        rows = [json.dumps(make(n)) for n in range(count + 1)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def options(data: Path, tmp_path_factory: pytest.TempPathFactory) -> argparse.Namespace:
    folder = tmp_path_factory.mktemp("training")
    tiny_model().save_pretrained(folder / "target")
    AutoTokenizer.from_pretrained(REFERENCE / "target").save_pretrained(folder / "target")
    chat = [{"role": "user", "content": "How do I add?"}, {"role": "assistant", "content": "With a plus sign."}]
    (folder / "responses.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    return argparse.Namespace(
        data=data,
        target=folder / "target",
        responses=folder / "responses.jsonl",
        out=folder,
        minutes=0.0,
        causal_weight=0.5,
        keep=0.25,
        compile=False,
        device="cpu",
        rows=2,
        learning_rate=8e-4,
    )


def dense_states(model: Qwen3ForCausalLM, work: training.Pass, row: int) -> Tensor:
    """One sequence a block: the clean tokens before it, causal, and the block, which sees all of them and itself."""
    clean = work.tokens[row, : training.ROW]
    found = [model.model(input_ids=clean[None]).last_hidden_state[0]]
    noisy = work.tokens[row, training.ROW :].view(-1, work.blocks.size)
    for start, block in zip(work.blocks.starts[row].tolist(), noisy, strict=True):
        tokens = torch.cat([clean[:start], block])
        places = torch.arange(len(tokens))
        visible = (places[:, None] >= places) | (places[:, None] >= start)
        mask = torch.where(visible, 0.0, -math.inf)[None, None]
        found.append(model.model(input_ids=tokens[None], attention_mask=mask).last_hidden_state[0, start:])
    return torch.cat(found)


@pytest.mark.parametrize("size", [4, 8])
@torch.no_grad()
def test_both_halves_are_those_of_dense_passes(size: int) -> None:
    model, noise = tiny_model(), torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 8000, (2, training.ROW), generator=noise)
    rows = training.Text(tokens, torch.ones_like(tokens, dtype=torch.bool))
    blocks = training.choose_blocks(rows, size, 6, noise)
    work = training.Pass.of(rows, blocks, training.choose_masks((2, 6), size, noise), MASK)
    found = training.states(model, work)
    model.set_attn_implementation("eager")
    for row in range(2):
        torch.testing.assert_close(found[row], dense_states(model, work, row), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_order", [False, True])
@torch.no_grad()
def test_a_block_is_revealed_slot_by_slot(in_order: bool) -> None:
    model, noise, size = tiny_model(), torch.Generator().manual_seed(5), 4
    tokens = torch.randint(4, 8000, (1, training.ROW), generator=noise)
    rows = training.Text(tokens, torch.ones_like(tokens, dtype=torch.bool))
    blocks = training.choose_blocks(rows, size, 3, noise)
    order = torch.rand(1, 3, size, generator=noise).argsort(-1) if in_order else None
    found = training.blocks_nats(model, rows, blocks, MASK, order)
    model.set_attn_implementation("eager")
    masked, expected = torch.ones(1, 3, size, dtype=torch.bool), torch.zeros(1, 3)
    for number in range(size):
        work = training.Pass.of(rows, blocks, masked, MASK)
        laws = model.lm_head(dense_states(model, work, 0)[training.ROW :]).log_softmax(-1).view(3, size, -1)
        for block, start in enumerate(blocks.starts[0].tolist()):
            left = [slot for slot in range(size) if masked[0, block, slot]]
            surest = max(left, key=lambda own, block=block: float(laws[block, own].max()))
            slot = surest if order is None else int(order[0, block, number])
            expected[0, block] -= laws[block, slot, tokens[0, start + slot]]
            masked[0, block, slot] = False
    assert not masked.any()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_several_orders_bound_more_tightly() -> None:
    model = tiny_model()
    for weight in model.parameters():
        weight.mul_(4)  # so that orders differ
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "target")
    text = torch.arange(4, 4 + 3 * training.ROW, dtype=torch.int32) * 7 % 8000
    text[0] = tokenizer.convert_tokens_to_ids("<|im_start|>")
    found = training.held_out(model, tokenizer, (["gsm8k_train"], [text]), MASK, most=2, orders=6)["math"]
    assert found["bound 8, 6 orders"] < found["bound 8"] - 1e-3
    rows = text[: 2 * training.ROW].long().view(2, -1)
    logits = model(input_ids=rows).logits[:, :-1]
    causal = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert found["causal"] == pytest.approx(float(causal), abs=1e-3)


@torch.no_grad()
def test_blocks_begin_within_answers() -> None:
    is_answer = torch.zeros(2, training.ROW, dtype=torch.bool)
    is_answer[0, 100:120] = True
    rows = training.Text(torch.zeros_like(is_answer, dtype=torch.long), is_answer)
    starts = training.choose_blocks(rows, 8, 500, torch.Generator().manual_seed(4)).starts
    assert set(starts[0].tolist()) == set(range(100, 120))
    assert starts[1].min() >= 1
    assert starts[1].max() == training.ROW - 8 - 1


def test_the_loss_and_its_gradients_are_those_of_autograd() -> None:
    noise = torch.Generator().manual_seed(2)
    hidden, head = (torch.randn(shape, generator=noise, requires_grad=True) for shape in ((300, 16), (50, 16)))
    labels = torch.randint(50, (300,), generator=noise)
    weights, soft = torch.rand(300, generator=noise), torch.rand(300, generator=noise)
    laws, rows = torch.randn(40, 50, generator=noise).softmax(-1), torch.randint(40, (300,), generator=noise)
    logs = (hidden @ head.t()).log_softmax(-1)
    hard = torch.nn.functional.one_hot(labels, 50)
    wanted = (1 - soft[:, None]) * hard + soft[:, None] * laws[rows]
    expected = torch.autograd.grad(-(wanted * logs).sum(-1) @ weights, (hidden, head))
    loss = training.JointCrossEntropy.apply(hidden, head, labels, weights, laws, rows, soft)
    torch.testing.assert_close(loss, -(hard * logs.detach()).sum(-1) @ weights)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, head)), expected)


def test_as_many_slots_are_asked_with_any_number_of_masks_and_a_fifth_are_drafts() -> None:
    masked = training.choose_masks((20_000,), 8, torch.Generator().manual_seed(3))
    number = masked.sum(dim=1)
    slots = number.bincount(minlength=9)[1:] * torch.arange(1, 9)
    assert bool(masked.any(dim=1).all())
    assert float((slots[:6] / slots[:6].float().mean() - 1).abs().max()) < 0.15
    assert 0.1 <= (number == 8).float().mean() < 0.16
    assert 0.1 <= (~masked[:, 0] & (number == 7)).float().mean() < 0.12
    alike = masked[number < 7].float().mean(dim=0)
    assert float(alike.max() - alike.min()) < 0.05


@pytest.mark.slow
def test_slots_with_revealed_tokens_behind_them_learn_the_token_alone(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = training.Trainer(options)
    tokens = torch.randint(4, 8000, (1, training.ROW), generator=torch.Generator().manual_seed(6))
    rows = training.Text(tokens, torch.ones_like(tokens, dtype=torch.bool))
    pattern = torch.tensor([True, False, True, True])
    monkeypatch.setattr(training, "choose_masks", lambda shape, size, noise: pattern.expand(*shape, size))
    asked = []

    def note(hidden: Tensor, labels: Tensor, weights: Tensor, *more: Tensor) -> Tensor:
        asked.append((labels, weights, *more))
        return hidden.sum()

    monkeypatch.setattr(trainer, "loss", note)
    trainer.accumulate(rows, 4, torch.Generator().manual_seed(7))
    causal, (labels, weights, _, places, soft) = asked
    half = training.SOFT
    assert set(causal[4].tolist()) == {half}
    assert soft.tolist() == [0.0, half, half] * (len(labels) // 3)
    assert torch.equal(labels, tokens[0, places + 1])
    decay = training.SLOT_DECAY
    torch.testing.assert_close(weights[:3] / weights[0], torch.tensor([1.0, decay**2, decay**3]))
    assert float(weights.sum()) == pytest.approx(1)


@pytest.mark.slow
def test_a_run_learns_goes_on_and_ends_in_a_model_that_answers(
    options: argparse.Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = training.Trainer(options)
    trainer.read()
    assert trainer.names.count("responses") == 1
    assert set(trainer.names) <= set(training.EPOCH_WEIGHTS)
    losses = [float(trainer.step()[0]) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.3
    trainer.state["step"] = 8
    trainer.save()
    again = training.Trainer(options)
    again.load()
    again.read()
    assert again.state == trainer.state
    assert torch.equal(again.step(), trainer.step())
    trainer.finish()
    report = json.loads((options.out / "report.json").read_text())
    assert set(report["held_out"]["math"]) == {"causal", "bound 4", "bound 8", "bound 16"}
    bundle.write_diffusion(options.out, tmp_path / "diffusion", 0.7)
    assert "| math | " in (tmp_path / "diffusion" / "README.md").read_text()
    answers(tmp_path / "diffusion")
    training.score(tmp_path / "diffusion", options.data, orders=2)
    printed = capsys.readouterr().out.splitlines()
    heads, row = (
        next(line.split(" | ") for line in printed if line.startswith(f"| {name}")) for name in ("dom", "math")
    )
    losses = {name.strip(" |"): float(loss.strip(" |")) for name, loss in zip(heads[1:], row[1:], strict=True)}
    more = losses.keys() - set(report["held_out"]["math"])
    assert more == {"bound 8, 2 orders", "surest first 4", "surest first 8", "surest first 16"}
    for name, loss in report["held_out"]["math"].items():
        assert losses[name] == pytest.approx(loss, abs=0.02)
    check_shortened(options.out / "model", tmp_path / "diffusion")


def check_shortened(source: Path, bundled: Path) -> None:
    """Two matrices a layer are stored in 8 bits, and are what is loaded; all else is as it was."""
    stored, whole = (load_tensors(folder / "model.safetensors") for folder in (bundled, source))
    short = {name for name, weight in stored.items() if weight.dtype is torch.float8_e4m3fn}
    assert len(short) == 2 * 2
    assert all(torch.equal(stored[name], whole[name]) for name in whole.keys() - short)
    loaded = Qwen3ForCausalLM.from_pretrained(bundled, dtype=torch.bfloat16).state_dict()
    for name in short:
        assert torch.equal(loaded[name], whole[name].to(torch.float8_e4m3fn).to(torch.bfloat16))
        assert float((loaded[name].float() - whole[name].float()).norm() / whole[name].float().norm()) < 0.05


def answers(folder: Path) -> None:
    target = load_target(folder, torch.float32, "cpu")
    assert target.diffusion is not None
    assert (target.diffusion.mask_token_id, target.diffusion.settings.threshold) == (MASK, 0.7)
    engine = Engine(target)
    asked = [{"role": "user", "content": "How do I add?"}]
    found = {}
    for mode in ("autoregressive", "self", "diffusion"):
        own = DiffusionParams.from_mapping({"mode": mode})
        (result,) = engine.generate(asked, SamplingParams(max_tokens=10, ignore_eos=True, diffusion=own))
        found[mode] = result.token_ids
    assert found["self"] == found["autoregressive"]
    prompt = torch.tensor([engine.encode(asked)])
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, min_new_tokens=10)
    assert MASK not in found["diffusion"]
    assert len(plain[0]) == prompt.shape[1] + 10
