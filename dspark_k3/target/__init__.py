# SPDX-License-Identifier: Apache-2.0
"""The Kimi K3 target in vLLM 0.33: its decode steps through our executor.

Start with `executor`. `model` is the class that vLLM builds, `scope` says which
deployments are refused, `left` which ops vLLM keeps, `sublayers` holds what runs,
`attention` lets requests verify different numbers of drafts on Hopper.
"""
