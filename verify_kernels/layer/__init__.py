# SPDX-License-Identifier: Apache-2.0
"""Parts of a K3 layer made of several launches: what follows what, and on which stream.

They hold weights that stay where they are and know nothing of an engine. The executor
in `dspark_k3.target` is built from them, and so is `experiments.layer_chain`, which
times them without one.
"""

from verify_kernels.layer.moe import FRONT_ROWS, LatentMoe, MoeWeights
from verify_kernels.layer.products import Product, Products
from verify_kernels.layer.side import Side

__all__ = ["FRONT_ROWS", "LatentMoe", "MoeWeights", "Product", "Products", "Side"]
