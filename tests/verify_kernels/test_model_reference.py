# SPDX-License-Identifier: Apache-2.0
"""A whole small K3: what speculation gives is what plain decoding gives, to the bit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify_kernels import whole_sequence
from verify_kernels import VerifyBatch
from verify_kernels.model.loop import Draft, Generation, Layout, Request, generate
from verify_kernels.model.reference import K3Model, K3State
from verify_kernels.model.weights import K3Config, random_weights

CONFIGS = {
    "fp64": (K3Config(), torch.float64),
    # Other block edges (layers 0 and 3), two KDA layers in a row, fp32 throughout.
    "fp32": (
        K3Config(
            layers=5, residual_block=3, mla_layers=(2, 4), dense_layers=2, top_k=3
        ),
        torch.float32,
    ),
}
PROMPTS = ((3,), (7, 7), (1, 2, 3, 4, 5), tuple(range(8)), (9, *range(20, 36)))


@cache
def model(name: str) -> K3Model:
    config, dtype = CONFIGS[name]
    return K3Model(config, random_weights(config, 0, dtype))


@cache
def plain(name: str, prompt: tuple[int, ...], budget: int) -> Generation:
    """One request alone, one row a step, its prompt too."""
    return generate(model(name), [Request(prompt, budget)], max_width=1, max_running=1)[
        0
    ]


def assert_same(got: Generation, expected: Generation) -> None:
    assert got.tokens == expected.tokens
    assert torch.equal(torch.stack(got.logits), torch.stack(expected.logits))
    assert got.final_state.keys() == expected.final_state.keys()
    for part, value in expected.final_state.items():
        assert torch.equal(got.final_state[part], value), part


def mixed_drafts(
    truths: Sequence[Generation], prompts: Sequence[tuple[int, ...]], seed: int
) -> Draft:
    """0 to 9 drafts, the first few of them right, another number each time."""
    rng = random.Random(seed)

    def draft(number: int, text: Sequence[int]) -> list[int]:
        done = len(text) - len(prompts[number])
        right = truths[number].tokens[done : done + rng.randint(0, 7)]
        wrong = [rng.randrange(48) for _ in range(rng.choice([0, 0, 1, 4]))]
        return [*right, *wrong][: rng.randint(0, 9)]

    return draft


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_whole_sequence(name: str) -> None:
    """Independent: no cache, no rows, every operation batched over the sequence."""
    config = dataclasses.replace(CONFIGS[name][0], round_prefix=None)
    weights = random_weights(config, 5, torch.float64)
    tokens = random.Random(1).choices(range(config.vocab_size), k=21)
    small = K3Model(config, weights)
    state = small.new_state(2, 6, 4)
    got, done = [], 0
    for width in (8, 1, 5, 7):
        batch = step_batch([width], [1], [done], [[5, 0, 3, 1, 4, 2]])
        rows = torch.tensor(tokens[done : done + width])
        got.append(small.step(batch, rows, state))
        state.commit(1, width)
        done += width
    expected = whole_sequence.logits(config, weights, tokens)
    # fp64 through at most 5 layers: each is a few sums of at most 32 products (4e-15)
    # under norms and gates of slope about 1, and 21 tokens of recurrence.
    torch.testing.assert_close(torch.cat(got), expected, rtol=0, atol=1e-11)


requests = st.lists(
    st.tuples(st.sampled_from(PROMPTS), st.sampled_from([1, 5, 12])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(list(CONFIGS)),
    requests=requests,
    layout=st.sampled_from(["eager", "fold"]),
    running=st.integers(1, 4),
    max_width=st.integers(2, 8),
    page=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 10**6),
)
def test_any_drafts_give_plain_decoding(
    name: str,
    requests: list[tuple[tuple[int, ...], int]],
    layout: Layout,
    running: int,
    max_width: int,
    page: int,
    seed: int,
) -> None:
    """Field cases F01, F02, F06, F13, F18, F19, F40: text, logits and committed state
    bit for bit, with ragged widths, batch mates that come and go, and reused slots."""
    truths = [plain(name, prompt, budget) for prompt, budget in requests]
    results = generate(
        model(name),
        [Request(prompt, budget) for prompt, budget in requests],
        mixed_drafts(truths, [prompt for prompt, _ in requests], seed),
        layout=layout,
        max_running=running,
        max_width=max_width,
        page=page,
    )
    for got, expected in zip(results, truths, strict=True):
        assert_same(got, expected)
        assert max(got.widths) <= max_width


@pytest.mark.parametrize("layout", ["eager", "fold"])
@pytest.mark.parametrize("right", [True, False])
def test_right_and_wrong_drafts_at_every_width(layout: Layout, right: bool) -> None:
    """Field case F13: 0 to 7 drafts, all right or all wrong, one number after another;
    right ones save the steps they should and wrong ones cost no token."""
    prompt, budget = PROMPTS[2], 12
    truth = plain("fp64", prompt, budget)
    for count in range(8):

        def draft(_: int, text: Sequence[int], count: int = count) -> list[int]:
            done = len(text) - len(prompt)
            ahead = truth.tokens[done : done + count]
            return ahead if right else [(token + 1) % 48 for token in ahead]

        got = generate(model("fp64"), [Request(prompt, budget)], draft, layout=layout)[
            0
        ]
        assert_same(got, truth)
        # The prompt's step has room for 8 - 5 drafts; the later ones for all.
        first = 1 + min(count, 3) if right else 1
        steps = 1 + -(-(budget - first) // (1 + count if right else 1))
        assert len(got.widths) == steps
        if right:
            assert got.kept == got.widths


def test_a_stop_inside_an_accepted_run_ends_the_text() -> None:
    """Field case F31: nothing after the stop is kept, in the text or in the state."""
    prompt = PROMPTS[3]
    full = plain("fp64", prompt, 12)
    place = next(i for i in range(3, 12) if full.tokens[i] not in full.tokens[:i])
    request = Request(prompt, 12, stop_ids=(full.tokens[place],))
    alone = generate(model("fp64"), [request], max_width=1, max_running=1)[0]
    assert alone.tokens == full.tokens[: place + 1]

    def oracle(_: int, text: Sequence[int]) -> list[int]:
        return full.tokens[len(text) - len(prompt) :]

    for layout in ("eager", "fold"):
        got = generate(model("fp64"), [request], oracle, layout=layout)[0]
        assert_same(got, alone)
        assert got.kept[-1] < got.widths[-1]  # drafts behind the stop were verified


def test_a_lost_convolution_commit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case F40's planted fault: the comparison used here must catch it."""
    prompt, commit = PROMPTS[2], K3State.commit

    def forgetful(self: K3State, slot: int, accepted: int) -> None:
        window = self.kda[0].window_k[slot].clone()
        commit(self, slot, accepted)
        if accepted == 2:
            self.kda[0].window_k[slot] = window

    truth = plain("fp64", prompt, 5)
    monkeypatch.setattr(K3State, "commit", forgetful)

    def draft(_: int, text: Sequence[int]) -> list[int]:
        done = len(text) - len(prompt)
        return truth.tokens[done : done + 1]

    got = generate(model("fp64"), [Request(prompt, 5)], draft)[0]
    with pytest.raises(AssertionError):
        assert_same(got, truth)


