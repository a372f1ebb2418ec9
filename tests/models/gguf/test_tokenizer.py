"""Tokenizers from GGUF files. That text is cut as llama.cpp cuts it is tested on real vocabularies in ``tests/llamacpp``."""

from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tests.conftest import CHAT_TEMPLATE, byte_tokenizer
from tests.models.gguf.files import add_tokenizer, bpe_tokenizer
from volley.chat import own_template
from volley.errors import UnsupportedModelError
from volley.models.gguf.tokenizer import load_gguf_tokenizer

DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<|fim|>"]
LANGUAGES = [
    "你好，世界！今天天气很好。",
    "　全角　空格\u3000和……",
    "日本語のテキスト、カタカナ、ｶﾀｶﾅ。",
    "한국어 문장입니다.",
    "Здравствуй, мир: «ёлки»",
    "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया",
    "e\u0301 é ﬁ ① ½ 12345",
    "🙂👩\u200d👩\u200d👧 🇩🇪",
    "a\u00a0b\u200bc\r\n\t d's WE'LL",
    "<｜User｜>你好<｜Assistant｜><think>\n好<|fim|>x<｜end▁of▁sentence｜>",
    "<|endoftext|>",
]
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


def test_named_templates_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, own = GGUFWriter.add_chat_template, bpe_tokenizer().chat_template
    named = [{"name": "default", "template": own}, {"name": "tool_use", "template": "{{ tools }}"}]
    monkeypatch.setattr(GGUFWriter, "add_chat_template", lambda writer, _: add(writer, named))
    found = load_gguf_tokenizer(write(tmp_path / "model.gguf"))
    assert (own_template(found), own_template(found, with_tools=True)) == (own, "{{ tools }}")


def test_tokenizer_files_beside_it_are_not_looked_at(tmp_path: Path) -> None:
    own, other = bpe_tokenizer(), byte_tokenizer()
    other.chat_template = "another"
    other.save_pretrained(tmp_path)
    found = load_gguf_tokenizer(write(tmp_path / "model.gguf"))
    assert [found(text)["input_ids"] for text in TEXTS] == [own(text)["input_ids"] for text in TEXTS]
    assert found.chat_template == own.chat_template


def trained_tokenizer(split: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE that has merged Chinese, with special tokens of other characters than those that stand for bytes."""
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(GGUF_PRE_TOKENIZER_SPLITS[split])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=DEEPSEEK, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text for text in LANGUAGES if "<" not in text] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=DEEPSEEK[0], eos_token=DEEPSEEK[1])
    fast.add_tokens(["<think>"])
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.mark.parametrize("split", ["qwen2", "deepseek-r1-qwen", "llama-bpe", "tekken", "gpt-4o"])
def test_text_of_any_language_is_cut_as_before(tmp_path: Path, split: str) -> None:
    own = trained_tokenizer(split)
    if split in ("llama-bpe", "tekken"):
        own.backend_tokenizer.model.ignore_merges = True
    writer = GGUFWriter(tmp_path / "model.gguf", "qwen2")
    add_tokenizer(writer, own, split)
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()
    found = load_gguf_tokenizer(tmp_path / "model.gguf")
    assert (found.bos_token_id, found.eos_token_id) == (own.bos_token_id, own.eos_token_id)
    assert len(found) == len(own), "no token is added"
    for text in LANGUAGES:
        expected = own.encode(text, add_special_tokens=False)
        assert found.encode(text, add_special_tokens=False) == expected, text
        assert found.decode(expected) == text
        assert found.decode(expected, skip_special_tokens=True) == own.decode(expected, skip_special_tokens=True)


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


def test_a_file_that_does_not_say_how_text_is_split_is_refused(tmp_path: Path) -> None:
    """llama.cpp takes it for its default, which is not GPT-2's."""
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_pre = lambda _: None  # type: ignore[method-assign]
    add_tokenizer(writer, bpe_tokenizer())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"splits text as 'default'.*Hugging Face folder"):
        load_gguf_tokenizer(tmp_path / "model.gguf")
