# SPDX-License-Identifier: Apache-2.0
"""tiny-k3: what vLLM 0.33 expects of it, its training, and the shipped pair."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from drafters.backbone import DSparkDrafter
from drafters.captured import WARM_UP
from drafters.checkpoint import load_drafter
from drafters.config import read_config
from drafters.loop import decode_plainly, speculate
from drafters.training import (
    Schedule,
    drafter_loss,
    drafter_step,
    initialise,
    train_drafter,
)
from experiments import corpora, train_tiny_k3
from experiments.tiny_k3 import train
from experiments.tiny_k3.evaluate import Acceptance, acceptance, bits_per_byte
from experiments.tiny_k3.target import (
    BLOCK_SIZE,
    TARGET,
    TOKENS,
    K3Target,
    drafter_config,
    load_target,
)
from tests.drafters.capturing import hazards, on_meta
from verify_kernels.model import checkpoint
from verify_kernels.model.loop import Request, generate
from verify_kernels.model.parallel import forward
from verify_kernels.model.weights import K3Config, K3Weights, random_weights
from verify_kernels.moe.mxfp4 import Mxfp4, dequantise, quantise
from verify_kernels.moe.reference import MoeWeights

TINY = Path(train_tiny_k3.__file__).parent / "tiny"
SHIPPED = pytest.mark.skipif(
    not (TINY / "k3-target" / "model.safetensors").is_file(),
    reason="experiments/tiny/k3-target is not trained yet: make train-tiny-k3",
)

#: Parameters of vLLM 0.33.0's KimiLinearForCausalLM at TP 1 for these sizes, as its
#: own constructor made them (2026-11-30, on a CPU with attention backends stubbed; its
#: load_weights took a checkpoint of this writer, every parameter filled and equal):
#: the checkpoint's names that go into each, the parameter's shape, and its dtype.
MIXES = {
    "self_attention_res_norm.weight": (512,),
    "self_attention_res_proj.weight": (1, 512),
    "mlp_res_norm.weight": (512,),
    "mlp_res_proj.weight": (1, 512),
    "input_layernorm.weight": (512,),
    "post_attention_layernorm.weight": (512,),
}
KDA = {
    "self_attn.in_proj_qkvgfab.weight": (
        ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"),
        (1168, 512),  # 14 rows of padding
    ),
    "self_attn.conv1d.weight": (("q_conv1d", "k_conv1d", "v_conv1d"), (768, 1, 4)),
    "self_attn.f_b_proj.weight": (("f_b_proj",), (256, 128)),
    "self_attn.o_proj.weight": (("o_proj",), (512, 256)),
    "self_attn.o_norm.weight": (("o_norm",), (128,)),
}
KDA_VECTORS = {"self_attn.A_log": (2,), "self_attn.dt_bias": (256,)}
MLA = {
    "self_attn.fused_qkv_a_g_proj.weight": (
        ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
        (1088, 512),
    ),
    "self_attn.q_a_layernorm.weight": (("q_a_layernorm",), (256,)),
    "self_attn.q_b_proj.weight": (("q_b_proj",), (384, 256)),
    "self_attn.kv_a_layernorm.weight": (("kv_a_layernorm",), (512,)),
    "self_attn.kv_b_proj.weight": (("kv_b_proj",), (512, 512)),
    "self_attn.o_proj.weight": (("o_proj",), (512, 256)),
}
MOE = {
    "gate.weight": (16, 512),
    "gate.e_score_correction_bias": (16,),
    "routed_expert_down_proj.weight": (128, 512),
    "routed_expert_norm.weight": (128,),
    "routed_expert_up_proj.weight": (512, 128),
}
#: Of routed_experts: [E, ...] parameters and what one expert puts where.
EXPERTS = {
    "w13_weight": (("w1", "w3"), "weight_packed", (16, 256, 64)),
    "w13_weight_scale": (("w1", "w3"), "weight_scale", (16, 256, 4)),
    "w2_weight": (("w2",), "weight_packed", (16, 128, 64)),
    "w2_weight_scale": (("w2",), "weight_scale", (16, 128, 4)),
}
FP32 = ("A_log", "dt_bias", "conv1d", "e_score_correction_bias", "o_norm")
#: The same of K3DSparkForCausalLM (the vocabulary before its padding to 320), and what
#: goes into each parameter of a layer.
DRAFTER = {
    "context_proj.weight": (512, 1024),
    "context_norm.weight": (512,),
    "final_norm.weight": (512,),
    "markov_head.markov_w1.weight": (260, 64),
    "markov_head.markov_w2.weight": (260, 64),
    "confidence_head.proj.weight": (1, 576),
    "confidence_head.proj.bias": (1,),
}
DRAFTER_LAYER = {
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"): (704, 512),
    ("self_attn.q_a_layernorm",): (128,),
    ("self_attn.q_b_proj",): (384, 128),
    ("self_attn.kv_a_layernorm",): (512,),
    ("self_attn.kv_b_proj",): (512, 512),
    ("self_attn.o_proj",): (512, 256),
    ("mlp.gate_proj", "mlp.up_proj"): (512, 512),
    ("mlp.down_proj",): (512, 256),
    ("input_layernorm",): (512,),
    ("post_attention_layernorm",): (512,),
}


def test_checkpoint_fills_vllms_parameters() -> None:
    shapes = checkpoint.layout(TARGET)
    left = dict(shapes)

    def take(names: list[str], shape: tuple[int, ...], padding: int = 0) -> None:
        parts = [left.pop(name)[0] for name in names]
        assert sum(part[0] for part in parts) + padding == shape[0], names
        assert all(part[1:] == shape[1:] for part in parts), names

    take(["model.embed_tokens.weight"], (260, 512))
    take(["lm_head.weight"], (260, 512))
    take(["model.norm.weight"], (512,))
    take(["model.output_attn_res_norm.weight"], (512,))
    take(["model.output_attn_res_proj.weight"], (1, 512))
    for i in range(4):
        at = f"model.layers.{i}."
        for name, shape in MIXES.items():
            take([at + name], shape)
        for name, (parts, shape) in (MLA if i == 3 else KDA).items():
            padding = 14 if "in_proj" in name else 0
            take([f"{at}self_attn.{p}.weight" for p in parts], shape, padding)
        for name, shape in {} if i == 3 else KDA_VECTORS.items():  # type: ignore[union-attr]
            take([at + name], shape)
        inner = "mlp." if i == 0 else "block_sparse_moe.shared_experts."
        width = 256 if i == 0 else 128
        take([f"{at}{inner}{p}_proj.weight" for p in ("gate", "up")], (2 * width, 512))
        take([f"{at}{inner}down_proj.weight"], (512, width))
        if i == 0:
            continue
        moe = at + "block_sparse_moe."
        for name, shape in MOE.items():
            take([moe + name], shape)
        for parts, suffix, shape in EXPERTS.values():
            for e in range(shape[0]):
                take([f"{moe}experts.{e}.{p}.{suffix}" for p in parts], shape[1:])
    assert not left
    for name, (_, dtype) in shapes.items():
        packed = name.endswith(("weight_packed", "weight_scale"))
        wanted = torch.float32 if any(part in name for part in FP32) else torch.bfloat16
        assert dtype == (torch.uint8 if packed else wanted), name


def test_config_says_what_vllm_reads() -> None:
    raw = checkpoint.config_json(TARGET, **TOKENS)
    assert raw["architectures"] == ["KimiLinearForCausalLM"]
    assert raw["model_type"] == "kimi_linear"
    assert raw["quantization_config"] == {"quant_method": "mxfp4"}
    assert raw["linear_attn_config"]["kda_layers"] == [1, 2, 3]
    assert raw["linear_attn_config"]["full_attn_layers"] == [4]
    assert raw["num_shared_experts"] == 1 and raw["attn_res_block_size"] == 2
    drafter = drafter_config()
    # K3DSparkConfig refuses these otherwise.
    assert drafter["num_target_layers"] == len(drafter["target_layer_ids"])
    assert not any(drafter.get(f"mla_use_{x}") for x in ("nope", "output_gate"))
    read = read_config(drafter)
    read.check_against(
        target_vocab_size=260,
        target_hidden_size=512,
        num_target_layers=4,
        draft_length=BLOCK_SIZE,
    )
    assert read.layout == "k3" and read.anchor_first and read.rope.interleaved


SMALL = K3Config(
    vocab_size=corpora.VOCAB_SIZE,
    kda_k=4,
    kda_v=4,
    decay_rank=4,
    shared_inner=32,
    experts=4,
)


@cache
def texts(kind: corpora.Kind) -> bytes:
    return corpora.held_out_bytes(kind)


@pytest.fixture
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "training_bytes", texts)
    monkeypatch.setattr(train_tiny_k3, "training_bytes", texts)


@pytest.fixture
def exact_products() -> Iterator[None]:
    """No TF32, which is the process's setting."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_masters_see_what_ships(short_texts: None) -> None:
    """The forward pass of training, in fp32, is that of the checkpoint as read, but
    for the bf16 rounding of the masters; its expert weights are the stored ones."""
    masters = train.Masters(SMALL, seed=0, device="cpu")
    data = train.batches(4, 24, seed=1, device="cpu")
    first = {i: b.clone() for i, b in masters.bias.items()}
    losses: list[str] = []
    train.train_target(
        masters,
        data,
        Schedule(60, 1e-2),
        lambda step, message: losses.append(message),
    )
    assert float(losses[-1].split()[1]) < float(losses[0].split()[1]) - 1
    shipped = masters.shipped()
    banks = masters.banks()
    for i, layer in enumerate(shipped.layers[1:], 1):
        for ours, packed in zip(
            banks[i], (layer.mlp.w1, layer.mlp.w3, layer.mlp.w2), strict=True
        ):
            assert torch.equal(ours, dequantise(packed, torch.float32))
            # Quantising again finds the same numbers.
            again = quantise(dequantise(packed))
            assert torch.equal(dequantise(again), dequantise(packed))
        # Balanced: moved, by at most its rate a step, and in no common direction.
        moved = masters.bias[i] - first[i]
        assert 0 < float(moved.abs().max()) <= 60 * train.BIAS_RATE
        assert moved.min() < 0 < moved.max()
        assert torch.equal(layer.mlp.bias, masters.bias[i])
    tokens = next(data)[:, :-1]
    trained = forward(SMALL, masters.weights(), tokens, experts=banks).logits
    read = K3Target(SMALL, shipped)(tokens)[0]
    # bf16 rounds weights by 2^-9 relative; four layers of that on logits of size 5.
    assert (trained - read).abs().mean() < 0.05


