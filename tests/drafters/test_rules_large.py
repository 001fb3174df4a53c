# SPDX-License-Identifier: Apache-2.0
"""The batched `verify` on large samples: chi-square against the target's own law.

Family-wise error 1e-3 over the whole grid (Bonferroni), seeds fixed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from scipy.stats import chisquare

from drafters.rules import rates_from_length, verify
from drafters.sampling import probs_from_logits, sample
from drafters.schedule import static_threshold

torch.set_num_threads(1)

ALPHA = 1e-3
LOSSLESS = ("standard", "block", "greedy", "target_only")
SCHEDULES = ("zero", "full", "ragged", "threshold")
TEMPERATURES = (0.3, 1.0, 1.5)
VOCABULARIES = (2, 5)
GRID = list(itertools.product(LOSSLESS, SCHEDULES, TEMPERATURES, VOCABULARIES))
ROWS = 60_000


@dataclass
class Pair:
    """Target and drafter as Markov chains: logits of the next token by the last one."""

    target: torch.Tensor
    draft: torch.Tensor

    @classmethod
    def make(cls, seed: int, vocab: int) -> Pair:
        gen = torch.Generator().manual_seed(seed)
        target = 1.2 * torch.randn(vocab, vocab, generator=gen, dtype=torch.float64)
        noise = torch.randn(vocab, vocab, generator=gen, dtype=torch.float64)
        return cls(target, target + 0.8 * noise)


def _rollout(
    pair: Pair,
    rule: str,
    schedule: str | int,
    temperature: float,
    k: int,
    rows: int,
    seed: int,
    stated_temperature: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens [rows, k+1] completed from the target, target table, accepted)."""
    gen = torch.Generator().manual_seed(seed)
    p_table = probs_from_logits(pair.target, temperature)
    q_table = probs_from_logits(pair.draft, temperature)
    told = q_table
    if stated_temperature is not None:
        told = probs_from_logits(pair.draft, stated_temperature)
    drawn = probs_from_logits(pair.draft, 0.0) if rule == "greedy" else q_table
    last = torch.zeros(rows, dtype=torch.long)
    drafts, history = [], [last]
    for _ in range(k):
        last = sample(drawn[last], gen)
        drafts.append(last)
        history.append(last)
    seen = torch.stack(history, dim=1)
    if schedule == "threshold":
        # The first slot always passes; later ones depend on the drafts before them.
        peak = q_table.amax(dim=-1).clamp(max=1.0)
        lengths = static_threshold(peak[seen[:, :k]], float(peak[0]))
    elif schedule == "ragged":
        lengths = torch.randint(0, k + 1, (rows,), generator=gen)
    else:
        fixed = {"zero": 0, "full": k}.get(str(schedule), schedule)
        lengths = torch.full((rows,), int(fixed))
    verdict = verify(
        rule,
        torch.stack(drafts, dim=1),
        lengths,
        p_table[seen],
        draft_probs=told[seen[:, :k]] if rule in ("standard", "block") else None,
        generator=gen,
    )
    tokens = verdict.tokens.clone()
    for column in range(1, k + 1):
        plain = sample(p_table[tokens[:, column - 1].clamp(min=0)], gen)
        tokens[:, column] = torch.where(tokens[:, column] < 0, plain, tokens[:, column])
    return tokens, p_table, verdict.accepted


