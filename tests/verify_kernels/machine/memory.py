# SPDX-License-Identifier: Apache-2.0
"""Global memory made of tensors, the shared memory of a CTA, and mbarriers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
#: The values of a load, [lanes, count], read when it is called.
Fetch = Callable[[], Array]

#: An SM keeps the first bytes of a CTA's shared memory for itself.
SHARED_BASE = 1024
#: Bits of a shared address within one CTA; above them is the CTA's rank in its cluster,
#: in the CTA's own addresses too: ptxas makes them with SR_CgaCtaId << 24.
WINDOW_BITS = 24
#: Bits of an address within one tensor, so that no overrun reaches another.
TENSOR_BITS = 36
#: A barrier counts at most 2^20 - 1 bytes at once.
MAX_BYTES = 2**20 - 1

_UNSIGNED = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}


class Fault(Exception):
    """What a GPU would stop at, or should: a bad access or a misused barrier."""


def _views(data: Array) -> dict[int, Array]:
    """The bytes as unsigned numbers of 1, 2, 4 and 8 bytes; a rest is cut off."""
    return {
        size: data[: len(data) // size * size].view(dtype)
        for size, dtype in _UNSIGNED.items()
    }


def _index(offsets: Array, size: int, count: int) -> Array:
    return (offsets // size)[:, None] + np.arange(count)


def _check_aligned(addresses: Array, size: int) -> None:
    if np.bitwise_or.reduce(addresses) % size:
        bad = next(int(a) for a in addresses if a % size)
        raise Fault(f"address {bad:#x} is not a multiple of {size}")


@dataclass(frozen=True)
class Buffer:
    """The bytes of one tensor, shared with it, and those between its elements."""

    name: str
    address: int
    data: dict[int, Array]
    #: 0xff for each byte of an element, 0 for one between rows; None if all are.
    inside: dict[int, Array] | None
    dynamic: bool
    writable: bool

    def offsets(self, addresses: Array, size: int) -> Array:
        """Where accesses of ``size`` bytes lie; all of them belong to elements."""
        offsets = addresses.astype(np.int64) - self.address
        bad = (offsets < 0) | (offsets + size > len(self.data[1]))
        if not bad.any() and self.inside is not None:
            unit = size & -size if size < 8 else 8
            held = self.inside[unit][_index(offsets, unit, size // unit)]
            bad = (held != np.iinfo(held.dtype).max).any(1)
        if bad.any():
            raise Fault(
                f"{size} bytes at {int(offsets[bad.argmax()])} of {self.name} are not "
                f"all its own; it spans {len(self.data[1])}"
            )
        return offsets


class GlobalMemory:
    """Tensors by address.

    Attributes:
        prefetched: (address, bytes) of every prefetch into L2, in order.
    """

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self.prefetched: list[tuple[int, int]] = []

    def add(
        self,
        tensor: Tensor,
        name: str,
        *,
        dynamic: bool = False,
        writable: bool = False,
    ) -> int:
        """Make a CPU tensor known; launches read and write its memory in place.

        Args:
            tensor: any strides; the bytes between its elements may not be touched.
            name: for messages.
            dynamic: an earlier kernel of the step writes or reads it, so it may be
                used only after ``griddepcontrol.wait``; reads before it yield NaN.
            writable: stores are allowed.

        Returns:
            its address, aligned as the view is within its storage.
        """
        count = 1 + sum(
            (n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)
        )
        # From an aligned place on, so that wide accesses are whole numbers of the view.
        lead = tensor.storage_offset() % (256 // tensor.element_size())
        start = tensor.storage_offset() - lead
        flat = torch.as_strided(tensor, (lead + count,), (1,), start)
        inside = None
        if tensor.numel() != lead + count:
            marks = torch.zeros(lead + count, dtype=torch.uint8)
            torch.as_strided(marks, tensor.shape, tensor.stride(), lead).fill_(255)
            inside = _views(marks.numpy().repeat(tensor.element_size()))
        address = len(self._buffers) + 1 << TENSOR_BITS
        data = flat.view(torch.uint8).numpy()
        self._buffers.append(
            Buffer(name, address, _views(data), inside, dynamic, writable)
        )
        return address + lead * tensor.element_size()

    def _parts(
        self, addresses: Array, size: int, alignment: int
    ) -> Iterator[tuple[Buffer, Array, Array]]:
        """Buffer, which of the lanes, and their offsets, for each buffer touched."""
        _check_aligned(addresses, alignment)
        numbers = (addresses >> np.uint64(TENSOR_BITS)).astype(np.int64) - 1
        for number in np.unique(numbers):
            if not 0 <= number < len(self._buffers):
                bad = int(addresses[(numbers == number).argmax()])
                raise Fault(f"address {bad:#x} is in no tensor")
            lanes = np.flatnonzero(numbers == number)
            buffer = self._buffers[number]
            yield buffer, lanes, buffer.offsets(addresses[lanes], size)

    def reader(self, addresses: Array, size: int, count: int, waited: Array) -> Fetch:
        """A checked load of ``count`` numbers of ``size`` bytes a lane.

        Args:
            addresses: uint64 [lanes].
            size: bytes of one number.
            count: numbers of one lane, adjacent.
            waited: bool [lanes], past ``griddepcontrol.wait``.
        """
        parts = []
        for buffer, lanes, offsets in self._parts(
            addresses, size * count, size * count
        ):
            early = ~waited[lanes] if buffer.dynamic else None
            if early is not None and not early.any():
                early = None
            parts.append(
                (lanes, buffer.data[size], _index(offsets, size, count), early)
            )

        def fetch() -> Array:
            values = np.empty((len(addresses), count), _UNSIGNED[size])
            for lanes, data, index, early in parts:
                found = data[index]
                if early is not None:
                    found[early] = np.iinfo(found.dtype).max
                values[lanes] = found
            return values

        return fetch

    def write(self, addresses: Array, values: Array, waited: Array) -> None:
        """Store ``values`` [lanes, count], unsigned, a lane's adjacent."""
        size, count = values.itemsize, values.shape[1]
        for buffer, lanes, offsets in self._parts(
            addresses, size * count, size * count
        ):
            if not buffer.writable:
                raise Fault(f"a store to {buffer.name}, which the kernel only reads")
            if not waited[lanes].all():
                raise Fault(f"a store to {buffer.name} before griddepcontrol.wait")
            buffer.data[size][_index(offsets, size, count)] = values[lanes]

    def bytes_at(self, address: int, size: int, waited: bool) -> Fetch:
        """A checked read of ``size`` bytes, uint8 [size], for an asynchronous copy."""
        place = np.array([address], np.uint64)
        ((buffer, _, offsets),) = self._parts(place, size, 16)
        start = int(offsets[0])
        data = buffer.data[1][start : start + size]
        if buffer.dynamic and not waited:
            return lambda: np.full(size, 0xFF, np.uint8)
        return lambda: data

    def prefetch(self, address: int, size: int) -> None:
        """Note a request for L2; refused as the copy would be."""
        if size % 16:
            raise Fault(f"a prefetch of {size} bytes; the unit is 16")
        self.bytes_at(address, size, True)
        self.prefetched.append((address, size))


