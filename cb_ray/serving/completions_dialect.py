"""`/v1/completions`: the legacy OpenAI dialect, text in and text out.

Owns its request fields and the shape of its answers and stream events. Knows the shared dialect, generation and text; no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from ..errors import InvalidRequestError
from ..messages import GenerateRequest
from ..text.detokenizer import Detokenizer, TextDelta, TextStream, TokenInfo
from .answer_form import FormedBody
from .generation import Choice, Written
from .openai import MAX_CHOICES, MAX_LOGPROBS, TokenId, check_stream_options, plain_logprob, sampling_params
from .reply import Reply, ReplyHead
from .served_model import ServedModel

DEFAULT_MAX_TOKENS = 16  # as OpenAI documents


def _prompt_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "(text)"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return "(ids)" if isinstance(first, int) else "(id lists)" if isinstance(first, list) else "(texts)"


Ids = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[list[str], Field(min_length=1), Tag("(texts)")]
    | Annotated[Ids, Tag("(ids)")]
    | Annotated[list[Ids], Field(min_length=1), Tag("(id lists)")],
    Discriminator(
        _prompt_form,
        custom_error_type="prompt",
        custom_error_message="Should be a string, a list of strings, a list of token ids or a list of such lists",
    ),
]


class CompletionsBody(FormedBody):
    """The body of POST /v1/completions."""

    prompt: Prompt = Field(description="Text, token ids, or a list of either; each prompt has n choices.")
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="16 by default. 0 only with echo, to score the prompt.")
    echo: bool | None = Field(None, description="Begin each choice with its prompt.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Log-probabilities of so many best tokens.")
    best_of: int | None = Field(None, ge=1, description="Only as n.")
    add_special_tokens: bool | None = Field(None, description="Extension: false tokenizes prompts as they stand.")
    suffix: None = Field(None, description="Not supported.")

    @property
    def prompts(self) -> list[str | list[int]]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else list(self.prompt)  # type: ignore[list-item]

    @property
    def num_chars(self) -> int:
        return sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str))


def check_completions(body: CompletionsBody) -> None:
    """Raises InvalidRequestError for fields that do not go together."""
    check_stream_options(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError(f"best_of must be the same as n here, got {body.best_of}", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError("max_tokens must be 1 or more, got 0; 0 is for scoring a prompt with echo", param="max_tokens")
    if len(body.prompts) * (body.n or 1) > MAX_CHOICES:
        raise InvalidRequestError(f"n times the number of prompts must be at most {MAX_CHOICES}", param="n")


def tokenize_prompts(body: CompletionsBody, model: ServedModel) -> list[list[int]]:
    """Token ids of each prompt. Slow for long text. Raises InvalidRequestError for what is empty, unknown or too long."""
    return [_token_ids(body, model, prompt) for prompt in body.prompts]


def _token_ids(body: CompletionsBody, model: ServedModel, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        model.check_length(model.codec.at_least(len(prompt)), None, "prompt")
        ids = model.codec.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        ids = prompt
    if not ids:
        raise InvalidRequestError("the prompt is empty; it needs at least one token", param="prompt")
    model.check_length(len(ids), max(1, _max_tokens(body)), "prompt")
    if not isinstance(prompt, str):
        model.check_token_ids(ids, "prompt")
    return ids


def _max_tokens(body: CompletionsBody) -> int:
    return DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens


def completion_choices(body: CompletionsBody, model: ServedModel, head: ReplyHead, prompts: Sequence[list[int]]) -> list[Choice]:
    """One Choice for each prompt and each of its n answers, numbered prompt by prompt."""
    choices: list[Choice] = []
    scores = body.logprobs if body.echo else None
    grammar = body.wanted_grammar
    for number, ids in enumerate(prompts):
        for copy in range(body.n or 1):
            index = len(choices)
            sampling = sampling_params(body, model, logprobs=body.logprobs, prompt_logprobs=scores, choice=copy, grammar=grammar)
            choices.append(
                Choice(
                    index=index,
                    prompt=number,
                    request=GenerateRequest(
                        request_id=f"{head.id}-{index}",
                        token_ids=tuple(ids),
                        max_new_tokens=max(1, _max_tokens(body)),
                        sampling=sampling,
                        stream=bool(body.stream or body.stops),
                        priority=body.priority or 0,
                        cache_salt=body.cache_salt or "",
                        fork_of=f"{head.id}-{index - copy}" if copy else None,
                    ),
                    text=TextStream(
                        codec=model.codec,
                        stop=body.stops,
                        include_stop=bool(body.include_stop_str_in_output),
                        skip_special_tokens=body.skip_special_tokens is not False,
                        min_tokens=body.min_tokens or 0,
                        stop_ids=sampling.stop_ids,
                        keep_tokens=body.logprobs is not None,
                    ),
                )
            )
    return choices


class CompletionsReply(Reply):
    """Answers and events of `text_completion` objects."""

    kind = chunk_kind = "text_completion"

    def __init__(self, head: ReplyHead, body: CompletionsBody, model: ServedModel, choices: Sequence[Choice]) -> None:
        super().__init__(head, choices, include_usage=body.include_usage, running_usage=body.running_usage)
        self._model, self._body = model, body
        self._begun: set[int] = set()
        self._skip_special = body.skip_special_tokens is not False
        self._only_scores = body.max_tokens == 0

    def num_generated(self, choice: Choice) -> int:
        return 0 if self._only_scores else choice.text.num_tokens

    def events(self, choice: Choice, delta: TextDelta) -> Iterable[dict[str, Any]]:
        text, tokens = ("", ()) if self._only_scores else (delta.text, delta.tokens)
        first = choice.index not in self._begun
        self._begun.add(choice.index)
        if first and self._body.echo:
            yield self._choice(choice, self._prompt_text(choice), None, self._prompt_logprobs(choice))
        if text or tokens or delta.finish_reason:
            yield self._choice(choice, text, delta.finish_reason, self._logprobs(choice, tokens))

    def whole(self, choice: Choice, written: Written) -> dict[str, Any]:
        text, tokens = ("", ()) if self._only_scores else (written.text, written.tokens)
        logprobs = self._logprobs(choice, tokens)
        if self._body.echo:
            text = self._prompt_text(choice) + text
            scores = self._prompt_logprobs(choice)
            logprobs = scores and logprobs and {name: scores[name] + logprobs[name] for name in scores}
        return self._choice(choice, text, written.finish_reason, logprobs)

    @staticmethod
    def _choice(choice: Choice, text: str, reason: str | None, logprobs: dict[str, list[Any]] | None) -> dict[str, Any]:
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _prompt_text(self, choice: Choice) -> str:
        """The prompt as it was sent, or the text of the token ids that were."""
        prompt = self._body.prompts[choice.prompt]
        return prompt if isinstance(prompt, str) else self._model.codec.decode(prompt)

    def _logprobs(self, choice: Choice, tokens: Iterable[TokenInfo]) -> dict[str, list[Any]] | None:
        if self._body.logprobs is None:
            return None
        base = len(self._prompt_text(choice)) if self._body.echo else 0
        logs: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            self._add(logs, token.token_id, token.logprob, token.top, base + token.offset)
        return logs

    def _prompt_logprobs(self, choice: Choice) -> dict[str, list[Any]] | None:
        if self._body.logprobs is None:
            return None
        scores, tops = choice.text.prompt_logprobs, choice.text.prompt_top_logprobs
        if scores is None:
            raise InvalidRequestError("this server does not score prompts: leave out echo or logprobs", param="echo")
        logs: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        detokenizer, offset = Detokenizer(self._model.codec, skip_special_tokens=self._skip_special), 0
        for position, token_id in enumerate(choice.request.token_ids):
            self._add(logs, token_id, scores[position], tops[position] if tops else (), offset)
            offset += len(detokenizer.push(token_id))
        return logs

    def _add(self, logs: dict[str, list[Any]], token_id: int, logprob: float | None, top: Any, offset: int) -> None:
        logs["tokens"].append(self._name(token_id))
        logs["token_logprobs"].append(None if logprob is None else plain_logprob(logprob))
        alternatives = {self._name(other): plain_logprob(value) for other, value in top}
        if logprob is not None:
            alternatives.setdefault(self._name(token_id), plain_logprob(logprob))
        logs["top_logprobs"].append(alternatives if logprob is not None else None)
        logs["text_offset"].append(offset)

    def _name(self, token_id: int) -> str:
        """A token as text; a piece of a character as OpenAI spells one, `bytes:\\xf0\\x9f`, so that names stay apart."""
        spelled = self._model.codec.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
