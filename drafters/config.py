# SPDX-License-Identifier: Apache-2.0
"""What a DSpark checkpoint says about itself, read strictly.

Two published formats are understood: DeepSpec's Qwen3 drafters
(``architectures: ["Qwen3DSparkModel"]``) and the dense MLA drafter of Kimi K3
(``["K3DSparkModel"]``). A wrong guess about the layout of the block does not crash:
acceptance silently falls to about one per cent. So whatever is missing, ambiguous or
unknown is refused here, with the name of the key.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Layout = Literal["qwen3", "k3"]
MarkovHeadType = Literal["none", "vanilla", "gated", "rnn"]

ARCHITECTURES: Mapping[str, Layout] = {
    "Qwen3DSparkModel": "qwen3",
    "K3DSparkModel": "k3",
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is; the message names the key."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the drafter.

    ``interleaved`` pairs channels (0,1),(2,3)... (K3) instead of halves (Qwen3).
    ``yarn`` holds the YaRN parameters (``factor``,
    ``original_max_position_embeddings``, ``beta_fast``, ``beta_slow``, ``mscale``,
    ``mscale_all_dim``), or None.
    """

    theta: float
    interleaved: bool = False
    yarn: Mapping[str, float] | None = None


@dataclass(frozen=True)
class DSparkConfig:
    """Everything the drafter needs, in tokens and channels.

    ``block_size`` is the number of drafts the block was trained for; ``anchor_first``
    says that slot 0 (the anchor) already predicts the first draft (DeepSpec's layout:
    k inputs, k predictions) as opposed to the fill-in layout (1 + k inputs).
    ``target_layer_ids`` are 0-based decoder layers whose raw outputs are fused.
    """

    layout: Layout
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    markov_rank: int
    markov_head_type: MarkovHeadType
    confidence_head: bool
    confidence_head_with_markov: bool
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    anchor_first: bool = True
    num_target_layers: int | None = None
    # Qwen3 attention
    num_kv_heads: int = 0
    head_dim: int = 0
    # K3 attention (multi-head latent attention)
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    def block_inputs(self, draft_length: int) -> int:
        """Rows the backbone runs for ``draft_length`` drafts."""
        return draft_length if self.anchor_first else draft_length + 1

    def check_draft_length(self, draft_length: int) -> None:
        """Raise CheckpointError unless 1 <= draft_length <= block_size.

        More than the trained block collapses every position, not only the extra ones
        (acceptance length 1.31 against 2.74 in a public report), so it is refused.
        """
        if not 1 <= draft_length <= self.block_size:
            raise CheckpointError(
                f"num_speculative_tokens={draft_length}: this drafter was trained for "
                f"block_size={self.block_size}; use 1 to {self.block_size}"
            )

    def check_against(
        self,
        *,
        target_vocab_size: int,
        target_hidden_size: int,
        num_target_layers: int,
        draft_length: int | None = None,
    ) -> None:
        """Raise CheckpointError unless the drafter fits this target."""
        # A larger input vocabulary is deliberate when the outputs are named apart (an
        # extra mask row, say); anything else is another tokenizer.
        larger = self.vocab_size > target_vocab_size >= self.draft_vocab_size
        if self.vocab_size != target_vocab_size and not larger:
            raise CheckpointError(
                f"vocab_size={self.vocab_size} in the drafter's config.json, but the "
                f"target has {target_vocab_size}: this drafter belongs to another "
                "target or another tokenizer (a larger input vocabulary needs "
                "draft_vocab_size)"
            )
        if self.target_hidden_size != target_hidden_size:
            key = "target_hidden_size" if self.layout == "k3" else "hidden_size"
            raise CheckpointError(
                f"{key}={self.target_hidden_size} in the drafter's config.json, but "
                f"the target's hidden_size is {target_hidden_size}: the fused target "
                "features would not fit"
            )
        if (
            self.num_target_layers is not None
            and self.num_target_layers != num_target_layers
        ):
            raise CheckpointError(
                f"num_target_layers={self.num_target_layers} in the drafter's "
                f"config.json, but the target has {num_target_layers} layers"
            )
        if self.target_layer_ids[-1] >= num_target_layers - 1:
            raise CheckpointError(
                f"target_layer_ids={list(self.target_layer_ids)}: the last usable "
                f"layer of a {num_target_layers}-layer target is "
                f"{num_target_layers - 2} (the final layer's output is stored normed "
                "by some engines and raw by others)"
            )
        if draft_length is not None:
            self.check_draft_length(draft_length)