def test_stored_numbers_are_the_quantisers() -> None:
    """Every tie between two codes, both signs, extreme scales, and random numbers."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 7, 7.9])
    ties = torch.cat((grid, (grid[1:] + grid[:-1]) / 2))
    near = torch.cat((ties, torch.nextafter(ties, ties + 1)))
    near = torch.cat((near, torch.nextafter(ties, ties - 1)))
    near = torch.cat((near, -near))
    rows = F.pad(near[:, None], (0, 31), value=4.0)  # the scale of every row is 1
    drawn = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    exponents = torch.linspace(-122, 123, 4096).round()[:, None]
    cases = torch.cat((rows, drawn * 2.0**exponents, torch.zeros(1, 32)))
    wanted = dequantise(quantise(cases), torch.float32)
    ours = train.as_stored(cases)
    assert torch.equal(ours, wanted)
    assert torch.equal(torch.signbit(ours), torch.signbit(wanted))


def test_gradient_passes_straight_through_the_quantiser() -> None:
    masters = train.Masters(SMALL, seed=0, device="cpu")
    bank = masters.banks()[2][0]
    weight = torch.randn(bank.shape, generator=torch.Generator().manual_seed(0))
    (bank * weight).sum().backward()
    assert torch.equal(masters.experts[2][0].grad, weight)


def test_load_counts_experts() -> None:
    ids = torch.tensor([[0, 2], [2, 3], [2, 1]])
    assert train.expert_load(ids, 5).tolist() == [1, 1, 3, 1, 0]


@pytest.fixture(scope="module")
def small_pair() -> tuple[K3Target, DSparkDrafter]:
    """A random target and a drafter of its shape; sharp enough to differ by row."""
    target = K3Target(SMALL, random_weights(SMALL, 2, torch.float32))
    raw = drafter_config() | {
        "hidden_size": SMALL.hidden,
        "target_hidden_size": SMALL.hidden,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "intermediate_size": 16,
        "markov_rank": 4,
    }
    torch.manual_seed(0)
    drafter = DSparkDrafter(read_config(raw))
    initialise(drafter, target)
    return target, drafter


def test_speculation_over_recurrent_state_is_plain_decoding(
    small_pair: tuple[K3Target, DSparkDrafter],
) -> None:
    """The loop cuts KDA states back to the accepted rows; the text does not change.
    And `K3Model`, which decodes another way, writes the same text."""
    target, drafter = small_pair
    prompt = list(b"def f(x):")
    plain = decode_plainly(target, prompt, max_new_tokens=24)
    for draft_length in (1, 4, 7):
        trace = speculate(
            target, drafter, prompt, max_new_tokens=24, draft_length=draft_length
        )
        assert trace.tokens == plain.tokens
    assert len(set(plain.tokens)) > 4
    model = checkpoint.K3Model(target.config, target.weights)
    generated = generate(model, [Request(prompt, 24)])[0]
    assert generated.tokens == plain.tokens


def test_drafter_learns_from_a_k3(
    small_pair: tuple[K3Target, DSparkDrafter], short_texts: None
) -> None:
    target, drafter = small_pair
    data = train.batches(8, 40, seed=1, device="cpu")
    tokens = next(data)
    anchors = torch.tensor([[2, 9, 20, 30]] * 8)
    with torch.no_grad():
        before = drafter_loss(drafter, target, tokens[:, :-1], anchors)
    train_drafter(
        drafter,
        target,
        data,
        Schedule(60, 1e-2),
        lambda step, message: None,
        anchors_per_sequence=6,
        generator=torch.Generator().manual_seed(0),
        autocast=torch.bfloat16,
    )
    with torch.no_grad():
        after = drafter_loss(drafter, target, tokens[:, :-1], anchors)
    assert after < before - 0.1
    assert drafter.fc.weight.dtype == torch.float32
    assert torch.equal(drafter.lm_head.weight, target.head)


def test_bits_per_byte_of_a_known_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Even:
        embedding = torch.zeros(1)

        def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            return F.one_hot(tokens, 4).float() * 0, None, None

    module = sys.modules[bits_per_byte.__module__]
    monkeypatch.setattr(module, "held_out_bytes", lambda kind: bytes([0, 1, 2, 3] * 9))
    assert bits_per_byte(Even(), "stdlib", 3, 8) == pytest.approx(2.0)  # type: ignore[arg-type]


def test_calibration_counts_positions_that_were_reached() -> None:
    # Two rounds of three drafts: 1 kept (positions 1 and 2 seen), 3 kept (all seen).
    rounds = Acceptance([1, 3], [[0.0, 0.0, 9.0], [0.0, 0.0, 0.0]])
    assert rounds.length == 3.0
    assert rounds.calibration() == pytest.approx(
        {"predicted": 0.5, "observed": 0.8, "error": 0.3}
    )


def test_whole_script_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_texts: None
) -> None:
    """--quick: both directories are written, load, and fit the sizes that may ship."""
    monkeypatch.setattr(
        sys, "argv", ["x", "--quick", "--out", str(tmp_path), "--device", "cpu"]
    )
    train_tiny_k3.main()
    check_directories(tmp_path)
    config = json.loads((tmp_path / "k3-target" / "config.json").read_text())
    assert checkpoint.read_config(config) == TARGET
    record = json.loads((tmp_path / "train.json").read_text())
    assert set(record["held_out"]) == set(corpora.KINDS)
    assert record["plan"]["target_steps"] == WARM_UP + 2
    assert record["captured"] == {"target": False, "drafter": False}
    # Again from the target that is there: only the drafter is trained.
    file = tmp_path / "k3-target" / "model.safetensors"
    weights, drafter = file.read_bytes(), tmp_path / "k3-dspark" / "model.safetensors"
    first = drafter.read_bytes()
    sys.argv.append("--keep-target")
    train_tiny_k3.main()
    assert file.read_bytes() == weights and drafter.read_bytes() == first


def on_meta_device(weights: K3Weights) -> K3Weights:
    layers = []
    for layer in train.map_tensors(weights, lambda at, x: on_meta(x)).layers:
        if isinstance(layer.mlp, MoeWeights):
            banks = {
                name: Mxfp4(*(on_meta(x) for x in vars(bank).values()))
                for name, bank in vars(layer.mlp).items()
                if isinstance(bank, Mxfp4)
            }
            layer = replace(layer, mlp=replace(layer.mlp, **banks))
        layers.append(layer)
    whole = train.map_tensors(weights, lambda at, x: on_meta(x))
    return replace(whole, layers=tuple(layers))


@pytest.mark.parametrize("checked", ["target", "drafter"])
def test_steps_can_be_captured(checked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a step of the plan's size waits for the GPU or copies from the host;
    the meta device knows shapes alone."""
    weights = on_meta_device(random_weights(TARGET, 0, torch.float32))
    plan, schedule = train_tiny_k3.FULL, Schedule(5, 1e-3)
    inputs: tuple[torch.Tensor, ...]
    if checked == "target":
        monkeypatch.setattr(train, "random_weights", lambda *args: weights)
        masters = train.Masters(TARGET, seed=0, device="meta")
        step = train.target_step(masters, schedule)
        trained = {**masters.parameters}
        trained |= {
            f"{i} {j}": w for i, b in masters.experts.items() for j, w in enumerate(b)
        }
        # Layer 0 has nothing to mix.
        unused = {f".layers.0.before_mixer.{x}" for x in ("norm", "query")}
        inputs = (torch.empty(plan.target_rows, plan.length + 1, dtype=torch.long),)
    else:
        with torch.device("meta"):
            drafter = DSparkDrafter(read_config(drafter_config()))
            target = K3Target(TARGET, weights)
            initialise(drafter, target)
        step = drafter_step(drafter, target, schedule)
        trained = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
        unused = set()
        inputs = (
            torch.empty(plan.draft_rows, plan.length, dtype=torch.long),
            torch.empty(plan.draft_rows, plan.anchors, dtype=torch.long),
        )
    record = hazards(step, tuple(on_meta(x) for x in inputs), monkeypatch)
    assert not record.found
    assert {name for name, p in trained.items() if p.grad is None} == unused


