# SPDX-License-Identifier: Apache-2.0
"""Byte model of Kimi K3 against hand-made tables (MB per rank and layer)."""

import pytest

from experiments.byte_model import K3Bytes, distinct_experts, parse_floor
from experiments.published import K3_GOLDEN_LENGTHS

#: kind, batch, rows a request -> total MB at TP1, TP8, TP16.
LAYER_MB = {
    ("kda", 1, 1): (1561.4, 196.8, 105.3),
    ("kda", 1, 2): (1843.5, 232.1, 128.7),
    ("kda", 1, 4): (2393.0, 300.8, 174.2),
    ("kda", 1, 8): (3435.8, 431.1, 260.6),
    ("kda", 8, 1): (3482.4, 437.0, 263.5),
    ("kda", 2, 8): (5320.6, 666.7, 416.4),
    ("kda", 4, 8): (8387.3, 1050.1, 669.6),
    ("kda", 8, 8): (12488.2, 1562.7, 1006.5),
    ("kda", 64, 1): (12861.1, 1609.3, 1029.8),
    ("mla", 1, 1): (1134.4, 176.6, 114.0),
    ("mla", 1, 2): (1410.2, 211.0, 137.0),
    ("mla", 1, 4): (1947.0, 278.1, 181.7),
    ("mla", 1, 8): (2964.3, 405.3, 266.5),
    ("mla", 8, 1): (3030.3, 471.4, 332.5),
    ("mla", 2, 8): (4801.0, 643.1, 428.2),
    ("mla", 4, 8): (7771.4, 1031.0, 693.1),
    ("mla", 8, 8): (11679.7, 1552.6, 1053.4),
    ("mla", 64, 1): (12208.2, 2081.1, 1581.9),
}
FIXED_MB = {
    1: (887.8, 464.4, 379.8, 379.8),
    8: (112.6, 84.5, 47.5, 148.6),
    16: (57.3, 57.4, 23.7, 132.1),
}


@pytest.mark.parametrize("tp", sorted(FIXED_MB))
def test_fixed_weights(tp: int) -> None:
    model = K3Bytes(tp)
    stock = K3Bytes(tp, replicated_moe=True)
    got = (model.kda_mixer(), model.mla_mixer(), model.moe_fixed(), stock.moe_fixed())
    assert [value / 1e6 for value in got] == pytest.approx(FIXED_MB[tp], abs=0.051)


@pytest.mark.parametrize("cell", sorted(LAYER_MB))
def test_layer_totals(cell: tuple[str, int, int]) -> None:
    kind, batch, width = cell
    for tp, megabytes in zip((1, 8, 16), LAYER_MB[cell], strict=True):
        total = K3Bytes(tp).moe_layer(kind, batch * width, batch)
        assert total / 1e6 == pytest.approx(megabytes, abs=0.051), tp


def test_one_moe_layer_by_hand_with_width_3584() -> None:
    """Field case F26: routed experts read and write the latent width, not 7168."""
    one = (2 * 3072 * 3584 + 3584 * 3072) * 17 / 32
    assert K3Bytes(1).expert() == one == pytest.approx(17.547e6, rel=1e-4)
    sixteenth = (2 * 192 * 3584 + 3584 * 192) * 17 / 32
    assert K3Bytes(16).expert(padded=False) == sixteenth
    assert K3Bytes(16).expert() == sixteenth * 256 / 192
    fixed = 2 * (896 * 7168 + 2 * 3584 * 7168 + 3 * 6144 * 7168)
    assert K3Bytes(1).moe_fixed() == fixed


def test_distinct_experts() -> None:
    """Field case F11: 16 at one row, about 120 at eight independent rows."""
    assert distinct_experts(1) == pytest.approx(16)
    assert distinct_experts(8) == pytest.approx(120.3, abs=0.05)
    assert distinct_experts(64) == pytest.approx(613.2, abs=0.05)


def test_whole_step_and_drafter() -> None:
    for tp, plain, stock, verify in ((8, 18.2, 27.5, 39.6), (16, 10.2, 20.2, 24.4)):
        model = K3Bytes(tp)
        assert model.step(1, 1) / 1e9 == pytest.approx(plain, abs=0.051)
        assert model.step(8, 1) / 1e9 == pytest.approx(verify, abs=0.051)
        replicated = K3Bytes(tp, replicated_moe=True).step(1, 1)
        assert replicated / 1e9 == pytest.approx(stock, abs=0.051)
    assert K3Bytes(8).draft_layer() / 1e6 == pytest.approx(128.8, abs=0.051)
    assert K3Bytes(8).draft_weights(7) / 1e9 == pytest.approx(2.08, abs=0.0051)
    assert K3Bytes(8).draft(0, 4) == 0


@pytest.mark.parametrize(
    ("spec", "speeds"),
    [
        ("floor:k3-tp8-h200:nodraft", (236, 371, 439, 465, 469, 461, 439, 417)),
        (
            "floor:k3-tp16-gb300:nodraft",
            (785, 1200, 1391, 1454, 1450, 1411, 1334, 1258),
        ),
    ],
)
def test_tokens_per_second_of_the_golden_curve(
    spec: str, speeds: tuple[int, ...]
) -> None:
    profile = parse_floor(spec)
    lengths = (1.0, *K3_GOLDEN_LENGTHS[:7])
    for k, speed in enumerate(speeds):
        got = lengths[k] / profile.verify_ms(k + 1, 1) * 1e3
        assert got == pytest.approx(speed, abs=0.6)


def test_folded_state_moves_twice_however_many_rows() -> None:
    fold, snapshots = K3Bytes(8, fold_state=True), K3Bytes(8)
    state, record = 786_432, 1536 * (4 + 2 + 2)
    conv = 4608 * 2 * (6 + 7)
    assert fold.kda_state(8, 1) == 2 * state + 2 * 8 * record + conv
    assert snapshots.kda_state(8, 1) == 9 * state + conv


def test_drafter_cost_is_in_unless_left_out() -> None:
    with_draft, without = (
        parse_floor("floor:k3-tp16-h200"),
        parse_floor("floor:k3-tp16-h200:nodraft"),
    )
    assert with_draft.draft_ms(7, 1) > 0 == without.draft_ms(7, 1)
    assert "included" in with_draft.note and "free" in without.note
    assert "do not fit" in parse_floor("floor:k3-tp8-h200").note
    assert "do not fit" not in with_draft.note


@pytest.mark.parametrize(
    "spec",
    [
        "floor:k3-tp16",
        "floor:k2-tp16-h200",
        "floor:k3-tp3-h200",
        "floor:k3-tp8-h100",
        "floor:k3-tp8-h200:fast",
        "floor:k3-tp8-h200:context=x",
    ],
)
def test_bad_spec_shows_the_grammar(spec: str) -> None:
    with pytest.raises(ValueError, match="write floor:k3-tp"):
        parse_floor(spec)
