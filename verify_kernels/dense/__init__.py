# SPDX-License-Identifier: Apache-2.0
"""The SiTU MLP of dense layers and shared experts; the reference so far."""
