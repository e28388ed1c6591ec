"""`/tokenize` and `/detokenize`: the tokenizer over HTTP, with the field names of the servers that have it.

Owns the two bodies and answers. Knows the chat dialect's messages and the text floor; no sockets.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..errors import InvalidRequestError
from ..text.chat import chat_token_ids
from .chat_dialect import ChatMessage, Tool, num_chars
from .openai import StrictModel, TokenId
from .served_model import ServedModel


class TokenizeBody(StrictModel):
    """The body of POST /tokenize: a text (`prompt` or `content`) or a conversation (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = Field(None, description="Another name of prompt.")
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = Field(None, description="For a conversation: as in a chat.")
    add_special_tokens: bool | None = Field(None, description="For a text: true by default.")
    add_special: bool | None = Field(None, description="Another name of add_special_tokens.")
    add_generation_prompt: bool | None = Field(None, description="For a conversation: true by default.")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(None, description="Also give each token as text.")

    @property
    def text(self) -> str | None:
        return self.prompt if self.prompt is not None else self.content

    @property
    def num_chars(self) -> int:
        return len(self.text or "") + num_chars(self.messages or ())


class DetokenizeBody(StrictModel):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = Field(None, description="False by default.")


def tokenize(body: TokenizeBody, model: ServedModel) -> dict[str, Any]:
    """Token ids, their number and the model's context length. Raises InvalidRequestError."""
    if body.messages is not None:
        ids = chat_token_ids(
            model.codec,
            [message.model_dump(exclude_none=True) for message in body.messages],
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs,
        )
    elif body.text is not None:
        special = body.add_special_tokens is not False and body.add_special is not False
        ids = model.codec.encode(body.text, add_special_tokens=special)
    else:
        raise InvalidRequestError("tokenize needs a prompt or messages", param="prompt")
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.context_length}
    if body.return_token_strs:
        answer["token_strs"] = [model.codec.token_text(token_id) for token_id in ids]
    return answer


def detokenize(body: DetokenizeBody, model: ServedModel) -> dict[str, Any]:
    """The text of token ids. Raises InvalidRequestError for ids that are not of this model."""
    model.check_token_ids(body.tokens, "tokens")
    return {"prompt": model.codec.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))}
