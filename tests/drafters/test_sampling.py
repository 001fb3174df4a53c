# SPDX-License-Identifier: Apache-2.0
"""Logits to probabilities, and drawing from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafters.sampling import pick, probs_from_logits, sample

torch.set_num_threads(1)


def test_temperature_by_hand() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).double()
    weights = np.exp(np.array([0.0, 1.0, 2.0]) / 0.5)
    got = probs_from_logits(logits, 0.5)
    np.testing.assert_allclose(got.numpy(), weights / weights.sum(), rtol=1e-14)


def test_rows_may_have_their_own_temperature_and_zero_is_argmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0]])
    got = probs_from_logits(logits, torch.tensor([0.0, 1.0]))
    assert got.dtype == torch.float32
    assert got[0].tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(got[1], logits[1].softmax(-1))
    block = torch.zeros(2, 3, 4)
    assert probs_from_logits(block, torch.tensor([[0.0], [1.0]]))[0, 2, 0] == 1.0


def test_top_k_and_top_p_cut_as_written() -> None:
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3]).double()
    logits = probs.log()
    np.testing.assert_allclose(
        probs_from_logits(logits, 1.0, top_k=2), [0, 4 / 7, 0, 3 / 7]
    )
    np.testing.assert_allclose(
        probs_from_logits(logits, 1.0, top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]
    )
    # Top-p works on what top-k left: 4/7 of the mass already reaches .5.
    np.testing.assert_allclose(
        probs_from_logits(logits, 1.0, top_k=2, top_p=0.5), [0, 1, 0, 0]
    )
    np.testing.assert_allclose(probs_from_logits(logits, 1.0, top_p=1e-9), [0, 1, 0, 0])
    flat = probs_from_logits(torch.zeros(5), 1.0, top_k=2)
    assert flat.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]


def test_forbidden_tokens_stay_at_exactly_zero() -> None:
    logits = torch.tensor([0.0, -torch.inf, 1.0])
    for temperature in (0.0, 0.7):
        assert probs_from_logits(logits, temperature)[1] == 0.0


def test_pick_is_the_inverse_cdf_and_skips_zeros_at_both_ends() -> None:
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]).double()
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.9999, 1.0 - 2.0**-53]).double()
    got = pick(weights.expand(5, 5), uniform)
    assert got.tolist() == [1, 1, 3, 3, 3]


def test_pick_survives_a_sum_that_rounds_onto_its_end() -> None:
    weights = torch.tensor([[1.0, 2.0**-60, 0.0]]).double()
    top = torch.tensor([1.0]).double()
    assert pick(weights, top).tolist() == [1]


def test_sample_repeats_with_its_seed() -> None:
    probs = torch.full((64, 9), 1 / 9)
    draws = [sample(probs, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*draws)
    assert len(set(draws[0].tolist())) > 3


@pytest.mark.parametrize(
    ("logits", "more", "message"),
    [
        (torch.tensor([0.0, torch.nan]), {}, "NaN"),
        (torch.tensor([0.0, torch.inf]), {}, r"\+inf"),
        (torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]]), {}, "row of -inf"),
        (torch.tensor([0, 1]), {}, "floating point"),
        (torch.zeros(2), {"temperature": -1.0}, "temperature is -1.0"),
        (torch.zeros(2), {"top_k": 0}, "top_k is 0"),
        (torch.zeros(2), {"top_p": 0.0}, "top_p is 0.0"),
        (torch.zeros(2), {"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_bad_input_is_named(
    logits: torch.Tensor, more: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        probs_from_logits(logits, **{"temperature": 1.0, **more})  # type: ignore[arg-type]
