# SPDX-License-Identifier: Apache-2.0
"""Losslessness by exact enumeration: rules times schedules, and what must be caught."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from drafters.rules import OutcomeLaw, outcome_law
from drafters.schedule import (
    early_stop_prefix,
    global_top_k,
    stale_budget,
    static_threshold,
)
from tests.drafters import exact_law
from tests.drafters.exact_law import Policy, Round, Tiny, law_error, output_law

torch.set_num_threads(1)

EXACT = 1e-12
CAUGHT = 0.01
LOSSLESS = ("standard", "block", "greedy", "target_only")
SHAPES = ((3, 2), (2, 3))
SPEED = [0.0, 1.0, 0.83, 0.7, 0.6, 0.52, 0.46, 0.41, 0.37]
STEP_TIME = [0.0, *(1.0 / s for s in SPEED[1:])]


def _mode(rule: str) -> str:
    return "greedy" if rule == "greedy" else "probabilistic"


def _fixed(length: int) -> Policy:
    return lambda r: (torch.full((len(r.draft_tokens),), length), None)


def _threshold(r: Round) -> tuple[torch.Tensor, None]:
    return static_threshold(r.confidence, 0.5), None


def _early_stop(r: Round) -> tuple[torch.Tensor, None]:
    return early_stop_prefix(r.survival, SPEED), None


def _stale_top_k(r: Round) -> tuple[torch.Tensor, object]:
    """The budget from the survivals remembered, the slots from the current ones."""
    stale = torch.ones_like(r.survival) if r.memory is None else torch.tensor(r.memory)
    kept = tuple(tuple(row) for row in r.survival.tolist())
    return global_top_k(r.survival, stale_budget(stale.double(), STEP_TIME)), kept


def _budget(total: int) -> Policy:
    return lambda r: (global_top_k(r.survival, total), None)


def _max_q_gate(r: Round) -> tuple[torch.Tensor, None]:
    """Gate on max_v q_i(v), a function of the prefix only."""
    return static_threshold(r.head_probs.amax(dim=-1), 0.6), None


def _leaky(r: Round) -> tuple[torch.Tensor, None]:
    """Everything or nothing by the last confidence, which has seen the drafts."""
    k = r.confidence.shape[1]
    return torch.where(r.confidence[:, -1] < 0.5, 0, k), None


def _fresh_argmax(r: Round) -> tuple[torch.Tensor, None]:
    """The stale-budget search fed with the current survivals."""
    table = [0.0, 1.0, 1.9, 2.1, 2.2]
    return global_top_k(r.survival, stale_budget(r.survival, table)), None


def _own_probability(r: Round) -> tuple[torch.Tensor, None]:
    """Gate on q(x_i) of the token that was sampled."""
    own = r.head_probs.gather(-1, r.draft_tokens.unsqueeze(-1)).squeeze(-1)
    return static_threshold(own, 0.4), None


SINGLE: dict[str, Callable[[int], list[Policy]]] = {
    "fixed": lambda k: [_fixed(n) for n in range(k + 1)],
    "static_threshold": lambda k: [_threshold],
    "early_stop": lambda k: [_early_stop],
    "top_k": lambda k: [_budget(n) for n in range(k + 1)],
    "max_q_gate": lambda k: [_max_q_gate],
}


@pytest.mark.parametrize("schedule", SINGLE)
@pytest.mark.parametrize("rule", LOSSLESS)
def test_one_request_has_the_target_law(rule: str, schedule: str) -> None:
    """gamma + 1 tokens (bonus included), random p and q with zeros in both."""
    worst = 0.0
    for vocab, gamma in SHAPES:
        for seed in range(24):
            model = Tiny(seed, vocab, gamma, _mode(rule))
            for policy in SINGLE[schedule](gamma):
                error = law_error([model], rule, policy, horizon=gamma + 1)
                worst = max(worst, error)
    assert worst < EXACT


@pytest.mark.parametrize("rule", LOSSLESS)
def test_schedules_do_cut_and_lengths_do_vary(rule: str) -> None:
    """The enumeration above is not of one constant length in disguise."""
    for policy in (_threshold, _early_stop, _max_q_gate):
        seen: set[int] = set()
        for seed in range(24):
            model = Tiny(seed, 3, 2, _mode(rule))

            def spy(r: Round, policy: Policy = policy) -> tuple[torch.Tensor, object]:
                lengths, memory = policy(r)
                seen.update(lengths.tolist())  # noqa: B023
                return lengths, memory

            output_law([model], rule, spy, horizon=3)
        assert seen == {0, 1, 2}


@pytest.mark.parametrize("rule", LOSSLESS)
def test_two_requests_share_a_budget_and_stay_independent(rule: str) -> None:
    """The joint law of both requests is the product of the targets' laws, although
    each request's length depends on the other's drafts."""
    policies = [_budget(n) for n in range(5)] + [_early_stop]
    worst = 0.0
    for seed in range(6):
        models = [Tiny(1000 + 2 * seed + r, 2, 2, _mode(rule)) for r in range(2)]
        for policy in policies:
            worst = max(worst, law_error(models, rule, policy, horizon=3))
    assert worst < EXACT


@pytest.mark.parametrize("rule", LOSSLESS)
def test_stale_budget_over_two_rounds(rule: str) -> None:
    """The second round's budget comes from the first round's confidences, those of
    rejected drafts included."""
    worst, budgets = 0.0, set()

    def policy(r: Round) -> tuple[torch.Tensor, object]:
        lengths, memory = _stale_top_k(r)
        if r.memory is not None:
            budgets.add(int(lengths.sum()))
        return lengths, memory

    for seed in range(12):
        model = Tiny(2000 + seed, 2, 2, _mode(rule))
        error = law_error([model], rule, policy, horizon=5, rounds=2)
        worst = max(worst, error)
    assert worst < EXACT
    assert len(budgets) > 1


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_stale_budget_over_two_rounds_and_two_requests(rule: str) -> None:
    models = [Tiny(3000 + r, 2, 2) for r in range(2)]
    error = law_error(models, rule, _stale_top_k, horizon=3, rounds=2)
    assert error < EXACT


def test_truncated_drafts_with_the_same_truncated_q_are_exact() -> None:
    """Field case F27: a truncated q is fine when it is the one that was drawn from."""
    worst = 0.0
    for seed, rule in itertools.product(range(24), ("standard", "block")):
        model = Tiny(seed, 3, 2, "truncated")
        worst = max(worst, law_error([model], rule, _threshold, horizon=3))
    assert worst < EXACT


BIASED: dict[str, tuple[str, str, Policy]] = {
    "leaky length, standard": ("standard", "probabilistic", _leaky),
    "leaky length, block": ("block", "probabilistic", _leaky),
    "budget from current confidences": ("standard", "probabilistic", _fresh_argmax),
    "gate on q of the sampled token": ("standard", "probabilistic", _own_probability),
    "same gate, block": ("block", "probabilistic", _own_probability),
    "truncated drafts, full q": ("standard", "truncated-full", _fixed(2)),
    "truncated drafts, full q, block": ("block", "truncated-full", _fixed(2)),
    "greedy drafts, softmax q": ("standard", "greedy-softmax", _fixed(2)),
    "greedy drafts, softmax q, block": ("block", "greedy-softmax", _fixed(2)),
}


@pytest.mark.parametrize("name", BIASED)
def test_known_bias_is_caught(name: str) -> None:
    """Field case F27, and lengths that look ahead: the check above has power."""
    rule, mode, policy = BIASED[name]
    worst = max(
        law_error([Tiny(seed, 3, 2, mode)], rule, policy, horizon=3)
        for seed in range(24)
    )
    assert worst > CAUGHT


@pytest.mark.parametrize("own", ["block", "standard"])
def test_a_rule_with_the_residual_of_the_other_is_caught(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case F27: each acceptance rule is paired with its own residual."""

    def mixed(rule: str, *args: Any, **more: Any) -> OutcomeLaw:
        other = "standard" if own == "block" else "block"
        return OutcomeLaw(
            outcome_law(own, *args, **more).accepted,
            outcome_law(other, *args, **more).next_token,
        )

    monkeypatch.setattr(exact_law, "outcome_law", mixed)
    worst = max(
        law_error([Tiny(seed, 3, 2)], own, _fixed(2), horizon=3) for seed in range(24)
    )
    assert worst > CAUGHT


