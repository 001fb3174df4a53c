# SPDX-License-Identifier: Apache-2.0
"""Reading and writing checkpoints: DeepSpec's Qwen3 drafters, K3's drafter, the target.

A drafter directory holds config.json and model.safetensors with DeepSpec's names (no
``model.`` prefix) or K3's (``context_proj``, ``context_norm``, ``final_norm``, no
embedding and no LM head: those are the target's).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafters.backbone import DSparkDrafter
from drafters.config import CheckpointError, load_config
from drafters.target import Qwen3Config, Qwen3Target, Target

#: K3's names for what DeepSpec calls otherwise.
_K3_NAMES = {
    "context_proj.": "fc.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
}
_SHARED = ("embed_tokens.weight", "lm_head.weight")


def load_drafter(directory: str | Path, target: Target | None = None) -> DSparkDrafter:
    """The drafter in ``directory``, in fp32 evaluation mode.

    ``target`` supplies the embedding and LM head when the checkpoint leaves them out
    (always in K3's format), and is checked against the drafter's config when given.
    Raises CheckpointError naming the key that is missing, unexpected or misshapen.
    """
    config = load_config(directory)
    weights = _read(Path(directory))
    if config.layout == "k3":
        for name in list(weights):
            for theirs, ours in _K3_NAMES.items():
                if name.startswith(theirs):
                    weights[ours + name.removeprefix(theirs)] = weights.pop(name)
    shared: dict[str, Tensor] = {}
    if target is not None:
        config.check_against(
            target_vocab_size=target.vocab_size,
            target_hidden_size=target.hidden_size,
            num_target_layers=target.num_layers,
        )
        pair = (target.embedding.data.float(), target.head.data.float())
        shared = dict(zip(_SHARED, pair, strict=True))
    for name in _SHARED:
        if name not in weights:
            if name not in shared:
                raise CheckpointError(
                    f"{name} is not in {directory}: this format shares it with the "
                    "target; pass target="
                )
            weights[name] = shared[name]
    offsets = weights.pop("d2t", None)
    weights.pop("t2d", None)
    if config.draft_vocab_size < config.vocab_size and offsets is None:
        raise CheckpointError(
            f"d2t is missing: draft_vocab_size={config.draft_vocab_size} is smaller "
            f"than vocab_size={config.vocab_size}, so drafts need a map to target ids"
        )
    drafter = DSparkDrafter(config)
    _load(drafter, weights, directory)
    if offsets is not None:
        drafter.draft_to_target = torch.arange(config.draft_vocab_size) + offsets
    return drafter.eval()


def load_target(directory: str | Path) -> Qwen3Target:
    """A Qwen3 checkpoint (config.json, model.safetensors) in fp32 evaluation mode."""
    directory = Path(directory)
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} not found: is this a model directory?")
    raw = json.loads(path.read_text())
    if raw.get("architectures") != ["Qwen3ForCausalLM"]:
        raise CheckpointError(
            f"architectures={raw.get('architectures')}: the engine-free target reads "
            "Qwen3ForCausalLM only"
        )
    try:
        config = Qwen3Config(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            intermediate_size=raw["intermediate_size"],
            max_position_embeddings=raw["max_position_embeddings"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=raw["rope_theta"],
        )
    except KeyError as error:
        raise CheckpointError(f"{error.args[0]} is missing from {path}") from error
    target = Qwen3Target(config)
    _load(target, _read(directory), directory)
    return target.eval()


def save_checkpoint(
    directory: str | Path,
    config: Mapping[str, Any],
    module: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json and model.safetensors; weights rounded to ``dtype``.

    A drafter whose config names ``K3DSparkModel`` is written under K3's names and
    without the embedding and LM head it shares with the target.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    tensors = {
        k: v.detach().to("cpu", dtype).contiguous()
        for k, v in module.state_dict().items()
    }
    if "K3DSparkModel" in config.get("architectures", ()):
        for name in _SHARED:
            del tensors[name]
        for theirs, ours in _K3_NAMES.items():
            for name in [name for name in tensors if name.startswith(ours)]:
                tensors[theirs + name.removeprefix(ours)] = tensors.pop(name)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _read(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"no *.safetensors in {directory}")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= load_file(file)
    return {k: v if k in ("d2t", "t2d") else v.float() for k, v in weights.items()}


def _load(module: nn.Module, weights: Mapping[str, Tensor], where: object) -> None:
    own = module.state_dict()
    missing = sorted(own.keys() - weights.keys())
    unexpected = sorted(weights.keys() - own.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"weights in {where} do not match config.json: missing "
            f"{missing[:4] or 'none'}, unexpected {unexpected[:4] or 'none'}"
        )
    for name, tensor in weights.items():
        if own[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name} in {where} has shape {tuple(tensor.shape)}, config.json "
                f"implies {tuple(own[name].shape)}"
            )
    module.load_state_dict(weights)
