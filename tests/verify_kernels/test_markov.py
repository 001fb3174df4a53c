# SPDX-License-Identifier: Apache-2.0
"""The sequential head: what its tokens must be, and the same against vLLM's own loop on
a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.bench.markov import stock_draw
from experiments.bench.neighbours import neighbours
from verify_kernels.markov import MarkovSpace, Noise, markov_sample, reference

#: fp32 noise and division against fp64: a few units in the last place of a score of at
#: most 32 or so.
NEAR = 2e-5
#: Two units of bf16 of numbers from 8 to 16: a bias that is rounded otherwise.
TWO_UNITS = 2 * 2.0**-4


@dataclasses.dataclass(frozen=True)
class Case:
    """A step's tensors as `markov_sample` takes them."""

    base: Tensor
    w1: Tensor
    w2: Tensor
    anchor: Tensor

    def to(self, device: str) -> Case:
        return Case(*(x.to(device) for x in vars(self).values()))

    def requests(self, picked: slice) -> Case:
        return Case(self.base[picked], self.w1, self.w2, self.anchor[picked])


#: What runs a case: tokens int64 [B, N].
Run = Callable[[Case, Noise | None], Tensor]


def make(
    requests: int,
    drafts: int,
    vocab: int,
    rank: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    spread: float = 2.0,
    device: str = "cpu",
) -> Case:
    """Rows of base lie apart, between NaN; biases are as large as base is."""
    g = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g, device=device)

    base = torch.full(
        (requests, drafts + 1, vocab + 16), torch.nan, dtype=dtype, device=device
    )[:, :drafts, :vocab]
    base.copy_(spread * normal(*base.shape))
    w1 = normal(vocab, rank)
    w2 = normal(vocab, rank) * spread / rank**0.5
    anchor = torch.randint(
        vocab, (requests,), generator=g, dtype=torch.int32, device=device
    )
    return Case(base, w1.bfloat16(), w2.bfloat16(), anchor)


def noise_of(case: Case, seed: int = 0, kept: bool = True) -> Noise:
    """States in another order than requests, every third greedy, one of nobody where
    there are more than two."""
    g = torch.Generator().manual_seed(100 + seed)
    requests, drafts, vocab = case.base.shape
    states = requests + 3
    temperature = torch.rand(states, generator=g) + 0.5
    order = torch.randperm(states, generator=g)[:requests]
    temperature[order[::3]] = 0.0
    where = order[:, None].expand(-1, drafts).clone()
    if requests > 2:
        where[2] = -1
    return Noise(
        temperature,
        torch.randint(-(2**62), 2**62, (states,), generator=g),
        where,
        torch.randint(5000, (requests, 1), generator=g) + torch.arange(drafts),
        case.base.new_full((states, drafts + 1, vocab + 8), torch.nan)
        if kept
        else None,
    )


def noise_to(noise: Noise, device: str) -> Noise:
    moved = {k: None if v is None else v.to(device) for k, v in vars(noise).items()}
    return Noise(**moved)


def alone(noise: Noise, picked: slice) -> Noise:
    """For some of the requests."""
    return dataclasses.replace(
        noise, states=noise.states[picked], positions=noise.positions[picked]
    )


def check(run: Run, case: Case, noise: Noise | None = None) -> None:
    """Each token is the reference's behind the tokens before it; with noise, or one
    whose score cannot be told from it in fp32. Kept logits are the reference's."""
    tokens = run(case, noise)
    previous = case.anchor.long()
    tables = case.base, case.w1, case.w2
    for number in range(case.base.shape[1]):
        logits, values = reference.step(*tables, previous, number, noise)
        own, exact = tokens[:, number], reference.argmax(values)
        assert ((own >= 0) & (own < case.base.shape[2])).all()
        if noise is None:
            assert torch.equal(own, exact), number
        else:
            assert reference.close(values, own, NEAR).all(), number
            states = noise.states[:, number]
            there = states >= 0
            cold = ~there | (noise.temperature[states.clamp(min=0)] == 0)
            assert torch.equal(own[cold], exact[cold]), number
            if noise.logits is not None:
                found = noise.logits[states[there], number, : logits.shape[1]]
                assert torch.equal(found, logits[there]), number
        previous = own
    if noise is not None and noise.logits is not None:
        untouched = noise.logits.isnan()
        assert untouched[:, case.base.shape[1] :].all()
        assert untouched[:, :, case.base.shape[2] :].all()
        nobody = torch.ones(len(untouched), dtype=torch.bool)
        nobody[noise.states[noise.states >= 0].cpu()] = False
        assert untouched[nobody.to(untouched.device)].all()


