# SPDX-License-Identifier: Apache-2.0
"""The sequential head's PTX on the CPU, under several schedules."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.engine import ENVIRONMENT
from experiments.forking import Forker
from tests.verify_kernels import test_markov as cases
from tests.verify_kernels.machine import Fault, GlobalMemory, launch, tensor_argument
from tests.verify_kernels.machine.kernels import Edit, compiled
from tests.verify_kernels.test_markov import Case, make, noise_of
from verify_kernels.markov import MarkovSpace, Noise
from verify_kernels.markov.host import ctas_of, variant_name

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

ROOT = Path(__file__).resolve().parents[2]


def run(
    case: Case,
    noise: Noise | None,
    seed: int = 0,
    edit: Edit = str,
    processors: int = 3,
) -> Tensor:
    """The launches of `markov_sample`."""
    _, drafts, vocab = case.base.shape
    wide = case.base.dtype == torch.float32
    name = variant_name(case.w1.shape[1], wide, noise is not None)
    variant, ptx = compiled("markov", name)
    kernel, space = variant.kernel, MarkovSpace.allocate("cpu")
    tokens = cases.blank(case)
    ctas = ctas_of(vocab, processors)
    for step in range(drafts + 1):
        memory = GlobalMemory()

        def add(
            tensor: Tensor,
            name: str,
            dims: int,
            strides: int = 0,
            memory: GlobalMemory = memory,
        ) -> bytes:
            at = memory.add(
                tensor,
                name,
                dynamic=name not in ("w1", "w2"),
                writable=name in ("parts", "tokens", "logits"),
            )
            return tensor_argument(at, tensor.shape[:dims], tensor.stride()[:strides])

        arguments = [
            add(case.base, "base", 3, 2),
            add(case.w1, "w1", 1),
            add(case.w2, "w2", 1),
            add(case.anchor, "anchor", 1),
            add(space.parts, "parts", 0),
            add(tokens, "tokens", 2, 1),
        ]
        if noise is not None:
            kept = case.base if noise.logits is None else noise.logits
            arguments += [
                add(noise.temperature, "temperature", 1),
                add(noise.seeds, "seeds", 1),
                add(noise.states, "states", 2, 1),
                add(noise.positions, "positions", 2, 1),
                add(kept, "logits", 3, 2),
            ]
        tiles = -(-vocab // 16) if step < drafts else 0
        keeps = noise is not None and noise.logits is not None
        numbers = (keeps, step, ctas if step else 0, tiles // ctas, tiles % ctas)
        launch(
            edit(ptx),
            memory,
            arguments + [np.int32(x).tobytes() for x in numbers],
            grid=(ctas, 1, 1),
            block=(kernel.threads, 1, 1),
            shared_bytes=kernel.shared_bytes,
            seed=seed + step,
            races=True,
        )
    return tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("requests", "vocab", "rank"), [(1, 70, 256), (3, 200, 32), (9, 160, 64)]
)
def test_drafts_are_right(
    requests: int, vocab: int, rank: int, dtype: torch.dtype
) -> None:
    case = make(requests, 2, vocab, rank, dtype, seed=requests)
    cases.check(run, case)
    cases.check(run, case, noise_of(case))


@pytest.mark.parametrize("noised", [False, True])
def test_schedules_and_ctas_give_the_same_tokens(noised: bool) -> None:
    """Also with more CTAs than tiles."""
    case = make(5, 2, 100, seed=5)
    noise = noise_of(case, kept=False) if noised else None
    first = run(case, noise)
    for seed, processors in ((1, 3), (2, 1), (3, 16)):
        found = run(case, noise, 10 * seed, processors=processors)
        assert torch.equal(found, first), (seed, processors)


def test_a_step_of_all_requests() -> None:
    """64, more than the warps have under way at once, and of two such steps."""
    case = make(64, 2, 48, seed=8)
    cases.check(run, case)
    cases.check(run, case, noise_of(case))


@pytest.mark.parametrize("noised", [False, True])
def test_requests_do_not_depend_on_batch_mates(noised: bool) -> None:
    case = make(10, 2, 64, seed=9)
    cases.check_requests_alone(
        run, case, noise_of(case, kept=False) if noised else None
    )


def test_strange_numbers_are_in_range() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        cases.check_strange_numbers(run, make(6, 2, 64, dtype=dtype, seed=2))


def test_the_lowest_of_equal_ids_is_taken() -> None:
    """In tiles of two CTAs, and of two warps of one."""
    for processors in (1, 2):
        cases.check_ties(functools.partial(run, processors=processors), 320)


def test_an_anchor_that_is_no_token_is_the_last() -> None:
    case = make(2, 1, 64, seed=4)
    wrong = torch.tensor([-1, 1 << 30], dtype=torch.int32)
    last = torch.full_like(wrong, 63)
    found, right = (
        run(Case(case.base, case.w1, case.w2, anchor), None) for anchor in (wrong, last)
    )
    assert torch.equal(found, right)


def test_seeds_are_those_of_the_step_only_with_kept_logits() -> None:
    """vLLM 0.33 mixes the draft's number into the seed where logits are kept."""
    case = make(4, 3, 64, seed=6)
    noise = noise_of(case)
    cases.check(run, case, noise)
    unkept = noise_of(case, kept=False)
    cases.check(run, case, unkept)
    flat = Case(torch.zeros_like(case.base), case.w1, case.w2 * 0, case.anchor)
    kept, plain = run(flat, noise), run(flat, unkept)
    assert torch.equal(kept[:, 0], plain[:, 0]) and not torch.equal(kept, plain)


@pytest.mark.parametrize("noised", [False, True])
@pytest.mark.parametrize(
    "wait", ["griddepcontrol.wait;", "bar.sync ", "cp.async.wait_group"]
)
def test_every_wait_is_needed(wait: str, noised: bool) -> None:
    """Without the first of each kind something is read too early."""
    case = make(9, 2, 100, seed=7)
    noise = noise_of(case, kept=False) if noised else None
    wanted = run(case, noise)

    def without(ptx: str) -> str:
        lines = ptx.splitlines()
        at = next(i for i, line in enumerate(lines) if wait in line)
        return "\n".join(lines[:at] + lines[at + 1 :])

    def fails(seed: int) -> bool:
        try:
            return not torch.equal(run(case, noise, seed, without), wanted)
        except Fault:
            return True

    assert any(fails(seed) for seed in range(3))


@pytest.mark.engine
def test_tokens_are_those_of_vllms_sampler() -> None:
    """All of 60, whose noise its Triton kernel draws in the interpreter."""
    with Forker({**ENVIRONMENT, "PYTHONPATH": str(ROOT)}) as forker:
        log, code = forker.run("tests.verify_kernels.interpreted_sampler", [])
    assert code == 0, log[-20:]
    found = json.loads(log[-1])
    assert len(found) == 4 and not any(found.values()), found
