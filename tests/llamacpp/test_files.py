"""Files of llama.cpp's converter, and how llama.cpp cuts text: what other tests of GGUF files take for granted."""

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.llamacpp.running import SERVER, convert_all, llama_server
from tests.models.gguf.converted import CASES, random_model
from tests.models.gguf.files import bpe_tokenizer, train_bpe, write_model
from volley.models.gguf.model import load_model
from volley.models.gguf.splits import SPLITS
from volley.models.gguf.tokenizer import load_gguf_tokenizer

pytestmark = [
    pytest.mark.llamacpp,
    pytest.mark.skipif(not SERVER.exists(), reason="llama.cpp is not built; run make peers"),
]
SCRIPTS = [
    "The quick brown Fox can't jump; WE'LL see, it's 3.14159 o'clock: naïve café Straße İstanbul ŞIŞLI ﬁ ǅ d's",
    "Καλημέρα κόσμε, ΑΒΓ τι κάνεις; Ωμέγα ά",
    "Здравствуй, Мир: «ёлки-палки» ПриветМир БЫЛО 12345 лет",
    "مرحبا بالعالم ١٢٣٤٥ كَيْفَ حَالُكَ؟، ،نص",
    "שלום עולם בְּרֵאשִׁית 42 ״ציטוט״",
    "नमस्ते दुनिया, आप कैसे हैं? १२३४ हिन्दी।",
    "বাংলা ভাষা ১২৩ কেমন আছেন",
    "தமிழ் மொழி வணக்கம் ௧௨",
    "สวัสดีชาวโลก ราคา ๑๒๓ บาท",
    "你好，世界！今天天气很好。一二三１２３、「引用」……",
    "日本語のテキスト、カタカナ、ｶﾀｶﾅ。１２３ー々",
    "한국어 문장입니다. ㄱㄴㄷ 한글",
    "საქართველო ႠႡ ᲐᲑ",
    "Բարեւ աշխարհ",
    "🙂👩\u200d👩\u200d👧 🇩🇪 ☃ ①½²Ⅻ ⅓ ₂ 👍🏽!!",
    'def f(x):\n\treturn x**2 # comment\n\n    if (a==b) && c||d: print("%d\\n" % 0xFF12)\r\n\r\nfoo_bar += $x->y; /* c */\n',
    "a  b   c\t\td \n e\n\n\nf  \u00a0\u00a0g\u3000 \u2003h\u200b \u2028i\u0085j \x0b\x0c \r k   ",
    "1 12 123 1234 12345 123456 1234567 1,234,567.89 -5 1e10 1a2b3c x1234 $9.99 7٣8",
    "(a|b) c.d,e!f?g…h。i，j、k।l۔m، n) 'tis <sentinel:12> IMGIMGABZ" + " " * 37 + "y" + " " * 5 + "\n" + " " * 9,
]


def texts() -> list[str]:
    """300 mixtures of scripts."""
    source = random.Random(0)
    letters, words = [*"".join(SCRIPTS)], " ".join(SCRIPTS).split(" ")
    between = [" ", "  ", "\n", "\n\n", "\t", " \n", "\r\n", "", "'", "/", "\u3000", ".", ", ", " " * 7]
    found = [*SCRIPTS]
    while len(found) < 300:
        found.append("".join(source.choice(letters) for _ in range(source.randint(1, 40))))
        found.append("".join(source.choice(words) + source.choice(between) for _ in range(source.randint(1, 14))))
    return found


def greedy_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that was trained on uncut text: where it is cut shows in its tokens."""
    splits = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return train_bpe(texts(), 4096, ["<|im_end|>"], splits, eos_token="<|im_end|>")


@pytest.mark.parametrize("name", {split: name for name, split in SPLITS.items()}.values())
def test_text_is_cut_as_llama_cpp_cuts_it(tmp_path: Path, name: str) -> None:
    own = greedy_tokenizer()
    model = random_model("llama", vocab_size=len(own), num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    path = write_model(tmp_path / "model.gguf", model, "llama", tokenizer=own, split=name)
    found = load_gguf_tokenizer(path)
    with llama_server(tmp_path / "log", "-m", str(path)) as client:
        for text in texts():
            body = {"content": text, "add_special": False, "parse_special": True}
            expected = client.post("/tokenize", json=body).json()["tokens"]
            assert found(text, add_special_tokens=False)["input_ids"] == expected, text


def test_files_of_the_converter_are_as_the_tests_write_them(tmp_path: Path) -> None:
    files = {tmp_path / str(index): tmp_path / f"{index}.gguf" for index in range(len(CASES))}
    for case, folder in zip(CASES, files, strict=True):
        random_model(case).save_pretrained(folder)
        bpe_tokenizer().save_pretrained(folder)
    convert_all(files, "f32")
    for case, theirs in zip(CASES, files.values(), strict=True):
        model, architecture = random_model(case), CASES[case][0]
        own = gguf.GGUFReader(write_model(tmp_path / "own.gguf", model, architecture))
        found = gguf.GGUFReader(theirs)
        stored = {one.name: one.data for one in found.tensors}
        assert stored.keys() == {one.name for one in own.tensors}, case
        for one in own.tensors:
            assert np.allclose(one.data.squeeze(), stored[one.name].squeeze(), atol=1e-6), (case, one.name)
        for key, field in found.fields.items():
            if key.startswith(f"{architecture}.") and key in own.fields:
                assert field.contents() == own.fields[key].contents(), (case, key)
        loaded = load_model(theirs, torch.float32).state_dict()
        for key, weight in model.state_dict().items():
            assert torch.allclose(loaded[key], weight, atol=1e-6), (case, key)
