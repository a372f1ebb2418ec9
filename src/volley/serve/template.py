"""A chat template at work: conversations as it can write them, and the format of the answers to its prompts."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from volley.chat import find_template, own_template, render_chat
from volley.serve.conversations import Conversations
from volley.serve.formats import anchored, format_of


class ChatTemplate:
    """One chat template of a model. A base model has none: then ``text`` is empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, answer_format: str) -> None:
        self.text = text
        self._render = partial(render_chat, tokenizer, template=text or None)
        self._conversations = Conversations(self._render)
        self.form = anchored(format_of(tokenizer, text, answer_format), self._conversations.opening())
        """How answers hold reasoning and calls; ``None``: they are nothing but text."""

    @property
    def takes_tools(self) -> bool:
        return "tools" in self.text

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the prompt of ``messages``, put as the template can write them; ``options`` are :func:`render_chat`'s."""
        return self._render(self._conversations(list(map(dict, messages))), **options)


class ChatTemplates:
    """The chat templates of a model: one for conversations with tools, one for all others; often the same one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, choice: str | None, answer_format: str) -> None:
        """``choice`` is the name of one of the tokenizer's, or a file, to use for both; ``None``: the tokenizer chooses."""
        if choice is not None:
            texts = [find_template(tokenizer, choice)] * 2
        else:
            texts = [own_template(tokenizer, with_tools=with_tools) or "" for with_tools in (False, True)]
        self.plain = ChatTemplate(tokenizer, texts[0], answer_format)
        self.for_tools = self.plain if texts[0] == texts[1] else ChatTemplate(tokenizer, texts[1], answer_format)

    def choose(self, *, with_tools: bool) -> ChatTemplate:
        return self.for_tools if with_tools else self.plain
