# SPDX-License-Identifier: Apache-2.0
"""The shipped tiny pair really speculates, and the training script makes such pairs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from drafters.checkpoint import load_drafter, load_target
from drafters.loop import speculate
from drafters.training import drafter_loss
from experiments import corpora, train_tiny


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
@pytest.mark.parametrize(("kind", "floor"), [("stdlib", 3.0), ("generated", 6.0)])
def test_acceptance_length_on_held_out_text(
    head: str, kind: corpora.Kind, floor: float, tiny_target: Path
) -> None:
    """Field case F25: many distinct held-out prompts, temperature 1, bonus included."""
    target = load_target(tiny_target)
    drafter = load_drafter(tiny_target.parent / f"dspark-{head}", target)
    rounds: list[int] = []
    for seed, prompt in enumerate(corpora.held_out_prompts(kind, 96)):
        rounds += speculate(
            target,
            drafter,
            prompt,
            max_new_tokens=72,
            draft_length=7,
            temperature=1.0,
            generator=torch.Generator().manual_seed(seed),
        ).accepted
    assert 1 + sum(rounds) / len(rounds) >= floor


def test_held_out_text_is_not_trained_on() -> None:
    held_out = {path.name for path in corpora.stdlib_files(held_out=True)}
    assert held_out
    assert not set(corpora.stdlib_files(True)) & set(corpora.stdlib_files(False))
    trained = corpora.training_bytes("stdlib")
    for prompt in corpora.held_out_prompts("stdlib", 8, length=200):
        assert bytes(prompt) not in trained


def test_prompts_reject_bad_requests() -> None:
    with pytest.raises(ValueError, match="kind='prose'"):
        corpora.held_out_prompts("prose", 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="length=0"):
        corpora.held_out_prompts("stdlib", 2, 0)


def test_tokenizer_ids_are_byte_values(tiny_target: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_target / "tokenizer.json"))
    text = "def f(x):\n\treturn 'é' # 4\n"
    assert tokenizer.encode(text).ids == corpora.encode(text)
    assert tokenizer.decode(corpora.encode(text)) == text
    assert tokenizer.token_to_id("<|endoftext|>") == corpora.EOS
    assert tokenizer.token_to_id("<|mask|>") == corpora.MASK


def test_script_trains_a_pair_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few steps lower the drafter's loss, and what is written loads."""
    texts = {kind: corpora.held_out_bytes(kind) for kind in corpora.KINDS}
    monkeypatch.setattr(train_tiny, "training_bytes", lambda kind: texts[kind])
    monkeypatch.setattr(train_tiny, "SEQUENCE", 64)
    losses = []
    for steps in ("1", "40"):
        out = tmp_path / steps
        arguments = ["--out", str(out), "--target-steps", "10", "--heads", "gated"]
        monkeypatch.setattr(sys, "argv", ["x", *arguments, "--draft-steps", steps])
        train_tiny.main()
        target = load_target(out / "target")
        drafter = load_drafter(out / "dspark-gated", target)
        tokens = next(train_tiny.batches(rows=8, seed=9))[:, :-1]
        with torch.no_grad():
            loss = drafter_loss(
                drafter, target, tokens, torch.tensor([[5, 20, 40]] * 8)
            )
        losses.append(float(loss))
    assert losses[1] < losses[0] - 0.1
