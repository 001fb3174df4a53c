# SPDX-License-Identifier: Apache-2.0
"""Small kernels with a fault each, for the audit to find, and some without."""
