"""The way in for requests: what a caller says becomes a GenerateRequest with an id, checked, in line.

Owns the translation of arguments, the check against model and cache, ids, children (num_return_sequences) and cancelling. Knows
no thread and no step; locks are the mailboxes'. All or none: what is refused leaves nothing behind.

    input_ids, keywords ──prompt()──▶ request without id ──hand_in()──▶ [id, its children …] ──▶ Inbox
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from ..core.request import RequestLimits, derived_seed
from ..errors import EngineStoppedError, InvalidRequestError
from ..grammar import Grammar
from ..messages import GenerateRequest, GenerationOutput, RequestStatus, as_token_ids
from .mailbox import Cancel, Inbox, Mailbox, Outbox
from .outputs import OutputRecord
from .parts import Grammars
from .sampling_config import SamplingPolicy


class HandedIn(NamedTuple):
    """What is in line now: [id, its children …] of each prompt, and when."""

    families: list[list[str]]
    created: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What an engine asks of requests and does with what they leave out: enough to check them in another process."""

    limits: RequestLimits
    policy: SamplingPolicy


class Intake:
    """Takes requests in for one manager. `limits` is replaced when the engine is rebuilt."""

    def __init__(
        self,
        *,
        policy: SamplingPolicy,
        limits: RequestLimits,
        inbox: Inbox,
        outbox: Outbox,
        clock: Callable[[], float],
        grammars: Grammars | None = None,
    ) -> None:
        self.limits = limits
        self.grammars = grammars
        self._policy = policy
        self._inbox, self._outbox = inbox, outbox
        self._clock = clock
        self._has_forks = False

    @property
    def refusing(self) -> str | None:
        """Why no more requests are taken; None: they are."""
        return self._inbox.refusing

    def prompt(
        self,
        input_ids: Iterable[int],
        *,
        max_new_tokens: int | None = None,
        eos_token_id: Any = None,
        sampling: dict[str, Any] | None = None,
        **fields: Any,
    ) -> GenerateRequest:
        """A request without an id yet, checked against the model and the cache. `fields` are those of GenerateRequest.

        A grammar is compiled first, which may take a while: `compile_grammar` beforehand where that must not be waited for.
        Raises InvalidRequestError naming the parameter.
        """
        ids = as_token_ids(input_ids, self.limits.vocab_size)
        request = GenerateRequest(
            request_id="",
            token_ids=ids,
            max_new_tokens=self._policy.max_new_tokens(len(ids), max_new_tokens),
            sampling=self._policy.params(len(ids), eos_token_id, sampling),
            **fields,
        )
        self.limits.check(request)
        return self._with_grammar(request)

    async def compile_grammar(self, grammar: Any) -> None:
        """Have this grammar ready, if it is one. Raises InvalidRequestError when it cannot be used."""
        if grammar is not None:
            await asyncio.wrap_future(self._known_grammars().submit(Grammar.of(grammar)))

    def _with_grammar(self, request: GenerateRequest) -> GenerateRequest:
        grammar = request.sampling.grammar
        if grammar is None or grammar.compiled is not None:
            return request
        grammar = replace(grammar, compiled=self._known_grammars().compile(grammar))
        return replace(request, sampling=replace(request.sampling, grammar=grammar))

    def _known_grammars(self) -> Grammars:
        if self.grammars is None:
            raise InvalidRequestError("this engine knows no grammars", param="grammar")
        return self.grammars

    def hand_in(
        self,
        prompts: Sequence[GenerateRequest],
        wanted: Sequence[str | None],
        *,
        num_return_sequences: int | None = None,
        mailbox: Mailbox | None = None,
    ) -> HandedIn:
        """Name requests as `wanted` (None: `req_{n}`), add their children, put all in line or none.

        Raises InvalidRequestError (an id that is in use, or no id), QueueFullError or EngineStoppedError.
        """
        children = self._count(num_return_sequences) - 1
        prompts = [self._with_grammar(prompt) for prompt in prompts]
        families: list[list[str]] = []
        try:
            for prompt, name in zip(prompts, wanted, strict=True):
                _check_id(name)
                self.limits.check(prompt)
                families.append(self._outbox.reserve(name, children))
            created = self._put(prompts, families, mailbox, places=len(prompts))
        except BaseException:
            self._outbox.forget(name for family in families for name in family)
            raise
        return HandedIn(families, created)

    def _put(
        self, prompts: Sequence[GenerateRequest], families: Sequence[Sequence[str]], mailbox: Mailbox | None, places: int | None
    ) -> float:
        """Returns when they were handed in, as their outputs will tell."""
        requests = [member for prompt, names in zip(prompts, families, strict=True) for member in _family(prompt, names)]
        created = self._clock()

        def accept() -> None:
            for request in requests:
                self._outbox.listen(request, created, mailbox)

        self._has_forks |= len(requests) > len(prompts)
        self._inbox.add(requests, created, accept, places=places)
        return created

    def _count(self, num_return_sequences: int | None) -> int:
        count = self._policy.num_return_sequences if num_return_sequences is None else num_return_sequences
        if count < 1:
            raise InvalidRequestError(f"num_return_sequences must be at least 1, got {count}", param="num_return_sequences")
        return count

    def cancel(self, request_id: str) -> None:
        """Cancel a live request and its children; anything else is ignored."""
        for name in self._outbox.family(request_id) if self._has_forks else [request_id]:
            if self._outbox.is_live(name):
                self._inbox.put(Cancel(name))

    def abandon(self, names: Iterable[str]) -> None:
        """Their reader has left: cancel them, and tell nobody."""
        for name in names:
            self._outbox.hang_up(name)
            self._inbox.put(Cancel(name))

    # ---- whole batches --------------------------------------------------------------------------------------------------------

    def run_batch(
        self, inputs: Sequence[Iterable[int]], on_end: Callable[[], object], **arguments: Any
    ) -> dict[str, GenerationOutput]:
        """Serve a batch to its end: outputs in input order, children before their parent. A bad prompt is FAILED, the others
        finish.

        `on_end` is called for each sequence that ends; `arguments` are those of `prompt`. The waiting line is not bounded here:
        the batch is in memory already. Raises EngineStoppedError when the engine takes no more.
        """
        if self.refusing is not None:
            raise EngineStoppedError(self.refusing)
        children = self._count(None) - 1
        families = [self._outbox.reserve(None, children) for _ in inputs]
        ended: dict[str, GenerationOutput] = {}
        good: list[tuple[GenerateRequest, list[str]]] = []
        for input_ids, names in zip(inputs, families, strict=True):
            try:
                good.append((self.prompt(input_ids, **arguments), names))
            except InvalidRequestError as error:
                self._outbox.forget(names)
                for name in names:
                    ended[name] = _failed(name, input_ids, error)
                    on_end()
        mailbox = Mailbox()
        try:
            created = self._put([prompt for prompt, _ in good], [names for _, names in good], mailbox, places=None)
        except BaseException:
            self._outbox.forget(name for _, names in good for name in names)
            raise
        records = {name: OutputRecord(replace(prompt, request_id=name), created) for prompt, names in good for name in names}
        try:
            _read_all(mailbox, records, ended, on_end)
        except BaseException:  # an interrupted caller leaves nothing running
            self.abandon(name for name in records if name not in ended)
            raise
        return {name: ended[name] for names in families for name in (*names[1:], names[0])}


