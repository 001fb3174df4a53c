# SPDX-License-Identifier: Apache-2.0
"""The experts' peers without vLLM's kernels: how its layer is built and called."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.bench import experts_peers
from experiments.bench.candidate import MODES
from experiments.bench.experts_data import INDEPENDENT, ExpertsShape, Step, Weights
from experiments.bench.experts_ways import EXPERTS, ROUTED
from verify_kernels.moe import ExpertBank

CPU = torch.device("cpu")
SHAPE = ExpertsShape(16, 128, 64, 16, 4)


def bytes_of(*size: int) -> torch.nn.Parameter:
    filled = torch.full(size, 255, dtype=torch.uint8)
    return torch.nn.Parameter(filled, requires_grad=False)


class FakeVllm:
    """As much of vLLM as a layer touches; notes what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.arguments: dict[str, Any] = {}
        self.config: Any = None
        self.configs: list[Any] = []
        self.groups = False
        self.monolithic = False

    def modules(self) -> dict[str, Any]:
        def groups(**options: Any) -> None:
            self.calls.append(f"world {options['world_size']} {options['backend']}")

        def parallel(size: int) -> None:
            assert self.config.model_config is None
            self.groups = True

        fakes = (
            SimpleNamespace(
                VllmConfig=lambda: SimpleNamespace(
                    kernel_config=SimpleNamespace(moe_backend="auto"), model_config=None
                ),
                set_current_vllm_config=self.current,
            ),
            SimpleNamespace(
                model_parallel_is_initialized=lambda: self.groups,
                init_distributed_environment=groups,
                initialize_model_parallel=parallel,
            ),
            SimpleNamespace(set_forward_context=self.forward),
            SimpleNamespace(FusedMoEFactory=self.factory),
            SimpleNamespace(Mxfp4Config=lambda: "mxfp4"),
            SimpleNamespace(
                is_workspace_manager_initialized=lambda: False,
                init_workspace_manager=lambda device: self.calls.append("workspace"),
            ),
        )
        return dict(zip(experts_peers._MODULES, fakes, strict=True))

    @contextmanager
    def current(self, config: Any):  # type: ignore[no-untyped-def]
        self.config = config
        self.configs.append(config)
        yield

    @contextmanager
    def forward(self, metadata: Any, config: Any):  # type: ignore[no-untyped-def]
        assert metadata is None and any(config is one for one in self.configs)
        self.calls.append("context")
        yield

    def factory(self, **arguments: Any) -> Any:
        assert not torch.is_inference_mode_enabled()
        self.arguments = arguments
        count, latent = arguments["num_experts"], arguments["hidden_size"]
        width = arguments["intermediate_size"]
        method = SimpleNamespace(
            experts_cls=FakeVllm,
            is_monolithic=self.monolithic,
            topk_indices_dtype=torch.int32,
            process_weights_after_loading=lambda layer: self.calls.append("repack"),
        )
        layer = SimpleNamespace(
            quant_method=method,
            w13_weight=bytes_of(count, 2 * width, latent // 2),
            w13_weight_scale=bytes_of(count, 2 * width, latent // 32),
            w2_weight=bytes_of(count, latent, width // 2),
            w2_weight_scale=bytes_of(count, latent, width // 32),
            _ensure_moe_quant_config_init=lambda: self.calls.append("quant"),
            forward_modular=self.run,
        )
        router = SimpleNamespace(select_experts=self.choose)
        self.layer = layer
        self.moe_config = SimpleNamespace()
        return SimpleNamespace(
            routed_experts=layer, router=router, moe_config=self.moe_config
        )

    def choose(self, **given: Any) -> tuple[Tensor, Tensor]:
        self.calls.append("choose")
        rows = given["router_logits"].shape[0]
        return torch.ones(rows, 4), torch.zeros(rows, 4, dtype=torch.int32)

    def run(self, *, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        self.calls.append(f"run {int(topk_ids.sum())}")
        return torch.nn.functional.pad(x, (0, 8))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    found = FakeVllm()
    modules = found.modules()
    monkeypatch.setattr(experts_peers.vllm_peers, "load", modules.__getitem__)
    return found


def test_the_layer_is_the_models(fake: FakeVllm) -> None:
    """Its arguments, the padded share, the context of every call."""
    weights = Weights.draw(SHAPE, CPU)
    step = Step.draw(SHAPE, INDEPENDENT, 3, 2, CPU)
    with torch.inference_mode():
        layer = experts_peers.VllmLayer("humming", SHAPE, weights, step.bias, CPU)
    assert fake.config.kernel_config.moe_backend == "humming"
    assert fake.config.model_config.quantization_config is None
    assert fake.calls == ["workspace", "world 1 gloo", "repack", "quant"]
    given = fake.arguments
    assert given["intermediate_size"] == 256 and given["activation"] == "situ"
    assert (given["activation_situ_beta"], given["activation_situ_linear_beta"]) == (
        4.0,
        25.0,
    )
    assert given["scoring_func"] == "sigmoid" and given["quant_config"] == "mxfp4"
    assert torch.equal(given["e_score_correction_bias"], step.bias)
    assert fake.moe_config.intermediate_size_per_partition_unpadded == 64
    assert layer.note.startswith("vLLM's FakeVllm of 256 rows for 64")
    fake.calls.clear()
    out = experts_peers.alone(layer, step)(1)
    assert torch.equal(out, step.latent)
    assert fake.calls == ["context", f"run {int(step.ids[1].sum())}"]
    fake.calls.clear()
    experts_peers.routed(layer, step)(0)
    assert fake.calls == ["context", "choose", "context", "run 0"]
    with pytest.raises(RuntimeError, match=r"ids are torch.int64; the layer takes"):
        layer.experts(step.latent, step.shares[0], step.ids[0].long())


def test_what_is_padded_is_zero(fake: FakeVllm) -> None:
    weights = Weights.draw(SHAPE, CPU)
    bias = torch.zeros(16)
    experts_peers.VllmLayer("marlin", SHAPE, weights, bias, CPU)
    w13, w2 = fake.layer.w13_weight, fake.layer.w2_weight
    assert torch.equal(w13[:, :64], weights.gate.packed)
    assert torch.equal(w13[:, 256:320], weights.up.packed)
    assert not w13[:, 64:256].any() and not w13[:, 320:].any()
    assert torch.equal(w2[..., :32], weights.down.packed) and not w2[..., 32:].any()
    scales, last = fake.layer.w13_weight_scale, fake.layer.w2_weight_scale
    assert torch.equal(scales[:, 256:320], weights.up.scales)
    assert torch.equal(last[..., :2], weights.down.scales) and not last[..., 2:].any()


def test_widths_that_vllm_gives_a_rank() -> None:
    widths = {tp: experts_peers.padded_width(ExpertsShape.of(tp)) for tp in (1, 8, 16)}
    assert widths == {1: 3072, 8: 384, 16: 256}


def test_every_peer_is_reported_when_its_library_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(experts_peers.vllm_peers, "load", lambda name: "nothing here")
    weights = Weights.draw(SHAPE, CPU)
    warm = Step.draw(SHAPE, INDEPENDENT, 2, 1, CPU)
    offer = experts_peers.peers(SHAPE, weights, warm)
    why = "RuntimeError: vllm.config: nothing here"
    assert not offer.ways and offer.missing == {"humming": why, "marlin": why}


def test_a_layer_that_routes_by_itself_is_no_peer(fake: FakeVllm) -> None:
    fake.monolithic = True
    weights = Weights.draw(SHAPE, CPU)
    with pytest.raises(RuntimeError, match="humming routes by itself"):
        experts_peers.VllmLayer("humming", SHAPE, weights, torch.zeros(16), CPU)


def test_a_peer_runs_once_before_any_is_timed(fake: FakeVllm) -> None:
    """With the most rows; one that raises then is said, and the other is there."""
    weights = Weights.draw(SHAPE, CPU)
    warm = Step.draw(SHAPE, INDEPENDENT, 8, 1, CPU)
    seen: list[int] = []

    class Layer(experts_peers.VllmLayer):
        def experts(self, latent: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
            seen.append(len(latent))
            if self._config.kernel_config.moe_backend == "marlin":
                raise RuntimeError("no kernel image")
            return super().experts(latent, shares, ids)

        def bank(self) -> ExpertBank:
            return ExpertBank.of(weights.gate, weights.up, weights.down)

    offer = experts_peers.peers(SHAPE, weights, warm, Layer)
    assert offer.missing == {"marlin": "RuntimeError: no kernel image"}
    assert [(w.name, w.mode, w.part) for w in offer.ways] == [
        ("humming", "plain", EXPERTS),
        ("humming", "plain", ROUTED),
        *(
            (experts_peers.THERE, mode, part)
            for part in (EXPERTS, ROUTED)
            for mode in MODES
        ),
    ]
    assert seen == [8, 8]
    assert torch.equal(offer.ways[0].make(warm)(0), warm.latent)


def test_a_layer_whose_weights_ours_cannot_read_is_a_peer_all_the_same(
    fake: FakeVllm,
) -> None:
    weights = Weights.draw(SHAPE, CPU)
    warm = Step.draw(SHAPE, INDEPENDENT, 8, 1, CPU)

    class Layer(experts_peers.VllmLayer):
        def bank(self) -> ExpertBank:
            raise ValueError("in another order")

    offer = experts_peers.peers(SHAPE, weights, warm, Layer, ["humming"])
    assert offer.missing == {experts_peers.THERE: "ValueError: in another order"}
    assert [w.name for w in offer.ways] == ["humming", "humming"]