def load_config(directory: str | Path) -> DSparkConfig:
    """Read ``directory/config.json``. Raises CheckpointError."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path} not found: a drafter is a directory with config.json and "
            "model.safetensors"
        )
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    return read_config(raw)


def read_config(raw: Mapping[str, Any]) -> DSparkConfig:
    """Interpret the contents of a config.json. Raises CheckpointError."""
    layout = _layout(raw)
    vocab_size = _int(raw, "vocab_size")
    markov_rank = _int(raw, "markov_rank", minimum=0)
    hidden_size = _int(raw, "hidden_size")
    target_layer_ids = _target_layers(raw)
    draft_vocab_size = raw.get("draft_vocab_size") or vocab_size
    if draft_vocab_size > vocab_size or (
        layout == "k3" and draft_vocab_size != vocab_size
    ):
        raise CheckpointError(
            f"draft_vocab_size={draft_vocab_size} with vocab_size={vocab_size}: "
            "it must not be larger, and K3's drafter shares the target's LM head, so "
            "there it must be equal"
        )
    fields: dict[str, Any] = {
        "layout": layout,
        "hidden_size": hidden_size,
        "num_layers": _int(raw, "num_hidden_layers"),
        "num_heads": _int(raw, "num_attention_heads"),
        "intermediate_size": _int(raw, "intermediate_size"),
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "block_size": _int(raw, "block_size", "dspark_block_size"),
        "mask_token_id": _mask_token(raw, vocab_size),
        "target_layer_ids": target_layer_ids,
        "markov_rank": markov_rank,
        "markov_head_type": _markov_type(raw, markov_rank),
        "confidence_head": bool(raw.get("enable_confidence_head", False)),
        "confidence_head_with_markov": bool(
            raw.get("confidence_head_with_markov", False)
        ),
        "rms_norm_eps": _float(raw, "rms_norm_eps"),
        "max_position_embeddings": _int(raw, "max_position_embeddings"),
        "anchor_first": _anchor_first(raw),
    }
    if layout == "qwen3":
        heads = fields["num_heads"]
        head_dim = raw.get("head_dim") or hidden_size // heads
        fields |= {
            "num_kv_heads": _int(raw, "num_key_value_heads"),
            "head_dim": head_dim,
            "target_hidden_size": raw.get("target_hidden_size") or hidden_size,
            "num_target_layers": raw.get("num_target_layers"),
            "rope": _rope(raw, interleaved=False),
        }
    else:
        for key in ("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm"):
            if raw.get(key):
                raise CheckpointError(f"{key}=true is not supported for K3 drafters")
        declared = raw.get("num_target_layers")
        if declared is not None and declared != len(target_layer_ids):
            raise CheckpointError(
                f"num_target_layers={declared} but target_layer_ids lists "
                f"{len(target_layer_ids)} layers (in K3's format they must agree)"
            )
        fields |= {
            "target_hidden_size": _int(raw, "target_hidden_size"),
            "rope": _rope(raw, interleaved=True),
        }
        for key in (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        ):
            fields[key] = _int(raw, key)
    return DSparkConfig(**fields)


def _layout(raw: Mapping[str, Any]) -> Layout:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise CheckpointError(
        f"architectures={names}: not a DSpark layout this package reads; known are "
        f"{', '.join(ARCHITECTURES)}"
    )


def _anchor_first(raw: Mapping[str, Any]) -> bool:
    if raw.get("dspark_bonus_anchor"):
        raise CheckpointError(
            "dspark_bonus_anchor=true: a block seeded with the bonus token as context "
            "is not supported; use a checkpoint with sample_from_anchor"
        )
    if "sample_from_anchor" in raw:
        return bool(raw["sample_from_anchor"])
    if "speculators_model_type" in raw or "speculators_config" in raw:
        raise CheckpointError(
            "sample_from_anchor is missing: checkpoints in the speculators format "
            "exist in both block layouts (anchor-first and fill-in) and the wrong one "
            "accepts almost nothing; add sample_from_anchor to config.json"
        )
    return True


def _markov_type(raw: Mapping[str, Any], rank: int) -> MarkovHeadType:
    name = raw.get("markov_head_type", "vanilla")
    if rank == 0:
        return "none"
    if name not in ("vanilla", "gated", "rnn"):
        raise CheckpointError(
            f"markov_head_type={name!r}: known are vanilla, gated and rnn"
        )
    return name  # type: ignore[no-any-return]


def _mask_token(raw: Mapping[str, Any], vocab_size: int) -> int:
    for key in ("mask_token_id", "dspark_noise_token_id"):
        value = raw.get(key)
        if value is not None:
            if not (isinstance(value, int) and 0 <= value < vocab_size):
                raise CheckpointError(
                    f"{key}={value!r} is outside the vocabulary of {vocab_size}"
                )
            return value
    raise CheckpointError(
        "mask_token_id is missing: the drafter fills its block with that token's "
        "embedding and cannot draft without it"
    )


def _target_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("target_layer_ids", "dspark_target_layer_ids")
    found = {key: tuple(raw[key]) for key in keys if raw.get(key) is not None}
    if not found:
        raise CheckpointError(
            "target_layer_ids is missing: which layers feed the drafter?"
        )
    if len(set(found.values())) > 1:
        raise CheckpointError(
            f"target_layer_ids={list(found[keys[0]])} but dspark_target_layer_ids="
            f"{list(found[keys[1]])}: engines differ in which they read; keep one"
        )
    key, ids = next(iter(found.items()))
    if (
        not ids
        or not all(isinstance(i, int) and i >= -1 for i in ids)
        or any(b <= a for a, b in itertools.pairwise(ids))
    ):
        raise CheckpointError(
            f"{key}={list(ids)}: must be strictly increasing layer numbers "
            "(0-based; -1 is the embedding output)"
        )
    return ids


def _rope(raw: Mapping[str, Any], *, interleaved: bool) -> RopeConfig:
    params = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = params.get("rope_type", params.get("type", "default"))
    theta = params.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise CheckpointError("rope_theta is missing")
    if kind == "default":
        return RopeConfig(float(theta), interleaved)
    if kind != "yarn":
        raise CheckpointError(f"rope_type={kind!r}: only default and yarn are read")
    if "factor" not in params or "original_max_position_embeddings" not in params:
        raise CheckpointError(
            "rope_parameters of type yarn need factor and "
            "original_max_position_embeddings"
        )
    yarn = {
        "factor": float(params["factor"]),
        "original_max_position_embeddings": float(
            params["original_max_position_embeddings"]
        ),
        "beta_fast": float(params.get("beta_fast", 32)),
        "beta_slow": float(params.get("beta_slow", 1)),
        "mscale": float(params.get("mscale", 1)),
        "mscale_all_dim": float(params.get("mscale_all_dim", 0)),
    }
    return RopeConfig(float(theta), interleaved, yarn)


def _int(raw: Mapping[str, Any], *keys: str, minimum: int = 1) -> int:
    for key in keys:
        value = raw.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise CheckpointError(f"{key}={value!r}: must be an integer >= {minimum}")
        return value
    raise CheckpointError(f"{' or '.join(keys)} is missing from config.json")


def _float(raw: Mapping[str, Any], key: str) -> float:
    value = raw.get(key)
    if not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(f"{key}={value!r}: must be a positive number")
    return float(value)
