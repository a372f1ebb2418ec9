"""Tokenizers from GGUF files. All ways to cut text are compared with llama.cpp in ``tests/llamacpp``."""

from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Regex, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tests.conftest import byte_tokenizer
from tests.models.gguf.files import add_tokenizer, bpe_tokenizer, finish, train_bpe
from volley.chat import own_template
from volley.errors import CheckpointError, UnsupportedModelError
from volley.models.gguf.file import GGUFFile
from volley.models.gguf.splits import SPLITS, pre_tokenizer
from volley.models.gguf.tokenizer import load_gguf_tokenizer
from volley.models.gguf.tokens import stop_tokens

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
PUBLISHED = ["qwen2", "deepseek-r1-qwen", "llama-bpe", "gpt-2", "smollm", "starcoder", "command-r", "deepseek-v3"]
"""Names that cut as the published tokenizer does, and so as llama.cpp does."""
PIECES = [
    ("smollm", ["It", "'s", " ", "2", "0", "2", "4", ",", "\n\n ", "1", "2", "½", " मस", "्", "त", "े"]),
    ("deepseek-coder", ["x", "1", " =", " y", ";", "\n", " ", "你好", "ab", "  ", "١", "٢"]),
    ("deepseek-coder", ["你", "\u3000", "好", "\u3000 "]),
    ("deepseek-llm", ["Мир", " ", "123", "!?", " ", "你好", "  "]),
    ("deepseek-v3", ["a", " ", "123", "45", " ", "カタカナ", "ab", "!x", ".foo", "\n"]),
    ("falcon", ["a", " ", "`", "b", "`", " ", "123", "45", "'", "s"]),
    ("seed-coder", ["f", "(x", ");", "\n\n", "1", "2", "3"]),
    ("tekken", ["ПриветМир", " Hello", "World", " नमस", "्त", "े", " ", "1", "2"]),
    ("gpt-4o", ["Hello", "World's", " नमस", "्त", "े", " ", "123", "4", "//\n"]),
    ("qwen35", ["नमस्ते", ",", " É", " ", "1", "2"]),
    ("bailingmoe", ["It", "'S", "\n\n\n", " ", "1", "2"]),
    ("poro-chat", ["a", ",", "b", " (", "c", ")", " d"]),
    ("superbpe", ["a b ", "1", "234", "567", "c"]),
    ("tiny_aya", ["x", " ", " ", "1", "234", "567", " अतः"]),
    ("chameleon", ["a", "\t", "b", " ", "1", "2", "!", "!", "    ", "c"]),
    ("minicpm5", ["a", "123", "45", " b"]),
]
"""How llama.cpp's ``unicode_regex_split`` cuts some texts."""
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
    finish(writer)
    return path


def write_tokens(path: Path, tokens: list[str], types: list[int], name: str = "Llama") -> Path:
    """SentencePiece of these tokens, the first the best."""
    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types(types)
    finish(writer)
    return path


def test_a_byte_level_tokenizer_and_its_template_come_back(tmp_path: Path) -> None:
    own, found = bpe_tokenizer(), load_gguf_tokenizer(write(tmp_path / "model.gguf"))
    for text in TEXTS:
        assert found(text)["input_ids"] == own(text)["input_ids"], text
        assert found.decode(found(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "the then"}]
    assert found.apply_chat_template(chat, tokenize=False) == own.apply_chat_template(chat, tokenize=False)
    assert found.eos_token_id == own.eos_token_id


def test_tokenizer_files_beside_it_are_not_looked_at(tmp_path: Path) -> None:
    own, other = bpe_tokenizer(), byte_tokenizer()
    other.chat_template = "another"
    other.save_pretrained(tmp_path)
    found = load_gguf_tokenizer(write(tmp_path / "model.gguf"))
    assert [found(text)["input_ids"] for text in TEXTS] == [own(text)["input_ids"] for text in TEXTS]
    assert found.chat_template == own.chat_template


def published_splits(split: str) -> pre_tokenizers.PreTokenizer:
    """Cut text as ``tokenizer.json`` of such models does."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if split == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split in ("smollm", "starcoder", "command-r"):
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if split == "deepseek-v3":
        punctuated = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        symbols = r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        patterns = [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", f"{punctuated}|{symbols}"]
    else:
        patterns = [GGUF_PRE_TOKENIZER_SPLITS[split]]
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(one), "isolated") for one in patterns), spelled])


def trained_tokenizer(split: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE that has merged Chinese, with special tokens of other characters than those that stand for bytes."""
    texts = [text for text in LANGUAGES if "<" not in text] * 3
    names = {"bos_token": DEEPSEEK[0], "eos_token": DEEPSEEK[1]}
    fast = train_bpe(texts, 420, DEEPSEEK, published_splits(split), **names)
    fast.add_tokens(["<think>"])
    return fast


