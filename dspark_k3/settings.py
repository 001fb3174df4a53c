# SPDX-License-Identifier: Apache-2.0
"""What users set through vLLM's ``--additional-config '{"dspark_k3": {...}}'``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

KEY = "dspark_k3"

Side = Literal["ours", "stock"]
#: What the K3 executor can run either way, by sublayer. kda_core is the part of kda
#: between its projections: decay projection, convolution, recurrence and gated norm;
#: mla_core the part of mla between its projections: norms, cache insert, absorption,
#: attention, values and gate; moe_route the part of moe that chooses experts,
#: moe_experts the one that runs them.
OPS = (
    "attn_res",
    "kda",
    "kda_core",
    "mla",
    "mla_core",
    "moe",
    "moe_route",
    "moe_experts",
    "dense",
    "lm_head",
)
#: Ops that are stock where another is, and why.
FOLLOWING = (
    ("kda_core", "is a part of", "kda"),
    ("mla_core", "is a part of", "mla"),
    ("moe_route", "is a part of", "moe"),
    ("moe_experts", "is a part of", "moe"),
    ("moe_experts", "needs", "moe_route"),
)
SIDES = ("ours", "stock")
#: Attributes of `Settings` that nobody sets.
_FOUND = ("named", "left")
Layout = Literal["snapshot", "fold"]
Context = Literal["replicated", "sharded"]
#: How a request's recurrent states are kept (`dspark_k3.target.slots`).
LAYOUTS = ("snapshot", "fold")
#: How ranks hold the projection of a K3 drafter's context.
CONTEXTS = ("replicated", "sharded")
_CHOICES = {
    "kda_layout": LAYOUTS,
    "draft_sampler": SIDES,
    "draft_attention": SIDES,
    "draft_context": CONTEXTS,
}


def _defaults() -> Mapping[str, Side]:
    return MappingProxyType(dict.fromkeys(OPS, "ours"))


@dataclass(frozen=True)
class Settings:
    """Our settings.

    Attributes:
        check_draft: refuse a Qwen3 DSpark checkpoint that does not fit the target or
            the speculative settings. Set it to false to load it unchecked, as vLLM
            does.
        calibration: apply the calibration.json that stands beside a Qwen3 or K3 DSpark
            checkpoint (`dspark-k3 calibrate` writes it) to the confidence that
            adaptive verification goes by.
        draft_sampler: what draws a Qwen3 or K3 DSpark drafter's tokens: "stock", vLLM's
            loop, or "ours", one kernel a draft (`dspark_k3.draft.sequential`), on a GPU
            and where it has what the step needs; the log says what it lacks. Drafters
            of other families have vLLM's loop whatever stands here.
        draft_attention: what attends in a K3 DSpark drafter's layers: "stock", vLLM's
            kernel, or "ours" (`dspark_k3.draft.attention`), on a GPU and for steps of
            up to 64 rows. Other drafters have vLLM's whatever stands here.
        draft_context: how tensor-parallel ranks hold what projects the target's rows
            for a K3 DSpark drafter: "replicated", as vLLM's do, or "sharded", each its
            outputs, which are gathered (`dspark_k3.draft.k3`).
        target: run a Kimi K3 target's decode steps through our executor. Unsupported
            deployments are refused at start (`dspark_k3.target.scope`).
        ops: with ``target``, which sublayers are ours and which vLLM's, to find out
            which of them a difference comes from; what is not named is ours, but for
            mla_core, moe_route and moe_experts where they have no kernel (`without`). A
            stock kda has a stock kda_core, a stock mla a stock mla_core, a stock moe
            has stock parts, and a stock moe_route a stock moe_experts.
        kda_layout: with ``target``, how KDA's states are kept while drafts are
            verified: "snapshot", vLLM's way, the state after each of 1 + drafts rows in
            a slot of its own; "fold", one slot a request, the state of what was
            accepted and the last step's rows. Without speculation both are one state.
        pdl: with ``target``, launch our kernels as programmatic dependents.
        named: ops that ``ops`` sets to "ours", and what those need: they are never left
            to vLLM.
        left: ops that were left to vLLM, for we have no kernel for the deployment, and
            why.
    """

    check_draft: bool = True
    calibration: bool = True
    draft_sampler: Side = "stock"
    draft_attention: Side = "stock"
    draft_context: Context = "replicated"
    target: bool = False
    ops: Mapping[str, Side] = field(default_factory=_defaults)
    kda_layout: Layout = "snapshot"
    pdl: bool = True
    named: frozenset[str] = frozenset()
    left: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def ours(self, op: str) -> bool:
        """Whether the sublayer is ours."""
        return self.ops[op] == "ours"

    def without(self, reasons: Mapping[str, str]) -> Settings:
        """These settings with some ops, and what follows them, left to vLLM.

        Args:
            reasons: why, by op.
        """
        left = {**self.left, **reasons}
        for op, why, other in FOLLOWING:
            if other in left and self.ours(op):
                left.setdefault(op, f"it {why} {other}")
        ops: dict[str, Side] = {**self.ops}
        for op in left:
            ops[op] = "stock"
        return replace(self, ops=MappingProxyType(ops), left=MappingProxyType(left))


def read(additional_config: Any) -> Settings:
    """Settings from a vLLM ``additional_config`` (a mapping; others carry none).

    Raises ValueError for an unknown key or a value of the wrong type.
    """
    if not isinstance(additional_config, Mapping):
        return Settings()
    given = additional_config.get(KEY, {})
    known = [each.name for each in fields(Settings) if each.name not in _FOUND]
    if not isinstance(given, Mapping):
        raise ValueError(
            f"additional_config[{KEY!r}]={given!r}: must be an object with keys among "
            f"{', '.join(known)}"
        )
    values = dict(given)
    for name, value in values.items():
        if name not in known:
            raise ValueError(
                f"additional_config[{KEY!r}] has unknown key {name!r}; known keys: "
                f"{', '.join(known)}"
            )
        if name == "ops":
            values[name] = _read_ops(value)
        elif name in _CHOICES:
            if value not in _CHOICES[name]:
                raise ValueError(
                    f"additional_config[{KEY!r}][{name!r}]={value!r}: must be "
                    f"{' or '.join(map(repr, _CHOICES[name]))}"
                )
        elif not isinstance(value, bool):
            raise ValueError(
                f"additional_config[{KEY!r}][{name!r}]={value!r}: must be true or false"
            )
    for name in ("ops", "kda_layout"):
        if name in values and not values.get("target"):
            raise ValueError(
                f"additional_config[{KEY!r}] sets {name} without target; add "
                f'"target": true, or take {name} out'
            )
    settings = Settings(**values, named=_named(given.get("ops", {})))
    if settings.kda_layout == "fold" and not settings.ours("kda_core"):
        raise ValueError(
            f"additional_config[{KEY!r}] sets kda_layout to 'fold' and kda_core, which "
            "needs snapshots then, to 'stock': set kda_core to 'ours', or take "
            "kda_layout out"
        )
    return settings


def _read_ops(given: Any) -> Mapping[str, Side]:
    where = f"additional_config[{KEY!r}]['ops']"
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{where}={given!r}: must be an object such as "
            '{"moe": "stock"} with keys among ' + ", ".join(OPS)
        )
    for name, side in given.items():
        if name not in OPS:
            raise ValueError(
                f"{where} has unknown key {name!r}; known keys: {', '.join(OPS)}"
            )
        if side not in SIDES:
            raise ValueError(f"{where}[{name!r}]={side!r}: must be 'ours' or 'stock'")
    for op, why, other in FOLLOWING:
        if given.get(other) != "stock":
            continue
        if given.get(op) == "ours":
            raise ValueError(
                f"{where} sets {op} to 'ours' and {other}, which it {why}, to "
                f"'stock': take {op} out, or set {other} to 'ours'"
            )
        given = {**given, op: "stock"}
    return MappingProxyType({**_defaults(), **given})


def _named(given: Mapping[str, Side]) -> frozenset[str]:
    """The ops that are ours by name, with those that they need or are parts of."""
    named = {op for op, side in given.items() if side == "ours"}
    for op, _, other in reversed(FOLLOWING):
        if op in named:
            named.add(other)
    return frozenset(named)


def every_op(given: Mapping[str, str]) -> dict[str, Side]:
    """``ops`` that name every op as it is with these: an engine that is measured runs
    the ops that its figures are said to be of, or does not start.

    Raises ValueError as `read` does.
    """
    return dict(_read_ops(given))
