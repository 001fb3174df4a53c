# SPDX-License-Identifier: Apache-2.0
"""KDA verify on the GPU: its buffers, the compiled forms, the checks, the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verify_kernels.batch import MAX_ROWS, MAX_WIDTH, VerifyBatch
from verify_kernels.common.checks import Argument, check_all
from verify_kernels.common.variant import Variant, cached, device_arch, fake

#: K and V of a head, and the rank of the decay's projection.
DIM = 128
TAPS = 4
#: Entries of a window: three taps of the past and the rows of a step.
WINDOW = TAPS - 1 + MAX_WIDTH
#: CTAs of a cluster that are compiled; no bit depends on it.
CLUSTERS = (1, 2, 4, 8)
#: Heads of all requests of a step up to which they get such clusters: the best of four,
#: one row or eight, 6 to 96 heads (H200, 2026-11-30, graphs of programmatic
#: launches). With snapshots a wider cluster stores more states at a time.
FOLD_CLUSTERS = ((8, 8), (16, 4), (32, 2))
SNAPSHOT_CLUSTERS = ((8, 8), (60, 4), (110, 2))
#: Two CTAs of 256 threads fit an SM.
MAX_REGISTERS = 128
MAX_SHARED_BYTES = 113 * 1024
#: By name: whether rows are recorded to be folded, and whether the window rolls. "slot"
#: is the fold in vLLM's slots (`verify_kernels.kda.slots`).
LAYOUTS = {"fold": (True, False), "snapshot": (False, True), "slot": (True, True)}
#: At -O3 ptxas gives registers away for overlap and then spills the state: 8 to 104
#: bytes a thread of a whole head at 128 registers; at -O2 it needs 111 and spills none.
OPTIONS = "--ptxas-options -O2"


@dataclass(frozen=True)
class KdaVerifyWeights:
    """A layer's static weights, this rank's heads; all contiguous.

    The kernel reads them before earlier kernels end, so nothing may write them while
    steps run.

    Attributes:
        w_fb: bf16 [H 128, 128], f_a to the decay input.
        conv: fp32 [3 H 128, 4], taps of a channel of q, k, then v; the last is the
            row's own.
        a_log: fp32 [H].
        dt_bias: fp32 [H, 128].
        norm: fp32 [128], of the gated RMSNorm.
        lower_bound: the decay's logarithm lies in (lower_bound, 0).
        norm_eps: added to the mean square.
    """

    w_fb: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    lower_bound: float = -5.0
    norm_eps: float = 1e-5


@dataclass(frozen=True)
class KdaFoldState:
    """Slots of a layer in the fold layout: committed state, and the last step's rows.

    A step leaves the state as it was before its own rows and records what they change;
    the next step applies what was accepted of them while it loads. So ``state`` lacks
    the last step's accepted rows until then, or until `verify_kernels.kda.kda_commit`.
    The slot's stride is open (also the window's row stride); inside a slot all is
    contiguous.

    Attributes:
        state: fp32 [slots, H, V, K].
        window: bf16 [slots, 11, 3 H 128], projections of q, k and v before the
            convolution: three taps before the last step's row 0, oldest first, then
            the rows of the last step; entries past its width are stale. A prompt's
            last three go to entries 0 to 2, zeros where it is shorter.
        u, key, decay: fp32 [slots, H, 8, 128], of the last step's rows: u over V, the
            unit key and e^g over K; rows past its width are stale.
        counts: int32 [slots, H, 2]: rows recorded and not yet folded, and how often
            more were reported accepted than that.
    """

    state: Tensor
    window: Tensor
    u: Tensor
    key: Tensor
    decay: Tensor
    counts: Tensor

    @classmethod
    def allocate(
        cls, slots: int, heads: int, device: torch.device | str
    ) -> KdaFoldState:
        """Zero state, windows and counts; records NaN, so a wrong read shows."""

        def records() -> Tensor:
            shape = (slots, heads, MAX_WIDTH, DIM)
            return torch.full(shape, torch.nan, dtype=torch.float32, device=device)

        return cls(
            state=torch.zeros(
                slots, heads, DIM, DIM, dtype=torch.float32, device=device
            ),
            window=torch.zeros(
                slots, WINDOW, 3 * heads * DIM, dtype=torch.bfloat16, device=device
            ),
            u=records(),
            key=records(),
            decay=records(),
            counts=torch.zeros(slots, heads, 2, dtype=torch.int32, device=device),
        )

    def start(self, slots: Tensor) -> None:
        """Forget the recorded rows of ``slots``, an index tensor: their state and the
        first three window entries hold what a prompt left. No synchronisation."""
        self.counts[:, :, 0].index_fill_(0, slots, 0)


def variant_name(ctas: int, layout: str) -> str:
    """Name of a form, its layout one of `LAYOUTS`; says all its kernel is made from."""
    return f"{layout}_c{ctas}"


def cluster_size(requests: int, heads: int, fold: bool) -> int:
    """CTAs of a cluster for a step of ``requests`` requests, padding included.

    Few heads are spread over more SMs. No bit depends on it.
    """
    for most, ctas in FOLD_CLUSTERS if fold else SNAPSHOT_CLUSTERS:
        if requests * heads <= most:
            return ctas
    return 1


def _arguments(fold: bool, rolling: bool) -> Sequence[Any]:
    """Fake arguments: M, B, the heads, the slots and their strides are open."""
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    heads, requests, slots = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def records() -> Any:
        return fake(cutlass.Float32, (slots, heads, MAX_WIDTH, DIM), 1, 16)

    def integers(extent: Any) -> Any:
        return fake(cutlass.Int32, (extent,), 0, 4)

    bf16, fp32 = cutlass.BFloat16, cutlass.Float32
    return (
        fake(bf16, (cute.sym_int(), cute.sym_int()), 1, 16),
        fake(bf16, (cute.sym_int(), DIM), 0, 16),
        fake(fp32, (cute.sym_int(), TAPS), 0, 16),
        fake(fp32, (heads,), 0, 4),
        fake(fp32, (heads, DIM), 0, 4),
        fake(fp32, (DIM,), 0, 16),
        integers(cute.sym_int()),
        fake(cutlass.Int32, (requests, cute.sym_int()), 1, 4)
        if rolling
        else integers(requests),
        integers(requests),
        fake(fp32, (slots, heads, DIM, DIM), 1, 16),
        fake(bf16, (cute.sym_int(), cute.sym_int(), cute.sym_int()), 2, 16),
        *([records() for _ in range(3)] if fold else [None] * 3),
        fake(cutlass.Int32, (slots, heads, 2), 1, 4) if fold else None,
        fake(bf16, (cute.sym_int(), heads, DIM), 1, 8),
        cutlass.Float32(0.0),
        cutlass.Float32(0.0),
        cutlass.Int32(0),
        cutlass.Int32(0),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def variants() -> list[Variant]:
    """One form a layout and cluster size, and the commits. Programmatic launch is an
    argument."""
    from verify_kernels.kda.eager import commit_variant
    from verify_kernels.kda.kernel import KdaKernel

    forms = [
        Variant(
            op="kda",
            name=variant_name(ctas, layout),
            kernel=KdaKernel(ctas, *parts),
            arguments=functools.partial(_arguments, *parts),
            max_registers=MAX_REGISTERS,
            max_shared_bytes=MAX_SHARED_BYTES,
            options=OPTIONS,
        )
        for layout, parts in LAYOUTS.items()
        for ctas in CLUSTERS
    ]
    return [*forms, commit_variant(False), commit_variant(True)]


@functools.cache
def compiled(device: int, ctas: int, layout: str) -> Callable[..., None]:
    """The form of a layout and cluster size for a GPU."""
    name = variant_name(ctas, layout)
    variant = next(v for v in variants() if v.name == name)
    return cached(variant, device_arch(device))


def packed_width(heads: int) -> int:
    """Columns of the packed projection [q | k | v | gate | f_a | beta], no padding."""
    return 4 * heads * DIM + DIM + heads


def weight_arguments(weights: KdaVerifyWeights, heads: int) -> list[Argument]:
    """In the kernel's order."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        ("w_fb", weights.w_fb, bf16, (heads * DIM, DIM), 0, 16),
        ("conv", weights.conv, fp32, (3 * heads * DIM, TAPS), 0, 16),
        ("a_log", weights.a_log, fp32, (heads,), 0, 4),
        ("dt_bias", weights.dt_bias, fp32, (heads, DIM), 0, 4),
        ("norm", weights.norm, fp32, (DIM,), 0, 16),
    ]


