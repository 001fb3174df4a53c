# SPDX-License-Identifier: Apache-2.0
"""A complete small Kimi K3 in plain torch and a speculative decode loop over it."""
