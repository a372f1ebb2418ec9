"""Regular expressions that split text into words, by llama.cpp's names (``tokenizer.ggml.pre``).

The expressions of a name are applied one after the other, each to the pieces that the previous ones left. Tokens are then merged
within each word. Some names differ from the published tokenizer (``tekken`` and ``gpt-4o`` recognise upper case only in ASCII).
volley splits text as llama.cpp does.
"""

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers


class Split(NamedTuple):
    """Way to split text, and the defaults of files that use it."""

    expressions: tuple[str, ...]
    takes_whole_words: bool = False
    """True if a word that is a token is taken whole; the merges might not produce it."""
    begins: bool = False
    """True if a text begins with a BOS token."""


_SUFFIX = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_THREES_FROM_THE_RIGHT = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # including the characters before the digits
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(
    digits: str,
    *,
    suffix: str = _SUFFIX,
    word: str = _WORD,
    symbols: str = _SYMBOLS,
    space: str = _SPACE,
) -> str:
    """Return an expression in the style of GPT-4: words with the character before them, digits, symbols and spaces."""
    return "|".join(part for part in (suffix, word, digits, symbols, space) if part)


def _cased(letter: str, suffix: str) -> str:
    """Return an expression for words of capitals, then lower case; beyond ASCII every letter counts as both."""
    begin, rest = rf"(?:(?=[{letter}])[^a-z])", rf"(?:(?=[{letter}])[^A-Z])"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{begin}*{rest}+{suffix}|{before}{begin}+{rest}*{suffix}"


_LLAMA_3, _QWEN_2 = _words(_THREE_DIGITS), _words(_DIGIT)
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_QWEN_35 = _words(_DIGIT, word=_MARKED_WORD, symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = _words(_DIGIT, suffix="", word=_cased(r"\p{L}", ""), symbols=_SLASHED)
_GPT_4O = _words(_THREE_DIGITS, suffix="", word=_cased(r"\p{L}", f"(?:{_SUFFIX})?"), symbols=_SLASHED)
_GRANITE = _words(_THREE_DIGITS, suffix="", word=_cased(r"\p{L}\p{M}", f"(?:{_SUFFIX})?"), symbols=_SLASHED)
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_KANA_AND_HAN = r"[一-龥぀-ゟ゠-ヿ]+"
_PUNCTUATED = rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_DEEPSEEK_3 = (_THREE_DIGITS, _KANA_AND_HAN, rf"{_PUNCTUATED}[\r\n]*|{_SPACE}")
_EASTERN = r"[[ࠀ-龥가-퟿]&&\S]+"
_ASIAN = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_UNCASED = rf"{_MARKED_WORD}(?:{_SUFFIX})?"
_YOUTU = rf"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_KANA_AND_HAN}"
_RUNS_OF_SPACE = "|".join(rf"\s{{{length}}}(?!\S)" for length in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_JAIS_2 = _words(_THREE_DIGITS, space=rf"\s*[\r\n]+|{_RUNS_OF_SPACE}|\s")
_HAN = r"\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{2F800}-\x{2FA1F}"
_NOT_HAN = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+(?:{_SUFFIX})?"
_NO_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"
_UNKNOWN_TO_DEEPSEEK = (
    r"\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}\x{A790}-\x{A7FF}\x{AB30}-\x{AB6F}"
    r"\x{10570}-\x{105BF}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7FF}\x{1DF00}-\x{1DFFF}"
)
_CASED_LETTERS = rf"[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[^{_UNKNOWN_TO_DEEPSEEK}]]"

_BY_EXPRESSIONS: dict[Split, str] = {
    Split((_LLAMA_3,), True, True): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    Split((_LLAMA_3,), True): "glm4 glm5",
    Split((_LLAMA_3,)): "dbrx smaug-bpe chatglm-bpe",
    Split((_THREE_DIGITS, _words(r"\p{N}+")), True): "minicpm5",
    Split((_QWEN_2,)): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    Split((_words(_DIGIT, suffix=""),)): "ufakzeka",
    Split((r"[^\n]+|\n+", _QWEN_2)): "laguna",
    Split((_QWEN_35,)): "qwen35",
    Split((_TEKKEN,), True, True): "tekken",
    Split((_GPT_4O,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    Split((_GRANITE,), True): "granite-embed-multi-97m",
    Split(
        (_GPT2,)
    ): "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert exaone4 mpt olmo "
    "jais trillion granite-docling jina-v1-en jina-v2-code roberta-bpe",
    Split((_DIGIT, _GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")): "falcon",
    Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EASTERN, _DIGIT)): "deepseek-coder",
    Split(
        (r"[\r\n]", rf"\s?{_CASED_LETTERS}+", r"\s?[!-/:-~！-／：-～‘-‟、。]+", r"\s+$", _EASTERN, r"\p{N}+")
    ): "deepseek-llm",
    Split(_DEEPSEEK_3): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    Split((_THREE_DIGITS, _KANA_AND_HAN, rf"{_PUNCTUATED}|[\r\n]|\s+(?!\S)|\s+", _DIGIT)): "spark2_5",
    Split((_words(_DIGIT, symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),)): "seed-coder",
    Split(
        (
            _words(
                _DIGIT,
                suffix=r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])",
                space=r"\s*[\r\n]|\s+(?!\S)|\s+",
            ),
        )
    ): "bailingmoe bailingmoe2 llada-moe",
    Split(
        (
            _words(
                _DIGIT,
                word=r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                symbols=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                space=r"\s*[\r\n]|\s+(?!\S)|\s+",
            ),
        )
    ): "exaone-moe",
    Split((_NO_PUNCTUATION,)): "poro-chat bloom gpt3-finnish",
    Split((_NO_PUNCTUATION, _DIGIT)): "viking",
    Split((r"\p{N}+", r"[0-9]{3}(?=(?:[0-9]{3})*(?![0-9]))")): "superbpe",
    Split((_THREES_FROM_THE_RIGHT, _ASIAN, rf"{_PUNCTUATED}[\r\n]*|{_SPACE}")): "afmoe",
    Split(
        (_THREES_FROM_THE_RIGHT, _words(_THREE_DIGITS, suffix="", word=_UNCASED, symbols=_SLASHED))
    ): "tiny_aya cohere2moe",
    Split((_YOUTU, _words(_DIGIT, suffix="", word=_UNCASED, symbols=_SLASHED)), True): "youtu",
    Split((_JAIS_2,)): "jais-2",
    Split((rf"[{_HAN}]+|{_words(_THREE_DIGITS, suffix='', word=_NOT_HAN)}",)): "kimi-k2",
    Split(
        (r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", _DIGIT, r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        begins=True,
    ): "chameleon",
}
SPLITS = {name: split for split, names in _BY_EXPRESSIONS.items() for name in names.split()}
"""Ways to split text, by name."""


def pre_tokenizer(split: Split) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits text into words and maps their bytes to characters."""
    parts = [pre_tokenizers.Split(Regex(one), "isolated") for one in split.expressions]
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