@pytest.mark.parametrize("split", PUBLISHED)
def test_text_of_any_language_is_cut_as_before(tmp_path: Path, split: str) -> None:
    own = trained_tokenizer(split)
    if split == "llama-bpe":
        own.backend_tokenizer.model.ignore_merges = True
    writer = GGUFWriter(tmp_path / "model.gguf", "qwen2")
    add_tokenizer(writer, own, split)
    finish(writer)
    found = load_gguf_tokenizer(tmp_path / "model.gguf")
    assert (found.bos_token_id, found.eos_token_id) == (own.bos_token_id, own.eos_token_id)
    assert len(found) == len(own), "no token is added"
    for text in LANGUAGES:
        expected = own.encode(text, add_special_tokens=False)
        assert found.encode(text, add_special_tokens=False) == expected, text
        assert found.decode(expected) == text
        assert found.decode(expected, skip_special_tokens=True) == own.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(("split", "pieces"), PIECES, ids=[name for name, _ in PIECES])
def test_text_is_cut_as_llama_cpp_cuts_it(split: str, pieces: list[str]) -> None:
    cut = pre_tokenizer(SPLITS[split]).pre_tokenize_str("".join(pieces))
    assert [decoders.ByteLevel().decode([piece]) for piece, _ in cut] == pieces


@pytest.mark.parametrize("split", SPLITS)
def test_every_way_to_cut_text_loses_nothing(tmp_path: Path, split: str) -> None:
    found = load_gguf_tokenizer(write(tmp_path / "model.gguf", split))
    for text in LANGUAGES[:-2]:
        assert found.decode(found(text, add_special_tokens=False)["input_ids"]) == text


def test_a_word_that_is_a_token_may_be_taken_whole(tmp_path: Path) -> None:
    """Its merges need not reach it."""
    own = bpe_tokenizer()
    for split, whole in (("qwen2", False), ("glm4", True)):
        writer = GGUFWriter(tmp_path / f"{split}.gguf", "llama")
        add_tokenizer(writer, own, split, tokens=["zqz"])
        finish(writer)
        found = load_gguf_tokenizer(tmp_path / f"{split}.gguf")("zqz")["input_ids"]
        assert (found == [len(own)]) == whole


def test_tokens_that_llama_cpp_knows_by_their_text_end_an_answer_whatever_their_type(tmp_path: Path) -> None:
    tokens, ends = [*"ab", "</s>", "<end_of_turn>", "<|file_sep|>", "<|end|>", "<other>"], {4, 5, 6}
    path = write_tokens(tmp_path / "model.gguf", ["<unk>", *tokens], [2] + [1] * 7)
    assert set(stop_tokens(GGUFFile(path))) == {*ends, 2}, "2 ends the texts of SentencePiece where a file does not say"
    assert load_gguf_tokenizer(path)("a<end_of_turn>b")["input_ids"][-3:] == [1, 4, 2]


def test_a_message_of_harmony_does_not_end_the_turn(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<|end|>", "<|return|>", "<|call|>"]
    assert stop_tokens(GGUFFile(write_tokens(tmp_path / "model.gguf", tokens, [2] + [3] * 5))) == [2, 4, 5]


def test_named_chat_templates(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    own = bpe_tokenizer()
    own.chat_template = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    add_tokenizer(writer, own)
    finish(writer)
    found = load_gguf_tokenizer(tmp_path / "model.gguf")
    assert found.chat_template == {"default": "plain", "tool_use": "tools"}
    assert (own_template(found), own_template(found, with_tools=True)) == ("plain", "tools")
    chat = [{"role": "user", "content": "a"}]
    assert found.apply_chat_template(chat, tokenize=False) == "plain"
    assert found.apply_chat_template(chat, tokenize=False, tools=[{"type": "function"}]) == "tools"


def test_merges_that_do_not_fit_the_tokens_are_an_error(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    add_tokenizer(writer, bpe_tokenizer(), merges=["zz qq"])
    finish(writer)
    with pytest.raises(CheckpointError, match="its merges do not fit its tokens"):
        load_gguf_tokenizer(tmp_path / "model.gguf")


def test_phi_3s_special_tokens_take_the_spaces_behind_them(tmp_path: Path) -> None:
    tokens, types = ["<unk>", "<s>", "</s>", "<|user|>", "▁a", "▁", "a"], [2, 3, 3, 3, 1, 1, 1]
    for name, spaces in (("Phi-3 mini", 0), ("Llama", 2)):
        path = write_tokens(tmp_path / f"{spaces}.gguf", tokens, types, name=name)
        assert load_gguf_tokenizer(path)("<|user|> \na", add_special_tokens=False)["input_ids"].count(3) == 1
        found = load_gguf_tokenizer(path)("<|user|>  a", add_special_tokens=False)["input_ids"]
        assert found == [3, 4] if not spaces else found == [3, 5, 5, 4]


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


@pytest.mark.parametrize("split", ["another", "default"])
def test_an_unknown_way_to_split_text_is_refused(tmp_path: Path, split: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"splits text as '{split}'; known are .*gpt-2.*qwen2"):
        load_gguf_tokenizer(write(tmp_path / "model.gguf", split))


def test_a_file_that_does_not_say_how_text_is_split_is_refused(tmp_path: Path) -> None:
    """llama.cpp takes it for its default, which is not GPT-2's."""
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_pre = lambda _: None  # type: ignore[method-assign]
    add_tokenizer(writer, bpe_tokenizer())
    finish(writer)
    with pytest.raises(UnsupportedModelError, match=r"splits text as 'default'.*Hugging Face folder"):
        load_gguf_tokenizer(tmp_path / "model.gguf")
