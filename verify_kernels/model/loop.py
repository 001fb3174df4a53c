# SPDX-License-Identifier: Apache-2.0
"""Greedy speculative decoding over `K3Model`: verify, accept, commit.

A step gives each running request a verify width of its own: the tokens of its text that
are not committed yet, up to 8, and behind the last of them drafts. A draft is accepted
if it is the argmax of the row before it. Accepted rows are committed, rejected ones
leave nothing, and the argmax after the last accepted row is the next token. So the text
is the one plain decoding gives, whatever the drafts are. A prompt is decoded by the
same steps, its tokens being accepted by definition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from verify_kernels.batch import MAX_ROWS, MAX_WIDTH, VerifyBatch
from verify_kernels.head.reference import argmax
from verify_kernels.model.reference import K3Model, K3State

#: (number of the request, its text so far) to any number of drafts.
Draft: TypeAlias = Callable[[int, Sequence[int]], Sequence[int]]
#: When accepted rows enter the state: after the step, or as the next step loads it.
Layout: TypeAlias = Literal["eager", "fold"]


@dataclass(frozen=True)
class Request:
    """Up to ``max_new_tokens`` after ``prompt``; the first stop id is kept and ends."""

    prompt: Sequence[int]
    max_new_tokens: int
    stop_ids: Collection[int] = ()


@dataclass
class Generation:
    """tokens and the logits [vocab] each was chosen from; widths and rows kept by step.

    ``final_state`` is `K3State.committed` of all tokens but the last.
    """

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    final_state: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Running:
    number: int
    request: Request
    slot: int
    result: Generation
    text: list[int]
    history: int = 0
    pages: list[int] = field(default_factory=list)
    accepted: int = 0
    rows: list[int] = field(default_factory=list)
    known: int = 0


class _Loop:
    def __init__(
        self, model: K3Model, layout: Layout, running: int, pages: int, page: int
    ) -> None:
        self.model = model
        self.fold = layout == "fold"
        self.size = running
        self.page = page
        self.state: K3State = model.new_state(running + 1, pages, page)
        self.slots = deque(range(1, running + 1))
        self.pages = deque(range(pages))
        self.active: list[_Running] = []

    def admit(self, number: int, request: Request, result: Generation) -> None:
        slot = self.slots.popleft()
        self.state.reset(slot)
        text = list(request.prompt)
        self.active.append(_Running(number, request, slot, result, text))

    def plan(self, run: _Running, draft: Draft | None, max_width: int) -> None:
        """Choose the rows of this step and the pages they need."""
        waiting = run.text[run.history :]
        run.rows = waiting[:max_width]
        run.known = len(run.rows)
        if run.known == len(waiting) and draft is not None:
            left = run.request.max_new_tokens - len(run.result.tokens)
            room = min(max_width - run.known, left - 1)
            run.rows += list(draft(run.number, tuple(run.text)))[:room]
        while len(run.pages) * self.page < run.history + len(run.rows):
            run.pages.append(self.pages.popleft())

    def batch(self) -> tuple[VerifyBatch, Tensor]:
        """The step in the shape a captured graph has: padded requests and rows."""
        idle = self.size - len(self.active)
        starts = [0]
        for run in self.active:
            starts.append(starts[-1] + len(run.rows))
        longest = max(len(run.pages) for run in self.active)
        table = [run.pages + [-1] * (longest - len(run.pages)) for run in self.active]
        tokens = [token for run in self.active for token in run.rows]

        def ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
            device = self.model.weights.embedding.device
            return torch.tensor(values, dtype=torch.int32, device=device)

        batch = VerifyBatch(
            row_start=ints(starts + starts[-1:] * idle),
            history=ints([run.history for run in self.active] + [0] * idle),
            state_slots=ints([run.slot for run in self.active] + [0] * idle),
            accepted=ints([run.accepted for run in self.active] + [0] * idle),
            block_table=ints(table + [[-1] * longest] * idle),
        )
        return batch, ints(tokens + [-1] * (MAX_ROWS - len(tokens)))

    def accept(self, run: _Running, logits: Tensor) -> bool:
        """Take the rows' tokens as far as they are right; True when it is finished."""
        keep, finished = run.known, False
        if run.history + run.known == len(run.text):
            while not finished:
                row = logits[keep - 1]
                token = int(argmax(row))
                run.text.append(token)
                run.result.tokens.append(token)
                run.result.logits.append(row.clone())
                finished = (
                    token in run.request.stop_ids
                    or len(run.result.tokens) == run.request.max_new_tokens
                )
                if finished or keep == len(run.rows) or run.rows[keep] != token:
                    break
                keep += 1
        run.result.widths.append(len(run.rows))
        run.result.kept.append(keep)
        run.history += keep
        run.accepted = keep
        if not self.fold:
            self.state.commit(run.slot, keep)
        return finished

    def retire(self, run: _Running) -> None:
        if self.fold:
            self.state.commit(run.slot, run.accepted)
        run.result.final_state = self.state.committed(run.slot, run.pages, run.history)
        self.slots.append(run.slot)
        self.pages.extend(run.pages)
        self.active.remove(run)


def generate(
    model: K3Model,
    requests: Sequence[Request],
    draft: Draft | None = None,
    *,
    layout: Layout = "eager",
    max_width: int = MAX_WIDTH,
    max_running: int = MAX_ROWS // MAX_WIDTH,
    page: int = 16,
) -> list[Generation]:
    """Decode every request greedily, ``max_running`` at a time; slots are used again.

    With ``max_width`` 1 this is plain decoding, one token a step. Drafts beyond the
    width or the request's budget are dropped.

    Raises:
        ValueError: for an empty prompt, a budget below 1, or a batch whose rows could
            exceed 64.
    """
    if not 1 <= max_width <= MAX_WIDTH:
        raise ValueError(f"max_width is {max_width}; it must be 1 to {MAX_WIDTH}")
    if not 1 <= max_running * max_width <= MAX_ROWS:
        raise ValueError(
            f"max_running is {max_running} with max_width {max_width}; their product "
            f"must be 1 to {MAX_ROWS} rows"
        )
    for number, request in enumerate(requests):
        if not request.prompt or request.max_new_tokens < 1:
            raise ValueError(
                f"requests[{number}] has {len(request.prompt)} prompt tokens and "
                f"max_new_tokens {request.max_new_tokens}; both must be at least 1"
            )
    lengths = [len(r.prompt) + r.max_new_tokens for r in requests]
    pages = max_running * -(-max(lengths, default=0) // page)
    loop = _Loop(model, layout, max_running, pages, page)
    waiting = deque(enumerate(requests))
    results = [Generation() for _ in requests]
    while waiting or loop.active:
        while waiting and loop.slots:
            number, request = waiting.popleft()
            loop.admit(number, request, results[number])
        for run in loop.active:
            loop.plan(run, draft, max_width)
        batch, tokens = loop.batch()
        logits = model.step(batch, tokens, loop.state, fold=loop.fold)
        starts = batch.row_start.tolist()
        for b, run in enumerate(list(loop.active)):
            if loop.accept(run, logits[starts[b] : starts[b + 1]]):
                loop.retire(run)
    return results
