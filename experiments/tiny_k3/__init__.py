# SPDX-License-Identifier: Apache-2.0
"""tiny-k3: a Kimi K3 small enough to ship, trained on the text of experiments.corpora.

All kinds of layers, two blocks of attention residuals, K3's own head sizes; bytes are
tokens. Its drafter is a ``K3DSparkModel``.
"""
