# SPDX-License-Identifier: Apache-2.0
"""What the kernels share: PTX with stated effects, arithmetic, compilation, their
list."""
