# SPDX-License-Identifier: Apache-2.0
"""Tilings of the ring kernel for every K and M, whether the package ships them or not."""

from __future__ import annotations

from verify_kernels.skinny_gemm.tiling import SUM_ORDER, Tiling

_PAIR = {"ctas_per_sm": 2}
_DEEP = {"cluster": 8, "exchange_buffers": 2, "reducers": 3}

#: K -> {rows: what differs from Tiling's defaults for M up to so many rows}.
CHOICES: dict[int, dict[int, dict[str, int]]] = {
    128: {
        8: {"row_tiles": 4, "stage_rows": 64, "stages": 2} | _PAIR,
        16: {"row_tiles": 4, "stage_rows": 64, "stages": 2, "held_tiles": 2} | _PAIR,
        32: {"row_tiles": 2, "stage_rows": 32, "held_tiles": 4},
        64: {"held_tiles": 8, "reducers": 2},
    },
    384: {
        8: {"row_tiles": 2, "stage_rows": 28, "stages": 3} | _PAIR,
        16: {"row_tiles": 2, "stage_rows": 28, "stages": 3, "held_tiles": 2} | _PAIR,
        32: {"held_tiles": 4, "stages": 6, "reducers": 2},
        64: {"held_tiles": 8, "stages": 4, "reducers": 3},
    },
    768: {
        8: {"stage_rows": 14, "stages": 4, "partial_buffers": 4} | _PAIR,
        16: {"stage_rows": 14, "stages": 3, "held_tiles": 2} | _PAIR,
        32: {"held_tiles": 4, "stages": 5, "reducers": 2},
        64: {"held_tiles": 4, "stages": 3, "partial_buffers": 1, "reducers": 3},
    },
    1536: {
        8: {"stages": 3} | _PAIR,
        16: {"cluster": 2, "held_tiles": 2, "stages": 3, "reducers": 2} | _PAIR,
        32: {"cluster": 2, "held_tiles": 4, "stages": 5, "reducers": 2},
        64: {"cluster": 2, "held_tiles": 4, "stages": 3, "reducers": 3}
        | {"partial_buffers": 1, "exchange_buffers": 2},
    },
    2112: {
        8: {"cluster": 2, "span": 1, "stages": 4},
        16: {"cluster": 2, "held_tiles": 2, "stages": 3, "reducers": 2},
        32: {"cluster": 2, "held_tiles": 2, "stages": 2, "exchange_buffers": 2},
    },
    3584: {
        8: {"cluster": 2, "span": 2, "stages": 3},
        16: {"cluster": 4, "held_tiles": 2, "stages": 5, "reducers": 2},
        32: {"cluster": 4, "held_tiles": 4, "stages": 4, "reducers": 2},
        64: {"cluster": 4, "held_tiles": 4, "stages": 3, "exchange_buffers": 2}
        | {"reducers": 3},
    },
    4224: {
        8: {"cluster": 4, "stages": 4},
        16: {"cluster": 4, "held_tiles": 2, "stages": 4, "reducers": 2},
        32: {"cluster": 4, "held_tiles": 2, "stages": 3, "exchange_buffers": 2},
    },
    6144: {
        8: {"cluster": 4, "span": 2, "stages": 3},
        16: {"cluster": 8, "held_tiles": 2, "stages": 6, "reducers": 2},
        32: {"held_tiles": 4, "stages": 5} | _DEEP,
        64: {"held_tiles": 4, "stages": 3} | _DEEP,
    },
    7168: {
        2: {"cluster": 2, "span": 2, "stages": 3},
        8: {"cluster": 4, "span": 2, "stages": 3},
        16: {"cluster": 8, "held_tiles": 2, "stages": 6, "reducers": 2},
        32: {"held_tiles": 4, "stages": 5} | _DEEP,
        64: {"held_tiles": 4, "stages": 3} | _DEEP,
    },
    12288: {
        2: {"cluster": 4, "stages": 4},
        8: {"cluster": 8, "stages": 4},
        16: {"held_tiles": 2, "stages": 3} | _DEEP | {"reducers": 2},
        32: {"held_tiles": 3, "stages": 3} | _DEEP,
    },
    33792: {
        8: {"cluster": 8, "stages": 1},
        16: {"cluster": 8, "stages": 1, "partial_buffers": 1}
        | {"exchange_buffers": 2, "reducers": 2},
    },
}


def _tilings(k: int) -> dict[int, Tiling]:
    return {
        rows: Tiling(k, token_tiles=-(-rows // 8), **choice)
        for rows, choice in CHOICES[k].items()
    }


#: K -> {rows: tiling}, rows ascending; more rows than the last are cut into launches.
TILINGS = {k: _tilings(k) for k in SUM_ORDER}