def _p_value(tokens: torch.Tensor, table: torch.Tensor) -> float:
    """Chi-square of the joint law of all columns, rare cells pooled."""
    vocab, rows = table.shape[0], tokens.shape[0]
    expected = table[0]
    index = tokens[:, 0]
    for column in range(1, tokens.shape[1]):
        last = torch.arange(expected.numel()) % vocab
        expected = (expected.unsqueeze(-1) * table[last]).flatten()
        index = index * vocab + tokens[:, column]
    counts = torch.bincount(index, minlength=expected.numel()).double()
    expected = expected.double() * rows
    common = expected >= 10
    if not bool(common.all()):
        counts = torch.cat([counts[common], counts[~common].sum()[None]])
        expected = torch.cat([expected[common], expected[~common].sum()[None]])
        if float(expected[-1]) < 10:
            assert float(counts[-1]) < 60
            counts, expected = counts[:-1], expected[:-1]
    expected = expected * (counts.sum() / expected.sum())
    return float(chisquare(counts.numpy(), expected.numpy()).pvalue)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_emitted_tokens_follow_the_target(rule: str) -> None:
    """Field case F27: temperatures .3, 1, 1.5 by lengths by vocabularies; the joint law
    of k + 1 = 4 tokens. Requests with zero drafts sit among the others."""
    most = dict.fromkeys(SCHEDULES, 0)
    for cell, (own, schedule, temperature, vocab) in enumerate(GRID):
        if own != rule:
            continue
        pair = Pair.make(100 + cell, vocab)
        tokens, table, accepted = _rollout(
            pair, rule, schedule, temperature, 3, ROWS, 900 + cell
        )
        p = _p_value(tokens, table)
        assert p > ALPHA / len(GRID), (rule, schedule, temperature, vocab, p)
        most[schedule] = max(most[schedule], int(accepted.max()))
    assert most == {"zero": 0, "full": 3, "ragged": 3, "threshold": 3}


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_planted_bias_is_detected_by_the_same_test(rule: str) -> None:
    """Field case F27: the drafter draws at temperature 1 and the rule is told the q of
    temperature 1.1. The chi-square above must see it at the corrected level."""
    for seed in range(3):
        tokens, table, _ = _rollout(
            Pair.make(100 + seed, 5), rule, "full", 1.0, 3, 200_000, seed, 1.1
        )
        assert _p_value(tokens, table) < ALPHA / len(GRID)


@pytest.mark.parametrize("length", range(8))
def test_every_length_up_to_seven(length: int) -> None:
    """Field case F13: no length is special; the joint law of 8 tokens at k = 7."""
    for rule in LOSSLESS:
        tokens, table, accepted = _rollout(
            Pair.make(17, 2), rule, length, 1.0, 7, 40_000, 50 + length
        )
        assert _p_value(tokens, table) > ALPHA / (8 * len(LOSSLESS))
        assert int(accepted.max()) == length
        assert int(accepted.min()) == 0


def test_near_tie_in_bf16() -> None:
    """Field case F27: logits one bf16 step apart. Drafts are drawn from, and judged by,
    the same bf16-derived q; judging them by another rounding's q is not assumed."""
    target = torch.tensor([[4.0, 4.03125]] * 2, dtype=torch.bfloat16)
    draft = torch.tensor([[4.03125, 4.0]] * 2, dtype=torch.bfloat16)
    assert target[0, 0] != target[0, 1]
    levels = ALPHA / 6
    for rule, temperature in itertools.product(("standard", "block"), (0.3, 1.0, 1.5)):
        pair = Pair(target, draft)
        tokens, table, _ = _rollout(pair, rule, "full", temperature, 2, 100_000, 3)
        assert table.dtype == torch.float32
        assert _p_value(tokens, table) > levels


@pytest.mark.parametrize("rule", LOSSLESS)
def test_impossible_tokens_never_appear(rule: str) -> None:
    """Top-k 2 of 6 on the target, ignored by the drafter; nothing else is emitted."""
    pair = Pair.make(7, 6)
    p_table = probs_from_logits(pair.target, 1.0, top_k=2)
    q_table = probs_from_logits(pair.draft, 1.0)
    assert bool(((p_table > 0).sum(dim=-1) == 2).all())
    gen = torch.Generator().manual_seed(1)
    rows, k = 20_000, 3
    seen = [torch.zeros(rows, dtype=torch.long)]
    for _ in range(k):
        seen.append(sample(q_table[seen[-1]], gen))
    path = torch.stack(seen, dim=1)
    verdict = verify(
        rule,
        path[:, 1:],
        torch.randint(0, k + 1, (rows,), generator=gen),
        p_table[path],
        draft_probs=q_table[path[:, :k]],
        generator=gen,
    )
    emitted = 0
    last = path[:, 0]
    for column in range(k + 1):
        token = verdict.tokens[:, column]
        real = token >= 0
        assert bool((p_table[last[real], token[real]] > 0).all())
        emitted += int(real.sum())
        last = token.clamp(min=0)
    assert emitted == int((verdict.accepted + 1).sum())


