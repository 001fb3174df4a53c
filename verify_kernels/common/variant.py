# SPDX-License-Identifier: Apache-2.0
"""Compiled forms of the kernels: how one is made, kept, listed and found again."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

#: Architectures every variant compiles for; the first runs here, the others compile.
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
#: Ops with kernels. Each has a module ``verify_kernels.<op>.host`` with ``variants``.
OPS = ("skinny_gemm", "attn_res", "prefetch", "kda", "moe", "mla", "markov")


class Kernel(Protocol):
    """What a kernel object states about itself, for the audit and the launch.

    Attributes:
        parameters: names of its tensor parameters, in order.
        early_loads: the parameters it may read before ``griddepcontrol.wait``.
        early_release: why it lets dependents start before its stores; "" if it does
            not.
        pdl: launched with the programmatic attribute.
        shared_bytes: dynamic shared memory of a CTA.
        kept_shared: byte ranges of it that nothing writes again once they are read, if
            there are any; may be missing.
    """

    parameters: tuple[str, ...]
    early_loads: tuple[str, ...]
    early_release: str
    pdl: bool
    shared_bytes: int


def fake(kind: Any, shape: tuple[Any, ...], opened: int, align: int) -> Any:
    """A tensor to compile with: the first ``opened`` strides are open, the rest
    contiguous."""
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    stride = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        stride[i] = cute.sym_int64() if i < opened else stride[i + 1] * shape[i + 1]
    return rt.make_fake_tensor(kind, shape, tuple(stride), assumed_align=align)


@dataclass(frozen=True)
class Variant:
    """One compiled form of one kernel.

    Attributes:
        op: the op's directory.
        name: unique within the op; letters, digits and underscores.
        kernel: the kernel object that is compiled.
        arguments: makes the fake tensors and stream it is compiled with.
        max_registers: budget per thread.
        max_shared_bytes: budget of dynamic shared memory per CTA.
        options: more options of ``cute.compile``.
    """

    op: str
    name: str
    kernel: Any
    arguments: Callable[[], Sequence[Any]]
    max_registers: int = 255
    max_shared_bytes: int = 227 * 1024
    options: str = ""

    def compile(self, arch: str, dump: Path | None = None) -> Any:
        """The tvm-ffi callable for ``arch``; with ``dump`` its PTX and cubin are kept.

        Two variants of one class write dump files of the same name: give each its own
        directory.
        """
        import cutlass.cute as cute

        options = f"--enable-tvm-ffi --gpu-arch {arch} {self.options}"
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            options += f" --keep-ptx --keep-cubin --dump-dir {dump}"
        return cute.compile(self.kernel, *self.arguments(), options=options)


def check_arch(arch: str) -> None:
    """Raise ValueError unless the kernels compile for ``arch``."""
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"arch={arch!r}: the kernels compile for {', '.join(ARCHITECTURES)}"
        )


def variants(ops: Sequence[str] = OPS) -> Iterator[Variant]:
    """Every variant of the given ops, in a fixed order."""
    for op in ops:
        yield from importlib.import_module(f"verify_kernels.{op}.host").variants()


@functools.cache
def device_arch(index: int) -> str:
    """Architecture of CUDA device ``index``, refused unless the kernels run there."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    arch = f"sm_{major}{minor}a"
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"GPU {index} is {torch.cuda.get_device_name(index)} ({arch}); the kernels "
            f"need one of {', '.join(ARCHITECTURES)}"
        )
    return arch


def cache_directory() -> Path:
    """``DSPARK_K3_CACHE``, else the user's cache directory."""
    configured = os.environ.get("DSPARK_K3_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured) if configured else Path(base) / "dspark_k3"


def cache_problem(directory: Path) -> str:
    """Why kernels cannot be kept in ``directory``, "" if they can; makes it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return f"kernel cache {directory} cannot be written ({error})"


@functools.cache
def _writable(directory: Path) -> bool:
    """Whether objects can be kept in ``directory``; warns once if not."""
    problem = cache_problem(directory)
    if problem:
        warnings.warn(
            f"{problem}; every process compiles anew. Set DSPARK_K3_CACHE to a "
            "writable directory.",
            stacklevel=5,
        )
    return not problem


@contextmanager
def _quack_cache() -> Iterator[None]:
    """quack's on-disk cache in our directory; quack's own kernels keep theirs."""
    import quack.cache as cache

    before = cache.CACHE_DIR, cache.CACHE_ENABLED
    directory = cache_directory()
    cache.CACHE_DIR, cache.CACHE_ENABLED = str(directory), _writable(directory)
    try:
        yield
    finally:
        cache.CACHE_DIR, cache.CACHE_ENABLED = before


def cached(variant: Variant, arch: str) -> Any:
    """``variant`` for ``arch`` from the cache on disk, compiled if it is not there.

    The key is the variant's name, the architecture and the sources of this package and
    of the compiler, so a name must say everything that its kernel object was made with.
    """
    check_arch(arch)
    with _quack_cache():
        return _compiled()(variant.op, variant.name, arch, _sources())


def compilations() -> int:
    """Kernels that this process compiled through `cached`; hits do not count."""
    return int(_compiled().cache_info().misses)


@functools.cache
def _registry(op: str) -> dict[str, Variant]:
    return {variant.name: variant for variant in variants((op,))}


@functools.cache
def _sources() -> str:
    """Hash of this package's sources.

    quack can hash them too, but only those it is told of before its first use in the
    process, which may be vLLM's.
    """
    package = Path(__file__).resolve().parent.parent
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        total.update(f"{path.relative_to(package)} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()


@functools.cache
def _compiled() -> Any:
    from quack.cache import jit_cache

    def verify_kernels_variant(op: str, name: str, arch: str, sources: str) -> Any:
        return _registry(op)[name].compile(arch)

    return jit_cache(verify_kernels_variant)
