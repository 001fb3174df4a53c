# SPDX-License-Identifier: Apache-2.0
"""What a client of ``vllm serve`` with a drafter may rely on, on any machine."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

PROMPT = "def read_text(path):\n    with open(path) as "
NEW_TOKENS = 40
START_LIMIT = 240.0


@dataclass(frozen=True)
class Server:
    """A running server: its client, its address, its model name."""

    client: openai.OpenAI
    url: str
    model: str

    def complete(self, **options: object) -> openai.types.Completion:
        """One greedy completion of PROMPT."""
        return self.client.completions.create(
            model=self.model,
            prompt=PROMPT,
            temperature=0,
            **{"max_tokens": NEW_TOKENS, **options},  # type: ignore[arg-type]
        )

    def counters(self) -> dict[str, int]:
        """The speculation counters of /metrics, by name and position."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        counts: dict[str, int] = {}
        for line in text.splitlines():
            name, _, rest = line.partition("{")
            if name.startswith("vllm:spec_decode_num_") and name.endswith("_total"):
                labels, _, value = rest.rpartition("} ")
                position = labels.partition('position="')[2].partition('"')[0]
                counts[name + position] = int(float(value))
            elif name == "vllm:num_requests_running":
                counts[name] = int(float(rest.rpartition("} ")[2]))
        return counts

    def streamed_ids(self) -> list[list[int]]:
        """Token ids of one streamed completion, chunk by chunk."""
        stream = self.complete(stream=True, extra_body={"return_token_ids": True})
        return [
            list(chunk.choices[0].token_ids)
            for chunk in stream
            if chunk.choices and chunk.choices[0].token_ids
        ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT
    while child.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    tail = "\n".join(log.read_text().splitlines()[-30:])
    pytest.fail(f"the server did not start (exit code {child.poll()}):\n{tail}")


@contextlib.contextmanager
def serve(
    target: Path,
    speculative: Mapping[str, Any],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
) -> Iterator[Server]:
    """A server of ``target`` with a drafter, ended when the context is left.

    Fails the test, with the end of the log, when the server does not start.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"),
        *(str(target), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--speculative-config", json.dumps(dict(speculative))),
        *arguments,
    ]
    with log_path.open("w") as log:
        child = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, child, log_path)
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
            yield Server(client, url, "tiny")
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class ClientSuite:
    """The checks; a subclass's module has its fixtures.

    ``server`` gives a :class:`Server`, ``full`` the text of its ``complete()``,
    ``reference`` a function from token ids to the target's logits [T, vocab] without an
    engine.
    """

    drafts = 4
    #: Equal streams from which step ends are pooled.
    streams = 3
    #: Distance of a logprob from the reference's.
    tolerance = 1e-4
    #: How far a greedy token's logit may lie below the reference's best.
    tie = 0.0

    def test_completion(self, server: Server, full: str) -> None:
        answer = server.complete()
        assert answer.usage is not None
        assert answer.usage.completion_tokens == NEW_TOKENS
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].text == full

    def test_streaming_says_the_same(self, server: Server, full: str) -> None:
        pieces = [
            chunk.choices[0].text
            for chunk in server.complete(stream=True)
            if chunk.choices
        ]
        assert "".join(pieces) == full
        # Speculation shows: some chunk carries an accepted run.
        assert max(len(piece) for piece in pieces) > 1

    @pytest.mark.parametrize("limit", range(1, 12))
    def test_max_tokens_inside_an_accepted_run(
        self, server: Server, full: str, limit: int
    ) -> None:
        """Field case F31: never more than max_tokens, wherever the run ends."""
        answer = server.complete(max_tokens=limit)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == limit
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].text == full[:limit]

    @pytest.mark.parametrize("start", range(2, 12))
    def test_stop_string_inside_an_accepted_run(
        self, server: Server, full: str, start: int
    ) -> None:
        """Field case F31: nothing after the stop leaks, also across two runs."""
        stop = full[start : start + 3]
        answer = server.complete(stop=[stop])
        assert answer.choices[0].text == full[: full.index(stop)]
        assert answer.choices[0].finish_reason == "stop"

    def test_the_earlier_of_stop_and_limit_wins(
        self, server: Server, full: str
    ) -> None:
        """Field case F31."""
        at = next(i for i in range(3, 30) if full.index(full[i : i + 3]) == i)
        stop = full[at : at + 3]
        short = server.complete(stop=[stop], max_tokens=at + 2).choices[0]
        assert (short.text, short.finish_reason) == (full[: at + 2], "length")
        enough = server.complete(stop=[stop], max_tokens=at + 3).choices[0]
        assert (enough.text, enough.finish_reason) == (full[:at], "stop")

    def test_an_aborted_request_leaves_the_server_well(
        self, server: Server, full: str
    ) -> None:
        stream = server.complete(stream=True, max_tokens=900)
        assert next(iter(stream)).choices[0].text
        stream.close()
        deadline = time.monotonic() + 30
        while server.counters()["vllm:num_requests_running"]:
            assert time.monotonic() < deadline, "the aborted request still runs"
            time.sleep(0.2)
        assert server.complete().choices[0].text == full

    def test_logprobs_are_the_targets(
        self, server: Server, reference: Callable[[list[int]], Any]
    ) -> None:
        """One a token, equal to a plain forward pass of the target over the text."""
        import torch

        answer = server.complete(logprobs=2, extra_body={"return_token_ids": True})
        found = answer.choices[0].logprobs
        ids = answer.choices[0].token_ids
        assert found is not None and found.token_logprobs is not None
        assert len(found.token_logprobs) == len(ids) == NEW_TOKENS
        logits = reference([*PROMPT.encode(), *ids])
        wanted = logits[len(PROMPT) - 1 : -1].float().log_softmax(-1)
        chosen = wanted[torch.arange(len(ids)), torch.tensor(ids)]
        torch.testing.assert_close(
            torch.tensor(found.token_logprobs), chosen, atol=self.tolerance, rtol=0
        )
        assert (wanted.max(-1).values - chosen).max() <= self.tie

    def test_metrics_match_a_hand_count(self, server: Server) -> None:
        """Field case F23: counted from what arrived, step by step.

        The first chunk is the token of the prefill; every later chunk is one verify
        step: its accepted drafts and one more token. A slow client may receive two
        steps as one chunk, so step ends are pooled over equal streams. The metered
        request ends at a step's end, so that nothing it accepted is cut off.
        """
        ends: set[int] = set()
        for _ in range(self.streams):
            total = 0
            for ids in server.streamed_ids():
                total += len(ids)
                ends.add(total)
        steps_end = sorted(ends)
        assert steps_end[0] == 1
        limit = steps_end[-2]
        steps = len(steps_end) - 2
        before = server.counters()
        server.complete(max_tokens=limit)
        after = server.counters()
        grown = {name: after[name] - before[name] for name in after}
        accepted = limit - 1 - steps
        assert accepted > 0
        assert grown["vllm:spec_decode_num_drafts_total"] == steps
        assert grown["vllm:spec_decode_num_draft_tokens_total"] == self.drafts * steps
        assert grown["vllm:spec_decode_num_accepted_tokens_total"] == accepted
        runs = [b - a - 1 for a, b in itertools.pairwise(steps_end[:-1])]
        for position in range(self.drafts):
            name = f"vllm:spec_decode_num_accepted_tokens_per_pos_total{position}"
            assert grown[name] == sum(run > position for run in runs)
