# SPDX-License-Identifier: Apache-2.0
"""The search in a layer's chain: what it tries, and that it serves what it says."""

from __future__ import annotations

import pytest
import torch

from experiments import layer_chain, layer_tune
from verify_kernels.skinny_gemm import choice
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling

BF16 = ("bf16",)
O_PROJ = (768, 7168, BF16)


def test_every_projection_is_a_slot_once() -> None:
    parts = set(layer_chain._PARTS)
    assert set(layer_tune.SLOTS["apart"]) == parts
    one = set(layer_tune.SLOTS["front"]) - {"front"} | set(layer_chain.FRONT)
    assert one == parts
    assert layer_tune.SLOTS.keys() == layer_chain.ORDERS.keys()


def test_candidates_serve_the_launch() -> None:
    """The one in use among them; grids that a direct kernel can hold; nothing twice."""
    found = layer_tune.candidates(O_PROJ, 1)
    assert len(set(found)) == len(found) > 3
    in_use = choice.choices(*O_PROJ, True)
    assert in_use[min(in_use)] in found
    for each in found:
        assert each.cut.k == 768 and choice.most_rows(each.cut) >= 1
        if isinstance(each.cut, DirectTiling):
            assert 0 < each.run <= each.cut.rows
    wide = layer_tune.candidates(O_PROJ, 64)
    assert wide and all(choice.most_rows(each.cut) >= 64 for each in wide)
    assert not layer_tune.candidates((768, 10**6, BF16), 1)


def test_other_choices_are_served_inside_only() -> None:
    before = choice.choices(*O_PROJ, True)
    other = layer_tune.candidates(O_PROJ, 1)[-1]
    with layer_tune.served({O_PROJ: other}):
        for pdl in (True, False):
            found = choice.choices(*O_PROJ, pdl)
            assert found == {choice.most_rows(other.cut): other}
        with layer_tune.served({}):
            assert choice.choices(*O_PROJ, True)[choice.most_rows(other.cut)] == other
        assert choice.choices(1536, 7168, BF16, True)
    assert choice.choices(*O_PROJ, True) == before


def test_rows_that_are_no_step_and_no_gpu_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in ((["--rows", "9"], "rows=9: use 1 to 8"), ([], "no CUDA")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit):
            layer_tune.main(arguments)
        assert words in capsys.readouterr().err


@pytest.mark.gpu
def test_a_search_ends_with_both_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over one launch of the layer."""
    monkeypatch.setitem(layer_tune.SLOTS, "front", ("o_proj",))
    assert layer_tune.main(["--rows", "1", "--rounds", "3"]) == 0
    said = capsys.readouterr().out
    assert "o_proj 7168 x 768: " in said and " us before, " in said
    assert "None" not in said
