# SPDX-License-Identifier: Apache-2.0
"""The sequential head's bench without a GPU: what its gates see, what is a peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from experiments.bench import __main__ as command
from experiments.bench import markov, report, timing
from experiments.bench.candidate import OURS, Key, Mode, Timing
from experiments.bench.markov import GREEDY, SAMPLED, MarkovData, MarkovShape
from experiments.bench.ways import Run, Way, Ways
from tests.experiments.fake_bench import ScriptedTimer, settings
from verify_kernels.markov import reference

GREEDY_STEP = MarkovShape(GREEDY, 3, vocab=96, rank=16, drafts=2)
SAMPLED_STEP = MarkovShape(SAMPLED, 3, vocab=96, rank=16, drafts=2)
PLAIN: Key = (OURS, "plain")
PDL: Key = (OURS, "pdl")
Edit = Callable[[Tensor], object]


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_COPIES", 2)


def exactly(data: MarkovData, edit: Edit = lambda _: None) -> Run:
    """The reference, with something done to each result."""
    tokens = data.tokens()

    def run(copy: int) -> Tensor:
        tables = data.base[copy], data.w1[copy], data.w2[copy]
        tokens.copy_(reference.markov_sample(*tables, data.anchor, data.noise))
        edit(tokens)
        return tokens

    return run


def ways(edits: dict[Mode, Edit]) -> Callable[[Sequence[Mode]], Ways[MarkovData]]:
    def offer(modes: Sequence[Mode]) -> Ways[MarkovData]:
        def way(mode: Mode) -> Way[MarkovData]:
            edit = edits.get(mode, lambda _: None)
            return Way(OURS, mode, lambda data: exactly(data, edit))

        return Ways([way(mode) for mode in modes])

    return offer


def test_a_right_way_is_timed_beside_vllms_loop() -> None:
    timer = ScriptedTimer({PLAIN: Timing(20.0, 1.0), PDL: Timing(4.0, 1.0)})
    bench = markov.MarkovBench(GREEDY_STEP, settings(timer), ways({}))
    (point,) = bench.measure()
    assert not point.red() and len(point.gates[PDL]) == 4
    assert set(point.timings) == {PLAIN, PDL, (markov.STOCK, "plain")}
    # 10 us of the loop's: twice as fast is asked for of three requests.
    assert report.verdicts(point) == {"peer_plain": False, "peer_pdl": True}
    assert "2x96" in report.table([point])
    bench.trace([point])
    assert point.kernels[PDL] == ["kernel_of_ours_pdl"]


def test_without_vllms_sampler_ours_are_timed_alone() -> None:
    def no_peer(shape: MarkovShape) -> Ways[MarkovData]:
        return Ways(missing={markov.STOCK: "not here"})

    settled = settings(ScriptedTimer())
    bench = markov.MarkovBench(SAMPLED_STEP, settled, ways({}), no_peer)
    (point,) = bench.measure()
    assert not point.red() and set(point.timings) == {PLAIN, PDL}
    assert point.missing == {markov.STOCK: "not here"}


def other_token(tokens: Tensor) -> None:
    tokens[0, 1] = (tokens[0, 1] + 1) % GREEDY_STEP.vocab


def out_of_range(tokens: Tensor) -> None:
    tokens[0, 1] = GREEDY_STEP.vocab


@pytest.mark.parametrize("edit", [other_token, out_of_range])
def test_a_wrong_token_is_seen(edit: Edit) -> None:
    timer = ScriptedTimer()
    bench = markov.MarkovBench(GREEDY_STEP, settings(timer), ways({"pdl": edit}))
    (point,) = bench.measure()
    assert not point.gates[PDL]["accurate"]
    assert not point.gates[PDL]["pdl_equals_plain"] and PDL not in point.timings


def test_tokens_that_depend_on_batch_mates_are_seen() -> None:
    def edit(tokens: Tensor) -> None:
        if len(tokens) > 1:
            tokens[-1, 1] = tokens[-1, 1] ^ 1

    bench = markov.MarkovBench(
        GREEDY_STEP, settings(ScriptedTimer()), ways({"plain": edit})
    )
    (point,) = bench.measure()
    assert not point.gates[PLAIN]["row_invariant"]


def test_tokens_that_change_are_seen() -> None:
    calls = []

    def edit(tokens: Tensor) -> None:
        calls.append(1)
        if len(calls) == 9:
            other_token(tokens)

    bench = markov.MarkovBench(
        GREEDY_STEP, settings(ScriptedTimer()), ways({"plain": edit})
    )
    (point,) = bench.measure()
    assert not point.gates[PLAIN]["repeatable_12"]


def test_vllms_loop_is_the_references() -> None:
    data = MarkovData.draw(GREEDY_STEP, 1, torch.device("cpu"))
    assert torch.equal(markov.stock_loop(data, None)(0), exactly(data)(0))


def test_the_floor_counts_w2_for_each_draft() -> None:
    one = MarkovShape(GREEDY, 1)
    assert one.moved_bytes == 7 * (163840 * 256 * 2 + 163840 * 2)
    assert MarkovShape(SAMPLED, 1).moved_bytes == one.moved_bytes + 7 * 163840 * 2


def test_the_command_takes_the_op() -> None:
    options = command._parser().parse_args(["markov", "--rows", "1,8"])
    found = command.benches(options, settings(ScriptedTimer(), rows=(1, 8)))
    assert [bench.label for bench in found] == [
        "greedy B=1",
        "sampled B=1",
        "greedy B=8",
        "sampled B=8",
    ]