def step_batch(
    widths: list[int],
    slots: list[int],
    history: list[int],
    table: list[list[int]],
    accepted: list[int] | None = None,
) -> VerifyBatch:
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + width)
    return VerifyBatch(
        *(
            torch.tensor(values, dtype=torch.int32)
            for values in (starts, history, slots, accepted or [0] * len(widths))
        ),
        torch.tensor(table, dtype=torch.int32),
    )


def test_padding_leaves_no_trace() -> None:
    """Field case F20: requests without a slot, empty ones and rows past the end, with
    tokens and pages that do not exist, change no other row and no state."""
    small = model("fp64")
    plain_state, padded_state = (small.new_state(5, 6, 4) for _ in range(2))
    expected = small.step(
        step_batch([3, 2], [1, 4], [0, 0], [[2], [5]]),
        torch.tensor([1, 2, 3, 4, 5]),
        plain_state,
    )
    got = small.step(
        step_batch(
            [0, 3, 2, 0, 2, 1],
            [3, 1, 0, -1, 4, -7],
            [9, 0, 50, 1, 0, 2],
            [[0], [2], [-1], [99], [5], [-1]],
            [8, 0, 3, 1, 0, 5],
        ),
        torch.tensor([1, 2, 3, -1, 9999, 4, 5, -5] + [2**31 - 1] * 4),
        padded_state,
    )
    rows = [0, 1, 2, 5, 6]
    assert torch.equal(got[rows], expected)
    rest = [m for m in range(12) if m not in rows]
    assert (got[rest] == 0).all()
    for layer, kept in plain_state.kda.items():
        for field, value in vars(kept).items():
            mine = getattr(padded_state.kda[layer], field)
            if torch.is_tensor(value):
                assert torch.equal(mine.nan_to_num(7), value.nan_to_num(7)), field
            else:
                assert mine == value
    for layer, lines in plain_state.mla.items():
        assert torch.equal(padded_state.mla[layer].nan_to_num(7), lines.nan_to_num(7))
    empty = step_batch([0, 2], [1, 0], [3, 0], [[2], [2]])
    assert (small.step(empty, torch.tensor([-1, -1]), padded_state) == 0).all()