@dataclass
class Barrier:
    """An mbarrier.

    Attributes:
        name: for messages.
        count: arrivals of a phase.
        missing: arrivals that this phase still needs.
        outstanding: bytes announced and not yet come; below 0 if they came first.
        phase: phases completed.
        waiters: called, once, when the phase completes.
    """

    name: str
    count: int
    missing: int = field(init=False)
    outstanding: int = 0
    phase: int = 0
    waiters: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.missing = self.count

    def passed(self, parity: int) -> bool:
        """Whether a wait for ``parity`` succeeds: that of the last phase completed."""
        return self.phase % 2 != parity

    def arrive(self, count: int = 1, announced: int = 0) -> None:
        """``count`` arrivals, after ``announced`` bytes have been added."""
        if not 0 < count <= self.missing:
            raise Fault(
                f"{count} arrivals at {self}: more than the {self.count} of a phase"
            )
        self.outstanding += announced
        self.missing -= count
        self._advance()

    def complete(self, size: int) -> None:
        """``size`` bytes have come."""
        self.outstanding -= size
        self._advance()

    def _advance(self) -> None:
        if abs(self.outstanding) > MAX_BYTES:
            raise Fault(f"{self.name} counts {self.outstanding} bytes, past 2^20 - 1")
        if self.missing or self.outstanding:
            return
        self.phase += 1
        self.missing = self.count
        waiters, self.waiters = self.waiters, []
        for wake in waiters:
            wake()

    def __str__(self) -> str:
        return (
            f"{self.name}: phase {self.phase}, {self.missing} of {self.count} arrivals "
            f"and {self.outstanding} bytes to come"
        )