@pytest.mark.parametrize("rule", ["greedy", "target_only"])
def test_point_mass_rule_tolerates_any_length(rule: str) -> None:
    """Exact for each draft sequence on its own, so even a leaky length is harmless."""
    worst = max(
        law_error([Tiny(seed, 3, 2)], rule, policy, horizon=3)
        for seed in range(24)
        for policy in (_leaky, _own_probability)
    )
    assert worst < EXACT


class _CounterExample(Tiny):
    """p = (.7, .3), q = (.5, .5); x_1 = A (token 0) makes c_2 high, B makes it 0."""

    def target(self, prefix: tuple[int, ...]) -> np.ndarray:
        return np.array([0.7, 0.3])

    def drawn(self, prefix: tuple[int, ...]) -> np.ndarray:
        return np.array([0.5, 0.5])

    stated = drawn

    def confidence(self, prefix: tuple[int, ...]) -> float:
        return 0.8 if not prefix else (0.9 if prefix[0] == 0 else 0.0)


def test_counter_example_of_the_paper() -> None:
    """One request, gamma 2, SPS (1, .5, .45): a full search over current confidences
    emits (.85, .15) for a target of (.7, .3); the early stop verifies nothing in
    either case and is exact."""
    speed = [0.0, 1.0, 0.5, 0.45]
    chosen: dict[str, set[tuple[int, int]]] = {"full": set(), "early": set()}

    def full(r: Round) -> tuple[torch.Tensor, None]:
        lengths = global_top_k(
            r.survival, stale_budget(r.survival, [0.0, *(1 / s for s in speed[1:])])
        )
        chosen["full"].add((int(r.draft_tokens[0, 0]), int(lengths)))
        return lengths, None

    def early(r: Round) -> tuple[torch.Tensor, None]:
        lengths = early_stop_prefix(r.survival, speed)
        chosen["early"].add((int(r.draft_tokens[0, 0]), int(lengths)))
        return lengths, None

    model = _CounterExample(0, 2, 2)
    biased = output_law([model], "standard", full, horizon=1)
    np.testing.assert_allclose(biased, [0.85, 0.15], atol=1e-12)
    exact = output_law([model], "standard", early, horizon=1)
    np.testing.assert_allclose(exact, [0.7, 0.3], atol=1e-12)
    assert chosen["full"] == {(0, 2), (1, 0)}
    assert chosen["early"] == {(0, 0), (1, 0)}


