# SPDX-License-Identifier: Apache-2.0
"""dspark-k3: speculative decoding of Kimi K3-class models on vLLM.

Importing this package loads neither torch nor vLLM.
"""

__version__ = "0.1.0"
