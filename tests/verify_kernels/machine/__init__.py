# SPDX-License-Identifier: Apache-2.0
"""A machine that runs compiled PTX on the CPU: what a kernel computes, who waits for
whom, and in which order things may happen.

A launch is one of many possible ones: its seed sets the pace of every warp, when an
asynchronous copy lands, how late the data of a load reaches its registers, and what
earlier kernels left in shared memory. A kernel is right if every seed gives the same
bits.

Modelled: 32-lane warps that diverge and meet again; CTAs, clusters and their shared
memory, whose addresses have the CTA's rank from bit 24 on; mbarriers with transaction
counts; bulk copies that land in pieces, a lane's own copies (cp.async), which land
late until their group is waited for; remote stores and remote arrivals that are
under way for a while; programmatic launch (before ``griddepcontrol.wait`` a lane reads
NaN in what earlier kernels write, and must not store); memory and registers that hold
NaN until written; the bytes of every tensor, not those between its rows, and who may
write them.

The data of a load come at any time up to their first use that is not arithmetic, past
arrivals, fences and ``bar.warp.sync`` too. PTX has an arrival order the loads before
it; ptxas was measured not to, where another warp's asynchronous copy follows, so code
must make its arrivals depend on the data. ``bar.sync``, a cluster arrival that is not
relaxed, and a store to the same state space wait for the data.

On request (``races``) accesses to shared memory that no barrier orders are faults,
whether or not they come in the wrong order, and so are stores that a wgmma reads with
no ``fence.proxy.async`` behind them: `machine.order`.

Of Hopper's wgmma that of bf16 is known, with A in registers or in shared memory, and
what PTX asks of its registers, groups and warps is checked: `machine.wgmma`. In shared
memory A has K fastest, B either; K without swizzle or with that of 128 bytes, tokens
with that: `machine.descriptor`.

Not modelled: time, caches, bank conflicts; the order of sums inside the tensor cores
(fp64 here) and the error of approximate functions; stores that become visible late, so
fences and memory orders matter to ``races`` alone; the budgets of ``setmaxnreg``;
several clusters at once; atomics and tensor maps. An instruction that the machine does
not know is refused when it is decoded.
"""

from tests.verify_kernels.machine.launch import Deadlock, launch, tensor_argument
from tests.verify_kernels.machine.memory import Fault, GlobalMemory

__all__ = ["Deadlock", "Fault", "GlobalMemory", "launch", "tensor_argument"]
