# SPDX-License-Identifier: Apache-2.0
"""Exact output law of speculative decoding on tiny vocabularies, by enumeration.

Every draft sequence, every accepted count and every next token is visited with its
probability. The probabilities come from `drafters.rules.outcome_law` (the law `verify`
draws from) and the lengths from whatever policy is under test, so what is enumerated is
the implementation. Contexts may be several rounds and several requests.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from drafters.rules import outcome_law

Prefix = tuple[int, ...]
Law = np.ndarray


class Tiny:
    """A random target, drafter and confidence head over V tokens.

    Each is a table by prefix, filled on first use from a seeded generator. `drawn` is
    the law drafts come from, `stated` what the rule is told (None: a point mass).
    """

    def __init__(
        self, seed: int, vocab: int, gamma: int, mode: str = "probabilistic"
    ) -> None:
        self.seed, self.vocab, self.gamma, self.mode = seed, vocab, gamma, mode
        self._tables: dict[tuple[str, Prefix], Law] = {}

    def _table(self, name: str, prefix: Prefix) -> Law:
        key = (name, prefix)
        if key not in self._tables:
            salt = {"p": 1, "q": 2, "c": 3}[name]
            rng = np.random.default_rng([self.seed, salt, len(prefix), *prefix])
            if name == "c":
                self._tables[key] = rng.uniform(0.05, 1.0, size=1)
            else:
                weights = rng.dirichlet(np.full(self.vocab, 0.8))
                # A third of the rows lose a token: zeros in p and q are the edge.
                if rng.uniform() < 1 / 3:
                    weights[rng.integers(self.vocab)] = 0.0
                self._tables[key] = weights / weights.sum()
        return self._tables[key]

    def target(self, prefix: Prefix) -> Law:
        return self._table("p", prefix)

    def confidence(self, prefix: Prefix) -> float:
        return float(self._table("c", prefix)[0])

    def head(self, prefix: Prefix) -> Law:
        """The drafter's softmax, before argmax or truncation."""
        return self._table("q", prefix)

    def drawn(self, prefix: Prefix) -> Law:
        q = self.head(prefix)
        if self.mode in ("greedy", "greedy-softmax"):
            return np.eye(self.vocab)[int(q.argmax())]
        if self.mode in ("truncated", "truncated-full"):
            kept = np.where(q >= np.sort(q)[-2], q, 0.0)
            return kept / kept.sum()
        return q

    def stated(self, prefix: Prefix) -> Law:
        if self.mode in ("greedy-softmax", "truncated-full"):
            return self.head(prefix)
        return self.drawn(prefix)


@dataclass
class Round:
    """What a policy may look at; each row is a request."""

    confidence: torch.Tensor
    draft_tokens: torch.Tensor
    head_probs: torch.Tensor
    memory: Any

    @property
    def survival(self) -> torch.Tensor:
        return self.confidence.cumprod(dim=1)


Policy = Callable[[Round], tuple[torch.Tensor, Any]]
"""Lengths [R] and the memory for the next round (hashable)."""


@dataclass
class _Outcomes:
    """Per (request, context): draft law, policy inputs and outcomes by length."""

    drafts: list[Prefix]
    weight: list[float]
    confidence: list[list[float]]
    head: np.ndarray
    by_length: dict[tuple[int, int], list[tuple[Prefix, float]]] = field(
        default_factory=dict
    )


