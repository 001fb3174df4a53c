# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from dspark_k3 import settings


@pytest.mark.parametrize("config", [{}, {"other": 1}, {"dspark_k3": {}}, None, "x"])
def test_defaults(config: Any) -> None:
    read = settings.read(config)
    assert read == settings.Settings(check_draft=True, target=False, pdl=True)
    assert all(read.ours(op) for op in settings.OPS)


def test_a_setting_is_read() -> None:
    given = {"dspark_k3": {"check_draft": False}}
    assert settings.read(given).check_draft is False


@pytest.mark.parametrize(
    ("named", "stock"),
    [
        (["dense"], ["dense"]),
        (["moe"], ["moe", "moe_route", "moe_experts"]),
        (["moe_route"], ["moe_route", "moe_experts"]),
        (["moe_experts"], ["moe_experts"]),
        (["kda"], ["kda", "kda_core"]),
        (["kda", "kda_core"], ["kda", "kda_core"]),
        (["kda_core"], ["kda_core"]),
        (["mla"], ["mla", "mla_core"]),
        (["mla_core"], ["mla_core"]),
    ],
)
def test_an_op_and_what_follows_it_are_stock_and_the_others_ours(
    named: list[str], stock: list[str]
) -> None:
    """Others may be named as ours."""
    for others in ({}, {op: "ours" for op in settings.OPS if op not in stock}):
        ops = dict.fromkeys(named, "stock") | others
        read = settings.read({"dspark_k3": {"target": True, "ops": ops}})
        assert [op for op in settings.OPS if not read.ours(op)] == stock


@pytest.mark.parametrize(
    ("ops", "named"),
    [
        ({}, set()),
        ({"moe_experts": "stock"}, set()),
        ({"dense": "ours", "mla": "stock"}, {"dense"}),
        ({"moe_route": "ours"}, {"moe_route", "moe"}),
        ({"moe_experts": "ours"}, {"moe_experts", "moe_route", "moe"}),
        ({"kda_core": "ours"}, {"kda_core", "kda"}),
        ({"mla_core": "ours"}, {"mla_core", "mla"}),
    ],
)
def test_an_op_that_is_named_names_what_it_needs(
    ops: dict[str, str], named: set[str]
) -> None:
    read = settings.read({"dspark_k3": {"target": True, "ops": ops}})
    assert read.named == named
    assert not read.left


@pytest.mark.parametrize(
    ("reasons", "left"),
    [
        ({}, {}),
        ({"moe_experts": "a"}, {"moe_experts": "a"}),
        ({"mla_core": "a"}, {"mla_core": "a"}),
        ({"moe_route": "b"}, {"moe_route": "b", "moe_experts": "it needs moe_route"}),
        (
            {"moe_route": "b", "moe_experts": "a"},
            {"moe_route": "b", "moe_experts": "a"},
        ),
    ],
)
def test_what_is_left_to_vllm_is_stock_with_its_reason(
    reasons: dict[str, str], left: dict[str, str]
) -> None:
    asked = settings.read({"dspark_k3": {"target": True, "ops": {"dense": "stock"}}})
    found = asked.without(reasons)
    assert found.left == left
    stock = {op for op in settings.OPS if not found.ours(op)}
    assert stock == {"dense", *left}
    # Once more, when the layers are loaded.
    assert found.without({"moe_experts": "c"}).left == left | {"moe_experts": "c"}
    assert not asked.left and asked.ours("moe_route")


def test_what_the_user_made_stock_is_not_left() -> None:
    ops = {"moe_experts": "stock"}
    asked = settings.read({"dspark_k3": {"target": True, "ops": ops}})
    assert list(asked.without({"moe_route": "b"}).left) == ["moe_route"]


@pytest.mark.parametrize("ops", [{}, {"moe_route": "stock"}, {"kda": "stock"}])
def test_every_op_can_be_named(ops: dict[str, str]) -> None:
    given = {"target": True, "ops": settings.every_op(ops)}
    read = settings.read({"dspark_k3": given})
    assert read.ops == settings.read({"dspark_k3": given | {"ops": ops}}).ops
    assert read.named == {op for op in settings.OPS if read.ours(op)}
    with pytest.raises(ValueError, match="unknown key 'mow'"):
        settings.every_op({"mow": "ours"})


def test_a_layout_is_read() -> None:
    for layout in settings.LAYOUTS:
        given = {"dspark_k3": {"target": True, "kda_layout": layout}}
        assert settings.read(given).kda_layout == layout
    assert settings.Settings().kda_layout == "snapshot"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chek_draft": True}, "unknown key 'chek_draft'; known keys: check_draft"),
        (
            {"named": ["moe"]},
            "unknown key 'named'; known keys: check_draft, calibration, draft_sampler, "
            "draft_attention, draft_context, target, ops",
        ),
        ({"left": {}}, "unknown key 'left'; known keys: check_draft"),
        ({"check_draft": "no"}, r"\['check_draft'\]='no': must be true or false"),
        ({"target": 1}, r"\['target'\]=1: must be true or false"),
        ({"target": True, "ops": ["moe"]}, r"\['ops'\]=\['moe'\]: must be an object"),
        ({"target": True, "ops": {"mow": "stock"}}, "unknown key 'mow'; known keys: a"),
        ({"target": True, "ops": {"moe": "theirs"}}, "must be 'ours' or 'stock'"),
        (
            {"target": True, "ops": {"kda": "stock", "kda_core": "ours"}},
            "sets kda_core to 'ours' and kda, which it is a part of, to 'stock'",
        ),
        (
            {"target": True, "ops": {"mla": "stock", "mla_core": "ours"}},
            "sets mla_core to 'ours' and mla, which it is a part of, to 'stock'",
        ),
        (
            {"target": True, "ops": {"moe": "stock", "moe_route": "ours"}},
            "sets moe_route to 'ours' and moe, which it is a part of, to 'stock'",
        ),
        (
            {"target": True, "ops": {"moe_route": "stock", "moe_experts": "ours"}},
            "sets moe_experts to 'ours' and moe_route, which it needs, to 'stock'",
        ),
        ({"ops": {"moe": "stock"}}, "sets ops without target"),
        ({"kda_layout": "fold"}, "sets kda_layout without target; add"),
        (
            {"target": True, "kda_layout": "eager"},
            r"\['kda_layout'\]='eager': must be 'snapshot' or 'fold'",
        ),
        ({"target": True, "kda_layout": True}, "=True: must be 'snapshot' or 'fold'"),
        *(
            (
                {"target": True, "kda_layout": "fold", "ops": {op: "stock"}},
                "sets kda_layout to 'fold' and kda_core, which needs snapshots then",
            )
            for op in ("kda", "kda_core")
        ),
        ([1], r"\[1\]: must be an object"),
    ],
)
def test_bad_settings_are_named(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.read({"dspark_k3": given})
