# SPDX-License-Identifier: Apache-2.0
"""What loaded layers have no kernel for is vLLM's everywhere, or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.models.kimi_k3")

import torch

from dspark_k3 import settings
from dspark_k3.target import agreement, executor, left, model, scope
from tests.dspark_k3 import gloo_ranks, mla_layers
from tests.dspark_k3.test_target_experts import SHAPE, layer
from tests.dspark_k3.test_target_route import router
from tests.verify_kernels.test_moe_experts import experts_of

WEIGHTS = experts_of(SHAPE, 3)
#: Changes of a layer, and what is found then.
SCALE = {"w2_weight_scale": torch.full((16, 4, 256), 129, dtype=torch.uint8)}
SCALE_FOUND = (
    "a scale byte is 129; the kernels take scales up to 2^1, byte 128, and no NaN"
)
MARLIN: dict[str, Any] = {
    "quant_method": SimpleNamespace(
        is_monolithic=False,
        topk_indices_dtype=None,
        experts_cls=type("MarlinExperts", (), {}),
    )
}
MARLIN_FOUND = "its weights are those of MarlinExperts"


def asking(**ops: str) -> settings.Settings:
    return settings.read({"dspark_k3": {"target": True, "ops": ops}})


KDA = SimpleNamespace(in_proj_qkvgfab=None)


def layers(*changes: dict[str, Any], **of_router: Any) -> list[SimpleNamespace]:
    """A dense layer, and one with experts a change of them; all with KDA."""
    found = [SimpleNamespace(self_attn=KDA, is_moe_layer=False, layer_idx=0)]
    for index, change in enumerate(changes, 1):
        runner = SimpleNamespace(
            router=router(**of_router), routed_experts=layer(WEIGHTS, **change)
        )
        mlp = SimpleNamespace(experts=runner)
        found.append(
            SimpleNamespace(self_attn=KDA, is_moe_layer=True, layer_idx=index, mlp=mlp)
        )
    return found


def with_mla(at: int, **changes: Any) -> list[SimpleNamespace]:
    """Three layers, one of them with MLA that has these changes."""
    found = layers({}, {})
    found[at].self_attn = mla_layers.layer()
    vars(found[at].self_attn).update(changes)
    return found


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the ranks before and behind this one have found."""

    def set_ranks(before: list[Any], behind: list[Any]) -> None:
        monkeypatch.setattr(
            agreement, "of_all_ranks", lambda own: [*before, own, *behind]
        )

    set_ranks([], [])
    return set_ranks


@pytest.mark.usefixtures("ranks")
def test_layers_with_kernels_keep_the_settings() -> None:
    for asked in (asking(), asking(moe_experts="ours")):
        assert left.settle(layers({}, {}), asked) == asked


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("changes", "found"),
    [
        # One layer of three, all of them, and two that differ in two ways.
        (({}, {}, SCALE), f"{SCALE_FOUND} (layer 3)"),
        ((MARLIN, MARLIN, MARLIN), f"{MARLIN_FOUND} (layer 1)"),
        (
            (SCALE, MARLIN | {"local_num_experts": 8}),
            f"{SCALE_FOUND} (layer 1), {MARLIN_FOUND} (layer 2), "
            "it has 8 of 16 experts (layer 2)",
        ),
    ],
)
def test_one_layer_without_a_kernel_leaves_all_to_vllm(
    changes: tuple[dict[str, Any], ...], found: str
) -> None:
    loaded = layers(*changes)
    settled = left.settle(loaded, asking())
    assert settled.left == {"moe_experts": found}
    assert [op for op in settings.OPS if not settled.ours(op)] == ["moe_experts"]
    with pytest.raises(scope.UnsupportedTarget) as error:
        left.settle(loaded, asking(moe_experts="ours"))
    line = f'moe_experts: found {found}; set "ops": {{"moe_experts": "stock"}}'
    assert str(error.value).endswith(line)
    # Nobody asks a layer about what is vLLM's already.
    for op in ("moe_experts", "moe"):
        asked = asking(**{op: "stock"})
        assert left.settle(loaded, asked) == asked