def cache_arguments(state: Tensor, window: Tensor) -> list[Argument]:
    """State and window, whose extents but the last two and the last are open."""
    slots, heads = state.shape[:2]
    columns = (slots, window.shape[1], 3 * heads * DIM)
    return [
        ("state", state, torch.float32, (slots, heads, DIM, DIM), 1, 16),
        ("window", window, torch.bfloat16, columns, 2, 16),
    ]


def record_arguments(cache: KdaFoldState) -> list[Argument]:
    """Records and counts, slots open."""
    shape = (*cache.state.shape[:2], MAX_WIDTH, DIM)
    return [
        ("u", cache.u, torch.float32, shape, 1, 16),
        ("key", cache.key, torch.float32, shape, 1, 16),
        ("decay", cache.decay, torch.float32, shape, 1, 16),
        ("counts", cache.counts, torch.int32, (*shape[:2], 2), 1, 4),
    ]


def _launch(
    packed: Tensor,
    weights: KdaVerifyWeights,
    state: Tensor,
    window: Tensor,
    entries: int,
    slots: Tensor,
    records: Sequence[Argument],
    batch: VerifyBatch,
    out: Tensor | None,
    ctas: int | None,
    pdl: bool,
) -> Tensor:
    """Checks, and the launch: of the fold layout if there are ``records``."""
    heads = state.shape[1] if state.dim() == 4 else 0
    if not heads or packed.dim() != 2 or packed.shape[1] < packed_width(heads):
        raise ValueError(
            f"packed is {tuple(packed.shape)} and state {tuple(state.shape)}; they "
            f"must be [M, P] and [slots, H, {DIM}, {DIM}] with P at least "
            f"{packed_width(heads)} for {heads} heads"
        )
    rows, requests = packed.shape[0], batch.size
    if rows > MAX_ROWS:
        raise ValueError(
            f"packed has {rows} rows; at most {MAX_ROWS}: split the step or use "
            "another kernel for prefill"
        )
    if ctas is None:
        ctas = cluster_size(requests, heads, bool(records))
    if ctas not in CLUSTERS:
        raise ValueError(f"ctas is {ctas}; it must be one of {CLUSTERS}")
    width = 3 * heads * DIM
    if window.dim() != 3 or window.shape[1] < entries:
        raise ValueError(
            f"window is {tuple(window.shape)}; it must be [slots, W, {width}] with W "
            f"at least {entries}"
        )
    bf16, fp32, int32 = torch.bfloat16, torch.float32, torch.int32
    table = (requests,) if records else (requests, *slots.shape[1:2])
    if out is None:
        out = torch.empty((rows, heads, DIM), dtype=bf16, device=packed.device)
    # In the kernel's order.
    arguments: list[Argument] = [
        ("packed", packed, bf16, packed.shape, 1, 16),
        *weight_arguments(weights, heads),
        ("row_start", batch.row_start, int32, (requests + 1,), 0, 4),
        ("state_slots" if records else "slots", slots, int32, table, len(table) - 1, 4),
        ("accepted", batch.accepted, int32, (requests,), 0, 4),
        *cache_arguments(state, window),
        *(records or [("", None, fp32, (), 0, 4)] * 4),
        ("out", out, bf16, (rows, heads, DIM), 1, 8),
    ]
    check_all(arguments, packed.device, "packed")
    if not rows or not requests:
        return out
    if packed.device.type != "cuda":
        raise ValueError(
            f"packed is on {packed.device}; the kernel needs a CUDA device: move the "
            "tensors there or use verify_kernels.kda.reference"
        )
    compiled(packed.device.index, ctas, "fold" if records else "snapshot")(
        *(tensor for _, tensor, *_ in arguments),
        weights.lower_bound,
        weights.norm_eps,
        1 if records else slots.shape[1],
        int(pdl),
    )
    return out


