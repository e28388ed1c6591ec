"""From deltas to all that is known so far: the cumulative outputs of transformers' API, at the cost of the new tokens only.

Owns `OutputRecord` and `Snapshot`. Knows no thread: the engine's thread adds chunks to a record, whose lists only ever grow, and
a snapshot remembers how long they were; the reader's thread cuts the lists when it turns the snapshot into an output.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..messages import GenerateRequest, GenerationOutput, TokenChunk, TopLogprobs, Usage


class OutputRecord:
    """All that has come for one request."""

    __slots__ = ("created", "logprobs", "prompt", "prompt_logprobs", "request_id", "times", "tokens", "top_logprobs", "usage")

    def __init__(self, request: GenerateRequest, created: float) -> None:
        self.request_id = request.request_id
        self.prompt = list(request.token_ids)
        self.created = created
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.times: list[float] | None = [] if request.record_timestamps else None
        self.top_logprobs: list[TopLogprobs] | None = [] if request.sampling.logprobs else None
        self.prompt_logprobs: list[float | None] | None = None
        self.usage: Usage | None = None  # what the last chunk told that had something to tell

    def add(self, chunk: TokenChunk) -> Snapshot:
        """Take a chunk in; the snapshot tells what is known with it."""
        self.tokens.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        if self.times is not None:
            self.times.extend(chunk.timestamps)
        if self.top_logprobs is not None:
            self.top_logprobs.extend(chunk.top_logprobs)
        self.usage = chunk.usage or self.usage
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = list(chunk.prompt_logprobs)
        return Snapshot(self, len(self.tokens), chunk, self.usage)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The first `count` tokens of a record, and the chunk that brought the last of them."""

    record: OutputRecord
    count: int
    chunk: TokenChunk
    usage: Usage | None

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def is_terminal(self) -> bool:
        return self.chunk.is_terminal

    def output(self) -> GenerationOutput:
        """A new output; nobody else holds its lists, but for the prompt's, which is not to be changed."""
        record, chunk, count, usage = self.record, self.chunk, self.count, self.usage
        output = GenerationOutput(
            request_id=record.request_id,
            prompt_ids=record.prompt,
            generated_tokens=record.tokens[:count],
            logprobs=record.logprobs[:count],
            error=None if chunk.error is None else str(chunk.error) or type(chunk.error).__name__,
            status=chunk.status,
            created_time=record.created,
            timestamps=None if record.times is None else record.times[:count],
            finish_reason=chunk.finish_reason,
            top_logprobs=None if record.top_logprobs is None else record.top_logprobs[:count],
            prompt_logprobs=record.prompt_logprobs,
            embedding=chunk.embedding,
        )
        if usage is not None:
            output.lifespan = (usage.started_time, usage.ended_time)
            output.num_cached_tokens = usage.num_cached_tokens
            output.queue_time = usage.queue_time
            output.num_preemptions = usage.num_preemptions
            output.weights_versions = usage.weights_versions
        return output
