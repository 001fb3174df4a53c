# SPDX-License-Identifier: Apache-2.0
"""How many drafts of each request go to the target.

Exactness asks of a schedule that whether slot i of a request is verified is settled
before its token x_i is drawn (DSpark, arXiv 2607.05147). c_i is computed from x_1 to
x_(i-1) and A_i is the product of c_1..c_i, so a decision on slot i may use A_1..A_i
and other requests' values, never this request's A_(i+1). Three schedules keep to it:

- `static_threshold`: a prefix cut at the first low confidence;
- `early_stop_prefix`: the search stops at the first slot that does not pay, so a later
  slot never argues for an earlier one;
- `stale_budget` + `global_top_k`: the budget comes from EARLIER steps. Feeding
  `stale_budget` the current survivals is the leak: the tests show its bias.

Every function is a pure function of its arguments, with a fixed order among equals.
Ranks of one tensor-parallel group still compute confidences that differ in the last
digits: let one rank call these, and broadcast lengths and their sum to the others.

Survival is [B, k], A[b, i] = P(drafts 1..i+1 of request b are all accepted). Give a
slot that does not exist (fewer drafts, no room) survival 0: it is never admitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Table: TypeAlias = Callable[[int], float] | Sequence[float]
"""A figure by number of tokens in the target pass: a function, or a sequence whose
entry n is for n tokens (entry 0 is not read)."""


def static_threshold(confidence: Tensor, theta: float) -> Tensor:
    """Verify up to, not including, the first draft with confidence below theta.

    Args:
        confidence: [B, k] in [0, 1]; c_i = P(x_i accepted | x_1..x_(i-1) accepted).
        theta: in [0, 1]; 0 verifies everything.

    Returns:
        int64 [B], lengths 0..k.

    Raises:
        ValueError: for a bad shape, a value outside [0, 1] or NaN.
    """
    _check_unit("confidence", confidence)
    if not 0.0 <= theta <= 1.0:
        raise ValueError(f"theta is {theta}; the threshold must lie in [0, 1]")
    return (confidence >= theta).long().cumprod(dim=1).sum(dim=1)


def early_stop_prefix(survival: Tensor, steps_per_second: Table) -> Tensor:
    """Longest run of slots, best first, that each raise the expected throughput.

    Algorithm 1 of DSpark (arXiv 2607.05147): slots enter in descending survival; with
    n tokens in the pass and tau expected output tokens the throughput is
    tau * steps_per_second(n); the first slot that does not raise it ends the search.
    This finds the best of all prefixes only where throughput has a single peak; that
    is the price of not looking ahead.

    Args:
        survival: [B, k], rows non-increasing.
        steps_per_second: target steps per second by tokens in the pass, B..B*(k+1).

    Returns:
        int64 [B], lengths 0..k.

    Raises:
        ValueError: for bad survivals, or a table entry missing or not positive.
    """
    _check_survival(survival)
    batch, k = survival.shape
    lengths = [0] * batch
    tokens, expected = batch, float(batch)
    if batch == 0:
        return torch.zeros(0, dtype=torch.long, device=survival.device)
    best = expected * _entry("steps_per_second", steps_per_second, tokens)
    for value, slot in _ranked(survival):
        tokens += 1
        expected += value
        rate = expected * _entry("steps_per_second", steps_per_second, tokens)
        if rate <= best:
            break
        best = rate
        lengths[slot // k] += 1
    return torch.tensor(lengths, dtype=torch.long, device=survival.device)


def stale_budget(
    stale_survival: Tensor, step_time: Table, draft_time: float = 0.0
) -> int:
    """Drafts to verify in all, from the survivals of an EARLIER step.

    argmax over D of (B + sum of the D largest survivals) / (draft_time +
    step_time(B + D)), over all D, the smallest among equals: staircases in the step
    time are seen whole. Exact only because the survivals are not this step's (DSpark,
    arXiv 2607.05147, section 5.2).

    Args:
        stale_survival: [B, k], rows non-increasing; 1.0 for requests without history.
        step_time: time of a target pass by tokens in it, B..B*(k+1); any unit.
        draft_time: time of the draft pass in the same unit; it is paid for every D.

    Returns:
        D, 0..B*k.

    Raises:
        ValueError: for bad survivals, a table entry missing or not positive, or a
            negative draft_time.
    """
    _check_survival(stale_survival)
    if not (math.isfinite(draft_time) and draft_time >= 0):
        raise ValueError(f"draft_time is {draft_time}; it must be finite and >= 0")
    batch = stale_survival.shape[0]
    if batch == 0:
        return 0
    expected = float(batch)
    best = expected / (draft_time + _entry("step_time", step_time, batch))
    budget = 0
    for count, (value, _) in enumerate(_ranked(stale_survival), start=1):
        expected += value
        rate = expected / (draft_time + _entry("step_time", step_time, batch + count))
        if rate > best:
            best, budget = rate, count
    return budget


def global_top_k(survival: Tensor, budget: int) -> Tensor:
    """Admit the `budget` slots of largest survival; each request gets a prefix.

    Among equals the lower request wins, then the lower position. If fewer than
    `budget` slots have positive survival, those are all that is admitted.

    Args:
        survival: [B, k], rows non-increasing, of the current step.
        budget: at least 0, decided before this step's tokens were drawn.

    Returns:
        int64 [B], lengths 0..k.

    Raises:
        ValueError: for bad survivals or a negative budget.
    """
    _check_survival(survival)
    if budget < 0:
        raise ValueError(f"budget is {budget}; it must be at least 0")
    batch, k = survival.shape
    # Rows are non-increasing and the sort is stable in row-major order, so a slot
    # never precedes an earlier slot of its own request: the winners form prefixes.
    order = survival.flatten().argsort(descending=True, stable=True)[:budget]
    winners = torch.zeros(batch * k, dtype=torch.bool, device=survival.device)
    winners[order] = True
    return (winners.view(batch, k) & (survival > 0)).sum(dim=1)


def _ranked(survival: Tensor) -> list[tuple[float, int]]:
    """(survival, flat slot) of the positive slots, best first, ties in slot order."""
    values, order = survival.flatten().double().sort(descending=True, stable=True)
    pairs = zip(values.tolist(), order.tolist(), strict=True)
    return [(value, slot) for value, slot in pairs if value > 0]


def _entry(name: str, table: Table, tokens: int) -> float:
    if callable(table):
        value = float(table(tokens))
    elif tokens < len(table):
        value = float(table[tokens])
    else:
        raise ValueError(
            f"{name} has entries up to {len(table) - 1} tokens but {tokens} are "
            "needed; extend the table to B * (k + 1) tokens"
        )
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} at {tokens} tokens is {value}; it must be positive")
    return value


def _check_unit(name: str, values: Tensor) -> None:
    if values.ndim != 2 or not values.is_floating_point():
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} and dtype {values.dtype}; "
            "it must be [B, k] floating point"
        )
    good = (values >= 0) & (values <= 1)
    if not bool(good.all()):
        b, i = (int(n) for n in (~good).nonzero()[0])
        raise ValueError(
            f"{name}[{b}, {i}] is {float(values[b, i])}; every entry must lie in "
            "[0, 1] (probabilities, not logits)"
        )


def _check_survival(survival: Tensor) -> None:
    _check_unit("survival", survival)
    rises = survival[:, 1:] > survival[:, :-1]
    if bool(rises.any()):
        b, i = (int(n) for n in rises.nonzero()[0])
        raise ValueError(
            f"survival[{b}, {i + 1}] = {float(survival[b, i + 1])} exceeds its "
            f"predecessor {float(survival[b, i])}; rows must not increase (pass the "
            "running product of the confidences)"
        )
