"""Tokenizers with several named chat templates: everything that reads one gets the one that the tokenizer chooses."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.conftest import byte_tokenizer
from tests.serve.running import Running, Tiny, running
from tests.serve.test_tools import CHAT, TEMPLATE, WEATHER
from volley.chat import check_template, encode_chat, find_template, own_template, render_chat, template_digest
from volley.errors import ConfigError

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant\n"
NAMED = {"default": PLAIN, "tool_use": TEMPLATE, "rag": "{% for m in messages %}RAG {{ m.content }}{% endfor %}"}


@pytest.fixture(params=["config", "folder"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedTokenizerBase:
    """A tokenizer with named templates, in either of the two forms that checkpoints have them in."""
    folder = tmp_path / "named"
    byte_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    if request.param == "config":
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": template} for name, template in NAMED.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(PLAIN)
        for name in ("tool_use", "rag"):
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])
    return AutoTokenizer.from_pretrained(folder)


def test_the_tokenizer_chooses(tokenizer: PreTrainedTokenizerBase) -> None:
    assert isinstance(tokenizer.chat_template, dict)
    assert check_template(tokenizer) == own_template(tokenizer) == PLAIN
    assert own_template(tokenizer, with_tools=True) == TEMPLATE
    with pytest.raises(ConfigError, match="no thinking switch"):
        check_template(tokenizer, True)  # which only the other template has
    alone = byte_tokenizer()
    alone.chat_template = PLAIN
    assert template_digest(tokenizer) == template_digest(alone)
    assert encode_chat(tokenizer, CHAT) == encode_chat(alone, CHAT)
    assert "Tools:" in render_chat(tokenizer, CHAT, tools=[WEATHER])


def test_a_template_by_name_or_file(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("own")
    assert find_template(tokenizer, "rag") == NAMED["rag"]
    assert find_template(tokenizer, file) == "own"
    with pytest.raises(ConfigError, match="did you mean 'tool_use'"):
        find_template(tokenizer, "tool_uze")
    with pytest.raises(ConfigError, match=r"give a file of Jinja, or one of .*\(default, rag, tool_use\)"):
        find_template(tokenizer, "elsewhere")
    tokenizer.chat_template = {"rag": NAMED["rag"]}
    with pytest.raises(ConfigError, match="templates rag, and none is the default; choose one with --chat-template"):
        own_template(tokenizer)
    tokenizer.chat_template = PLAIN
    assert find_template(tokenizer, "default") == PLAIN


def tokens(server: Running, **body: Any) -> list[int]:
    response = server.client.post("/tokenize", json={"messages": CHAT, **body})
    assert response.status_code == 200, response.text
    return list(response.json()["tokens"])


@pytest.mark.slow
def test_a_server_of_named_templates(
    tiny: Tiny, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are those of transformers, with tools and without, and calls of the template for tools are found."""
    monkeypatch.setattr(tiny.target, "tokenizer", tokenizer)
    want = [
        tokenizer.apply_chat_template(CHAT, tools=tools, add_generation_prompt=True)["input_ids"]
        for tools in (None, [WEATHER])
    ]
    with running(tiny.engine()) as server:
        assert [tokens(server), tokens(server, tools=[WEATHER])] == want
        assert tokens(server, tools=[WEATHER], tool_choice="none") == want[0]
        assert server.client.get("/tokenizer_info").json()["chat_template"] == PLAIN
        body = {"tools": [WEATHER], "max_tokens": 200, "seed": 1, "parallel_tool_calls": False}
        forced = server.post("chat/completions", {"messages": CHAT, "tool_choice": "required", **body}).json()
        assert forced["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert forced["usage"]["prompt_tokens"] == len(want[1])
        assert (
            server.post("chat/completions", {"messages": CHAT, "max_tokens": 2, "tools": [WEATHER]}).status_code == 200
        )
        server.settle()
    with running(tiny.engine(), chat_template="rag") as server:
        assert tokenizer.decode(tokens(server)) == f"RAG {CHAT[0]['content']}"
        refused = server.post("chat/completions", {"messages": CHAT, "tools": [WEATHER]})
        assert "not known how this model writes tool calls" in refused.json()["error"]["message"]
