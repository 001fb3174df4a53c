# SPDX-License-Identifier: Apache-2.0
"""Kimi K3 checkpoints of one file: config.json and model.safetensors.

The names, shapes and dtypes are those of the published checkpoint's text model, which
vLLM 0.33's ``KimiLinearForCausalLM`` loads: the parts of a packed projection on their
own, experts packed MXFP4 (two E2M1 codes a byte, low nibble first, E8M0 scale bytes),
``A_log``, ``dt_bias``, convolutions, the KDA norm and the router's bias fp32, all else
bf16. `layout` is the one list of them; `save` and `load` both follow it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verify_kernels.dense.reference import SITU_BETA, SITU_LINEAR_BETA, MlpWeights
from verify_kernels.kda.reference import TAPS, KdaWeights
from verify_kernels.mla.reference import MlaWeights
from verify_kernels.model.parallel import dense_banks, forward
from verify_kernels.model.reference import K3Model
from verify_kernels.model.weights import (
    K3Config,
    K3Layer,
    K3Weights,
    KdaLayer,
    MlaLayer,
    ResidualWeights,
)
from verify_kernels.moe.mxfp4 import GROUP, Mxfp4
from verify_kernels.moe.reference import MoeWeights

ARCHITECTURE = "KimiLinearForCausalLM"
_BF16, _FP32, _BYTE = torch.bfloat16, torch.float32, torch.uint8
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


def layout(config: K3Config) -> Layout:
    """Shape and dtype of every tensor of the checkpoint, by name."""
    c = config
    names: Layout = {}

    def put(name: str, *shape: int, dtype: torch.dtype = _BF16) -> None:
        names[name] = (shape, dtype)

    def mlp(at: str, inner: int) -> None:
        put(f"{at}.gate_proj.weight", inner, c.hidden)
        put(f"{at}.up_proj.weight", inner, c.hidden)
        put(f"{at}.down_proj.weight", c.hidden, inner)

    def residual(score: str, norm: str) -> None:
        put(f"{score}_norm.weight", c.hidden)
        put(f"{score}_proj.weight", 1, c.hidden)
        put(f"{norm}.weight", c.hidden)

    put("model.embed_tokens.weight", c.vocab_size, c.hidden)
    for i in range(c.layers):
        at = f"model.layers.{i}"
        attention = f"{at}.self_attn"
        residual(f"{at}.self_attention_res", f"{at}.input_layernorm")
        residual(f"{at}.mlp_res", f"{at}.post_attention_layernorm")
        if i in c.mla_layers:
            values = c.heads * c.v_head
            put(f"{attention}.q_a_proj.weight", c.q_lora, c.hidden)
            put(f"{attention}.q_a_layernorm.weight", c.q_lora)
            put(f"{attention}.q_b_proj.weight", c.heads * (c.nope + c.rope), c.q_lora)
            put(f"{attention}.kv_a_proj_with_mqa.weight", c.kv_lora + c.rope, c.hidden)
            put(f"{attention}.kv_a_layernorm.weight", c.kv_lora)
            put(
                f"{attention}.kv_b_proj.weight",
                c.heads * (c.nope + c.v_head),
                c.kv_lora,
            )
            put(f"{attention}.g_proj.weight", values, c.hidden)
        else:
            keys, values = c.heads * c.kda_k, c.heads * c.kda_v
            for part, width in (("q", keys), ("k", keys), ("v", values)):
                put(f"{attention}.{part}_proj.weight", width, c.hidden)
                put(f"{attention}.{part}_conv1d.weight", width, 1, TAPS, dtype=_FP32)
            put(f"{attention}.g_proj.weight", values, c.hidden)
            put(f"{attention}.f_a_proj.weight", c.decay_rank, c.hidden)
            put(f"{attention}.f_b_proj.weight", keys, c.decay_rank)
            put(f"{attention}.b_proj.weight", c.heads, c.hidden)
            put(f"{attention}.A_log", c.heads, dtype=_FP32)
            put(f"{attention}.dt_bias", keys, dtype=_FP32)
            put(f"{attention}.o_norm.weight", c.kda_v, dtype=_FP32)
        put(f"{attention}.o_proj.weight", c.hidden, values)
        if i < c.dense_layers:
            mlp(f"{at}.mlp", c.dense_inner)
            continue
        moe = f"{at}.block_sparse_moe"
        put(f"{moe}.gate.weight", c.experts, c.hidden)
        put(f"{moe}.gate.e_score_correction_bias", c.experts, dtype=_FP32)
        put(f"{moe}.routed_expert_down_proj.weight", c.latent, c.hidden)
        put(f"{moe}.routed_expert_norm.weight", c.latent)
        put(f"{moe}.routed_expert_up_proj.weight", c.hidden, c.latent)
        mlp(f"{moe}.shared_experts", c.shared_inner)
        for e in range(c.experts):
            for name, n, k in (
                ("w1", c.expert_inner, c.latent),
                ("w3", c.expert_inner, c.latent),
                ("w2", c.latent, c.expert_inner),
            ):
                expert = f"{moe}.experts.{e}.{name}"
                put(f"{expert}.weight_packed", n, k // 2, dtype=_BYTE)
                put(f"{expert}.weight_scale", n, k // GROUP, dtype=_BYTE)
    residual("model.output_attn_res", "model.norm")
    put("lm_head.weight", c.vocab_size, c.hidden)
    return names


def config_json(config: K3Config, **extra: Any) -> dict[str, Any]:
    """The contents of config.json; ``extra`` (token ids, positions) goes on top.

    Raises:
        ValueError: for sizes that the format cannot say: KDA heads whose keys, values
            and decay rank differ, or a shared width that is no multiple of an expert's.
    """
    c = config
    if not c.kda_k == c.kda_v == c.decay_rank:
        raise ValueError(
            f"kda_k is {c.kda_k}, kda_v {c.kda_v}, decay_rank {c.decay_rank}; the "
            "checkpoint has one head_dim for all three"
        )
    if c.shared_inner % c.expert_inner:
        raise ValueError(
            f"shared_inner is {c.shared_inner}; it must be a multiple of expert_inner "
            f"= {c.expert_inner}, one for every shared expert"
        )
    layers = range(c.layers)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "kimi_linear",
        "torch_dtype": "bfloat16",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden,
        "head_dim": c.hidden // c.heads,
        "intermediate_size": c.dense_inner,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.heads,
        "hidden_act": "situ",
        "activation_situ_beta": SITU_BETA,
        "activation_situ_linear_beta": SITU_LINEAR_BETA,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": False,
        "attn_res_block_size": c.residual_block,
        "linear_attn_config": {
            # 1-based in this format.
            "kda_layers": [i + 1 for i in layers if i not in c.mla_layers],
            "full_attn_layers": [i + 1 for i in layers if i in c.mla_layers],
            "num_heads": c.heads,
            "head_dim": c.kda_k,
            "short_conv_kernel_size": TAPS,
            "gate_lower_bound": c.decay_lower_bound,
            "use_full_rank_gate": True,
        },
        "q_lora_rank": c.q_lora,
        "kv_lora_rank": c.kv_lora,
        "qk_nope_head_dim": c.nope,
        "qk_rope_head_dim": c.rope,
        "v_head_dim": c.v_head,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "first_k_dense_replace": c.dense_layers,
        "moe_layer_freq": 1,
        "num_experts": c.experts,
        "num_experts_per_token": c.top_k,
        "num_shared_experts": c.shared_inner // c.expert_inner,
        "moe_intermediate_size": c.expert_inner,
        "routed_expert_hidden_size": c.latent,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": c.routed_scale,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        # The name vLLM gives the published compressed-tensors format before it picks a
        # method; KimiLinearForCausalLM on its own has no such rewrite.
        "quantization_config": {"quant_method": "mxfp4"},
    } | extra


def read_config(raw: Mapping[str, Any]) -> K3Config:
    """The sizes in a config.json of this architecture.

    Raises:
        ValueError: for another architecture, a setting this model does not have, or a
            missing key.
    """
    if raw.get("architectures") != [ARCHITECTURE]:
        raise ValueError(
            f"architectures is {raw.get('architectures')}; this reads {ARCHITECTURE}"
        )
    try:
        linear = raw["linear_attn_config"]
        fixed = {
            "hidden_act": "situ",
            "activation_situ_beta": SITU_BETA,
            "activation_situ_linear_beta": SITU_LINEAR_BETA,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "latent_moe_use_norm": True,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_expert_group": 1,
            "moe_layer_freq": 1,
        }
        for key, value in fixed.items():
            if raw[key] != value:
                raise ValueError(f"{key} is {raw[key]!r}; this model has {value!r}")
        if (
            not linear["use_full_rank_gate"]
            or linear["num_heads"] != (raw["num_attention_heads"])
        ):
            raise ValueError(
                f"linear_attn_config is {linear}; KDA needs use_full_rank_gate and as "
                f"many heads as MLA, {raw['num_attention_heads']}"
            )
        head = linear["head_dim"]
        return K3Config(
            vocab_size=raw["vocab_size"],
            hidden=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            residual_block=raw["attn_res_block_size"],
            mla_layers=tuple(i - 1 for i in linear["full_attn_layers"]),
            heads=raw["num_attention_heads"],
            kda_k=head,
            kda_v=head,
            decay_rank=head,
            decay_lower_bound=linear["gate_lower_bound"],
            q_lora=raw["q_lora_rank"],
            kv_lora=raw["kv_lora_rank"],
            nope=raw["qk_nope_head_dim"],
            rope=raw["qk_rope_head_dim"],
            v_head=raw["v_head_dim"],
            dense_layers=raw["first_k_dense_replace"],
            dense_inner=raw["intermediate_size"],
            experts=raw["num_experts"],
            top_k=raw["num_experts_per_token"],
            latent=raw["routed_expert_hidden_size"],
            expert_inner=raw["moe_intermediate_size"],
            shared_inner=raw["moe_intermediate_size"] * raw["num_shared_experts"],
            routed_scale=raw["routed_scaling_factor"],
            norm_eps=raw["rms_norm_eps"],
        )
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]}") from error


def named_tensors(config: K3Config, weights: K3Weights) -> dict[str, Tensor]:
    """The weights under the checkpoint's names, in its shapes and dtypes, on the CPU.

    Raises:
        ValueError: if a tensor does not have the shape that ``config`` implies.
    """
    c = config
    out: dict[str, Tensor] = {}

    def mlp(at: str, w: MlpWeights) -> None:
        out[f"{at}.gate_proj.weight"] = w.gate
        out[f"{at}.up_proj.weight"] = w.up
        out[f"{at}.down_proj.weight"] = w.down

    def residual(score: str, norm: str, w: ResidualWeights) -> None:
        out[f"{score}_norm.weight"] = w.norm
        out[f"{score}_proj.weight"] = w.query[None]
        out[f"{norm}.weight"] = w.output_norm

    out["model.embed_tokens.weight"] = weights.embedding
    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}"
        attention = f"{at}.self_attn"
        residual(
            f"{at}.self_attention_res", f"{at}.input_layernorm", layer.before_mixer
        )
        residual(f"{at}.mlp_res", f"{at}.post_attention_layernorm", layer.before_mlp)
        mixer = layer.mixer
        out[f"{attention}.o_proj.weight"] = mixer.out
        if isinstance(mixer, KdaLayer):
            keys, values = c.heads * c.kda_k, c.heads * c.kda_v
            parts = mixer.in_proj.split(
                [keys, keys, values, values, c.decay_rank, c.heads]
            )
            for name, part in zip(("q", "k", "v", "g", "f_a", "b"), parts, strict=True):
                out[f"{attention}.{name}_proj.weight"] = part
            core = mixer.core
            for name, taps in (
                ("q", core.conv_q),
                ("k", core.conv_k),
                ("v", core.conv_v),
            ):
                out[f"{attention}.{name}_conv1d.weight"] = taps.flatten(1).T[:, None]
            out[f"{attention}.f_b_proj.weight"] = mixer.w_fb
            out[f"{attention}.A_log"] = core.a_log
            out[f"{attention}.dt_bias"] = core.dt_bias.flatten()
            out[f"{attention}.o_norm.weight"] = core.norm
        else:
            own = mixer.core
            q_a, kv_a, gate = mixer.in_proj.split(
                [c.q_lora, c.kv_lora + c.rope, c.heads * c.v_head]
            )
            out[f"{attention}.q_a_proj.weight"] = q_a
            out[f"{attention}.kv_a_proj_with_mqa.weight"] = kv_a
            out[f"{attention}.g_proj.weight"] = gate
            out[f"{attention}.q_a_layernorm.weight"] = own.q_a_norm
            out[f"{attention}.kv_a_layernorm.weight"] = own.kv_norm
            out[f"{attention}.q_b_proj.weight"] = own.w_qb
            out[f"{attention}.kv_b_proj.weight"] = torch.cat(
                (own.w_uk, own.w_uv), 1
            ).flatten(0, 1)
        if isinstance(layer.mlp, MlpWeights):
            mlp(f"{at}.mlp", layer.mlp)
            continue
        m, moe = layer.mlp, f"{at}.block_sparse_moe"
        out[f"{moe}.gate.weight"] = m.router
        out[f"{moe}.gate.e_score_correction_bias"] = m.bias
        out[f"{moe}.routed_expert_down_proj.weight"] = m.latent_down
        out[f"{moe}.routed_expert_norm.weight"] = m.latent_norm
        out[f"{moe}.routed_expert_up_proj.weight"] = m.latent_up
        mlp(f"{moe}.shared_experts", m.shared)
        for e in range(c.experts):
            for name, bank in (("w1", m.w1), ("w3", m.w3), ("w2", m.w2)):
                expert = f"{moe}.experts.{e}.{name}"
                out[f"{expert}.weight_packed"] = bank.packed[e]
                out[f"{expert}.weight_scale"] = bank.scales[e]
    residual("model.output_attn_res", "model.norm", weights.output)
    out["lm_head.weight"] = weights.head
    wanted = layout(config)
    for name, (shape, dtype) in wanted.items():
        if tuple(out[name].shape) != shape:
            raise ValueError(
                f"{name} is {tuple(out[name].shape)}; the config implies {shape}"
            )
        out[name] = out[name].detach().to("cpu", dtype).contiguous().clone()
    return {name: out[name] for name in wanted}


def assemble(
    config: K3Config, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> K3Weights:
    """Weights in ``dtype`` from tensors under the checkpoint's names (MXFP4 as it is).

    Raises:
        ValueError: naming tensors that are missing, not expected or misshapen.
    """
    c, wanted = config, layout(config)
    missing = sorted(wanted.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - wanted.keys())
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint does not match its config: missing {missing[:4] or 'none'}"
            f", unexpected {unexpected[:4] or 'none'}"
        )
    for name, (shape, _) in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"{name} is {tuple(tensors[name].shape)}; the config implies {shape}"
            )

    def get(name: str) -> Tensor:
        return tensors[name].to(dtype)

    def mlp(at: str) -> MlpWeights:
        return MlpWeights(
            *(get(f"{at}.{part}_proj.weight") for part in ("gate", "up", "down"))
        )

    def residual(score: str, norm: str) -> ResidualWeights:
        return ResidualWeights(
            get(f"{score}_norm.weight"),
            get(f"{score}_proj.weight")[0],
            get(f"{norm}.weight"),
        )

    def kda(at: str) -> KdaLayer:
        def taps(part: str, width: int) -> Tensor:
            kernel = get(f"{at}.{part}_conv1d.weight")[:, 0].T
            return kernel.contiguous().unflatten(1, (c.heads, width))

        names = ("q", "k", "v", "g", "f_a", "b")
        return KdaLayer(
            in_proj=torch.cat([get(f"{at}.{name}_proj.weight") for name in names]),
            w_fb=get(f"{at}.f_b_proj.weight"),
            core=KdaWeights(
                conv_q=taps("q", c.kda_k),
                conv_k=taps("k", c.kda_k),
                conv_v=taps("v", c.kda_v),
                a_log=get(f"{at}.A_log"),
                dt_bias=get(f"{at}.dt_bias").unflatten(0, (c.heads, c.kda_k)),
                norm=get(f"{at}.o_norm.weight"),
                lower_bound=c.decay_lower_bound,
                norm_eps=c.norm_eps,
            ),
            out=get(f"{at}.o_proj.weight"),
        )

    def mla(at: str) -> MlaLayer:
        names = ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")
        both = get(f"{at}.kv_b_proj.weight").unflatten(0, (c.heads, -1))
        return MlaLayer(
            in_proj=torch.cat([get(f"{at}.{name}.weight") for name in names]),
            core=MlaWeights(
                q_a_norm=get(f"{at}.q_a_layernorm.weight"),
                kv_norm=get(f"{at}.kv_a_layernorm.weight"),
                w_qb=get(f"{at}.q_b_proj.weight"),
                w_uk=both[:, : c.nope].contiguous(),
                w_uv=both[:, c.nope :].contiguous(),
                norm_eps=c.norm_eps,
            ),
            out=get(f"{at}.o_proj.weight"),
        )

    def moe(at: str) -> MoeWeights:
        def bank(name: str) -> Mxfp4:
            every = [f"{at}.experts.{e}.{name}" for e in range(c.experts)]
            return Mxfp4(
                torch.stack([tensors[f"{e}.weight_packed"] for e in every]),
                torch.stack([tensors[f"{e}.weight_scale"] for e in every]),
            )

        return MoeWeights(
            router=get(f"{at}.gate.weight"),
            bias=get(f"{at}.gate.e_score_correction_bias"),
            latent_down=get(f"{at}.routed_expert_down_proj.weight"),
            latent_norm=get(f"{at}.routed_expert_norm.weight"),
            latent_up=get(f"{at}.routed_expert_up_proj.weight"),
            w1=bank("w1"),
            w3=bank("w3"),
            w2=bank("w2"),
            shared=mlp(f"{at}.shared_experts"),
            top_k=c.top_k,
            routed_scale=c.routed_scale,
            norm_eps=c.norm_eps,
        )

    def layer(i: int) -> K3Layer:
        at = f"model.layers.{i}"
        attention = f"{at}.self_attn"
        return K3Layer(
            residual(f"{at}.self_attention_res", f"{at}.input_layernorm"),
            mla(attention) if i in c.mla_layers else kda(attention),
            residual(f"{at}.mlp_res", f"{at}.post_attention_layernorm"),
            mlp(f"{at}.mlp") if i < c.dense_layers else moe(f"{at}.block_sparse_moe"),
        )

    return K3Weights(
        embedding=get("model.embed_tokens.weight"),
        layers=tuple(layer(i) for i in range(c.layers)),
        output=residual("model.output_attn_res", "model.norm"),
        head=get("lm_head.weight"),
    )


def save(
    directory: str | Path, config: K3Config, weights: K3Weights, **extra: Any
) -> None:
    """Write config.json (with ``extra``, see `config_json`) and model.safetensors."""
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_json(config, **extra), indent=2) + "\n"
    (directory / "config.json").write_text(text)
    save_file(
        named_tensors(config, weights),
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )


def load(
    directory: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> tuple[K3Config, K3Weights]:
    """Sizes and weights of a checkpoint directory, in ``dtype`` on ``device``.

    Raises:
        ValueError: if the directory holds no checkpoint of this kind, or one whose
            weights do not match its config.
    """
    from safetensors.torch import load_file

    directory = Path(directory)
    path, file = directory / "config.json", directory / "model.safetensors"
    if not path.is_file() or not file.is_file():
        raise ValueError(
            f"{directory} has no config.json or no model.safetensors; give a directory "
            "written by verify_kernels.model.checkpoint.save"
        )
    config = read_config(json.loads(path.read_text()))
    tensors = load_file(file, device=str(device))
    return config, assemble(config, tensors, dtype)


def load_model(
    directory: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> K3Model:
    """The checkpoint as the model that decodes step by step."""
    return K3Model(*load(directory, dtype, device))


@torch.no_grad()
def prompt_logits(model: K3Model, tokens: list[int]) -> Tensor:
    """Logits [T, vocab] of every position of one prompt, all positions at once."""
    weights = model.weights
    ids = torch.tensor([tokens], device=weights.embedding.device)
    banks = dense_banks(weights, model.dtype)
    return forward(model.config, weights, ids, experts=banks).logits[0]