def _read_all(
    mailbox: Mailbox, records: dict[str, OutputRecord], ended: dict[str, GenerationOutput], on_end: Callable[[], object]
) -> None:
    """Read until every record has its terminal chunk. The engine sees to it that there is one, whatever happens to it."""
    left = len(records)
    while left:
        chunk = mailbox.take()
        assert chunk is not None
        snapshot = records[chunk.request_id].add(chunk)
        if chunk.is_terminal:
            ended[chunk.request_id] = snapshot.output()
            left -= 1
            on_end()


def _family(prompt: GenerateRequest, names: Sequence[str]) -> list[GenerateRequest]:
    """The request under its name, and its children. Children of a seeded request get seeds of their own."""
    family = [replace(prompt, request_id=names[0])]
    for k, name in enumerate(names[1:]):
        sampling, seed = prompt.sampling, prompt.sampling.seed
        if seed is not None:
            sampling = replace(sampling, seed=derived_seed(seed, f"child {k}"))
        family.append(replace(prompt, request_id=name, sampling=sampling, fork_of=names[0]))
    return family


def _check_id(wanted: object) -> None:
    if wanted is not None and not (isinstance(wanted, str) and wanted):
        raise InvalidRequestError(f"request_id must be a string that is not empty, or None, got {wanted!r}", param="request_id")


def _failed(name: str, input_ids: Any, error: InvalidRequestError) -> GenerationOutput:
    return GenerationOutput(
        request_id=name, prompt_ids=plain_ids(input_ids), error=str(error), status=RequestStatus.FAILED, finish_reason="failed"
    )


def plain_ids(input_ids: Any) -> list[int]:
    """The ids of a prompt as far as they are ids, for showing; empty when they are not."""
    try:
        return [int(token) for token in cast("Iterable[Any]", input_ids)]
    except (TypeError, ValueError):
        return []