def kda_verify(
    packed: Tensor,
    weights: KdaVerifyWeights,
    cache: KdaFoldState,
    batch: VerifyBatch,
    out: Tensor | None = None,
    *,
    ctas: int | None = None,
    pdl: bool = True,
) -> Tensor:
    """Fold what was accepted of the last step, then run this step's rows; one launch.

    The equations are in `verify_kernels.kda.reference`, the layout is its *fold*; all
    is fp32 but r = W_fb f_a, which is rounded to bf16 as between vLLM's two GEMMs, and
    the result, rounded once. A row's bits do not depend on the request's width, on
    other requests, or on ``ctas``, and a folded row leaves the bits that the step left
    which computed it. A step of width 1 is plain decoding.

    Of request b with slot s, ``min(accepted[b], counts[s, h, 0])`` rows are folded,
    none if that is negative; more accepted than recorded adds 1 to ``counts[s, h, 1]``.
    Requests of width 0 are not touched, so pass their count again with their next rows.
    Rows of a request with slot <= 0 are zeros in ``out``; rows from
    ``batch.row_start[B]`` on are not written. No two requests may have one live slot.

    Args:
        packed: bf16 [M, P], M = 0 .. 64, P at least `packed_width`: q, k, v, output
            gate (H 128 each), f_a (128), beta (H), padding; rows at multiples of 16
            bytes.
        weights: static, read before earlier kernels end.
        cache: updated in place.
        batch: on the device; ``history`` and ``block_table`` are not read.
        out: bf16 [M, H, 128], or None to allocate it; rows at multiples of 8 bytes. It
            may not share memory with another argument. An allocated one is not cleared.
        ctas: CTAs of a cluster, 1, 2, 4 or 8; None asks `cluster_size`.
        pdl: launch without waiting for earlier kernels to end; the kernel waits itself.

    Returns:
        ``out``, gated and normed.

    Raises:
        ValueError: for a dtype, shape, stride or device that does not fit, more than 64
            rows, or a cluster size that is not compiled. Nothing is written then.
    """
    return _launch(
        packed,
        weights,
        cache.state,
        cache.window,
        WINDOW,
        batch.state_slots,
        record_arguments(cache),
        batch,
        out,
        ctas,
        pdl,
    )


