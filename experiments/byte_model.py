# SPDX-License-Identifier: Apache-2.0
"""Step times of Kimi K3 modelled from bytes: ``floor:k3-tp16-h200`` and the like.

The floor is HBM bytes of one rank over its bandwidth, and nothing else: no launch
latency, no network, no arithmetic, no reuse in L2. It is what a perfect
implementation could reach; public figures at batch 1 are several times slower. Past
64 rows the weights may have to be read more than once and arithmetic begins to
matter, so the floor grows optimistic there.

Counted per step: every weight matrix once, the distinct routed experts, the KDA
recurrent and convolution state, the MLA cache of the context, the dense layer 0, the
LM head. Not counted: activations, attention residuals, embeddings.
All sizes come from the published ``config.json`` of Kimi K3 and of its DSpark
drafter (Inferact/Kimi-K3-DSpark).
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.acceptance import Label

BF16 = 2.0
FP32 = 4.0
#: E2M1 nibble and one E8M0 scale byte for 32 weights.
MXFP4 = 0.5 + 1 / 32

HIDDEN = 7168
HEADS = 96
HEAD_DIM = 128
KDA_LAYERS = 69
MLA_LAYERS = 24
DENSE_LAYERS = 1
MOE_LAYERS = KDA_LAYERS + MLA_LAYERS - DENSE_LAYERS
CONV_WIDTH = 4
Q_LORA = 1536
KV_LORA = 512
ROPE_DIM = 64
EXPERTS = 896
TOP_K = 16
LATENT = 3584
EXPERT_INTERMEDIATE = 3072
SHARED_INTERMEDIATE = 6144
DENSE_INTERMEDIATE = 33792
VOCAB = 163840
#: Without expert parallelism a rank's expert shard is padded up to this width.
MIN_EXPERT_SHARD = 256
PACKED_ROW_MULTIPLE = 16

DRAFT_LAYERS = 5
DRAFT_HEADS = 64
DRAFT_INTERMEDIATE = 14336
DRAFT_FEATURES = 5
MARKOV_RANK = 256

DEFAULT_CONTEXT = 8192

#: GPU key -> (name, bytes per second, bytes of memory).
GPUS = {
    "h200": ("NVIDIA H200", 4.3e12, 141e9),
    "gb300": ("NVIDIA GB300", 8.0e12, 288e9),
}
TENSOR_PARALLEL = (1, 2, 4, 8, 16)


def distinct_experts(rows: int) -> float:
    """Expected distinct experts of ``rows`` rows under uniform, independent routing.

    ``896 * (1 - (1 - 16/896)^rows)``. Rows of one request share experts in
    practice, so this is an upper bound for a verify step.
    """
    return EXPERTS * (1.0 - (1.0 - TOP_K / EXPERTS) ** rows)


@dataclass(frozen=True)
class K3Bytes:
    """Bytes that one tensor-parallel rank reads and writes in a step.

    Attributes:
        tp: tensor-parallel size; 1, 2, 4, 8 or 16.
        context: committed tokens of each request.
        replicated_moe: router and latent projections whole on every rank, as stock
            vLLM keeps them on Hopper, instead of sharded.
        fold_state: read and write the KDA state once a step, however many rows
            there are (plus the step's records); otherwise one snapshot a row.
    """

    tp: int
    context: int = DEFAULT_CONTEXT
    replicated_moe: bool = False
    fold_state: bool = False

    def __post_init__(self) -> None:
        if self.tp not in TENSOR_PARALLEL:
            raise ValueError(
                f"tensor parallel size is {self.tp}; the byte model knows "
                f"{', '.join(map(str, TENSOR_PARALLEL))}"
            )
        if self.context < 0:
            raise ValueError(f"context is {self.context}; it cannot be negative")

    def _matrix(self, n: float, k: float) -> float:
        return n * k * BF16

    def kda_mixer(self) -> float:
        """Weights of one KDA mixer."""
        width = HEADS * HEAD_DIM / self.tp
        packed = 4 * width + HEAD_DIM + HEADS / self.tp
        packed = -(-packed // PACKED_ROW_MULTIPLE) * PACKED_ROW_MULTIPLE
        conv = 3 * width * CONV_WIDTH * FP32
        return (
            self._matrix(packed, HIDDEN)
            + self._matrix(width, HEAD_DIM)
            + conv
            + self._matrix(HIDDEN, width)
        )

    def _mla(self, heads: float, gate: bool) -> float:
        width = heads * HEAD_DIM
        down = Q_LORA + KV_LORA + ROPE_DIM + (width if gate else 0)
        return (
            self._matrix(down, HIDDEN)
            + self._matrix(heads * (HEAD_DIM + ROPE_DIM), Q_LORA)
            + 2 * self._matrix(width, KV_LORA)
            + self._matrix(HIDDEN, width)
        )

    def mla_mixer(self) -> float:
        """Weights of one MLA mixer; q_a and kv_a are replicated on every rank."""
        return self._mla(HEADS / self.tp, gate=True)

    def moe_fixed(self) -> float:
        """Router, latent down and up, shared expert of one layer."""
        shards = 1 if self.replicated_moe else self.tp
        routed = self._matrix(EXPERTS + 2 * LATENT, HIDDEN) / shards
        return routed + 3 * self._matrix(SHARED_INTERMEDIATE / self.tp, HIDDEN)

    def expert(self, padded: bool = True) -> float:
        """One routed expert: three matrices of latent width 3584, MXFP4."""
        width = EXPERT_INTERMEDIATE / self.tp
        if padded:
            width = max(width, MIN_EXPERT_SHARD)
        return 3 * LATENT * width * MXFP4

    def experts(self, rows: int) -> float:
        """Distinct routed experts of one layer for ``rows`` rows."""
        return distinct_experts(rows) * self.expert()

    def kda_state(self, rows: int, batch: int) -> float:
        """KDA state traffic of one layer for ``batch`` requests with ``rows`` rows.

        Snapshots: one read a request and one write a row. The convolution reads
        three taps a request and writes those of every row: 3 + (rows - 1).
        """
        width = HEADS * HEAD_DIM / self.tp
        state = width * HEAD_DIM * FP32
        tap = 3 * width * BF16
        conv = tap * (2 * (CONV_WIDTH - 1) * batch + rows - batch)
        if self.fold_state:
            record = width * (FP32 + 2 * BF16)
            return batch * 2 * state + 2 * rows * record + conv
        return (batch + rows) * state + conv

    def mla_cache(self, rows: int, batch: int) -> float:
        """Cache traffic of one MLA layer: the context once a request, rows written."""
        row = (KV_LORA + ROPE_DIM) * BF16
        return row * (self.context * batch + rows)

    def dense(self) -> float:
        """Dense MLP of layer 0."""
        return 3 * self._matrix(DENSE_INTERMEDIATE / self.tp, HIDDEN)

    def lm_head(self) -> float:
        """Vocabulary-sharded LM head."""
        return self._matrix(VOCAB / self.tp, HIDDEN)

    def moe_layer(self, kind: str, rows: int, batch: int) -> float:
        """One whole MoE layer whose mixer is "kda" or "mla"."""
        if kind == "kda":
            mixer = self.kda_mixer() + self.kda_state(rows, batch)
        else:
            mixer = self.mla_mixer() + self.mla_cache(rows, batch)
        return mixer + self.moe_fixed() + self.experts(rows)

    def step(self, rows: int, batch: int) -> float:
        """One forward of the whole target over ``rows`` rows."""
        if not 1 <= batch <= rows:
            raise ValueError(
                f"batch is {batch} and rows {rows}; each request has at least one row"
            )
        return (
            KDA_LAYERS * (self.kda_mixer() + self.kda_state(rows, batch))
            + MLA_LAYERS * (self.mla_mixer() + self.mla_cache(rows, batch))
            + MOE_LAYERS * (self.moe_fixed() + self.experts(rows))
            + DENSE_LAYERS * self.dense()
            + self.lm_head()
        )

    def draft_layer(self) -> float:
        """One drafter layer: MLA with 64 heads and a dense MLP of 14336."""
        mlp = 3 * self._matrix(DRAFT_INTERMEDIATE / self.tp, HIDDEN)
        return self._mla(DRAFT_HEADS / self.tp, gate=False) + mlp

    def draft_weights(self, k: int) -> float:
        """Drafter weights read to draft k tokens.

        Feature projection, context KV projection and the Markov head are replicated
        on every rank; the Markov projection is read once per drafted token.
        """
        cache_row = KV_LORA + ROPE_DIM
        return (
            DRAFT_LAYERS * self.draft_layer()
            + self._matrix(HIDDEN, DRAFT_FEATURES * HIDDEN)
            + self._matrix(DRAFT_LAYERS * cache_row, HIDDEN)
            + self.lm_head()
            + k * self._matrix(VOCAB, MARKOV_RANK)
        )

    def draft(self, k: int, batch: int) -> float:
        """Drafting k tokens for ``batch`` requests: weights and draft KV caches."""
        if k == 0:
            return 0.0
        return self.draft_weights(k) + DRAFT_LAYERS * self.mla_cache(k * batch, batch)

    def resident(self) -> float:
        """Weights of target and drafter that one rank must hold."""
        per_layer = self.moe_fixed() + EXPERTS * self.expert()
        embedding = self.lm_head()
        # Two Markov tables are stored; the LM head is the target's.
        drafter = self.draft_weights(2) - self.lm_head()
        return (
            KDA_LAYERS * self.kda_mixer()
            + MLA_LAYERS * self.mla_mixer()
            + MOE_LAYERS * per_layer
            + DENSE_LAYERS * self.dense()
            + self.lm_head()
            + embedding
            + drafter
        )


@dataclass(frozen=True)
class FloorProfile:
    """Byte floor as a step-time profile; times in milliseconds."""

    name: str
    bytes: K3Bytes
    gpu: str
    bandwidth: float
    memory: float
    with_draft: bool = True
    label: Label = "modelled"

    @property
    def note(self) -> str:
        """What the figures include."""
        draft = "drafter's bytes included" if self.with_draft else "drafter free"
        state = "state folded" if self.bytes.fold_state else "one state a row"
        text = (
            f"HBM bytes only, TP{self.bytes.tp}, {self.bandwidth / 1e12:g} TB/s, "
            f"context {self.bytes.context}, {draft}, {state}; no launch, network or "
            "arithmetic time, so real steps are slower"
        )
        if self.bytes.resident() > self.memory:
            text += (
                f"; the weights ({self.bytes.resident() / 1e9:.0f} GB a rank) do not "
                "fit this GPU: for study only"
            )
        return text

    def _ms(self, count: float) -> float:
        return count / self.bandwidth * 1e3

    def plain_ms(self, batch: int) -> float:
        """Plain decode step: one row a request."""
        return self._ms(self.bytes.step(batch, batch))

    def draft_ms(self, k: int, batch: int) -> float:
        """Drafting step; 0 without the drafter or for k = 0."""
        return self._ms(self.bytes.draft(k, batch)) if self.with_draft else 0.0

    def verify_ms(self, rows: int, batch: int) -> float:
        """Verify step of ``rows`` rows over ``batch`` requests."""
        return self._ms(self.bytes.step(rows, batch))


_GRAMMAR = (
    "write floor:k3-tp<1|2|4|8|16>-<h200|gb300>, then optionally "
    ":nodraft,fold,replicated,context=<tokens>"
)


def parse_floor(spec: str) -> FloorProfile:
    """Parse "floor:k3-tp16-h200" or "floor:k3-tp8-gb300:nodraft,context=32768".

    Options: ``nodraft`` leaves the drafter's cost out, ``fold`` moves the KDA state
    once a step, ``replicated`` keeps router and latent projections whole on every
    rank as stock vLLM does on Hopper, ``context=N`` sets the context.

    Raises:
        ValueError: anything else; the message shows the grammar.
    """
    shape, _, tail = spec.removeprefix("floor:").partition(":")
    parts = shape.lower().split("-")
    if len(parts) != 3 or parts[0] != "k3" or not parts[1].startswith("tp"):
        raise ValueError(f"profile {spec!r} is not understood; {_GRAMMAR}")
    if parts[2] not in GPUS:
        raise ValueError(f"profile {spec!r}: GPU {parts[2]!r} is unknown; {_GRAMMAR}")
    if not parts[1][2:].isdecimal() or int(parts[1][2:]) not in TENSOR_PARALLEL:
        raise ValueError(f"profile {spec!r}: {parts[1]!r} is no size; {_GRAMMAR}")
    context = DEFAULT_CONTEXT
    flags: set[str] = set()
    for option in filter(None, tail.lower().split(",")):
        key, _, value = option.partition("=")
        if key == "context" and value.isdecimal():
            context = int(value)
        elif option in ("nodraft", "fold", "replicated"):
            flags.add(option)
        else:
            raise ValueError(f"profile {spec!r}: option {option!r}; {_GRAMMAR}")
    gpu, bandwidth, memory = GPUS[parts[2]]
    model = K3Bytes(
        tp=int(parts[1][2:]),
        context=context,
        replicated_moe="replicated" in flags,
        fold_state="fold" in flags,
    )
    return FloorProfile(
        spec, model, gpu, bandwidth, memory, with_draft="nodraft" not in flags
    )
