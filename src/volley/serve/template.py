"""Chat template together with the rewriting of conversations that it needs and the format of answers to its prompts."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from volley.chat import find_template, own_template, render_chat
from volley.serve.conversations import Conversations
from volley.serve.formats import anchored, format_of


class ChatTemplate:
    """One chat template of a model; ``text`` is empty for a base model, which has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, answer_format: str) -> None:
        self.text = text
        self._render = partial(render_chat, tokenizer, template=text or None)
        self._conversations = Conversations(self._render)
        self.form = anchored(format_of(tokenizer, text, answer_format), self._conversations.opening())
        """Format of reasoning and calls in answers; ``None``: answers are plain text."""

    @property
    def takes_tools(self) -> bool:
        return "tools" in self.text

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the prompt of ``messages``, rewritten for the template. ``options`` are those of :func:`render_chat`."""
        return self._render(self._conversations(list(map(dict, messages))), **options)


class ChatTemplates:
    """Chat templates of a model: one for conversations with tools and one for all others, often the same."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, choice: str | None, answer_format: str) -> None:
        """Load the templates. ``choice`` is a template's name or file to use for both; ``None``: the tokenizer's defaults."""
        if choice is not None:
            texts = [find_template(tokenizer, choice)] * 2
        else:
            texts = [own_template(tokenizer, with_tools=with_tools) or "" for with_tools in (False, True)]
        self.plain = ChatTemplate(tokenizer, texts[0], answer_format)
        self.for_tools = self.plain if texts[0] == texts[1] else ChatTemplate(tokenizer, texts[1], answer_format)

    def choose(self, *, with_tools: bool) -> ChatTemplate:
        return self.for_tools if with_tools else self.plain
