"""What answers look like, as schemas for the description: clients are generated from them, and tests hold every answer against them.

Owns these shapes. Answers are built as plain dictionaries where they are made; nothing here is on the path of a request.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorObject(_Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Answer):
    """OpenAI's envelope of an error."""

    error: ErrorObject


class AnthropicErrorObject(_Answer):
    type: str
    message: str


class AnthropicErrorAnswer(_Answer):
    """Anthropic's envelope of an error."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | None


class ChoiceMade(_Answer):
    """How one choice was made. Times are milliseconds."""

    request_id: str
    queue_ms: float
    replica: str | None = None
    reason: str | None = None
    predicted_cached_tokens: int | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None
    weights_versions: list[int] | None = None


class Made(_Answer):
    """How an answer was made; with X-Cb-Ray-Debug, or where the server always tells."""

    request_id: str
    choices: list[ChoiceMade]


class PromptDetails(_Answer):
    cached_tokens: int


class CompletionDetails(_Answer):
    reasoning_tokens: int


class UsageObject(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class TopLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None = None


class CalledFunction(_Answer):
    name: str
    arguments: str


class CalledTool(_Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswerMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    tool_calls: list[CalledTool] | None = None
    reasoning_content: str | None = None


class ChatChoice(_Answer):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class _OpenAIAnswer(_Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: UsageObject
    cb_ray: Made | None = None


class ChatCompletion(_OpenAIAnswer):
    """A chat's answer; streamed, `chat.completion.chunk` events and then [DONE]."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(_OpenAIAnswer):
    """A completion; streamed, events of the same kind and then [DONE]."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class EmbeddingObject(_Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers, or little-endian float32 in base64.")


class EmbeddingUsage(_Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(_Answer):
    """Vectors of texts, in the order of the input."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class GenerationChoice(_Answer):
    index: int
    token_ids: list[int]
    finish_reason: Literal["stop", "length"] | None
    stop_token: int | None = None
    weights_versions: list[int] | None = None
    logprobs: list[float | None] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None


class Generation(_OpenAIAnswer):
    """Generated tokens; streamed, events of the same kind and then [DONE]."""

    object: Literal["generation"]
    choices: list[GenerationChoice]


class ResponseObject(_Answer):
    """A response; streamed, the typed events of OpenAI's Responses API."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    previous_response_id: str | None
    usage: dict[str, Any] | None
    metadata: dict[str, str]
    store: bool
    background: bool


class DeletedResponse(_Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(_Answer):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(_Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int


class AnthropicUsage(_Answer):
    input_tokens: int = Field(description="Without those read from the cache.")
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(_Answer):
    """A message; streamed, the events of Anthropic's Messages API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class CountedTokens(_Answer):
    input_tokens: int


class ModelCard(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(_Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Capabilities(_Answer):
    object: Literal["capabilities"]
    model: dict[str, Any]
    features: dict[str, bool]
    endpoints: dict[str, list[str]] = Field(description="Each route with the parameters that its body may have.")
    limits: dict[str, int | float | None]
    build: dict[str, str]


class Tokens(_Answer):
    tokens: list[int]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None = None


class TextOfTokens(_Answer):
    prompt: str


class Status(_Answer):
    status: Literal["ok", "ready"]


class RouteDecision(_Answer):
    prompt_tokens: int
    policy: str
    reason: str
    order: list[str]
    prices_s: dict[str, float]
    predicted_cached_tokens: int


ANSWERS: dict[tuple[str, str], type[BaseModel]] = {
    ("GET", "/v1/models"): ModelList,
    ("GET", "/v1/models/{name:path}"): ModelCard,
    ("GET", "/v1/capabilities"): Capabilities,
    ("POST", "/v1/chat/completions"): ChatCompletion,
    ("POST", "/v1/completions"): Completion,
    ("POST", "/v1/embeddings"): EmbeddingList,
    ("POST", "/v1/responses"): ResponseObject,
    ("POST", "/v1/responses/input_tokens"): InputTokens,
    ("GET", "/v1/responses/{response_id}"): ResponseObject,
    ("DELETE", "/v1/responses/{response_id}"): DeletedResponse,
    ("POST", "/v1/responses/{response_id}/cancel"): ResponseObject,
    ("GET", "/v1/responses/{response_id}/input_items"): InputItems,
    ("POST", "/v1/messages"): MessageAnswer,
    ("POST", "/v1/messages/count_tokens"): CountedTokens,
    ("POST", "/generate"): Generation,
    ("POST", "/tokenize"): Tokens,
    ("POST", "/detokenize"): TextOfTokens,
    ("GET", "/health"): Status,
    ("GET", "/ready"): Status,
    ("POST", "/debug/route"): RouteDecision,
}
