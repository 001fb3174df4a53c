# SPDX-License-Identifier: Apache-2.0
"""bf16 projections of 1 to 64 rows at the speed the weights can be read.

    gemm = SkinnyGemm(7168)      # once, for a K and its output types
    gemm(x, w, out)              # one launch, no allocation
    bound = gemm.bind(w)         # once for a weight: checks and looks up
    bound(x, out)                # on the decode path: the same launch, less Python
    serves(7168, torch.float32)  # whether there is a kernel for a K and its outputs

How an op is laid out here, for whoever adds the next one: `reference` says what is
computed, `tiling` in which order it is summed and what a CTA holds, `kernel` is the
device code, `host` compiles, checks and launches. This op has three kernels with one
order of sums, so with the same bits: `kernel` (a ring of bulk copies), `direct` (short
launches) and `wide` (many rows, wgmma; `wide_staged` is its form with asynchronous
copies); `choice` says which serves a shape, from the table that
`python -m experiments.bench.tune` measured and from one for widths that it has not
measured yet.
"""

from verify_kernels.skinny_gemm.host import BoundGemm, SkinnyGemm, serves

__all__ = ["BoundGemm", "SkinnyGemm", "serves"]
