"""Several models in one server: found by name, counted apart, and not touched by each other's failures."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TinyPair
from tests.models.drafters.test_adapter import make_adapter
from tests.serve.running import MODEL, Running, Tiny, running
from volley import Engine
from volley.cli.models import ModelOptions
from volley.config import CapacityConfig, DecodingConfig
from volley.engine.step import Step
from volley.errors import ConfigError
from volley.serve.config import ServeConfig
from volley.serve.model_file import override, read_models
from volley.serve.models import Models
from volley.serve.service import Service

ASK = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def other(tiny_pair: TinyPair) -> Tiny:
    """Engines of one target take turns, and those of a server step at once: the second has a target of its own."""
    return Tiny(tiny_pair)


@pytest.fixture
def pair(tiny: Tiny, other: Tiny) -> Iterator[Running]:
    with running(tiny.engine(policy="fixed"), {"plain": Engine(other.target, num_pages=64)}) as server:
        yield server


def test_each_name_has_its_own_engine(pair: Running, tiny: Tiny) -> None:
    assert [card["id"] for card in pair.client.get("/v1/models").json()["data"]] == [MODEL, "plain"]
    want = tiny.answer("Hello", max_tokens=8)
    for name in (MODEL, "plain"):
        answer = pair.post("completions", {"model": name, **ASK}).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (name, want)
        assert pair.client.post("/tokenize", json={"model": name, "prompt": "Hello"}).json()["count"] > 0
        assert pair.client.get(f"/v1/models/{name}").json()["id"] == name
    pair.settle()
    seen = pair.metrics()
    assert seen["volley:generation_tokens_total"] == seen['volley:generation_tokens_total{model_name="plain"}'] == 8
    assert seen["volley:spec_decode_num_drafts_total"] > 0
    assert seen['volley:spec_decode_num_drafts_total{model_name="plain"}'] == 0
    assert seen['volley:kv_pages{model_name="plain"}'] == 64
    assert seen['volley:memory_bytes{model_name="plain",part="kv"}'] < seen['volley:memory_bytes{part="kv"}']


def test_a_name_that_is_not_there(pair: Running) -> None:
    missing = pair.post("completions", ASK)
    assert missing.status_code == 400
    assert missing.json()["error"]["param"] == "model"
    unknown = pair.post("completions", {"model": "plane", **ASK})
    assert unknown.status_code == 404
    assert "did you mean 'plain'?" in unknown.json()["error"]["message"]


def test_one_engine_dies_and_the_other_goes_on(pair: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: Step) -> None:
        raise KeyboardInterrupt("not even an exception")

    monkeypatch.setattr(pair.engine.runner, "forward", broken)
    assert pair.post("completions", {"model": MODEL, **ASK}).status_code == 503
    assert pair.post("completions", {"model": MODEL, **ASK}).json()["error"]["code"] == "engine_dead"
    assert pair.post("completions", {"model": "plain", **ASK}).status_code == 200
    health = pair.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, f"the engine of {MODEL} has stopped")
    assert pair.client.get("/ready").status_code == 200


@pytest.mark.slow
def test_adapters_belong_to_their_model(tiny: Tiny, other: Tiny, tmp_path: Path) -> None:
    make_adapter(tmp_path / "code", tiny.drafter)
    with_adapter = ServeConfig(adapters=(f"code={tmp_path / 'code'}",))
    models = Models(
        [Service(tiny.engine(), with_adapter, "one"), Service(Engine(other.target, num_pages=64), ServeConfig(), "two")]
    )
    assert models.names == ["one", "one:code", "two"]
    assert models.find("one:code").model == "one"
    with pytest.raises(ConfigError, match="same name"):
        Models([*models, *models])


def test_a_file_of_models(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        "[models.small]\nkv_mib = 64\ndrafter = 'none'\n[models.large]\nnum_pages = 9\nadapters = ['a=b']\n"
    )
    described = read_models(file)
    assert list(described) == ["small", "large"]
    base = (ModelOptions(dtype="float32"), DecodingConfig(), CapacityConfig(page_size=8), ServeConfig())
    models, _, capacity, _ = override("small", described["small"], *base)
    assert models == ModelOptions(dtype="float32", drafter="none")
    assert capacity == CapacityConfig(page_size=8, kv_mib=64)
    assert override("large", described["large"], *base)[3].adapters == ("a=b",)


def load(file: Path) -> None:
    for name, own in read_models(file).items():
        override(name, own, ModelOptions(), DecodingConfig(), CapacityConfig(), ServeConfig())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "give a TOML file"),
        ("a = 1", r"write a table \[models.NAME\]"),
        ("[models]\na = 1", r"write a table \[models.NAME\]"),
        ("[models.'a:b']", "has a colon"),
        ("[models.a]\nkv_mib=1\n[models.b]", "'b' does not say what its K/V may take"),
        ("[models.a]\nnum_page=1", "unknown option of the model 'a' 'num_page'; did you mean 'num_pages'"),
        ("[models.a]\nnum_pages='many'", "the model 'a': num_pages: .*valid integer"),
        ("[models.a]\nkv_mib=1\nnum_pages=1", "give one of them"),
        ("[models.a]\napi_key_file='keys'", "api_key_file of the model 'a' .*the whole server.*--api-key-file"),
        ("[models.a]\nthreads=2", "threads of the model 'a' .*the whole server"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(file)