@pytest.mark.usefixtures("ranks")
def test_a_router_without_a_kernel_takes_the_experts_along() -> None:
    loaded = layers({}, SCALE, scoring_func="softmax")
    settled = left.settle(loaded, asking())
    found = "it scores by softmax (layer 1)"
    assert settled.left["moe_route"] == found
    assert settled.left["moe_experts"] == f"{SCALE_FOUND} (layer 2)"
    alone = left.settle(layers({}, scoring_func="softmax"), asking())
    assert alone.left == {"moe_route": found, "moe_experts": "it needs moe_route"}
    with pytest.raises(scope.UnsupportedTarget) as error:
        left.settle(loaded, asking(moe_experts="ours"))
    assert f"\n  moe_route: found {found}; set" in str(error.value)
    assert f"\n  moe_experts: found {SCALE_FOUND} (layer 2); set" in str(error.value)
    with pytest.raises(scope.UnsupportedTarget, match="moe_route: found it scores"):
        left.settle(loaded, asking(moe_route="ours"))


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("at", [0, 2])
def test_a_layer_of_mla_without_a_kernel_leaves_its_core_to_vllm(at: int) -> None:
    """Beside a dense MLP and beside experts; the projections stay ours."""
    assert left.settle(with_mla(at), asking(mla_core="ours")).left == {}
    loaded = with_mla(at, v_head_dim=64, kv_cache_dtype="fp8")
    settled = left.settle(loaded, asking())
    found = (
        f"v_head_dim 64, not 128 (layer {at}), "
        f"kv_cache_dtype fp8, not auto or bfloat16 (layer {at})"
    )
    assert settled.left == {"mla_core": found}
    assert [op for op in settings.OPS if not settled.ours(op)] == ["mla_core"]
    with pytest.raises(scope.UnsupportedTarget) as error:
        left.settle(loaded, asking(mla_core="ours"))
    line = f'mla_core: found {found}; set "ops": {{"mla_core": "stock"}}'
    assert str(error.value).endswith(line)
    for op in ("mla_core", "mla"):
        asked = asking(**{op: "stock"})
        assert left.settle(loaded, asked) == asked


def test_a_rank_leaves_what_another_rank_has_no_kernel_for(
    ranks: Callable[..., None],
) -> None:
    """A scale in one rank's share: every rank says the same, or refuses the same."""
    nothing: left.Found = {op: {} for op in left.LOOKS}
    (theirs, own) = (left._look(layers({}, change), asking()) for change in (SCALE, {}))
    assert own == nothing
    said = set()
    for before, change, behind in (
        ([], {}, [theirs]),
        ([nothing], SCALE, []),
    ):
        ranks(before, behind)
        settled = left.settle(layers({}, change), asking())
        said.add(settled.left["moe_experts"])
        with pytest.raises(scope.UnsupportedTarget, match="layer 2, rank 1"):
            left.settle(layers({}, change), asking(moe_experts="ours"))
    assert said == {f"{SCALE_FOUND} (layer 2, rank 1)"}


def test_ranks_tell_each_other_over_gloo(tmp_path: Path) -> None:
    """In processes of their own, by vLLM's group."""
    told = gloo_ranks.run("tests.dspark_k3.telling_ranks", tmp_path / "store")
    assert told == [[{}, {"moe_experts": {"a scale byte is 129": 3}}]] * 2


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        agreement, "get_tp_group", lambda: SimpleNamespace(world_size=1)
    )
    assert agreement.of_all_ranks("x") == ["x"]


def made(asked: settings.Settings, *changes: dict[str, Any]) -> model.K3ForCausalLM:
    """The model with layers loaded and nothing else."""
    found = object.__new__(model.K3ForCausalLM)
    torch.nn.Module.__init__(found)
    found._settings = asked
    vars(found)["model"] = SimpleNamespace(layers=layers(*changes))
    return found


class Counted:
    """Stands for the executor; notes the settings that it is built with."""

    def __init__(self, _: Any, given: settings.Settings) -> None:
        self.settings = given
        self.counters = SimpleNamespace(read=lambda: {"ours": 1})


@pytest.mark.usefixtures("ranks")
def test_the_log_and_the_model_say_what_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executor, "Executor", Counted)
    monkeypatch.setattr(model.logger, "propagate", True)
    # vLLM's logger has a handler of its own.
    model.logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger="vllm.dspark_k3")
    built: Any = made(asking(dense="stock"), {}, SCALE)
    built.specialized_decode = None
    assert built.dspark_k3_ops() == {}
    try:
        built.build_specialized_decode()
    finally:
        model.logger.removeHandler(caplog.handler)
    why = f"{SCALE_FOUND} (layer 2)"
    said = {
        record.levelname: record.getMessage()
        for record in caplog.records
        if record.name == "vllm.dspark_k3"
    }
    assert said["WARNING"] == (
        "dspark-k3: left to vLLM, for we have no kernel for them here: moe_experts "
        f'({why}); "ops": {{"moe_experts": "ours"}} makes that an error'
    )
    sides = (
        "ours: attn_res, kda, kda_core, mla, mla_core, moe, moe_route, lm_head; "
        f"stock: moe_experts ({why}), dense; "
    )
    assert sides in said["INFO"]
    assert not built.specialized_decode.settings.ours("moe_experts")
    assert built.dspark_k3_counters() == {"ours": 1}
    stock = {"moe_experts": f"stock: {why}", "dense": "stock"}
    assert built.dspark_k3_ops() == dict.fromkeys(settings.OPS, "ours") | stock


@pytest.mark.usefixtures("ranks")
def test_nothing_is_warned_of_where_every_op_is_as_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executor, "Executor", Counted)
    model.logger.addHandler(caplog.handler)
    try:
        made(asking(), {}).build_specialized_decode()
        made(asking(moe_experts="stock"), SCALE).build_specialized_decode()
        with pytest.raises(scope.UnsupportedTarget, match="moe_experts: found a scale"):
            made(asking(moe_experts="ours"), SCALE).build_specialized_decode()
    finally:
        model.logger.removeHandler(caplog.handler)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