class SharedMemory:
    """The dynamic shared memory of one CTA, full of the word ``stale``.

    Attributes:
        window: the shared address at which all that the CTA has begins.
        base: the one at which the dynamic part begins; offsets count from there.
    """

    def __init__(self, size: int, name: str, rank: int, stale: int) -> None:
        self.name = name
        self.window = rank << WINDOW_BITS
        self.base = self.window + SHARED_BASE
        words = np.full(-(-size // 16) * 4, stale, np.uint32)
        self._data = _views(words.view(np.uint8))
        self._size = size
        self._barriers: dict[int, Barrier] = {}

    def _check_window(self, addresses: Array) -> None:
        rank = self.window >> WINDOW_BITS
        bad = addresses >> WINDOW_BITS != rank
        if bad.any():
            other = int(addresses[bad.argmax()])
            raise Fault(
                f"address {other:#x} is in the window of rank {other >> WINDOW_BITS}; "
                f"{self.name} is that of rank {rank}, and others take shared::cluster"
            )

    def _offsets(self, addresses: Array, size: int, alignment: int) -> Array:
        _check_aligned(addresses, alignment)
        offsets = addresses.astype(np.int64) - self.base
        if offsets.min() < 0 or offsets.max() + size > self._size:
            self._check_window(addresses)
            raise Fault(
                f"{size} bytes at {int(offsets.min())} to {int(offsets.max())} of "
                f"{self.name}, which has {self._size} bytes"
            )
        return offsets

    def reader(self, addresses: Array, size: int, count: int) -> Fetch:
        """A checked load of ``count`` numbers of ``size`` bytes a lane."""
        offsets = self._offsets(addresses, size * count, size * count)
        data, index = self._data[size], _index(offsets, size, count)
        return lambda: data[index]

    def write(self, addresses: Array, values: Array) -> None:
        """Store ``values`` [lanes, count], unsigned, a lane's adjacent."""
        size, count = values.itemsize, values.shape[1]
        offsets = self._offsets(addresses, size * count, size * count)
        self._spare_barriers(offsets, size * count)
        self._data[size][_index(offsets, size, count)] = values

    def check_copy(self, address: int, size: int) -> None:
        """Refuse the place of an asynchronous copy of ``size`` bytes."""
        if size <= 0 or size % 16:
            raise Fault(f"a bulk copy of {size} bytes; it takes multiples of 16")
        self._offsets(np.array([address]), size, 16)

    def write_bytes(self, address: int, data: Array) -> None:
        """Store bytes that come from outside, uint8."""
        offsets = self._offsets(np.array([address]), len(data), 1)
        self._spare_barriers(offsets, len(data))
        start = int(offsets[0])
        self._data[1][start : start + len(data)] = data

    def _spare_barriers(self, offsets: Array, size: int) -> None:
        if not self._barriers or offsets.min() >= max(self._barriers) + 8:
            return
        for place, barrier in self._barriers.items():
            if ((offsets < place + 8) & (offsets + size > place)).any():
                raise Fault(f"a store over {barrier.name}")

    def init_barrier(self, address: int, count: int) -> None:
        """A new barrier for ``count`` arrivals a phase."""
        offset = int(self._offsets(np.array([address]), 8, 8)[0])
        if old := self._barriers.get(offset):
            raise Fault(f"{old.name} is made a second time")
        if not 0 < count < 2**20:
            raise Fault(f"a barrier of {count} arrivals")
        self._barriers[offset] = Barrier(f"barrier at {offset} of {self.name}", count)

    def barrier(self, address: int) -> Barrier:
        """The barrier at an address."""
        offset = address - self.base
        if offset not in self._barriers:
            self._check_window(np.array([address]))
            raise Fault(f"there is no barrier at {offset} of {self.name}")
        return self._barriers[offset]
