"""Tokenizers from GGUF files. That text is cut as llama.cpp cuts it is tested on real vocabularies in ``tests/llamacpp``."""

from pathlib import Path

import pytest
from gguf import GGUFWriter

from tests.models.gguf.files import add_tokenizer, bpe_tokenizer
from volley.errors import UnsupportedModelError
from volley.models.gguf.tokenizer import load_gguf_tokenizer

TEXTS = ["the then 12\n", "  Hello,  wörld's <|im_start|>user 漢字", "", "\n\n\t a"]


def write(path: Path, split: str = "gpt-2", *, sentencepiece: bool = False, **flags: bool) -> Path:
    writer = GGUFWriter(path, "llama")
    if sentencepiece:
        letters = [*"▁aab", "▁a", "ab"]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(letters)]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * 259 + [-float(index) for index in range(len(tokens) - 259, 0, -1)])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    else:
        add_tokenizer(writer, bpe_tokenizer(), split)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_byte_level_tokenizer_and_its_template_come_back(tmp_path: Path) -> None:
    own, found = bpe_tokenizer(), load_gguf_tokenizer(write(tmp_path / "model.gguf"))
    for text in TEXTS:
        assert found(text)["input_ids"] == own(text)["input_ids"], text
        assert found.decode(found(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "the then"}]
    assert found.apply_chat_template(chat, tokenize=False) == own.apply_chat_template(chat, tokenize=False)
    assert found.eos_token_id == own.eos_token_id


def test_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    found = load_gguf_tokenizer(write(tmp_path / "model.gguf", sentencepiece=True))
    tokens = {token: index for index, token in enumerate(found.convert_ids_to_tokens(range(len(found))))}
    begin, space_a, space, ab = 1, tokens["▁a"], tokens["▁"], tokens["ab"]
    assert found("a")["input_ids"] == [begin, space_a]
    assert found(" ab")["input_ids"] == [begin, space, space, ab]  # its score is above that of a space with a
    assert found("é", add_special_tokens=False)["input_ids"] == [space, tokens["<0xC3>"], tokens["<0xA9>"]]
    assert found.decode(found("a ab", add_special_tokens=False)["input_ids"]) == "a ab"
    bare = load_gguf_tokenizer(
        write(tmp_path / "bare.gguf", sentencepiece=True, add_bos_token=False, add_space_prefix=False)
    )
    assert bare("a")["input_ids"] == [tokens["a"]]


@pytest.mark.parametrize("split", ["deepseek-coder", "default"])
def test_an_unknown_way_to_split_text_is_refused(tmp_path: Path, split: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"splits text as '{split}'; known are .*gpt-2.*qwen2"):
        load_gguf_tokenizer(write(tmp_path / "model.gguf", split))