def check_requests_alone(run: Run, case: Case, noise: Noise | None) -> None:
    """Field case F40: each request has the tokens that it has alone."""
    tokens = run(case, noise)
    for b in range(case.base.shape[0]):
        one = slice(b, b + 1)
        own = None if noise is None else alone(noise, one)
        assert torch.equal(run(case.requests(one), own), tokens[one]), b


def check_strange_numbers(run: Run, case: Case) -> None:
    """A request of NaN or infinities has ids in range and leaves the others alone."""
    wrong = Case(case.base.clone(), case.w1, case.w2, case.anchor)
    wrong.base[0] = torch.nan
    wrong.base[1, :, 3] = torch.inf
    wrong.base[2] = -torch.inf
    wrong.base[3, 0, 5] = torch.nan
    found, right = run(wrong, None), run(case, None)
    assert ((found >= 0) & (found < case.base.shape[2])).all()
    assert (found[0] == 0).all() and (found[1] == 3).all() and found[3, 0] == 5
    assert torch.equal(found[4:], right[4:])


def check_ties(run: Run, vocab: int) -> None:
    """Equal logits everywhere, and in two places far apart: the lowest id."""
    case = make(2, 2, vocab, seed=1)
    base = torch.zeros_like(case.base)
    base[1, :, 37] = base[1, :, vocab - 3] = 4.0
    flat = Case(base, case.w1, torch.zeros_like(case.w2), case.anchor)
    assert run(flat, None).tolist() == [[0, 0], [37, 37]]


def test_the_hash_is_murmur3() -> None:
    """Published values of MurmurHash3_x86_32: "test" and "aaaa"."""
    test, letters = (
        torch.tensor(int.from_bytes(x, "little")) for x in (b"test", b"aaaa")
    )
    assert int(reference.murmur3([test])) == 0xBA6BD213
    assert int(reference.murmur3([test], 0x9747B28C)) == 0x704B81DC
    assert int(reference.murmur3([letters], 0x9747B28C)) == 0x5A97808A


def test_noise_is_gumbels() -> None:
    """Mean and variance of 200,000 draws, five standard errors wide."""
    drawn = reference.gumbel(torch.tensor([7]), torch.tensor([11]), 200_000)
    assert abs(float(drawn.mean()) - 0.5772157) < 5 * 1.2825 / 200_000**0.5
    assert abs(float(drawn.var()) - 1.6449341) < 5 * 1.6449341 * (4.4 / 200_000) ** 0.5


def test_no_two_draws_share_noise() -> None:
    """Of two seeds, seeds that differ above 32 bits, and positions."""
    seeds = torch.tensor([1, 2, 1 + (1 << 32), 1])
    drawn = reference.gumbel(seeds, torch.tensor([5, 5, 5, 6]), 64)
    for i in range(4):
        for j in range(i):
            assert int((drawn[i] == drawn[j]).sum()) <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": torch.zeros(2, 3, 9)}, "V even"),
        ({"base": torch.zeros(65, 3, 8)}, "B at most 64"),
        ({"base": torch.zeros(2, 16, 8)}, "N 1 to 15"),
        ({"base": torch.zeros(2, 3, 8, dtype=torch.float16)}, "bfloat16 or float32"),
        ({"w1": torch.zeros(8, 48).bfloat16()}, "R 256, 64, 32"),
        ({"w2": torch.zeros(10, 32).bfloat16()}, "w2 is"),
        ({"anchor": torch.zeros(2, dtype=torch.int64)}, "anchor is"),
        ({"tokens": torch.zeros(2, 2, dtype=torch.int64)}, "tokens is"),
        ({}, "need a CUDA device"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Tensor], message: str) -> None:
    given: dict[str, Any] = {
        "base": torch.zeros(2, 3, 8),
        "w1": torch.zeros(8, 32).bfloat16(),
        "w2": torch.zeros(8, 32).bfloat16(),
        "anchor": torch.zeros(2, dtype=torch.int32),
        "tokens": torch.zeros(2, 3, dtype=torch.int64),
        "space": MarkovSpace.allocate("cpu"),
    }
    with pytest.raises(ValueError, match=message):
        markov_sample(**{**given, **change})


def test_noise_that_does_not_fit_is_named() -> None:
    case = make(3, 2, 64)
    space, tokens = MarkovSpace.allocate("cpu"), torch.zeros(3, 2, dtype=torch.int64)
    noise = noise_of(case)
    assert noise.logits is not None
    for change, message in (
        ({"logits": noise.logits[:, :1]}, r"noise.logits is .*\[states, 2 or more, 64"),
        ({"logits": noise.logits.float()}, "noise.logits is torch.float32"),
        ({"states": noise.states.int()}, "noise.states is torch.int32"),
        ({"seeds": noise.seeds[1:]}, "noise.seeds is"),
    ):
        with pytest.raises(ValueError, match=message):
            markov_sample(
                *vars(case).values(),
                tokens,
                space,
                noise=dataclasses.replace(noise, **change),
            )


