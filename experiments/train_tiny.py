# SPDX-License-Identifier: Apache-2.0
"""Train the tiny pair that ships in experiments/tiny, from nothing, on one CPU thread.

    python -m experiments.train_tiny --out experiments/tiny

Byte-level Qwen3 target (4 layers, hidden 128) on standard-library text and generated
code in equal parts, then a vanilla and an rnn DSpark drafter for it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.backbone import DSparkDrafter
from drafters.checkpoint import load_target, save_checkpoint
from drafters.config import read_config
from drafters.target import Qwen3Config, Qwen3Target
from drafters.training import Schedule, initialise, train_drafter, train_target
from experiments.corpora import EOS, KINDS, MASK, VOCAB_SIZE, training_bytes

TARGET = Qwen3Config(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    intermediate_size=384,
    max_position_embeddings=2048,
)
BLOCK_SIZE = 7
TAPS = (0, 1, 2)
SEQUENCE = 192
#: What the shipped checkpoints were trained for. On one thread of an AMD EPYC (virtual
#: machine, 2026-11-29) the whole script took 517 s: 145 s for the target, 230 s for the
#: vanilla drafter, 141 s for the rnn drafter. Run again there, it gave the same
#: bytes.
TARGET_STEPS = 800
DRAFT_STEPS = {"vanilla": 2500, "gated": 2500, "rnn": 1500}


def _common_config(layers: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "dtype": "float32",
        "head_dim": TARGET.head_dim,
        "hidden_act": "silu",
        "hidden_size": TARGET.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": TARGET.intermediate_size,
        "max_position_embeddings": TARGET.max_position_embeddings,
        "num_attention_heads": TARGET.num_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": TARGET.num_kv_heads,
        "rms_norm_eps": TARGET.rms_norm_eps,
        "rope_theta": TARGET.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": TARGET.vocab_size,
    }


def target_config() -> dict[str, Any]:
    """config.json of the target, as Hugging Face and vLLM read it."""
    return {"architectures": ["Qwen3ForCausalLM"]} | _common_config(TARGET.num_layers)


def drafter_config(markov_head_type: str) -> dict[str, Any]:
    """config.json of a drafter in DeepSpec's format."""
    layers = 2
    return (
        {"architectures": ["Qwen3DSparkModel"]}
        | _common_config(layers)
        | {
            "block_size": BLOCK_SIZE,
            "confidence_head_with_markov": True,
            "enable_confidence_head": True,
            "layer_types": ["full_attention"] * layers,
            "markov_head_type": markov_head_type,
            "markov_rank": 32,
            "mask_token_id": MASK,
            "num_target_layers": TARGET.num_layers,
            "target_layer_ids": list(TAPS),
        }
    )


def batches(rows: int, seed: int) -> Iterator[Tensor]:
    """Random windows [rows, SEQUENCE + 1], half of them from each kind of text."""
    texts = [
        torch.frombuffer(bytearray(training_bytes(kind)), dtype=torch.uint8)  # type: ignore[arg-type]
        for kind in KINDS
    ]
    generator = torch.Generator().manual_seed(seed)
    while True:
        windows = []
        for row in range(rows):
            text = texts[row % len(texts)]
            start = int(
                torch.randint(len(text) - SEQUENCE - 1, (1,), generator=generator)
            )
            windows.append(text[start : start + SEQUENCE + 1])
        yield torch.stack(windows).long()


def write_tokenizer(directory: Path) -> None:
    """A tokenizer.json whose ids are byte values; no merges, two special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # The GPT-2 table that byte-level tokenizers share: printable bytes stand for
    # themselves, the others for characters from U+0100 on, in order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for byte in range(256):
        if byte in printable:
            table[chr(byte)] = byte
        else:
            table[chr(256 + extra)] = byte
            extra += 1
    tokenizer = Tokenizer(models.BPE(vocab=table, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken("<|endoftext|>", special=True),
            AddedToken("<|mask|>", special=True),
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "bos_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": TARGET.max_position_embeddings,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("experiments/tiny"))
    parser.add_argument("--target-steps", type=int, default=TARGET_STEPS)
    parser.add_argument(
        "--draft-steps", type=int, help=f"default by head: {DRAFT_STEPS}"
    )
    parser.add_argument("--heads", default="vanilla,rnn")
    parser.add_argument("--keep-target", action="store_true")
    arguments = parser.parse_args()
    # Two threads on a busy two-core machine were ten times slower than one.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    begin = time.time()

    def report(name: str, step: int, message: str) -> None:
        print(
            f"{time.time() - begin:6.0f} s  {name} step {step}: {message}",
            file=sys.stderr,
            flush=True,
        )

    directory = arguments.out / "target"
    if not arguments.keep_target:
        target = Qwen3Target(TARGET)
        for parameter in target.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        train_target(
            target,
            batches(rows=8, seed=1),
            Schedule(arguments.target_steps, 3e-3, weight_decay=0.05),
            lambda step, message: report("target", step, message),
        )
        save_checkpoint(directory, target_config(), target)
        write_tokenizer(directory)
    # Drafters are trained against what is shipped: the weights rounded to bf16.
    target = load_target(directory)
    for head in arguments.heads.split(","):
        config = drafter_config(head)
        torch.manual_seed(1)
        drafter = DSparkDrafter(read_config(config))
        initialise(drafter, target)
        train_drafter(
            drafter,
            target,
            batches(rows=4, seed=2),
            Schedule(arguments.draft_steps or DRAFT_STEPS[head], 3e-3),
            lambda step, message, head=head: report(head, step, message),  # type: ignore[misc]
            generator=torch.Generator().manual_seed(3),
        )
        save_checkpoint(arguments.out / f"dspark-{head}", config, drafter)


if __name__ == "__main__":
    main()
