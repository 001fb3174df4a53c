# SPDX-License-Identifier: Apache-2.0
"""Attention residuals against the equations written out in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verify_kernels.attn_res.reference import attn_res

HIDDEN = 24
EPS, OUTPUT_EPS = 1e-2, 3e-2  # large and different, so that a swap shows


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def inputs(rows: int, seed: int, used: int) -> dict[str, Any]:
    """fp64 inputs; blocks that may not be read hold NaN."""
    blocks = normal(rows, 8, HIDDEN, seed=seed + 2)
    blocks[:, used:] = torch.nan
    return {
        "prefix": 2 * normal(rows, HIDDEN, seed=seed),
        "delta": normal(rows, HIDDEN, seed=seed + 1),
        "blocks": blocks,
        "norm_weight": normal(HIDDEN, seed=seed + 3),
        "query_weight": normal(HIDDEN, seed=seed + 4),
        "output_norm_weight": normal(HIDDEN, seed=seed + 5),
    }


def by_hand(
    p: list[float], blocks: list[list[float]], wn: list[float], wq: list[float]
) -> list[float]:
    sources = [*blocks, p]
    scores = []
    for v in sources:
        dot = sum(a * b * c for a, b, c in zip(wn, wq, v, strict=True))
        scores.append(dot / math.sqrt(sum(c * c for c in v) / len(v) + EPS))
    shares = [math.exp(s - max(scores)) for s in scores]
    return [
        sum(share * v[j] for share, v in zip(shares, sources, strict=True))
        / sum(shares)
        for j in range(len(p))
    ]


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(0, 8),
    write=st.booleans(),
    update=st.sampled_from(["none", "add", "restart"]),
    norm=st.booleans(),
    seed=st.integers(0, 50),
)
def test_one_row_is_the_equations(
    num_blocks: int, write: bool, update: str, norm: bool, seed: int
) -> None:
    """Every block count, prefix update, write and norm; unread blocks are NaN."""
    given_inputs = inputs(1, seed, num_blocks)
    p, d = given_inputs["prefix"][0].tolist(), given_inputs["delta"][0].tolist()
    if update == "none":
        given_inputs["delta"] = None
    elif update == "add":
        p = [a + b for a, b in zip(p, d, strict=True)]
    else:
        p = d
    if not norm:
        given_inputs["output_norm_weight"] = None
    before = given_inputs["blocks"].clone()
    at = num_blocks if write and num_blocks < 8 else None
    hidden, prefix = attn_res(
        **given_inputs,
        num_blocks=num_blocks,
        write_block=at,
        restart=update == "restart",
        eps=EPS,
        output_norm_eps=OUTPUT_EPS,
        round_prefix=None,
    )
    assert prefix[0].tolist() == p
    weights = (given_inputs[n].tolist() for n in ("norm_weight", "query_weight"))
    h = by_hand(p, before[0, :num_blocks].tolist(), *weights)
    if norm:
        size = math.sqrt(sum(v * v for v in h) / HIDDEN + OUTPUT_EPS)
        scale = given_inputs["output_norm_weight"].tolist()
        h = [v / size * w for v, w in zip(h, scale, strict=True)]
    # Scores are sums of 24 products of up to 60 in size: 24 x 60 x 1.1e-16 = 2e-13
    # absolute, which exp turns into a relative error of shares, times values up to 10.
    assert hidden[0].tolist() == pytest.approx(h, rel=1e-11, abs=1e-11)
    blocks = given_inputs["blocks"]
    if at is not None:
        assert blocks[0, at].tolist() == p
        before[0, at] = blocks[0, at]
    assert torch.equal(blocks.nan_to_num(77), before.nan_to_num(77))


def test_no_blocks_gives_the_prefix_exactly() -> None:
    """N = 0 is no softmax of one: a score that would overflow is never formed."""
    given_inputs = inputs(3, 1, 0)
    given_inputs["prefix"] *= 1e200
    given_inputs["norm_weight"] *= 1e200
    given_inputs["output_norm_weight"] = None
    hidden, prefix = attn_res(**given_inputs, num_blocks=0, round_prefix=None)
    assert torch.equal(hidden, given_inputs["prefix"] + given_inputs["delta"])
    assert torch.equal(prefix, hidden)


def test_prefix_is_rounded_once_and_before_it_is_used() -> None:
    """bf16 in and out: the sum rounds as bf16(fp32 p + fp32 delta), ties included."""
    p = torch.cat((256 * normal(3, HIDDEN), normal(1, HIDDEN))).bfloat16()
    d = torch.cat((normal(3, HIDDEN, seed=1), 2.0**-9 * p[3:].double())).bfloat16()
    rest = inputs(4, 5, 2) | {"prefix": p, "delta": d}
    rest["blocks"] = rest["blocks"].bfloat16()
    hidden, prefix = attn_res(**rest, num_blocks=2, write_block=2)
    assert prefix.dtype == torch.bfloat16
    assert torch.equal(prefix, (p.float() + d.float()).bfloat16())
    assert torch.equal(rest["blocks"][:, 2], prefix)
    assert not torch.equal(prefix.double(), p.double() + d.double())
    same = rest | {"prefix": prefix, "delta": None}
    assert torch.equal(attn_res(**same, num_blocks=2)[0], hidden)


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
def test_rows_do_not_depend_on_batch_mates(compute: torch.dtype) -> None:
    """Field case F40: bit for bit, wherever the row stands and whatever M is."""
    for num_blocks in (0, 1, 5, 8):
        together = inputs(7, num_blocks, num_blocks)
        hidden, prefix = attn_res(
            **together, num_blocks=num_blocks, compute=compute, round_prefix=None
        )
        assert hidden.dtype == compute and torch.isfinite(hidden).all()
        for m in range(7):
            alone = {
                name: x if name.endswith("weight") else x[m : m + 1]
                for name, x in together.items()
            }
            one = attn_res(
                **alone, num_blocks=num_blocks, compute=compute, round_prefix=None
            )
            assert torch.equal(one[0][0], hidden[m])
            assert torch.equal(one[1][0], prefix[m])


def test_large_scores_stay_finite() -> None:
    """Scores near +-1e4 pick one source exactly; the softmax does not overflow."""
    given_inputs = inputs(1, 3, 2)
    given_inputs["query_weight"] = 1e4 * given_inputs["query_weight"]
    given_inputs["output_norm_weight"] = None
    hidden, prefix = attn_res(**given_inputs, num_blocks=2, round_prefix=None)
    sources = [*given_inputs["blocks"][0, :2], prefix[0]]
    assert any(torch.equal(hidden[0], v) for v in sources)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_blocks": 9}, "num_blocks is 9; it must be 0 to 8"),
        ({"write_block": 1}, "write_block is 1 with num_blocks 2"),
        ({"write_block": 8}, "write_block is 8"),
        ({"restart": True, "delta": None}, "restart is True without delta"),
        ({"query_weight": torch.ones(3)}, r"query_weight is \(3,\)"),
        ({"delta": torch.ones(2, 3)}, r"delta \(2, 3\)"),
        ({"extra": torch.ones(2, 3)}, r"extra is \(2, 3\)"),
        ({"extra": torch.ones(2, 32), "delta": None}, r"extra is \(2, 32\)"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], words: str) -> None:
    arguments = {**inputs(2, 0, 2), "num_blocks": 2} | change
    blocks = arguments["blocks"].clone()
    with pytest.raises(ValueError, match=words):
        attn_res(**arguments)
    assert torch.equal(arguments["blocks"].nan_to_num(7), blocks.nan_to_num(7))