@pytest.mark.gpu
def test_whole_script_on_a_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    short_texts: None,
    exact_products: None,
) -> None:
    """bf16 products under autocast, whole steps replayed as CUDA graphs: twice the
    same bytes, and the logits of the CPU."""
    written = []
    for name in ("a", "b"):
        out = tmp_path / name
        arguments = ["x", "--quick", "--out", str(out), "--device", "cuda"]
        monkeypatch.setattr(sys, "argv", arguments)
        train_tiny_k3.main()
        check_directories(out)
        record = json.loads((out / "train.json").read_text())
        assert record["captured"] == {"target": True, "drafter": True}
        files = sorted(out.glob("*/model.safetensors"))
        written.append([file.read_bytes() for file in files])
    assert written[0] == written[1]
    tokens = torch.tensor([list(b"def parse_line(lines: list) -> int:")])
    here, there = (
        load_target(tmp_path / "a" / "k3-target", device)(tokens.to(device))[0].cpu()
        for device in ("cpu", "cuda")
    )
    # fp32, and a bf16 prefix that may round to the other side of a tie.
    assert (here - there).abs().mean() < 0.01


def check_directories(out: Path) -> None:
    target, drafter = out / "k3-target", out / "k3-dspark"
    names = {"config.json", "model.safetensors"}
    assert {p.name for p in drafter.iterdir()} == names
    names |= {"tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in target.iterdir()} == names
    assert sum(p.stat().st_size for p in target.iterdir()) <= 12e6
    assert sum(p.stat().st_size for p in drafter.iterdir()) <= 6e6
    stored = load_file(drafter / "model.safetensors")
    for name, shape in DRAFTER.items():
        assert tuple(stored.pop(name).shape) == shape, name
    for i in range(2):
        for parts, shape in DRAFTER_LAYER.items():
            rows = [tuple(stored.pop(f"layers.{i}.{p}.weight").shape) for p in parts]
            assert sum(row[0] for row in rows) == shape[0], parts
            assert all(row[1:] == shape[1:] for row in rows), parts
    assert not stored
    load_drafter(drafter, load_target(target))


@SHIPPED
def test_shipped_directories() -> None:
    check_directories(TINY)


@SHIPPED
@pytest.mark.parametrize("kind", corpora.KINDS)
def test_shipped_acceptance_length_and_confidence(kind: corpora.Kind) -> None:
    """Held-out prompts, temperature 1, bonus included, seven drafts a round."""
    target = load_target(TINY / "k3-target")
    drafter = load_drafter(TINY / "k3-dspark", target)
    prompts = corpora.held_out_prompts(kind, 16)
    rounds = acceptance(target, drafter, prompts, temperature=1.0, tokens=64)
    assert rounds.length >= 2.5
    calibration = rounds.calibration()
    # Some 700 positions: their rate has a deviation of 0.02, a bin of 35 one of 0.08.
    assert calibration["error"] < 0.12
    assert abs(calibration["predicted"] - calibration["observed"]) < 0.08


@SHIPPED
def test_shipped_experts_are_all_used() -> None:
    record = json.loads((TINY / "train.json").read_text())
    for use in record["expert_use"].values():
        assert use["entropy"] > 0.9 and use["least"] > 0.05


@SHIPPED
def test_shipped_target_decodes_as_it_was_trained() -> None:
    """The step-by-step model on the shipped weights, and the whole-sequence one."""
    model = checkpoint.load_model(TINY / "k3-target")
    prompt = list(b"def load_row(rows: list) -> list:\n")
    generated = generate(model, [Request(prompt, 8)])[0]
    logits = checkpoint.prompt_logits(model, prompt + generated.tokens)
    rows = logits[len(prompt) - 1 : -1]
    # fp32, and a bf16 prefix that may round to the other side of a tie.
    difference = (rows - torch.stack(generated.logits)).abs()
    assert difference.mean() < 0.02
    assert bytes(generated.tokens).isascii()
