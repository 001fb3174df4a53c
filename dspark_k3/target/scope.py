# SPDX-License-Identifier: Apache-2.0
"""Which deployments the K3 executor serves; the others are refused before loading.

An op that nobody named and that a deployment has no kernel for may be left to vLLM in
place of a refusal, if its rule says so. What is only known of loaded layers is decided
in `dspark_k3.target.left`.

Free of vLLM: it reads the attributes of a ``VllmConfig`` and nothing else, so every
rule can be tried without an engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspark_k3 import seams
from dspark_k3.settings import OPS, Settings
from dspark_k3.target.projections import without_kernel
from verify_kernels.attn_res.host import FORMS
from verify_kernels.batch import MAX_WIDTH
from verify_kernels.kda.host import DIM, TAPS
from verify_kernels.mla.host import Q_LORAS, SPLITS
from verify_kernels.mla.parts import LATENT, NOPE, ROPE, VALUE
from verify_kernels.moe.experts import FORMS as EXPERTS
from verify_kernels.moe.host import FORMS as ROUTES
from verify_kernels.moe.layout import whole_blocks

#: Compute capabilities on which the executor ran. The kernels are compiled for sm_100a
#: and sm_103a too, which nobody has run.
CAPABILITIES = ((9, 0),)
#: What gives the part of a KDA layer back that our kernel does not compute.
STOCK_CORE = 'set "ops": {"kda_core": "stock"}'
#: The same for an MLA layer.
STOCK_MLA = 'set "ops": {"mla_core": "stock"}'
#: And for the choice of experts.
STOCK_ROUTE = 'set "ops": {"moe_route": "stock"}'
#: And for the experts themselves.
STOCK_EXPERTS = 'set "ops": {"moe_experts": "stock"}'
#: What our MLA kernels are compiled for beside `Q_LORAS`, by vLLM's names, and the most
#: heads of a rank.
MLA_SHAPE = {
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
}
MOST_HEADS = SPLITS[-1][0]
#: Rows of an expert that vLLM gives a rank at least.
_LEAST_ROWS = 256
#: What gives vLLM's slots back.
SNAPSHOT_LAYOUT = 'set "kda_layout": "snapshot"'


class UnsupportedTarget(ValueError):
    """The executor was asked for and does not serve this deployment."""


@dataclass(frozen=True)
class Deployment:
    """What the rules read.

    Attributes:
        config: vLLM's ``VllmConfig``, or anything with the same attributes.
        settings: ours.
        capability: of the GPU, or None without one.
        engine: the installed vLLM, or None.
    """

    config: Any
    settings: Settings
    capability: tuple[int, int] | None
    engine: seams.Engine | None

    @property
    def text(self) -> Any:
        """The text model's configuration."""
        return self.config.model_config.hf_text_config

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.config.parallel_config.tensor_parallel_size


@dataclass(frozen=True)
class Rule:
    """A condition: what holds when it fails, and what to do about it.

    ``failed`` returns what was found, or None if the condition holds. Where it fails,
    ``op`` is left to vLLM unless the settings name it.
    """

    name: str
    failed: Callable[[Deployment], str | None]
    change: str
    op: str | None = None


def _engine(d: Deployment) -> str | None:
    if d.engine is None:
        return "no vLLM distribution is installed"
    if d.engine.distribution == seams.GPU_ENGINE.distribution and d.engine.tested:
        return None
    return f"{d.engine.distribution} {d.engine.version}"


def _capability(d: Deployment) -> str | None:
    if d.capability in CAPABILITIES:
        return None
    if d.capability is None:
        return "no CUDA device"
    return f"compute capability {d.capability[0]}.{d.capability[1]}"


def _architecture(d: Deployment) -> str | None:
    text = d.text
    linear = getattr(text, "linear_attn_config", None) or {}
    missing = [
        name
        for name, has in (
            ("KDA layers", linear.get("kda_layers")),
            ("full-rank KDA gate", linear.get("use_full_rank_gate")),
            ("MLA query latent", getattr(text, "q_lora_rank", None)),
            ("MLA output gate", getattr(text, "mla_use_output_gate", None)),
            ("attention residuals", getattr(text, "attn_res_block_size", None)),
        )
        if not has
    ]
    if getattr(text, "num_experts", None) is not None:
        missing += [
            name
            for name, has in (
                ("latent experts", getattr(text, "routed_expert_hidden_size", None)),
                ("shared experts", getattr(text, "num_shared_experts", None)),
            )
            if not has
        ]
    return f"the model has no {', no '.join(missing)}" if missing else None


