# SPDX-License-Identifier: Apache-2.0
"""Backbone, heads and checkpoints against independent implementations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.backbone import DSparkDrafter, extend_context
from drafters.checkpoint import load_drafter, load_target, save_checkpoint
from drafters.config import CheckpointError, read_config
from drafters.layers import LatentAttention
from drafters.sampling import probs_from_logits
from drafters.training import block_mask
from tests.drafters.small import (
    VOCAB,
    drafter_json,
    k3_json,
    randomise,
    small_drafter,
    small_target,
)

HEADS = ["vanilla", "gated", "rnn"]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return probs_from_logits(logits, 0.0)


def first(probs: torch.Tensor) -> torch.Tensor:
    return probs.argmax(-1)


def context_of(drafter: DSparkDrafter, tokens: torch.Tensor) -> list:
    _, features, _ = small_target()(tokens, drafter.config.target_layer_ids)
    return drafter.context_kv(features, torch.arange(tokens.shape[1])[None])


@torch.no_grad()
def test_target_agrees_with_transformers(tiny_target: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(
        tiny_target, dtype=torch.float32
    )
    tokens = torch.arange(40, 100)[None]
    expected = theirs(tokens, output_hidden_states=True)
    logits, features, _ = load_target(tiny_target)(tokens, (-1, 0, 2))
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)
    # Field case F35: tap i is the raw output of layer i, hidden_states[i + 1] there.
    taps = torch.cat([expected.hidden_states[i] for i in (0, 1, 3)], -1)
    torch.testing.assert_close(features, taps, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("yarn", [False, True])
def test_latent_attention_agrees_with_transformers(yarn: bool) -> None:
    """Our K3 attention without a context equals DeepSeek-V3's full attention."""
    pytest.importorskip("transformers")
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as reference

    rope = {"rope_type": "default", "rope_theta": 50000.0}
    if yarn:
        rope = {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }
    config = read_config(k3_json(rope_parameters=rope) | {"qk_rope_head_dim": 16})
    theirs_config = DeepseekV3Config(
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=16,
        v_head_dim=8,
        rms_norm_eps=1e-6,
        rope_interleave=True,
        rope_parameters=dict(rope),
        max_position_embeddings=2048,
        attn_implementation="eager",
    )
    theirs = reference.DeepseekV3Attention(theirs_config, layer_idx=0).eval()
    for norm in (theirs.q_a_layernorm, theirs.kv_a_layernorm):
        norm.variance_epsilon = 1e-6
    randomise(theirs, 3, 0.3)
    ours = LatentAttention(config)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 90, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(90)[None]
    rotary = reference.DeepseekV3RotaryEmbedding(theirs_config)
    expected, *_ = theirs(x, rotary(x, positions), torch.zeros(1, 1, 90, 90))
    actual = ours(x, positions, ours.context_kv(x, positions), None)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_context_is_injected_incrementally() -> None:
    """Context added token by token equals context added at once."""
    drafter = small_drafter()
    tokens = torch.tensor([[1, 2, 3, 4, 0]])
    _, features, _ = small_target()(tokens, drafter.config.target_layer_ids)
    whole = drafter.context_kv(features, torch.arange(5)[None])
    grown = None
    for t in range(5):
        step = drafter.context_kv(features[:, t : t + 1], torch.tensor([[t]]))
        grown = extend_context(grown, step)
    for one, other in zip(whole, grown, strict=True):
        torch.testing.assert_close(one[0], other[0])
        torch.testing.assert_close(one[1], other[1])