def test_a_request_that_sits_out_a_step_keeps_its_records() -> None:
    """Fold layout, width 0 in between: the accepted count is passed again and counts
    once, while a batch mate goes on."""
    small, tokens = model("fp64"), [4, 8, 15, 16, 23, 42]
    state = small.new_state(3, 4, 8)
    table = [[0], [1]]
    rows = torch.tensor([*tokens[:3], 1])  # the third is rejected
    small.step(step_batch([3, 1], [1, 2], [0, 0], table), rows, state, fold=True)
    idle = step_batch([0, 1], [1, 2], [2, 1], table, [2, 1])
    small.step(idle, torch.tensor([2]), state, fold=True)
    back = step_batch([4, 1], [1, 2], [2, 2], table, [2, 1])
    rows = torch.tensor([*tokens[2:], 3])
    got = small.step(back, rows, state, fold=True)[:4]

    alone = small.new_state(2, 1, 8)
    expected = []
    for t, token in enumerate(tokens):
        batch = step_batch([1], [1], [t], [[0]])
        expected.append(small.step(batch, torch.tensor([token]), alone))
        alone.commit(1, 1)
    assert torch.equal(got, torch.cat(expected[2:]))


@pytest.mark.parametrize("fold", [False, True])
def test_a_slot_is_clean_after_a_reset(fold: bool) -> None:
    """Field case F32: a request that is aborted with committed tokens and a verify in
    flight leaves nothing to the next owner of its slot and pages."""
    small, table = model("fp64"), [[0, 1]]
    used, fresh = small.new_state(2, 2, 8), small.new_state(2, 2, 8)
    small.step(step_batch([8], [1], [0], table), torch.arange(8), used, fold=fold)
    used.commit(1, 8)
    small.step(step_batch([3], [1], [8], table), torch.arange(3), used, fold=fold)
    used.reset(1)
    batch = step_batch([4], [1], [0], table, [2 if fold else 0])
    rows = torch.tensor([11, 12, 13, 14])
    got, expected = (small.step(batch, rows, s, fold=fold) for s in (used, fresh))
    assert torch.equal(got, expected)
    used.commit(1, 4)
    fresh.commit(1, 4)
    kept, right = (s.committed(1, [0, 1], 4) for s in (used, fresh))
    assert all(torch.equal(kept[part], value) for part, value in right.items())


def test_text_depends_on_every_layer() -> None:
    """Silencing any one mixer or MLP changes the logits: no part is switched off."""
    config, dtype = CONFIGS["fp32"]
    tokens = torch.tensor([5, 6, 7])
    batch = step_batch([3], [1], [0], [[0]])

    def run(small: K3Model) -> torch.Tensor:
        return small.step(batch, tokens, small.new_state(2, 1, 4))

    clean = run(model("fp32"))
    for index in range(config.layers):
        for part in ("mixer", "mlp"):
            weights = random_weights(config, 0, dtype)
            block = getattr(weights.layers[index], part)
            if part == "mixer":
                block.out.zero_()
            else:
                (block.down if hasattr(block, "down") else block.latent_up).zero_()
            assert not torch.equal(run(K3Model(config, weights)), clean)


def test_kimi_k3_layer_pattern() -> None:
    c = K3Config.kimi_k3()
    assert len(c.mla_layers) == 24 and c.mla_layers[-2:] == (91, 92)
    assert [layer for layer in range(c.layers) if c.starts_block(layer)] == [
        0, 12, 24, 36, 48, 60, 72, 84,
    ]  # fmt: skip
    assert [c.saved_blocks(layer) for layer in (0, 1, 12, 13, 84, 85, 93)] == [
        0, 1, 1, 2, 7, 8, 8,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mla_layers": (4,)}, "mla_layers is .4,.; each must be 0 to 3"),
        ({"layers": 20}, "10 saved blocks; at most 8"),
        ({"latent": 40}, "latent is 40; MXFP4"),
        ({"top_k": 7}, "top_k is 7; it must be 1 to experts = 6"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        K3Config(**change)


def test_bad_input_is_refused() -> None:
    small = model("fp64")
    state = small.new_state(2, 1, 4)
    batch = step_batch([2], [1], [0], [[0]])
    with pytest.raises(ValueError, match="tokens has 1 rows and row_start ends at 2"):
        small.step(batch, torch.tensor([1]), state)
    with pytest.raises(ValueError, match=r"48\] in live rows; each must be 0 to 47"):
        small.step(batch, torch.tensor([1, 48]), state)
    for requests, options, words in (
        ([Request((), 3)], {}, "has 0 prompt tokens"),
        ([Request((1,), 0)], {}, "max_new_tokens 0"),
        ([Request((1,), 1)], {"max_width": 9}, "max_width is 9"),
        ([Request((1,), 1)], {"max_running": 9}, "must be 1 to 64 rows"),
    ):
        with pytest.raises(ValueError, match=words):
            generate(small, requests, **options)
