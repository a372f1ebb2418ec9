"""Small tokenizers with the structure of published ones, and chat templates that write and recognise each notation."""

import json
from functools import cache
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from volley.serve.formats import AnswerFormat, CallText, load_format

Split = Literal["byte_level", "llama", "gemma"]
Marks = Literal["text", "added", "special"]
Template = Literal["single", "named", "text_arguments"]
Begin = Literal["none", "tokenizer", "template"]
Thinks = Literal["prompt", "model", "never"]

VOCAB = 640
"""Width of a model for all of them."""
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
PIECES = (
    *(
        "weather",
        "name",
        "arguments",
        "parameters",
        "city",
        "days",
        "function",
        "tool",
        "call",
        "think",
        "arg",
        "value",
    ),
    *(
        "Bern",
        "Rome",
        "user",
        "assistant",
        "system",
        "the",
        "and",
        "is",
        "message",
        "channel",
        "analysis",
        '":',
        '",',
        "</",
    ),
)
MARKS: dict[str, list[str]] = {
    "hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "qwen3_5": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "glm4_5": [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|assistant|>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|turn>", "<turn|>"],
    "mistral": ["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    "mistral_list": ["[INST]", "[/INST]", "[TOOL_CALLS]"],
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"],
    "gpt_oss": ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>"],
}
MARKS["glm4_7"] = MARKS["glm4_5"]
FORMS = tuple(MARKS)
"""Own tokens of a tokenizer of each format, unless its markers are text."""
TURNS = {
    "hermes": ("<|im_start|>{role}\n", "<|im_end|>\n"),
    "glm4_5": ("<|{role}|>", ""),
    "glm4_7": ("<|{role}|>", ""),
    "gemma4": ("<|turn>{role}\n", "<turn|>\n"),
    "mistral": ("[INST]{role}: ", "[/INST]"),
    "mistral_list": ("[INST]{role}: ", "[/INST]"),
    "llama3": ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
    "gpt_oss": ("<|start|>{role}", "<|end|>"),
}
TURNS["qwen3_5"] = TURNS["hermes"]


def made_up(split: Split, marks: Marks, form: str, template: Template, begin: Begin, thinks: Thinks) -> Any:
    """A tokenizer with a chat template."""
    inner = Tokenizer.from_str(_split(split))
    if begin != "none":
        inner.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    if marks != "text" or form == "gpt_oss":
        is_special = marks == "special" or form == "gpt_oss"  # whose markers always are
        fast.add_tokens([AddedToken(one, normalized=False, special=is_special) for one in MARKS[form]])
    assert len(fast) <= VOCAB
    text = chat_template(form, as_text=template == "text_arguments", with_bos=begin == "template", thinks=thinks)
    fast.chat_template = text
    if template == "named":
        fast.chat_template = {"default": text, "tool_use": text.replace("{# tool_use #}", "tool_use ")}
    return fast


@cache
def _split(split: Split) -> str:
    space = "Ġ" if split == "byte_level" else "▁"
    if split == "byte_level":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        letters = [*(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127)), space, "ü"]
    vocab = {piece: index for index, piece in enumerate([PAD, BOS, EOS, *letters])}
    merges: list[tuple[str, str]] = []
    for piece in [own for word in PIECES for own in (word, space + word)]:
        for end in range(2, len(piece) + 1):
            pair = piece[: end - 1], piece[end - 1]
            if pair not in merges:
                merges.append(pair)
                vocab.setdefault(piece[:end], len(vocab))
    inner = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=split != "byte_level", unk_token=None, fuse_unk=False)
    )
    if split == "byte_level":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
    else:
        replace = normalizers.Replace(" ", space)
        first = [normalizers.Prepend(space)] if split == "llama" else []
        inner.normalizer = normalizers.Sequence([*first, replace])
        last = [decoders.Strip(" ", 1, 0)] if split == "llama" else []
        inner.decoder = decoders.Sequence(
            [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
        )
        if split == "gemma":
            inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    inner.add_special_tokens([PAD, BOS, EOS])
    return str(inner.to_str())


def chat_template(form: str, *, as_text: bool, with_bos: bool, thinks: Thinks) -> str:
    """A template in the manner of the format's models."""
    known = load_format(form)
    before, after = (part.replace("{role}", "{{ m.role }}") for part in TURNS[form])
    role = {"gemma4": "model"}.get(form, "assistant")
    opening = opening_of(form)
    if thinks == "prompt" and known.thinking is not None and form != "gpt_oss":
        opening += f"{{% if enable_thinking is not false %}}{known.thinking[0]}{{% endif %}}"
    arguments = "{{ '' + c.function.arguments }}" if as_text else "{{ c.function.arguments | tojson }}"
    return (
        f"{{# {' '.join(known.recognise)} #}}"
        + ("{{ bos_token }}" if with_bos else "")
        + "{# tool_use #}"
        + "{% if tools %}[tools{% for t in tools %} {{ t | tojson }}{% endfor %}]{% endif %}"
        + f"{{% for m in messages %}}{before}{{{{ m.reasoning_content }}}}{{{{ m.content }}}}"
        + f"{{% for c in m.tool_calls or [] %}}<call {{{{ c.function.name }}}} {arguments}>{{% endfor %}}{after}{{% endfor %}}"
        + f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    ).replace("{{ m.role }}", "{{ '" + role + "' if m.role == 'assistant' else m.role }}")


def opening_of(form: str) -> str:
    """End of a prompt."""
    if form in ("mistral", "mistral_list"):
        return ""
    role = "model" if form == "gemma4" else "assistant"
    return TURNS[form][0].replace("{role}", role)


def call_in(form: AnswerFormat, name: str, arguments: dict[str, Any]) -> str:
    """A call as the format's models write it."""
    call = form.call
    assert call is not None
    if call.is_json:
        return f"{call.begin}{name}{call.middle}{json.dumps(arguments, ensure_ascii=False)}{call.end}"
    if (tags := call.parameter) is not None:
        values = {key: own if isinstance(own, str) else json.dumps(own) for key, own in arguments.items()}
        inside = "".join(f"{tags.begin}{key}{tags.middle}{value}{tags.end}" for key, value in values.items())
    else:
        inside = _quoted(arguments, call)
    return f"{call.begin}{name}{call.middle}{inside}{call.end}"


def _quoted(value: Any, call: CallText) -> str:
    if isinstance(value, str):
        return f"{call.quote}{value}{call.quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_quoted(own, call)}" for key, own in value.items()) + "}"
    return json.dumps(value)