def blank(case: Case) -> Tensor:
    """Where tokens go: rows that lie apart, of ids that are none."""
    requests, drafts, _ = case.base.shape
    return torch.full((requests, drafts + 2), -7, device=case.base.device)[:, :drafts]


def on_gpu(case: Case, noise: Noise | None) -> Tensor:
    tokens = blank(case)
    space = MarkovSpace.allocate("cuda")
    return markov_sample(*vars(case).values(), tokens, space, noise=noise)


K3: dict[str, Any] = {"vocab": 163840, "rank": 256}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("requests", [1, 3, 8, 64])
def test_k3s_head_is_right(requests: int, dtype: torch.dtype) -> None:
    case = make(requests, 7, **K3, dtype=dtype, seed=requests).to("cuda")
    tokens = on_gpu(case, None)
    # Sums of 256 products in fp32 may round a bias to bf16 otherwise than the exact
    # sum: then two logits differ by two units of bf16 at most.
    previous = case.anchor.long()
    for number in range(7):
        _, values = reference.step(case.base, case.w1, case.w2, previous, number)
        own = tokens[:, number]
        assert reference.close(values, own, TWO_UNITS).all()
        assert (own != reference.argmax(values)).sum() <= max(1, requests // 16)
        previous = own


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_heads_on_the_gpu(dtype: torch.dtype) -> None:
    for rank, requests, vocab in ((32, 9, 256), (32, 33, 1000), (256, 5, 4098)):
        case = make(requests, 3, vocab, rank, dtype, seed=vocab).to("cuda")
        for noise in (None, noise_to(noise_of(case), "cuda")):
            check_requests_alone(on_gpu, case, noise)
    check_strange_numbers(on_gpu, make(6, 2, 512).to("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("noised", [False, True])
def test_a_thousand_launches_agree(noised: bool) -> None:
    case = make(8, 7, **K3, seed=3).to("cuda")
    noise = noise_to(noise_of(case, kept=False), "cuda") if noised else None
    picks = [slice(0, n) for n in (1, 3, 8)]
    wanted = on_gpu(case, noise)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with neighbours() as disturb:
        for i in range(1000):
            disturb()
            picked = picks[i % 3]
            own = None if noise is None else alone(noise, picked)
            wrong += (on_gpu(case.requests(picked), own) != wanted[picked]).sum()
    assert int(wrong) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sampled", [False, True])
def test_tokens_are_those_of_vllms_loop(sampled: bool, dtype: torch.dtype) -> None:
    """12,544 drafts. cuBLAS adds in another order, so one bias of some hundreds rounds
    otherwise, and so do a token or two: at most one of a thousand."""
    sampler = pytest.importorskip("vllm.v1.worker.gpu.sample.gumbel")
    different = 0
    for seed in range(28):
        case = make(64, 7, **K3, dtype=dtype, seed=seed, device="cuda")
        noise = noise_to(noise_of(case, seed), "cuda")
        tokens = on_gpu(case, noise if sampled else None)
        different += against_the_loop(case, noise, tokens, sampled, sampler)
    assert different <= 12


def against_the_loop(
    case: Case, noise: Noise, tokens: Tensor, sampled: bool, sampler: Any
) -> int:
    """Of tokens behind the same tokens, how many differ from vLLM's; what was kept is
    checked against its logits."""
    different = 0
    kept, vocab = noise.logits, case.base.shape[2]
    assert kept is not None
    previous = case.anchor.long()
    for step in range(case.base.shape[1]):
        bias = torch.nn.functional.linear(case.w1[previous], case.w2)
        logits = case.base[:, step] + bias
        own, states = tokens[:, step], noise.states[:, step]
        if sampled:
            there = states >= 0
            found = kept[states[there], step, :vocab].float()
            gap = (found - logits[there].float()).abs()
            assert gap.max() <= TWO_UNITS and (gap > 0).float().mean() < 0.01
            column = torch.tensor(step, device=logits.device)
            apart = dataclasses.replace(noise, logits=torch.empty_like(kept))
            stock = stock_draw(logits, apart, step, column, sampler.gumbel_sample)
        else:
            stock = logits.argmax(-1)
            pair = torch.stack((own, stock), 1)
            assert (logits.float().gather(1, pair).diff().abs() <= TWO_UNITS).all()
        different += int((own != stock).sum())
        previous = own
    return different