def _batch(
    rows: int, k: int, vocab: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    p = torch.randn(rows, k + 1, vocab, generator=gen, dtype=torch.float64).softmax(-1)
    q = torch.randn(rows, k, vocab, generator=gen, dtype=torch.float64).softmax(-1)
    drafts = sample(q.reshape(rows * k, vocab), gen).reshape(rows, k)
    lengths = torch.arange(rows) % (k + 1)
    return drafts, lengths, p, q


def _own(seeds: list[int]) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("rule", LOSSLESS)
def test_row_depends_on_its_own_request_only(rule: str) -> None:
    """Field case F28: a seeded request alone, with other mates, at another place in the
    batch, and padded to a longer k: identical tokens and an identical stream."""
    drafts, lengths, p, q = _batch(8, 4, 257, 0)
    seeds = list(range(42, 50))
    whole = verify(rule, drafts, lengths, p, draft_probs=q, generator=_own(seeds))
    for b in range(8):
        own = _own([seeds[b]])
        cut = slice(b, b + 1)
        alone = verify(
            rule,
            drafts[cut],
            lengths[cut],
            p[cut],
            draft_probs=q[cut],
            generator=own,
        )
        assert torch.equal(alone.tokens[0], whole.tokens[b])
        used = _own([seeds[b]])[0]
        torch.rand(2, generator=used, dtype=torch.float64)
        assert torch.equal(used.get_state(), own[0].get_state())
    order = torch.tensor([5, 2, 7, 0, 1, 6, 4, 3])
    moved = verify(
        rule,
        drafts[order],
        lengths[order],
        p[order],
        draft_probs=q[order],
        generator=_own([seeds[i] for i in order.tolist()]),
    )
    assert torch.equal(moved.tokens, whole.tokens[order])
    wide = verify(
        rule,
        torch.nn.functional.pad(drafts, (0, 3), value=-1),
        lengths,
        torch.nn.functional.pad(p, (0, 0, 0, 3), value=float("nan")),
        draft_probs=torch.nn.functional.pad(q, (0, 0, 0, 3), value=float("nan")),
        generator=_own(seeds),
    )
    assert torch.equal(wide.tokens[:, :5], whole.tokens)
    assert bool((wide.tokens[:, 5:] == -1).all())


@pytest.mark.parametrize("rule", LOSSLESS)
def test_none_accepted_and_all_accepted(rule: str) -> None:
    """Field case F03: accepted counts 0 and width - 1, in one batch with a request that
    has no drafts; counts never leave 0..length and rows are complete."""
    vocab, k = 4, 3
    point = torch.eye(vocab, dtype=torch.float64)
    p = point[torch.tensor([[1, 2, 3, 0], [1, 2, 3, 0], [2, 2, 2, 2], [1, 0, 3, 0]])]
    drafts = torch.tensor([[1, 2, 3], [0, 2, 3], [-1, -1, -1], [1, 2, 3]])
    lengths = torch.tensor([3, 3, 0, 3])
    got = verify(rule, drafts, lengths, p, draft_probs=None)
    assert got.accepted.tolist() == [3, 0, 0, 1]
    assert got.tokens.tolist() == [
        [1, 2, 3, 0],
        [1, -1, -1, -1],
        [2, -1, -1, -1],
        [1, 0, -1, -1],
    ]
    empty = verify(rule, drafts[:0], lengths[:0], p[:0])
    assert empty.tokens.shape == (0, k + 1)
    none = verify(rule, drafts[:, :0], torch.zeros(4).long(), p[:, :1])
    assert none.tokens[:, 0].tolist() == [1, 1, 2, 1]


def test_unread_rows_may_hold_nan_and_read_rows_may_not() -> None:
    drafts, lengths, p, q = _batch(5, 4, 3, 2)
    keep = torch.arange(5) <= lengths.unsqueeze(-1)
    nan = torch.where(keep.unsqueeze(-1), p, float("nan"))
    verdict = verify("block", drafts, lengths, nan, draft_probs=q)
    assert bool((verdict.accepted <= lengths).all())
    nan[3, 2] = float("nan")
    with pytest.raises(ValueError, match=r"target_probs\[3, 2\] is not a distribution"):
        verify("block", drafts, lengths, nan, draft_probs=q)


def test_synthetic_marginal_rates() -> None:
    """Field case F24: marginal rates [.9, .8, .5] mean 1 + 2.2 = 3.2 tokens a step, and
    each position's survival is the rate itself, not a product of rates."""
    rows, rates = 200_000, [0.9, 0.8, 0.5]
    p = torch.full((rows, 4, 2), 0.5)
    gen = torch.Generator().manual_seed(4)
    drafts = torch.zeros(rows, 3, dtype=torch.long)
    full = torch.full((rows,), 3)
    got = verify("synthetic", drafts, full, p, survival_rates=rates, generator=gen)
    counts = torch.bincount(got.accepted, minlength=4).double()
    share = torch.tensor([0.1, 0.1, 0.3, 0.5]).double()
    assert chisquare(counts.numpy(), (share * rows).numpy()).pvalue > ALPHA
    assert 1 + float(got.accepted.double().mean()) == pytest.approx(3.2, abs=0.01)
    short = verify(
        "synthetic",
        drafts,
        torch.ones_like(full),
        p,
        survival_rates=rates,
        generator=gen,
    )
    assert float(short.accepted.double().mean()) == pytest.approx(0.9, abs=0.005)


@pytest.mark.parametrize("k", [3, 7])
def test_synthetic_length_means_the_same_at_every_draft_length(k: int) -> None:
    """Field case F24: an acceptance length of 3 is 3 at k = 3 and at k = 7."""
    rates = rates_from_length(3.0, k)
    assert rates == [1.0, 1.0] + [0.0] * (k - 2)
    rows = 1000
    got = verify(
        "synthetic",
        torch.zeros(rows, k, dtype=torch.long),
        torch.full((rows,), k),
        torch.full((rows, k + 1, 2), 0.5),
        survival_rates=rates,
    )
    assert 1 + float(got.accepted.double().mean()) == 3.0


def test_synthetic_fractional_length() -> None:
    """Field case F24: 3.84 at k = 7 is [1, 1, .84, 0, 0, 0, 0]; the ends are exact."""
    assert rates_from_length(3.84, 7) == pytest.approx([1, 1, 0.84, 0, 0, 0, 0])
    assert rates_from_length(1.0, 3) == [0.0, 0.0, 0.0]
    assert rates_from_length(4.0, 3) == [1.0, 1.0, 1.0]
    for length in (1.5, 2.25, 7.75, 8.0):
        assert 1 + sum(rates_from_length(length, 7)) == pytest.approx(length)


def test_greedy_request_emits_the_argmax_text() -> None:
    """Temperature 0 makes the target one-hot: every rule yields the argmax path."""
    pair = Pair.make(23, 5)
    best = pair.target.argmax(dim=-1)
    for rule in LOSSLESS:
        tokens, _, _ = _rollout(pair, rule, "ragged", 0.0, 4, 200, 1)
        last = torch.zeros(200, dtype=torch.long)
        for column in range(5):
            last = best[last]
            assert torch.equal(tokens[:, column], last)


BAD: list[tuple[str, dict[str, object], str]] = [
    ("typical", {}, "rule is 'typical'"),
    ("standard", {"lengths": torch.tensor([3, 0])}, r"every entry must be in 0\.\.2"),
    ("standard", {"lengths": torch.tensor([1.0, 0.0])}, r"must be \[2\] integers"),
    ("block", {"draft_tokens": torch.tensor([[0, 9], [0, 0]])}, r"\[0, 1\] is 9"),
    ("block", {"target_probs": torch.ones(2, 3, 2)}, "is not a distribution"),
    ("block", {"target_probs": torch.ones(2, 2, 2)}, r"must be \[2, 3, V\]"),
    ("standard", {"draft_probs": torch.ones(2, 2, 3)}, r"must be \[2, 2, 2\]"),
    (
        "standard",
        {"draft_probs": torch.tensor([[[0.0, 1.0]] * 2] * 2)},
        "has probability 0 in",
    ),
    ("synthetic", {}, "survival_rates is None"),
    ("greedy", {"survival_rates": [1.0, 1.0]}, "with no other rule"),
    ("synthetic", {"survival_rates": [0.5]}, "one per draft position"),
    ("synthetic", {"survival_rates": [0.5, 0.6]}, "cannot be likelier"),
    ("synthetic", {"survival_rates": [1.5, 0.6]}, r"must lie in \[0, 1\]"),
    ("standard", {"generator": _own([1])}, "1 generators for 2 requests"),
]


@pytest.mark.parametrize(("rule", "change", "message"), BAD)
def test_bad_input_is_named(rule: str, change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "draft_tokens": torch.tensor([[0, 0], [0, 0]]),
        "lengths": torch.tensor([2, 2]),
        "target_probs": torch.full((2, 3, 2), 0.5),
    }
    with pytest.raises(ValueError, match=message):
        verify(rule, **{**good, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "k"), [(0.9, 3), (4.1, 3), (1.0, 0)])
def test_impossible_synthetic_length_is_refused(length: float, k: int) -> None:
    with pytest.raises(ValueError, match=r"must lie in \[1, 4\]|at least 1"):
        rates_from_length(length, k)
