# SPDX-License-Identifier: Apache-2.0
"""From times to the table that the package ships."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from experiments import results
from experiments.bench import table, tuning_sheet
from experiments.bench.table import Served
from verify_kernels.skinny_gemm import choice
from verify_kernels.skinny_gemm.choice import Choice, Entry, spell
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling
from verify_kernels.skinny_gemm.tiling import Tiling
from verify_kernels.skinny_gemm.wide_tiling import WideTiling

BF16 = ("bf16",)
RING = Tiling(7168, cluster=4, span=2, stages=3)
DIRECT = DirectTiling(7168, warps=28, depth=1)
WIDE = WideTiling(7168, token_tiles=1, cluster=4)
PAIR = Tiling(7168, cluster=2, span=2, stages=3)


def point(times: Mapping[Choice, float], n: int = 768, **changes: Any) -> Served:
    values = {"k": 7168, "n": n, "outputs": BF16, "rows": 8, "pdl": True, **changes}
    return Served(times=times, **values)


def shipped(text: str) -> dict[Served, Choice]:
    return {
        Served(e.k, e.n, e.outputs, e.rows, e.pdl, {}): e.choice
        for e in choice.entries_of(text)
    }


# Few kernels


def test_the_kernel_that_is_enough_for_more_is_shipped_alone() -> None:
    """PAIR is 1 % slower than the fastest of each, which are two."""
    points = [
        point({Choice(RING): 10.0, Choice(PAIR): 10.1, Choice(WIDE): 11.0}),
        point({Choice(DIRECT, 6): 20.0, Choice(PAIR): 20.2, Choice(RING): 25.0}, 1536),
    ]
    assert table.few_kernels(points) == {(PAIR, BF16)}
    assert table.few_kernels(points, 0.0) == {(RING, BF16), (DIRECT, BF16)}


def test_among_equals_the_one_that_loses_least_is_shipped() -> None:
    points = [
        point({Choice(RING): 10.0, Choice(PAIR): 10.1}),
        point({Choice(RING): 20.1, Choice(PAIR): 20.0}, 1536),
    ]
    assert table.few_kernels(points) == {(RING, BF16)}


def test_a_kernel_that_must_be_shipped_serves_whom_it_can() -> None:
    """RING is enough for three, more than any other, but none has only RING."""
    others = [Choice(PAIR), Choice(DIRECT, 6), Choice(WIDE)]
    points = [point({other: 10.0}, n) for n, other in enumerate(others, 1)]
    points += [
        point({Choice(RING): 10.0, other: 10.1}, n) for n, other in enumerate(others, 4)
    ]
    assert table.few_kernels(points) == {(other.cut, BF16) for other in others}
    assert len(table.few_kernels(points, 0.0)) == 4


def test_other_outputs_are_another_kernel() -> None:
    points = [
        point({Choice(RING): 10.0}),
        point({Choice(RING): 10.0}, outputs=("fp32",)),
    ]
    assert table.few_kernels(points) == {(RING, BF16), (RING, ("fp32",))}


def test_every_point_is_served_within_the_tolerance() -> None:
    """Times at random; the number of kernels is between one and one a point."""
    dice = random.Random(1)
    cuts = [DirectTiling(7168, warps=w, depth=1) for w in (7, 8, 14, 28)]
    cuts += [dataclasses.replace(c, halves=1) for c in cuts]
    points = [
        point(
            {
                Choice(cut, run): dice.uniform(10.0, 11.0)
                for cut, run in itertools.product(cuts, (3, 5, 8))
            },
            n,
            pdl=pdl,
        )
        for n in range(1, 31)
        for pdl in (False, True)
    ]
    sizes = []
    for tolerance in (0.0, 0.01, 0.02, 0.05):
        kernels = table.few_kernels(points, tolerance)
        for one in points:
            assert one.loss(one.fastest(kernels)) <= tolerance + 1e-12
        entries = shipped(table.document(points, {}, tolerance))
        assert len(entries) == len(points)
        assert {c.cut for c in entries.values()} <= {cut for cut, _ in kernels}
        sizes.append(len(kernels))
    assert sizes == sorted(sizes, reverse=True) and 1 < sizes[-1] < sizes[0] <= 8


# The text


def test_a_document_is_read_as_it_was_meant() -> None:
    points = [
        point({Choice(RING): 10.0}, 768),
        point({Choice(RING): 10.0, Choice(DIRECT, 6): 9.0}, 768, rows=2),
        point({Choice(WIDE, 100): 8.0}, 6288, pdl=False),
        point({Choice(DIRECT, 16): 8.0}, 1048, outputs=("fp32", "bf16", "bf16")),
        point({Choice(PAIR): 8.0}, 56, outputs=("fp32",), rows=1),
    ]
    text = table.document(points, {"gpu": "NVIDIA H200"})
    assert shipped(text) == {
        one: min(one.times, key=one.times.__getitem__) for one in points
    }
    content = json.loads(text)
    assert content["measured"] == {"gpu": "NVIDIA H200"}
    assert len(content["cuts"]) == 4
    assert max(map(len, text.splitlines())) < 300


def test_what_cannot_serve_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing was timed"):
        table.document([], {})
    with pytest.raises(ValueError, match="n=768, k=7168, M=8: no kernel"):
        table.document([point({})], {})
    text = table.document([point({Choice(RING): 1.0}, rows=9)], {})
    with pytest.raises(ValueError, match=r"rows=9: .* serves 1 to 8 in one launch"):
        choice.entries_of(text)
    with pytest.raises(ValueError, match="none of these designs"):
        choice.entries_of(text.replace("span", "spam"))
    with pytest.raises(ValueError, match=r"run=17: a CTA of .* has 1 to 16 rows"):
        Choice(DIRECT, 17)
    with pytest.raises(ValueError, match="run=0: a CTA"):
        Choice(DIRECT)
    with pytest.raises(ValueError, match="run=-1"):
        Choice(RING, -1)


# Lines


def line(
    used: Choice, us: float, stage: str = "search", **changes: Any
) -> results.Line:
    """A line of a search, M = 8 of 768 x 7168."""
    shape = {"n": 768, "k": 7168, "out": "bf16", "m": 8, "stage": stage}
    shape |= {"cut": spell(used.cut), "run": used.run}
    given = {name: changes.pop(name) for name in list(changes) if name in shape}
    recorder = results.Recorder("tune", commit="0" * 40)
    recorder.add_op(
        tuning_sheet.OP,
        us,
        label="measured",
        variant=changes.get("variant", "pdl"),
        shape=shape | given,
        gpu=changes.get("gpu", "NVIDIA H200"),
        gates={},
    )
    return recorder.lines[0]


def test_of_one_choice_the_last_line_counts() -> None:
    lines = [
        line(Choice(RING), 10.0),
        line(Choice(PAIR), 10.1),
        line(Choice(DIRECT, 6), 1.0, stage="partial"),
        line(Choice(RING), 11.0, variant="plain"),
        line(Choice(RING), 10.3, stage="final"),
        line(Choice(RING), 20.0, m=4),
    ]
    (pdl, plain, four), said = table.points_of(lines)
    assert not said
    assert (pdl, plain) == (point({}), point({}, pdl=False))
    assert pdl.times == {Choice(RING): 10.3, Choice(PAIR): 10.1}
    assert plain.times == {Choice(RING): 11.0}
    assert (four, four.times) == (point({}, rows=4), {Choice(RING): 20.0})


def test_lines_of_designs_that_changed_are_left_out_and_said() -> None:
    old = line(Choice(RING), 5.0)
    old["shape"]["cut"]["rings"] = 2
    ((found,), said) = table.points_of([old, old, line(Choice(PAIR), 9.0)])
    assert found.times == {Choice(PAIR): 9.0}
    assert len(said) == 1 and said[0].startswith("2 lines: cut={'design': 'ring'")


def test_lines_of_several_devices_do_not_compare() -> None:
    lines = [line(Choice(RING), 5.0), line(Choice(RING), 4.0, gpu="NVIDIA B200")]
    with pytest.raises(ValueError, match="gpu=NVIDIA B200, NVIDIA H200"):
        table.points_of(lines)


def test_what_was_not_measured_keeps_its_entry() -> None:
    earlier = [
        Entry(7168, 768, BF16, True, 8, Choice(RING)),
        Entry(7168, 768, BF16, False, 8, Choice(RING)),
        Entry(7168, 768, BF16, True, 2, Choice(PAIR)),
        Entry(7168, 56, ("fp32",), True, 8, Choice(DIRECT, 3)),
    ]
    lines = [line(Choice(WIDE, 100), 5.0), line(Choice(PAIR), 5.2)]
    text, said = table.rebuilt(lines, earlier)
    assert shipped(text) == {
        point({}): Choice(WIDE, 100),
        point({}, pdl=False): Choice(RING),
        point({}, rows=2): Choice(PAIR),
        point({}, 56, outputs=("fp32",)): Choice(DIRECT, 3),
    }
    measured = json.loads(text)["measured"]
    assert measured == {
        "gpu": "NVIDIA H200",
        "commit": "0" * 40,
        "date": lines[-1]["date"],
        "kept": 3,
    }
    assert said[0].startswith("1 points measured, 4 entries, 4 kernels")
    # PAIR is shipped anyway: with more tolerance it serves here too, and loses 4 %.
    text, said = table.rebuilt(lines, earlier, 0.05)
    assert shipped(text)[point({})] == Choice(PAIR)
    assert said[0].endswith("loses 4.00% to the fastest that was tried, at most 4.0%")


def test_what_is_refused_is_replaced_by_the_next() -> None:
    """Each kernel is asked for once; a point that has no other keeps its entry."""
    earlier = [Entry(7168, 56, BF16, True, 8, Choice(RING))]
    lines = [
        line(Choice(WIDE, 100), 5.0),
        line(Choice(PAIR), 5.1),
        line(Choice(DIRECT, 6), 5.2),
        line(Choice(WIDE, 10), 5.0, n=56),
        line(Choice(DIRECT, 9), 7.0, n=1536),
    ]
    asked: list[set[table.Kernel]] = []

    def refuse(kernels: Collection[table.Kernel]) -> dict[table.Kernel, str]:
        asked.append(set(kernels))
        return {k: "it spills" for k in kernels if k[0] in (WIDE, PAIR)}

    text, said = table.rebuilt(lines, earlier, 0.0, refuse)
    assert asked == [{(WIDE, BF16), (DIRECT, BF16)}, {(PAIR, BF16)}, set()]
    assert shipped(text) == {
        point({}): Choice(DIRECT, 6),
        point({}, 56): Choice(RING),
        point({}, 1536): Choice(DIRECT, 9),
    }
    assert said[:2] == [
        f"{WIDE.name} bf16: it spills",
        f"{PAIR.name} bf16: it spills",
    ]
    with pytest.raises(ValueError, match="nothing to ship"):
        table.rebuilt(lines[:1], [], 0.0, refuse)


def test_no_table_from_nothing() -> None:
    with pytest.raises(ValueError, match="none has a time that counts"):
        table.rebuilt([line(Choice(RING), 5.0, stage="partial")], [])
    with pytest.raises(ValueError, match=r"tolerance=0\.06: use 0 to 0\.05"):
        table.rebuilt([line(Choice(RING), 5.0)], [], 0.06)


def test_an_m_that_is_cut_into_launches_is_said() -> None:
    lines = [line(Choice(RING), 5.0)]
    lines.append(line(Choice(Tiling(7168, 8, cluster=8, stages=1)), 5.0, n=56, m=64))
    _, said = table.rebuilt(lines, [])
    assert said[1:] == [
        "n=768, k=7168, bf16, pdl: more than 8 rows are cut into launches"
    ]