def _hand_standard(x: list[int], p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """P(accepted = j), straight from the textbook, one uniform per draft."""
    law, alive = [], 1.0
    for i, token in enumerate(x):
        a = min(1.0, p[i][token] / q[i][token])
        law.append(alive * (1 - a))
        alive *= a
    return np.array([*law, alive])


def _hand_block(x: list[int], p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """P(accepted = j) after Sun et al., by integrating over pass and fail patterns."""
    gamma = len(x)
    joint, h = 1.0, []
    for i in range(gamma):
        joint = min(joint * p[i][x[i]] / q[i][x[i]], 1.0)
        if i == gamma - 1:
            h.append(joint)
        else:
            mass = float(np.maximum(joint * p[i + 1] - q[i + 1], 0.0).sum())
            h.append(mass / (mass + 1 - joint))
    law = np.zeros(gamma + 1)
    for pattern in itertools.product((False, True), repeat=gamma):
        chance = np.prod([h[i] if ok else 1 - h[i] for i, ok in enumerate(pattern)])
        law[max((i + 1 for i, ok in enumerate(pattern) if ok), default=0)] += chance
    return law


def test_laws_equal_a_textbook_derivation() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        p, q = rng.dirichlet(np.ones(4), 4), rng.dirichlet(np.ones(4), 3)
        x = rng.integers(4, size=3).tolist()
        for rule, hand in (("standard", _hand_standard), ("block", _hand_block)):
            law = outcome_law(
                rule,
                torch.tensor([x]),
                torch.tensor([3]),
                torch.tensor(p)[None],
                draft_probs=torch.tensor(q)[None],
            )
            np.testing.assert_allclose(
                law.accepted[0].numpy(), hand(x, p, q), atol=1e-14
            )


def test_residual_by_hand() -> None:
    """p (.5, .3, .2), q (.2, .2, .6): the residual is (.3, .1, 0) / .4; with a point
    mass at token 0 it is (0, .6, .4); block at P_1 = 1/3 keeps (0, 0, 0) of p / 3."""
    p = torch.tensor([[[0.5, 0.3, 0.2]] * 3]).double()
    q = torch.tensor([[[0.2, 0.2, 0.6]] * 2]).double()
    drafts, full = torch.tensor([[2, 0]]), torch.tensor([2])
    standard = outcome_law("standard", drafts, full, p, draft_probs=q)
    for j in (0, 1):
        np.testing.assert_allclose(standard.next_token[0, j], [0.75, 0.25, 0.0])
    np.testing.assert_allclose(standard.next_token[0, 2], [0.5, 0.3, 0.2])
    np.testing.assert_allclose(standard.accepted[0], [2 / 3, 0.0, 1 / 3], atol=1e-15)
    point = outcome_law("greedy", torch.tensor([[0, 0]]), full, p)
    np.testing.assert_allclose(point.next_token[0, 0], [0.0, 0.6, 0.4])
    np.testing.assert_allclose(point.accepted[0], [0.5, 0.25, 0.25])
    # Block: P = (1, 1/3, min(1, 5/6)); after one draft max(p/3 - q, 0) = 0, so h_1 = 0.
    block = outcome_law("block", drafts, full, p, draft_probs=q)
    np.testing.assert_allclose(block.accepted[0], [1 / 6, 0.0, 5 / 6], atol=1e-15)
    np.testing.assert_allclose(block.next_token[0, 0], [0.75, 0.25, 0.0])


def test_block_accepts_more_on_the_example_of_its_authors() -> None:
    """Sun et al.: p (1/3, 2/3), q (2/3, 1/3), two drafts: 10/9 accepted by the standard
    rule, 11/9 by block verification."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    mean = {}
    for rule in ("standard", "block"):
        total = 0.0
        for x in itertools.product(range(2), repeat=2):
            law = outcome_law(
                rule,
                torch.tensor([x]),
                torch.tensor([2]),
                torch.tensor(np.array([[p] * 3])),
                draft_probs=torch.tensor(np.array([[q] * 2])),
            )
            count = float((law.accepted[0] * torch.arange(3)).sum())
            total += q[x[0]] * q[x[1]] * count
        mean[rule] = total
    assert mean["standard"] == pytest.approx(10 / 9, abs=1e-12)
    assert mean["block"] == pytest.approx(11 / 9, abs=1e-12)


def test_block_never_accepts_fewer_in_the_mean() -> None:
    """Optimality of block verification, over random full-length models."""
    for seed in range(40):
        model = Tiny(seed, 3, 2)
        mean = {}
        for rule in ("standard", "block"):
            total = 0.0
            for x in itertools.product(range(3), repeat=2):
                steps = [x[:i] for i in range(3)]
                chance = float(np.prod([model.drawn(x[:i])[x[i]] for i in range(2)]))
                if chance == 0:
                    continue
                law = outcome_law(
                    rule,
                    torch.tensor([x]),
                    torch.tensor([2]),
                    torch.tensor(np.array([[model.target(s) for s in steps]])),
                    draft_probs=torch.tensor(
                        np.array([[model.drawn(s) for s in steps[:2]]])
                    ),
                )
                total += chance * float((law.accepted[0] * torch.arange(3)).sum())
            mean[rule] = total
        assert mean["block"] >= mean["standard"] - 1e-12
