# SPDX-License-Identifier: Apache-2.0
"""The entry points vLLM calls in every process: engine front end, core and workers.

Both are re-entrant and light: nothing heavy is imported until vLLM asks for it.
"""

from __future__ import annotations

import logging
import os
import sys

from dspark_k3 import __version__, cpu, seams

# A child of vLLM's own logger, so the lines appear with vLLM's format and level.
logger = logging.getLogger("vllm.dspark_k3")

DRAFT_OVERRIDES = {
    "Qwen3DSparkModel": "dspark_k3.draft.qwen3:CheckedQwen3DSpark",
}
"""Architecture names we register, and the classes (imported when first used)."""

TARGET_OVERRIDES = {
    "KimiLinearForCausalLM": "dspark_k3.target.model:K3ForCausalLM",
}
"""The same for targets, registered on GPU engines only."""

K3_DRAFT_OVERRIDES = {"K3DSparkModel": "dspark_k3.draft.k3:K3DSpark"}
"""The same for K3's drafter."""

_announced: set[str] = set()


def register() -> None:
    """Entry point ``vllm.general_plugins``: register our draft classes.

    Raises seams.UnsupportedEngine, RuntimeError or ValueError when the user asked for
    the CPU opt-in and it cannot be active; this is the first place where vLLM lets an
    error through to the user.
    """
    cpu_active = cpu.requested()
    if cpu_active:
        cpu.require_active()
    engine = seams.installed_engine()
    if engine is not None and (warning := seams.untested_warning(engine)):
        _once(logging.WARNING, warning)

    from vllm.model_executor.models.registry import ModelRegistry

    targets = TARGET_OVERRIDES if _has(engine, "K3 target to extend") else {}
    drafts = DRAFT_OVERRIDES
    if _has(engine, "K3 drafter to extend"):
        drafts = drafts | K3_DRAFT_OVERRIDES
    for architecture, path in (drafts | targets).items():
        ModelRegistry.register_model(architecture, path)
    _once(
        logging.INFO,
        f"dspark-k3 {__version__} active: draft models "
        f"{', '.join(drafts)}; targets that can be asked for "
        f"{', '.join(targets) or 'none'}; Triton on CPU "
        f"{'on (interpreter)' if cpu_active else 'off'}",
    )


def _has(engine: seams.Engine | None, seam: str) -> bool:
    """Whether this is a GPU engine with the K3 class that ours extends. An untested
    version may be: then ours refuses what the settings ask, and is vLLM's own
    otherwise."""
    return (
        engine is not None
        and engine.distribution == seams.GPU_ENGINE.distribution
        and seams.has(seam)
    )


def cpu_triton_platform() -> None:
    """Entry point ``vllm.platform_plugins``: make Triton usable on a CPU engine.

    Does nothing unless ``DSPARK_K3_CPU=1``. Always returns None, so vLLM's own
    CpuPlatform stays selected. vLLM calls this before it decides whether Triton is
    there, and hides what it raises; `register` raises the same error visibly.
    """
    if not cpu.requested():
        return
    cpu.check()
    from dspark_k3.cpu import patches

    patches.apply_all()


def _once(level: int, message: str) -> None:
    """Log ``message`` once a process.

    vLLM loads plug-ins before it configures its logging, so until then the line goes
    to stderr, under the level that vLLM will use.
    """
    if message in _announced:
        return
    _announced.add(message)
    if logger.isEnabledFor(level) and logger.hasHandlers():
        logger.log(level, message)
        return
    names = logging.getLevelNamesMapping()
    wanted = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    if level >= names.get(wanted, logging.INFO):
        print(f"{logging.getLevelName(level)} {message}", file=sys.stderr, flush=True)
