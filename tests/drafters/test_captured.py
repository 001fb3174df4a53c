# SPDX-License-Identifier: Apache-2.0
"""A step is the same step eager and captured, and what cannot be captured is found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.captured import WARM_UP, Step
from drafters.config import read_config
from drafters.training import Schedule, drafter_step, optimise
from tests.drafters.capturing import hazards
from tests.drafters.small import drafter_json, small_drafter, small_target


def _model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)).to(device)


def _step(model: nn.Module, after: Any = None) -> Step:
    def loss_of(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Step(model.parameters(), loss_of, clip=0.1, weight_decay=0.1, after=after)


def _data(device: str) -> Iterator[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield (torch.randint(11, (4, 9), generator=generator).to(device),)


def _by_hand(device: str, rates: list[float]) -> tuple[nn.Module, list[float]]:
    """The same training as torch's documentation writes it."""
    model, data, losses = _model(device), _data(device), []
    optimiser = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1
    )
    for rate in rates:
        optimiser.param_groups[0]["lr"] = rate
        (tokens,) = next(data)
        loss = F.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimiser.step()
        losses.append(loss.item())
    return model, losses


RATES = [0.1 / (1 + i) for i in range(WARM_UP + 5)]


def test_cpu_steps_are_plain_steps() -> None:
    wanted, losses = _by_hand("cpu", RATES)
    model, data = _model("cpu"), _data("cpu")
    rates: list[float | Tensor] = []
    step = _step(model, rates.append)
    assert [step(rate, *next(data)).item() for rate in RATES] == losses
    assert rates == RATES and not step.captured and step.obstacle is None
    for ours, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_replays_are_plain_steps() -> None:
    """Rates, data and the callback change from step to step; values within rounding
    (AdamW is fused here), and the same bits a second time."""
    wanted, losses = _by_hand("cuda", RATES)
    runs = []
    for _ in range(2):
        model, data = _model("cuda"), _data("cuda")
        total = torch.zeros((), device="cuda")
        step = _step(model, total.add_)
        ours = [step(rate, *next(data)).item() for rate in RATES]
        assert step.captured and step.obstacle is None
        assert ours == pytest.approx(losses, rel=1e-4)
        assert total.item() == pytest.approx(sum(RATES), rel=1e-6)
        runs.append([p.detach().clone() for p in model.parameters()])
    for ours_p, again, theirs in zip(*runs, wanted.parameters(), strict=True):
        assert torch.equal(ours_p, again)
        torch.testing.assert_close(ours_p, theirs, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="must have the same shapes"):
        step(0.1, torch.zeros(2, 9, dtype=torch.long, device="cuda"))


def train_with_a_wait() -> None:
    """What the test below runs in a process of its own: prints JSON."""
    model, data = _model("cuda"), _data("cuda")
    said: list[tuple[int, str]] = []

    def loss_of(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss if loss.item() > 0 else -loss

    step = Step(model.parameters(), loss_of, clip=0.1, weight_decay=0.1)
    schedule = Schedule(WARM_UP + 5, 0.05)
    captured = optimise(step, schedule, data, lambda n, text: said.append((n, text)))
    _, losses = _by_hand("cuda", [schedule.rate(i) for i in range(schedule.steps)])
    print(json.dumps([captured, step.obstacle, said, losses[-1]]))


@pytest.mark.gpu
def test_step_that_waits_stays_eager_and_says_so() -> None:
    # A failed capture may leave torch's allocator and generators in its state.
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.drafters.test_captured import train_with_a_wait as f; f()",
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    captured, obstacle, said, last = json.loads(done.stdout.splitlines()[-1])
    assert not captured and obstacle
    assert [n for n, text in said if obstacle in text] == [WARM_UP]
    assert float(said[-1][1].split()[1]) == pytest.approx(last, abs=2e-3)


HAZARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda x: x * x.sum().item(),
    "condition": lambda x: x if bool((x > 0).all()) else -x,
    "nonzero": lambda x: x[x.nonzero()],
    "boolean index": lambda x: x[x > 0],
    "host constant": lambda x: x * torch.tensor([1.0, 2.0]).to(x.device),
    "host index": lambda x: x[torch.arange(2)],
    "host copy": lambda x: x.to("cpu").to(x.device),
}


@pytest.mark.parametrize("name", HAZARDS)
def test_hazards_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.empty(2, device="meta"))
    bad = HAZARDS[name]
    step = Step([weight], lambda x: (bad(weight) * x.sum()).sum(), clip=1.0)
    try:
        found = hazards(step, (torch.empty(3, device="meta"),), monkeypatch).found
    except (NotImplementedError, RuntimeError) as error:
        assert "meta" in str(error).lower()
    else:
        assert found


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_drafter_step_can_be_captured(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(drafter_json(markov_head_type=head))
    target, drafter = small_target().to("meta"), small_drafter(config).to("meta")
    for frozen in (drafter.embed_tokens, drafter.lm_head):
        frozen.requires_grad_(False)
    step = drafter_step(drafter, target, Schedule(5, 1e-3))
    tokens = torch.empty(4, 40, dtype=torch.long, device="meta")
    record = hazards(step, (tokens, tokens[:, :6]), monkeypatch)
    assert not record.found
    assert all(p.grad is not None for p in drafter.parameters() if p.requires_grad)