def _expand(model: Tiny, context: Prefix, rule: str) -> _Outcomes:
    vocab, gamma = model.vocab, model.gamma
    drafts, weight, confidence, target, stated, head = [], [], [], [], [], []
    for draft in itertools.product(range(vocab), repeat=gamma):
        steps = [context + draft[:i] for i in range(gamma + 1)]
        chance = float(
            np.prod([model.drawn(steps[i])[token] for i, token in enumerate(draft)])
        )
        if chance == 0.0:
            continue
        drafts.append(draft)
        weight.append(chance)
        confidence.append([model.confidence(s) for s in steps[:gamma]])
        target.append([model.target(s) for s in steps])
        stated.append([model.stated(s) for s in steps[:gamma]])
        head.append([model.head(s) for s in steps[:gamma]])
    out = _Outcomes(drafts, weight, confidence, np.array(head))
    repeat = gamma + 1
    law = outcome_law(
        rule,
        torch.tensor(drafts).repeat_interleave(repeat, 0),
        torch.arange(repeat).repeat(len(drafts)),
        torch.tensor(np.array(target)).repeat_interleave(repeat, 0),
        draft_probs=torch.tensor(np.array(stated)).repeat_interleave(repeat, 0)
        if rule in ("standard", "block")
        else None,
    )
    accepted, following = law.accepted.numpy(), law.next_token.numpy()
    for row in range(len(drafts) * repeat):
        index, length = divmod(row, repeat)
        out.by_length[index, length] = [
            (context + drafts[index][:j] + (token,), chance)
            for j in range(length + 1)
            for token in range(vocab)
            if (chance := float(accepted[row, j] * following[row, j, token])) > 0.0
        ]
    return out


def _completion(model: Tiny, prefix: Prefix, horizon: int) -> Law:
    """Law of the first `horizon` tokens given the prefix, by target sampling."""
    law = np.ones(())
    for token in prefix[:horizon]:
        law = np.multiply.outer(law, np.eye(model.vocab)[token])
    if len(prefix) >= horizon:
        return law
    total = np.zeros((model.vocab,) * horizon)
    for token, chance in enumerate(model.target(prefix)):
        if chance > 0:
            total += chance * _completion(model, (*prefix, token), horizon)
    return total


def target_law(models: Sequence[Tiny], horizon: int) -> Law:
    law = np.ones(())
    for model in models:
        law = np.multiply.outer(law, _completion(model, (), horizon))
    return law


def output_law(
    models: Sequence[Tiny],
    rule: str,
    policy: Policy,
    *,
    horizon: int,
    rounds: int = 1,
    memory: Any = None,
) -> Law:
    """Joint law of the first `horizon` tokens of every request.

    `rounds` speculative rounds, completed by plain sampling from the target.
    """
    states: dict[tuple[tuple[Prefix, ...], Any], float] = {
        (tuple(() for _ in models), memory): 1.0
    }
    expanded: dict[tuple[int, Prefix], _Outcomes] = {}
    for _ in range(rounds):
        following: dict[tuple[tuple[Prefix, ...], Any], float] = defaultdict(float)
        for (contexts, held), mass in states.items():
            options = []
            for r, context in enumerate(contexts):
                if (r, context) not in expanded:
                    expanded[r, context] = _expand(models[r], context, rule)
                options.append(expanded[r, context])
            for picks in itertools.product(*(range(len(o.drafts)) for o in options)):
                pairs = list(zip(options, picks, strict=True))
                weight = mass * float(np.prod([o.weight[i] for o, i in pairs]))
                lengths, kept = policy(
                    Round(
                        torch.tensor([o.confidence[i] for o, i in pairs]).double(),
                        torch.tensor([o.drafts[i] for o, i in pairs]),
                        torch.tensor(np.array([o.head[i] for o, i in pairs])),
                        held,
                    )
                )
                outcomes = (
                    o.by_length[i, n]
                    for (o, i), n in zip(pairs, lengths.tolist(), strict=True)
                )
                for combo in itertools.product(*outcomes):
                    reached = tuple(prefix for prefix, _ in combo)
                    chance = float(np.prod([c for _, c in combo]))
                    following[reached, kept] += weight * chance
        states = following
    completions: dict[tuple[int, Prefix], Law] = {}
    total = np.zeros(tuple(m.vocab for m in models for _ in range(horizon)))
    for (contexts, _), mass in states.items():
        law = np.ones(())
        for r, context in enumerate(contexts):
            if (r, context) not in completions:
                completions[r, context] = _completion(models[r], context, horizon)
            law = np.multiply.outer(law, completions[r, context])
        total += mass * law
    return total


def law_error(
    models: Sequence[Tiny], rule: str, policy: Policy, *, horizon: int, **more: Any
) -> float:
    """Largest absolute difference of any outcome's probability to the target's."""
    mine = output_law(models, rule, policy, horizon=horizon, **more)
    return float(np.abs(mine - target_law(models, horizon)).max())