def kda_verify_snapshots(
    packed: Tensor,
    weights: KdaVerifyWeights,
    state: Tensor,
    window: Tensor,
    slots: Tensor,
    batch: VerifyBatch,
    out: Tensor | None = None,
    *,
    ctas: int | None = None,
    pdl: bool = True,
) -> Tensor:
    """Run this step's rows from the snapshot after the last accepted one; one launch.

    vLLM's own slots, and the layout of `verify_kernels.kda.snapshot`: request b starts
    from the state in ``slots[b, accepted[b] - 1]`` and leaves the state after its row t
    in ``slots[b, t]``, unless that is <= 0. Its window is in ``slots[b, 0]`` alone,
    c[0 ..]: the taps before row 0 are c[a - 1 .. a + 1] with a = accepted[b], and the
    step leaves [c[a], c[a + 1], x_0, .. x_{q - 1}], what follows stale. An accepted
    count is clamped into 1 .. S; it must not exceed the rows of the last step, which
    nothing here knows. After a prompt it is 1.

    Numbers, bits and the treatment of requests without rows are those of `kda_verify`;
    a request whose ``slots[b, 0]`` is <= 0 has none.

    Args:
        packed, weights, out, ctas, pdl: as of `kda_verify`.
        state: fp32 [N, H, 128, 128], V before K; slots at multiples of 16
            bytes.
        window: bf16 [N, W, 3 H 128], W at least S + 2: projections of q, k and v
            before the convolution; slots and entries at multiples of 16 bytes.
        slots: int32 [B, S], S = 1 .. 8, rows at any stride. A request may have at most
            S rows. No slot may be in it twice but for those <= 0.
        batch: on the device; ``state_slots`` is not read, ``slots`` are instead.

    Returns:
        ``out``, gated and normed.

    Raises:
        ValueError: as `kda_verify`, and for ``slots`` that are not a table.
    """
    if slots.dim() != 2 or not 1 <= slots.shape[1] <= MAX_WIDTH:
        raise ValueError(
            f"slots is {tuple(slots.shape)}; it must be [B, S] with S 1 to {MAX_WIDTH}"
        )
    return _launch(
        packed,
        weights,
        state,
        window,
        slots.shape[1] + TAPS - 2,
        slots,
        (),
        batch,
        out,
        ctas,
        pdl,
    )


