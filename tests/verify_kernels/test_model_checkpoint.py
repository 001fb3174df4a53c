# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the model: written and read to the same bits, faults named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from verify_kernels.model import checkpoint
from verify_kernels.model.loop import Request, generate
from verify_kernels.model.reference import K3Model
from verify_kernels.model.weights import K3Config, random_weights
from verify_kernels.moe.mxfp4 import dequantise

#: A model the format can say: one KDA width, a shared expert of whole experts.
CONFIG = K3Config(kda_k=4, kda_v=4, decay_rank=4, shared_inner=64)


def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    weights = random_weights(CONFIG, 3, torch.float32)
    checkpoint.save(tmp_path, CONFIG, weights, eos_token_id=7)
    config, again = checkpoint.load(tmp_path)
    assert config == CONFIG
    first = checkpoint.named_tensors(CONFIG, weights)
    second = checkpoint.named_tensors(config, again)
    assert first.keys() == checkpoint.layout(CONFIG).keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 7
    # Not only the tensors: the models they make.
    prompt = Request((1, 2, 3), 6)
    ours, theirs = (generate(K3Model(CONFIG, w), [prompt])[0] for w in (weights, again))
    assert torch.equal(torch.stack(ours.logits), torch.stack(theirs.logits))


def test_names_hold_what_they_say(tmp_path: Path) -> None:
    """Parts of packed projections, by hand for one layer of each kind."""
    weights = random_weights(CONFIG, 3, torch.float32)
    checkpoint.save(tmp_path, CONFIG, weights)
    tensors = load_file(tmp_path / "model.safetensors")
    kda, mla = weights.layers[0].mixer, weights.layers[1].mixer
    at = "model.layers.0.self_attn."
    wide = CONFIG.heads * 4
    rows = {"q": 0, "k": wide, "v": 2 * wide, "g": 3 * wide, "f_a": 4 * wide}
    for name, begin in rows.items():
        part = tensors[f"{at}{name}_proj.weight"].float()
        assert torch.equal(part, kda.in_proj[begin : begin + len(part)]), name
    assert torch.equal(tensors[at + "b_proj.weight"].float(), kda.in_proj[-2:])
    # Channel h K + j of the convolution, tap i (the newest last).
    assert tensors[at + "k_conv1d.weight"][4 + 3, 0, 2] == kda.core.conv_k[2, 1, 3]
    at = "model.layers.1.self_attn."
    both = tensors[at + "kv_b_proj.weight"].float().view(CONFIG.heads, -1, 6)
    assert torch.equal(both[1, :5], mla.core.w_uk[1])
    assert torch.equal(both[1, 5:], mla.core.w_uv[1])
    expert = "model.layers.2.block_sparse_moe.experts.5.w2"
    packed = tensors[expert + ".weight_packed"]
    scale = tensors[expert + ".weight_scale"]
    value = dequantise(weights.layers[2].mlp.w2)[5]
    low = packed[3, 6] & 15
    magnitude = [0, 0.5, 1, 1.5, 2, 3, 4, 6][int(low) & 7]
    expected = magnitude * (-1 if int(low) & 8 else 1) * 2.0 ** (int(scale[3, 0]) - 127)
    assert value[3, 12] == expected


def test_prompt_logits_are_those_of_decoding(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, round_prefix=None)
    weights = random_weights(config, 3, torch.float64)
    model = K3Model(config, weights)
    text = [1, 2, 3, 4, 5]
    generated = generate(model, [Request(text, 1)])[0]
    logits = checkpoint.prompt_logits(model, text)
    torch.testing.assert_close(logits[-1], generated.logits[0], rtol=0, atol=1e-11)


def test_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        checkpoint.load(tmp_path)
    with pytest.raises(ValueError, match="kda_k is 6, kda_v 4"):
        checkpoint.config_json(K3Config())
    with pytest.raises(ValueError, match="shared_inner is 10"):
        checkpoint.config_json(dataclasses.replace(CONFIG, shared_inner=10))
    raw = checkpoint.config_json(CONFIG)
    for change, words in (
        ({"architectures": ["Qwen3ForCausalLM"]}, "this reads KimiLinearForCausalLM"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu'; this model has 'situ'"),
        ({"mla_use_nope": False}, "mla_use_nope is False"),
    ):
        with pytest.raises(ValueError, match=words):
            checkpoint.read_config(raw | change)
    with pytest.raises(ValueError, match=r"config\.json has no num_experts$"):
        checkpoint.read_config({k: v for k, v in raw.items() if k != "num_experts"})
    weights = random_weights(CONFIG, 3, torch.float32)
    checkpoint.save(tmp_path, CONFIG, weights)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gate = tensors.pop("lm_head.weight")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"missing \['lm_head\.weight'\]"):
        checkpoint.load(tmp_path)
    save_file(tensors | {"lm_head.weight": gate[1:].contiguous()}, file)
    with pytest.raises(ValueError, match=r"lm_head\.weight is \(47, 20\)"):
        checkpoint.load(tmp_path)
