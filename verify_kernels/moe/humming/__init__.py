# SPDX-License-Identifier: Apache-2.0
"""The chosen experts from weights that vLLM's Humming layers hold, without a copy.

Read: layout.py (where a weight is) -> up.py, down.py -> host.py.
"""