def _heads(d: Deployment) -> str | None:
    linear = getattr(d.text, "linear_attn_config", None) or {}
    counts = {"MLA": d.text.num_attention_heads, "KDA": linear.get("num_heads", 0)}
    uneven = [f"{n} {kind} heads" for kind, n in counts.items() if n % d.tp]
    return f"TP {d.tp} with {', '.join(uneven)}" if uneven else None


def _kernels(d: Deployment) -> str | None:
    if _architecture(d) or _heads(d):
        return None
    ours = tuple(op for op in OPS if d.settings.ours(op))
    lacking = without_kernel(d.text, d.tp, ours)
    found = [f"{p.op} {p.name} has K = {p.k}" for p in lacking]
    hidden = d.text.hidden_size
    blocks = -(-d.text.num_hidden_layers // d.text.attn_res_block_size)
    if d.settings.ours("attn_res"):
        if hidden not in FORMS:
            found.append(f"attn_res has hidden size {hidden}")
        elif blocks > (most := max(form[0] for form in FORMS[hidden])):
            found.append(f"attn_res mixes {blocks} blocks of at most {most}")
    return ", ".join(found) or None


def _kda(
    setting: str, good: Callable[[Any], bool]
) -> Callable[[Deployment], str | None]:
    """The KDA setting of the model, if ``good`` denies it and the core is ours."""

    def failed(d: Deployment) -> str | None:
        if _architecture(d) or not d.settings.ours("kda_core"):
            return None
        value = d.text.linear_attn_config.get(setting)
        return None if good(value) else f"{setting}={value!r}"

    return failed


def _latent(d: Deployment) -> str | None:
    """What our MLA kernels do not compute, if MLA's core is ours."""
    if _architecture(d) or not d.settings.ours("mla_core"):
        return None
    found = [
        f"{name}={value!r}"
        for name, right in MLA_SHAPE.items()
        if (value := getattr(d.text, name, None)) != right
    ]
    if d.text.q_lora_rank not in Q_LORAS:
        found.append(f"q_lora_rank={d.text.q_lora_rank!r}")
    if (heads := d.text.num_attention_heads // d.tp) > MOST_HEADS:
        found.append(f"{heads} heads a rank")
    return ", ".join(found) or None


def _routing(d: Deployment) -> str | None:
    """What our routing kernel does not compute, if routing is ours."""
    if _architecture(d) or not d.settings.ours("moe_route"):
        return None
    experts = getattr(d.text, "num_experts", None)
    if experts is None:
        return None
    wanted = (
        ("moe_router_activation_func", "sigmoid"),
        ("moe_renormalize", True),
        ("num_expert_group", 1),
    )
    found = [
        f"{name}={value!r}"
        for name, right in wanted
        if (value := getattr(d.text, name, right)) != right
    ]
    top_k = d.text.num_experts_per_token
    if (experts, top_k) not in ROUTES:
        found.append(f"{top_k} of {experts} experts")
    return ", ".join(found) or None


def _experts(d: Deployment) -> str | None:
    """A rank's share that our experts' kernels do not have, if the experts are ours."""
    if _architecture(d) or _heads(d) or not d.settings.ours("moe_experts"):
        return None
    experts = getattr(d.text, "num_experts", None)
    if experts is None:
        return None
    rows = d.text.moe_intermediate_size // d.tp
    least = getattr(d.text, "min_moe_intermediate_per_partition", _LEAST_ROWS)
    held = max(rows, least) if d.tp > 1 else rows
    rows, held = whole_blocks(rows), whole_blocks(held)
    latent, top_k = d.text.routed_expert_hidden_size, d.text.num_experts_per_token
    if ((latent, rows, experts, top_k), held) in EXPERTS:
        return None
    return f"{top_k} of {experts} experts of {latent} x {rows}, {held} held, a rank"


def _window_layout(d: Deployment) -> str | None:
    name = "VLLM_SSM_CONV_STATE_LAYOUT"
    layout = os.environ.get(name) or "SD"
    if layout == "SD" or not d.settings.ours("kda_core"):
        return None
    return f"{name}={layout}"


def _is(path: str, good: Callable[[Any], bool]) -> Callable[[Deployment], str | None]:
    """The attribute at the dotted ``path`` of the config, if ``good`` denies it. A
    path that ends early (None, or an attribute the engine lacks) holds."""

    def failed(d: Deployment) -> str | None:
        value = d.config
        for name in path.split("."):
            value = getattr(value, name, None)
            if value is None:
                return None
        return None if good(value) else f"{path.rsplit('.', 1)[-1]}={value!r}"

    return failed


def _one(value: Any) -> bool:
    return value == 1


def _off(value: Any) -> bool:
    return not value


def _negative(value: Any) -> bool:
    return value is not None and value < 0


def _bf16(value: Any) -> bool:
    return str(value) in ("auto", "bfloat16")


def _absent(name: str, what: str) -> Callable[[Deployment], str | None]:
    def failed(d: Deployment) -> str | None:
        return None if getattr(d.config, name, None) is None else what

    return failed


def _offloaded(d: Deployment) -> str | None:
    for path in (
        "offload_config.uva.cpu_offload_gb",
        "offload_config.prefetch.offload_group_size",
    ):
        if found := _is(path, _off)(d):
            return found
    return None


def _attention_backend(d: Deployment) -> str | None:
    """One name for the target's MLA, which ours extends, would bind the drafter too,
    and no backend but TRITON_MLA serves its non-causal block on Hopper."""
    for path in ("attention_config.backend", "attention_config.backend_per_kind"):
        if found := _is(path, _off)(d):
            return found
    return None


def _graphs(d: Deployment) -> str | None:
    mode = str(getattr(d.config.compilation_config, "cudagraph_mode", None))
    return f"cudagraph_mode={mode}" if mode.endswith(".PIECEWISE") else None


def _tap_stream(d: Deployment) -> str | None:
    name = "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM"
    asked = d.config.speculative_config is not None and _switched_on(name)
    return name if asked else None


def _switched_on(variable: str) -> bool:
    """Whether an environment variable of vLLM's, 0 or 1, is 1."""
    return os.environ.get(variable, "0").strip().lower() in ("1", "true")


def _decode_backend(d: Deployment) -> str | None:
    extra = d.config.additional_config
    backend = extra.get("decode_backend", "auto") if isinstance(extra, dict) else "auto"
    return None if backend == "auto" else f"decode_backend={backend!r}"


RULES: tuple[Rule, ...] = (
    Rule("the engine", _engine, f"run {seams.GPU_ENGINE}"),
    Rule("the GPU", _capability, "use a Hopper GPU (H100, H200)"),
    Rule(
        "the architecture",
        _architecture,
        "serve a Kimi K3 model, or leave target out",
    ),
    Rule(
        "whole heads on every rank",
        _heads,
        "choose a tensor-parallel size that divides the heads",
    ),
    Rule(
        "a kernel for every projection",
        _kernels,
        "choose another tensor-parallel size, or set the sublayer to stock in ops",
    ),
    Rule(
        "bf16 activations",
        _is("model_config.dtype", lambda v: str(v).endswith("bfloat16")),
        "pass --dtype bfloat16",
    ),
    Rule(
        "model runner V2",
        _is("use_v2_model_runner", bool),
        "unset VLLM_USE_V2_MODEL_RUNNER",
    ),
    Rule(
        "a model that generates",
        _is("model_config.runner_type", lambda v: v == "generate"),
        "leave --runner out",
    ),
    Rule(
        "one pipeline stage",
        _is("parallel_config.pipeline_parallel_size", _one),
        "use tensor parallelism alone",
    ),
    Rule(
        "no data parallelism",
        _is("parallel_config.data_parallel_size", _one),
        "start one engine a replica",
    ),
    Rule(
        "experts on every rank",
        _is("parallel_config.enable_expert_parallel", _off),
        "leave --enable-expert-parallel out",
    ),
    Rule(
        "whole contexts on every rank (decode)",
        _is("parallel_config.decode_context_parallel_size", _one),
        "leave --decode-context-parallel-size out",
    ),
    Rule(
        "whole contexts on every rank (prefill)",
        _is("parallel_config.prefill_context_parallel_size", _one),
        "leave --prefill-context-parallel-size out",
    ),
    Rule(
        "whole batches",
        _is("parallel_config.use_ubatching", _off),
        "leave --enable-dbo out",
    ),
    Rule(
        "no LoRA",
        _absent("lora_config", "LoRA adapters"),
        "leave --enable-lora out",
    ),
    Rule(
        "weights that stay where they are (sleep mode)",
        _is("model_config.enable_sleep_mode", _off),
        "leave --enable-sleep-mode out",
    ),
    Rule(
        "weights that stay where they are (offloading)",
        _offloaded,
        "leave --cpu-offload-gb and --offload-* out",
    ),
    Rule(
        "weights that stay as loaded",
        _absent("weight_transfer_config", "weight transfer"),
        "leave --weight-transfer-config out",
    ),
    Rule(
        "DSpark or no speculation",
        _is("speculative_config.method", lambda v: v == "dspark"),
        'use "method": "dspark"',
    ),
    Rule(
        f"at most {MAX_WIDTH - 1} drafts",
        _is("speculative_config.num_speculative_tokens", lambda v: v < MAX_WIDTH),
        f"set num_speculative_tokens to {MAX_WIDTH - 1} or less",
    ),
    Rule(
        "one draft length a deployment, or adaptive verification",
        _is("speculative_config.num_speculative_tokens_per_batch_size", _off),
        "leave num_speculative_tokens_per_batch_size out; "
        "enable_adaptive_verification trims drafts by request",
    ),
    Rule(
        "drafter taps on the AttnRes prefix",
        _tap_stream,
        "unset VLLM_KIMI_K3_AUX_ATTN_RES_STREAM",
    ),
    Rule(
        "a bf16 KV cache",
        _is("cache_config.cache_dtype", _bf16),
        "leave --kv-cache-dtype out",
    ),
    Rule(
        "bf16 convolution windows",
        _is("cache_config.mamba_cache_dtype", _bf16),
        "leave --mamba-cache-dtype out",
    ),
    Rule(
        "float32 KDA states",
        _is("cache_config.mamba_ssm_cache_dtype", lambda v: v in ("auto", "float32")),
        "leave --mamba-ssm-cache-dtype out",
    ),
    Rule(
        "KDA heads that the kernel has",
        _kda("head_dim", lambda v: v == DIM),
        STOCK_CORE,
    ),
    Rule(
        "KDA convolutions that the kernel has",
        _kda("short_conv_kernel_size", lambda v: v == TAPS),
        STOCK_CORE,
    ),
    Rule("a bounded KDA decay", _kda("gate_lower_bound", _negative), STOCK_CORE),
    Rule("MLA that the kernels have", _latent, STOCK_MLA, "mla_core"),
    Rule("routing that the kernel has", _routing, STOCK_ROUTE, "moe_route"),
    Rule("experts that the kernels have", _experts, STOCK_EXPERTS, "moe_experts"),
    Rule(
        "convolution windows with channels last",
        _window_layout,
        f"unset VLLM_SSM_CONV_STATE_LAYOUT, or {STOCK_CORE}",
    ),
    Rule(
        "committed KDA states in vLLM's slots",
        _is("cache_config.use_replayssm", _off),
        'leave --use-replayssm out; "kda_layout": "fold" takes one slot a request',
    ),
    Rule(
        "KDA states of no other request",
        _is("cache_config.mamba_cache_mode", lambda v: v == "none"),
        "pass --no-enable-prefix-caching",
    ),
    Rule(
        "caches that stay on the GPU",
        _absent("kv_transfer_config", "a KV connector or offloading"),
        "leave --kv-transfer-config and --kv-offloading-size out",
    ),
    Rule(
        "vLLM's own choice of attention backends",
        _attention_backend,
        "leave --attention-backend and --attention-config out",
    ),
    Rule(
        "whole graphs of decode steps, or none",
        _graphs,
        "leave cudagraph_mode out of --compilation-config",
    ),
    Rule(
        "no outer torch.compile",
        _is("compilation_config.mode", lambda v: "STOCK_TORCH_COMPILE" not in str(v)),
        "leave mode out of --compilation-config",
    ),
    Rule(
        "no returned routing",
        _is("aux_output_config.enabled", _off),
        "leave --aux-output-config out",
    ),
    Rule(
        "the executor alone",
        _decode_backend,
        "leave decode_backend out of --additional-config",
    ),
)


def failures(deployment: Deployment) -> list[str]:
    """Every failed condition that is refused: what it is, what was found, what to
    change."""
    found = []
    for rule in RULES:
        if _may_be_left(rule, deployment.settings):
            continue
        if (what := rule.failed(deployment)) is not None:
            found.append(f"{rule.name}: found {what}; {rule.change}")
    return found


def left(deployment: Deployment) -> dict[str, str]:
    """The ops that nobody named and this deployment has no kernel for, and why."""
    found = {}
    for rule in RULES:
        if not _may_be_left(rule, deployment.settings):
            continue
        if (what := rule.failed(deployment)) is not None:
            assert rule.op is not None
            found[rule.op] = what
    return found


def _may_be_left(rule: Rule, settings: Settings) -> bool:
    return rule.op is not None and rule.op not in settings.named


def require(config: Any, settings: Settings) -> Settings:
    """The settings with the ops that are left to vLLM (`left`) stock.

    Raises:
        UnsupportedTarget: the deployment is outside the scope; with every failed
            condition on a line of its own.
    """
    import torch

    capability = (
        torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    )
    deployment = Deployment(config, settings, capability, seams.installed_engine())
    if found := failures(deployment):
        raise UnsupportedTarget(
            'dspark-k3: additional_config asks for "target", and the K3 executor does '
            "not serve this deployment. It needs\n  " + "\n  ".join(found)
        )
    return settings.without(left(deployment))
