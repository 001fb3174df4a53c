# SPDX-License-Identifier: Apache-2.0
"""The routing kernel's PTX on the CPU, under many schedules."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from tests.verify_kernels import test_moe_route as route_tests
from tests.verify_kernels.machine import Fault, kernels
from tests.verify_kernels.machine.launch import Cluster
from tests.verify_kernels.test_moe_route import KINDS, SCALE, Routed, inputs
from verify_kernels.moe.host import Form, forms

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

ONE, CLUSTER, PAIR, LARGE, TINY = forms()
#: Its clocks of 7168 lanes would take 600 MB.
UNFOLLOWED = LARGE


def run(
    logits: Tensor,
    bias: Tensor,
    form: Form,
    seed: int = 0,
    edit: kernels.Edit = str,
    padding: Tensor | None = None,
) -> Routed:
    found = Routed.stale(*logits.shape, form[1], "cpu")
    kernels.moe_route(
        form,
        logits,
        bias,
        found.plan,
        found.weights,
        found.ids,
        padding=padding,
        routed_scale=SCALE,
        seed=seed,
        edit=edit,
        races=form != UNFOLLOWED,
    )
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("form", "rows"),
    [(ONE, 1), (ONE, 3), (PAIR, 3), (CLUSTER, 3), (TINY, 3), (TINY, 9)],
    ids=route_tests.name_of,
)
def test_every_kind_of_row(form: Form, rows: int, kind: str) -> None:
    logits, bias = inputs(*form[:2], rows, kind, seed=rows)
    # Of this seed shared memory is full of the largest integer.
    found = run(logits, bias, form, seed=1)
    route_tests.check(found, logits, bias, form[1])


@pytest.mark.parametrize(
    ("form", "rows", "seeds"),
    [(ONE, 2, 6), (PAIR, 8, 3), (CLUSTER, 8, 3), (LARGE, 64, 2), (TINY, 33, 2)],
    ids=route_tests.name_of,
)
def test_schedules_give_the_same_bits(form: Form, rows: int, seeds: int) -> None:
    logits, bias = inputs(*form[:2], rows, "plain", seed=6)
    first = run(logits, bias, form)
    route_tests.check(first, logits, bias, form[1])
    for seed in range(1, seeds):
        for one, other in zip(
            run(logits, bias, form, seed).bits(), first.bits(), strict=True
        ):
            assert torch.equal(one, other), seed


@pytest.mark.parametrize(
    ("form", "rows"), [(ONE, 1), (CLUSTER, 9), (TINY, 33)], ids=route_tests.name_of
)
def test_rows_that_pad_choose_nothing(form: Form, rows: int) -> None:
    logits, bias = inputs(*form[:2], rows, "nan", seed=rows)
    for padding in (
        route_tests.with_padding(rows),
        torch.ones(rows, dtype=torch.bool),
        torch.zeros(rows, dtype=torch.bool),
    ):
        found = run(logits, bias, form, padding=padding)
        route_tests.check(found, logits, bias, form[1], padding)


@pytest.mark.parametrize("form", [PAIR, TINY], ids=route_tests.name_of)
def test_rows_do_not_depend_on_batch_mates(form: Form) -> None:
    """Field case F40."""
    picks = [slice(0, 1), slice(2, 3), slice(1, 5)]
    route_tests.check_rows_alone(run, form, 5, picks)


def test_one_expert_is_chosen_by_all_rows() -> None:
    logits, bias = inputs(*LARGE[:2], 64, "one", seed=9)
    found = run(logits, bias, LARGE)
    route_tests.check(found, logits, bias, LARGE[1])
    assert (found.ids == LARGE[0] // 3).any(1).all()


def test_clusters_give_the_bits_of_one_cta() -> None:
    logits, bias = inputs(896, 16, 5, "plain", seed=7)
    first = run(logits, bias, ONE).bits()
    for form in (PAIR, CLUSTER, LARGE):
        found = run(logits, bias, form).bits()
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True)), form


def test_no_cta_leaves_before_all_that_is_sent_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cluster's memory may be used only while both CTAs are there."""
    land = Cluster._land_one
    landed = 0

    def land_one(cluster: Cluster) -> None:
        nonlocal landed
        landed += 1
        gone = [cta.name for cta in cluster.ctas if cta.left]
        assert not gone, "has left while something was under way"
        land(cluster)

    monkeypatch.setattr(Cluster, "_land_one", land_one)
    logits, bias = inputs(*CLUSTER[:2], 8, "plain", seed=6)
    for seed in range(2):
        run(logits, bias, CLUSTER, seed)
    assert landed


#: What orders threads or launches: CTA barriers, the wait for what CTAs of a cluster
#: send, and that for earlier kernels. Not the cluster's barriers: no schedule here has
#: a peer done with a row before CTA 0 has begun, and leaving is tested above.
ORDERS = re.compile(
    r"bar\.sync\s+0;|griddepcontrol\.wait;|\{\.reg \.pred p; WAIT_\d+:.*?\}", re.S
)


@pytest.mark.parametrize(
    ("form", "count"), [(ONE, 8), (CLUSTER, 8)], ids=route_tests.name_of
)
def test_no_wait_can_be_left_out(form: Form, count: int) -> None:
    """Each taken out once: some schedule faults or gives other bits."""
    ptx = kernels.compiled("moe", route_tests.name_of(form))[1]
    places = list(ORDERS.finditer(ptx))
    assert len(places) == count
    logits, bias = inputs(*form[:2], 9, "plain", seed=8)
    right = run(logits, bias, form).bits()

    def wrong(place: re.Match[str], seed: int) -> bool:
        def without(text: str) -> str:
            return text[: place.start()] + text[place.end() :]

        try:
            found = run(logits, bias, form, seed, without).bits()
        except Fault:
            return True
        return not all(torch.equal(a, b) for a, b in zip(found, right, strict=True))

    for place in places:
        assert any(wrong(place, seed) for seed in range(8)), place.group()
