# SPDX-License-Identifier: Apache-2.0
"""DSpark drafters, free of any engine: torch only.

Start with `drafters.loop.speculate`: the whole speculative loop in one function.
"""