def by_requests(
    state: Tensor, ctas: int | None, layout: str, reference: str
) -> list[Callable[..., None]]:
    """Launches for steps of 0 to 64 requests on the GPU of ``state`` [slots, H, ...].

    Args:
        state: as checked.
        ctas: of every cluster; None for `cluster_size`.
        layout: of `compiled`.
        reference: what computes the same on a CPU.

    Raises:
        ValueError: for a cluster size that is not compiled, or a CPU.
    """
    if ctas not in (None, *CLUSTERS):
        raise ValueError(f"ctas is {ctas}; it must be one of {CLUSTERS}")
    device, heads = state.device, state.shape[1]
    if device.type != "cuda":
        raise ValueError(
            f"state is on {device}; the kernel needs a CUDA device: move the tensors "
            f"there or use {reference}"
        )
    fold = layout != "snapshot"
    return [
        compiled(device.index, ctas or cluster_size(requests, heads, fold), layout)
        for requests in range(MAX_ROWS + 1)
    ]


class BoundSnapshots:
    """`kda_verify_snapshots` for weights that stay and caches of one layout.

    Made by `bind_snapshots`. It holds the weights' memory, so a parameter that is given
    other memory must be bound again. The caches come with each call: their owner may
    free them in between. May be captured in a graph.
    """

    __slots__ = ("_columns", "_kernels", "_numbers", "_pdl", "_weights")

    def __init__(
        self,
        kernels: Sequence[Callable[..., None]],
        weights: KdaVerifyWeights,
        columns: int,
        pdl: bool,
    ) -> None:
        """``kernels`` by the number of requests; more than all take the last one."""
        w = weights
        self._kernels = kernels
        self._weights = (w.w_fb, w.conv, w.a_log, w.dt_bias, w.norm)
        self._columns = columns
        self._numbers = (w.lower_bound, w.norm_eps)
        self._pdl = int(pdl)

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
        """Launch on the current stream.

        Args:
            packed, state, window, slots, out: as of `kda_verify_snapshots`, M and B at
                least 1; caches as those that were checked.
            row_start, accepted: as of `verify_kernels.batch.VerifyBatch`.

        Raises:
            ValueError: more than 64 rows, or more columns of ``slots`` than 8 or than
                the window has room for. Nothing is written then. Other dtypes and
                extents the compiled function checks, in words of its own; that
                ``packed`` and ``out`` have the rows that ``row_start`` names, nobody
                does.
        """
        requests, columns = slots.shape
        rows = packed.shape[0]
        if rows > MAX_ROWS or columns > self._columns:
            raise ValueError(
                f"packed has {rows} rows and slots {columns} columns; at most "
                f"{MAX_ROWS} rows and {self._columns} columns"
            )
        kernel = self._kernels[min(requests, len(self._kernels) - 1)]
        kernel(
            packed,
            *self._weights,
            row_start,
            slots,
            accepted,
            state,
            window,
            None,
            None,
            None,
            None,
            out,
            *self._numbers,
            columns,
            self._pdl,
        )


def bind_snapshots(
    weights: KdaVerifyWeights,
    state: Tensor,
    window: Tensor,
    *,
    ctas: int | None = None,
    pdl: bool = True,
) -> BoundSnapshots:
    """The snapshot launch of a layer: what stays is checked and compiled here.

    Args:
        weights, state, window, ctas, pdl: as of `kda_verify_snapshots`; on the device
            that launches are for. The caches are checked and not held. The window has
            W entries: a call's ``slots`` may have W - 2 columns, and 8 at most.

    Raises:
        ValueError: for a dtype, shape, stride or device that does not fit, or a cluster
            size that is not compiled.
    """
    heads = state.shape[1] if state.dim() == 4 else 0
    if not heads or window.dim() != 3:
        raise ValueError(
            f"state is {tuple(state.shape)} and window {tuple(window.shape)}; they "
            f"must be [slots, H, {DIM}, {DIM}] and [slots, W, 3 H {DIM}]"
        )
    arguments = cache_arguments(state, window) + weight_arguments(weights, heads)
    check_all(arguments, state.device, "state")
    columns = min(MAX_WIDTH, window.shape[1] - (TAPS - 2))
    if columns < 1:
        raise ValueError(
            f"window is {tuple(window.shape)}; it must have at least {TAPS - 1} entries"
        )
    kernels = by_requests(state, ctas, "snapshot", "verify_kernels.kda.snapshot")
    return BoundSnapshots(kernels, weights, columns, pdl)
