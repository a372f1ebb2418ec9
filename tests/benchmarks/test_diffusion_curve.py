"""The curve of a diffusion language model, decoded here and asked of a server."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.diffusion_curve import main
from tests import tiny
from tests.conftest import byte_tokenizer
from tests.diffusion_gemma import random_model
from tests.quantised import edit_config
from tests.serve.running import running
from volley import Engine

THRESHOLDS = ["0.2", "0.99"]


def save_model(folder: Path, own: dict[str, object]) -> None:
    tiny.eager_model(tiny.target_config(vocab_size=260, num_hidden_layers=2)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    edit_config(folder, **own)


def curve(monkeypatch: pytest.MonkeyPatch, folder: Path, options: str, *texts: str) -> None:
    """Run the command for the model in ``folder`` on prompts of these texts."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts or ("Hello",)))
    monkeypatch.setattr(sys, "argv", f"curve --target {folder} --prompts {prompts} {options}".split())
    main()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "has_nats"),
    [
        ({"block_diffusion": {"mask_token_id": 3, "canvas_length": 8}}, True),
        ({"model_type": "sdar", "mask_token_id": 3, "block_size": 8}, False),
    ],
)
def test_a_server_gives_the_curve_that_the_engine_gives(
    own: dict[str, object],
    has_nats: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_model(tmp_path, own)

    def figures(server: str = "") -> list[tuple[str, ...]]:
        """Tokens per pass, nats and distinct pairs of each setting."""
        options = f"--raw --max-tokens 12 --dtype float32 --thresholds {' '.join(THRESHOLDS)} {server}"
        curve(monkeypatch, tmp_path, options, "Hello", "What is it?")
        rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
        assert [row[1].strip() for row in rows] == ["autoregressive", "self", *(f"threshold {t}" for t in THRESHOLDS)]
        chosen = [row for row in rows if row[1].strip() != "self"]  # how often that drafts depends on the clock
        return [tuple(row[column].strip() for column in (2, 5, 6)) for row in chosen]

    here = figures()
    assert here[0][0] == "1.00"
    assert (here[0][1] != "nan") == has_nats, "the likelihood of a text is causal"
    assert float(here[1][0]) > float(here[2][0]), "a lower threshold takes fewer passes"
    with running(Engine.from_pretrained(tmp_path, dtype=torch.float32)) as server:
        assert figures(f"--server {server.url}/v1") == here


def test_an_autoregressive_scorer_has_a_row_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "model", {"block_diffusion": {"mask_token_id": 3, "canvas_length": 8}})
    save_model(tmp_path / "scorer", {})
    options = f"--scorer {tmp_path}/scorer --raw --max-tokens 12 --dtype float32 --thresholds 0.5"
    curve(monkeypatch, tmp_path / "model", options)
    rows = {row[1].strip(): row for row in (line.split("|") for line in capsys.readouterr().out.splitlines()[2:])}
    assert list(rows) == ["autoregressive", "self", "threshold 0.5", "the scorer"]
    assert rows["the scorer"][2:7:3] == rows["autoregressive"][2:7:3], "the same weights write the same text"


@pytest.mark.parametrize(
    ("own", "options", "message"),
    [
        ({}, "", "is no diffusion language model"),
        ({"block_diffusion": {"mask_token_id": 3}}, "--server http://127.0.0.1:9", "start volley serve"),
        (None, "", "give --steps 12 24 48"),
    ],
)
def test_what_has_no_curve_is_told_so(
    own: dict[str, object] | None,
    options: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_model(tmp_path, own or {})
    if own is None:  # a model without a threshold
        random_model().save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        curve(monkeypatch, tmp_path, options)
    assert message in f"{stopped.value}{capsys.readouterr().err}"