@torch.no_grad()
@pytest.mark.parametrize("raw", [drafter_json(), k3_json()], ids=["qwen3", "k3"])
def test_packed_training_blocks_equal_single_blocks(raw: dict) -> None:
    """Training sees what drafting sees: context strictly before the anchor, own block
    whole, other blocks never."""
    drafter = small_drafter(read_config(raw))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB - 1, (1, 20), generator=generator)
    context = context_of(drafter, tokens)
    anchors = torch.tensor([[3, 9, 12]])
    blocks = torch.full((1, 3, 7), VOCAB - 1)
    blocks[0, :, 0] = tokens[0, anchors[0]]
    at = anchors[:, :, None] + torch.arange(7)
    packed = drafter.block_hidden(
        blocks.flatten(1), at.flatten(1), context, block_mask(anchors, 20, 7)
    ).view(3, 7, -1)
    for b, anchor in enumerate(anchors[0].tolist()):
        before = [(k[:, :anchor], v[:, :anchor]) for k, v in context]
        alone = drafter.block_hidden(blocks[:, b], at[:, b], before)
        torch.testing.assert_close(packed[b], alone[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("anchor_first", [True, False])
def test_every_hidden_row_decides_its_own_draft(anchor_first: bool) -> None:
    """Field case F12: k drafts come from k rows; zeroing row j changes draft j's
    distribution and no earlier one, in both block layouts."""
    raw = drafter_json(sample_from_anchor=anchor_first)
    drafter = small_drafter(read_config(raw))
    context = context_of(drafter, torch.tensor([[1, 2, 3]]))
    arguments = (torch.tensor([4]), torch.tensor([3]), context, 7)

    def softmax(logits: torch.Tensor) -> torch.Tensor:
        return probs_from_logits(logits, 1.0)

    base = drafter.propose(*arguments, softmax, first).probs
    original = drafter.block_hidden
    for j in range(7):

        def zeroed(*a: object, j: int = j) -> torch.Tensor:
            hidden = original(*a).clone()
            hidden[:, j + (0 if anchor_first else 1)] = 0
            return hidden

        drafter.block_hidden = zeroed  # type: ignore[method-assign]
        changed = drafter.propose(*arguments, softmax, first).probs
        assert torch.equal(changed[:, :j], base[:, :j])
        assert not torch.equal(changed[:, j], base[:, j])
    drafter.block_hidden = original  # type: ignore[method-assign]


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_sequential_head_is_an_explicit_softmax(head: str) -> None:
    """propose() equals the heads' equations written out token by token."""
    drafter = small_drafter(read_config(drafter_json(markov_head_type=head)))
    context = context_of(drafter, torch.tensor([[1, 2, 3]]))
    got = drafter.propose(
        torch.tensor([4]), torch.tensor([3]), context, 5,
        lambda x: probs_from_logits(x, 1.0), first,
    )  # fmt: skip
    block = torch.tensor([[4] + [VOCAB - 1] * 4])
    hidden = drafter.block_hidden(block, torch.arange(3, 8)[None], context)[0]
    w = dict(drafter.markov_head.named_parameters())
    state, previous = torch.zeros(4), 4
    for j in range(5):
        e = w["markov_w1.weight"][previous]
        feature = e
        if head == "gated":
            gate = w["gate_proj.weight"] @ torch.cat((hidden[j], e))
            feature = torch.sigmoid(gate + w["gate_proj.bias"]) * e
        elif head == "rnn":
            joint = w["joint_proj.weight"] @ torch.cat((state, e, hidden[j]))
            gate, candidate, out = (joint + w["joint_proj.bias"]).split(4)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            feature = torch.tanh(out)
        logits = drafter.lm_head.weight @ hidden[j] + w["markov_w2.weight"] @ feature
        torch.testing.assert_close(got.probs[0, j], logits.softmax(-1))
        c = drafter.confidence_head.proj
        expected = c.weight[0] @ torch.cat((hidden[j], e)) + c.bias[0]
        torch.testing.assert_close(got.confidence_logits[0, j], expected)
        previous = int(got.tokens[0, j])


@torch.no_grad()
def test_reduced_draft_vocabulary_maps_to_target_ids(tmp_path: Path) -> None:
    """Field case F34: a pruned draft vocabulary works with its map and is refused
    without it."""
    raw = drafter_json(draft_vocab_size=3)
    save_checkpoint(tmp_path, raw, small_drafter(read_config(raw)), torch.float32)
    with pytest.raises(CheckpointError, match="d2t"):
        load_drafter(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"d2t": torch.tensor([1, 1, 2])}, file)
    drafter = load_drafter(tmp_path)
    proposal = drafter.propose(
        torch.tensor([0]), torch.tensor([1]),
        context_of(drafter, torch.tensor([[1]])), 7,
        lambda x: probs_from_logits(x, 1.0), first,
    )  # fmt: skip
    assert (proposal.probs[..., [0, 3, 5]] == 0).all()
    assert set(proposal.tokens.flatten().tolist()) <= {1, 2, 4}


@pytest.mark.parametrize("head", HEADS)
def test_round_trip_in_deepspec_format(tmp_path: Path, head: str) -> None:
    raw = drafter_json(markov_head_type=head)
    drafter = small_drafter(read_config(raw))
    save_checkpoint(tmp_path, raw, drafter, torch.float32)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "embed_tokens.weight",
        "lm_head.weight",
        "layers.1.self_attn.q_norm.weight",
        "layers.0.mlp.down_proj.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.bias",
    } <= names
    loaded = load_drafter(tmp_path, small_target())
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_k3_format_shares_the_targets_embedding_and_head(tmp_path: Path) -> None:
    drafter = small_drafter(read_config(k3_json()))
    names = {"fc.": "context_proj.", "hidden_norm.": "context_norm."}
    weights = {}
    for name, tensor in drafter.state_dict().items():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            continue
        for ours, theirs in names.items():
            if name.startswith(ours):
                name = name.replace(ours, theirs)
        weights["final_norm.weight" if name == "norm.weight" else name] = tensor
    save_checkpoint(tmp_path, k3_json(), drafter, torch.float32)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    with pytest.raises(CheckpointError, match="embed_tokens"):
        load_drafter(tmp_path)
    target = small_target()
    loaded = load_drafter(tmp_path, target)
    assert torch.equal(loaded.lm_head.weight, target.lm_head.weight)
    assert torch.equal(loaded.fc.weight, drafter.fc.weight)
    assert torch.equal(loaded.norm.weight, drafter.norm.weight)


def test_wrong_weights_are_named(tmp_path: Path) -> None:
    raw = drafter_json()
    save_checkpoint(tmp_path, raw, small_drafter(), torch.float32)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    save_file({k: v for k, v in good.items() if k != "fc.weight"}, file)
    with pytest.raises(CheckpointError, match=r"missing \['fc\.weight'\]"):
        load_drafter(tmp_path)
    save_file(good | {"fc.weight": torch.zeros(16, 16)}, file)
    with pytest.raises(CheckpointError, match=r"fc\.weight .* \(16, 16\)"):
        load_drafter(tmp_path)
    save_file(good | {"extra.weight": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match=r"extra\.weight"):
        load_drafter(tmp_path)
