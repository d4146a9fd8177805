"""A replayed trace gives exactly what a dict of prefixes gives, for every cache size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.traces import Line, make_trace, naive_replay

from fastkv.errors import ConfigError
from fastkv.scheduler.replay import POLICIES, UNBOUNDED, Trace, parse_trace, replay

BLOCK = 16


def trace_of(lines: list[Line], block_tokens: int | None = None) -> Trace:
    return parse_trace([line.json() for line in lines], "t.jsonl", block_tokens)


@pytest.mark.parametrize("seed", range(4))
def test_replay_unbounded_finds_what_a_dict_finds(seed: int) -> None:
    lines = make_trace(200, BLOCK, seed)
    result = replay(trace_of(lines), UNBOUNDED)
    hits, _ = naive_replay(lines, BLOCK)
    total = sum(len(line.hash_ids) for line in lines)
    assert hits > 100
    assert (result.hit_blocks, result.evictions, result.rejected_requests) == (hits, 0, 0)
    assert result.hit_rate == hits / total
    assert result.saved_tokens == hits * BLOCK
    assert result.manager_seconds > 0


@pytest.mark.parametrize("size", [3, 8, 24, 40, 100])
def test_replay_bounded_evicts_as_leaf_first_lru(size: int) -> None:
    lines = make_trace(300, BLOCK, seed=size)
    result = replay(trace_of(lines), size, "lru")
    assert (result.hit_blocks, result.evictions) == naive_replay(lines, BLOCK, size)
    assert result.evictions > 0
    assert result.rejected_requests == sum(len(line.hash_ids) > size for line in lines)


@pytest.mark.parametrize("policy", POLICIES)
def test_replay_in_a_cache_that_holds_everything_any_policy_finds_the_limit(policy: str) -> None:
    lines = make_trace(200, BLOCK, seed=3)
    trace = trace_of(lines)
    assert replay(trace, trace.num_blocks, policy).hit_blocks == naive_replay(lines, BLOCK)[0]


def test_replay_full_prompt_twice_leaves_one_token_to_compute() -> None:
    """Two blocks exactly: the second block is full, but its last token has to be computed again."""
    exact = [Line(0, 2 * BLOCK, [1, 2]), Line(1, 2 * BLOCK, [1, 2])]
    assert replay(trace_of(exact, BLOCK), UNBOUNDED).hit_blocks == 1
    longer = [Line(0, 2 * BLOCK, [1, 2]), Line(1, 2 * BLOCK + 1, [1, 2, 3])]
    assert replay(trace_of(longer), UNBOUNDED).hit_blocks == 2


def test_replay_partial_block_is_never_found() -> None:
    """Block 2 is partial in the first request: the second, which has it in full, must compute it."""
    lines = [Line(0, 2 * BLOCK - 1, [1, 2]), Line(1, 2 * BLOCK + 1, [1, 2, 3])]
    assert replay(trace_of(lines, BLOCK), UNBOUNDED).hit_blocks == 1


def test_replay_same_hash_id_after_another_prefix_is_another_block() -> None:
    lines = [Line(0, 2 * BLOCK + 1, [1, 2, 8]), Line(1, 2 * BLOCK + 1, [7, 2, 9])]
    assert replay(trace_of(lines), UNBOUNDED).hit_blocks == 0


def test_trace_lines_out_of_order_are_run_by_timestamp() -> None:
    lines = [Line(5, 3 * BLOCK, [1, 2, 3]), Line(1, 2 * BLOCK, [1, 2])]
    trace = trace_of(lines, BLOCK)
    assert [request.input_tokens for request in trace.requests] == [2 * BLOCK, 3 * BLOCK]
    assert replay(trace, UNBOUNDED).hit_blocks == 2


def test_trace_with_text_hashes_and_large_numbers_counts_them_as_contents() -> None:
    text = '{"timestamp": 0.5, "input_length": 33, "hash_ids": ["ab", 99999999999999999999, "cd"]}'
    trace = parse_trace([text, "", text], block_tokens=16)
    assert (trace.num_unique, trace.num_blocks) == (3, 6)
    assert replay(trace, UNBOUNDED).hit_blocks == 2


def test_progress_reports_add_up_to_all_requests() -> None:
    lines = make_trace(600, BLOCK, seed=1)
    reports: list[int] = []
    result = replay(trace_of(lines), 20, on_requests=reports.append)
    assert result.rejected_requests > 0
    assert sum(reports) == 600
    assert len(reports) > 2


@pytest.mark.parametrize(("block_tokens", "seed"), [(16, 0), (64, 1), (48, 2)])
def test_block_size_is_derived_from_lengths_and_counts(block_tokens: int, seed: int) -> None:
    assert trace_of(make_trace(2000, block_tokens, seed)).block_tokens == block_tokens


def test_block_size_that_is_open_takes_the_only_power_of_two() -> None:
    assert trace_of([Line(0, 1100, [1, 2, 3])]).block_tokens == 512  # 367 to 549 would fit
    with pytest.raises(ConfigError, match=r"t\.jsonl leaves the block size open \(300 to 449 tokens\).*--block-tokens"):
        trace_of([Line(0, 900, [1, 2, 3])])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"t line 3 is no request: .*truncated"),
        ("[]", r"t line 3 is no request: .*object"),
        ('{"timestamp": 0, "input_length": 5}', r"t line 3 is no request: .*hash_ids"),
        ('{"timestamp": 0, "input_length": "5", "hash_ids": [1]}', r"t line 3 is no request: .*input_length"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [1.5]}', r"t line 3 is no request: .*hash_ids"),
        ('{"timestamp": null, "input_length": 5, "hash_ids": [1]}', r"t line 3 is no request: .*timestamp"),
        ('{"timestamp": 0, "input_length": 0, "hash_ids": [1]}', r"t line 3: input_length 0 .*at least 1"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": []}', r"t line 3: .* 0 hash_ids; both must be at least 1"),
        (b'{"timestamp": 0, "input_length": 5, "hash_ids": ["\xff"]}', r"t line 3 is no request"),
        (
            '{"timestamp": 0, "input_length": 33, "hash_ids": [1, 2]}',
            r"t line 3: no block size fits .*line 1 .*at most 16",
        ),
    ],
)
def test_broken_line_is_refused_with_its_number(text: str | bytes, message: str) -> None:
    good = Line(0, 33, [1, 2, 3]).json()  # blocks of 11 to 16 tokens
    with pytest.raises(ConfigError, match=message):
        parse_trace([good, " ", text], "t")


def test_line_that_contradicts_a_given_block_size_is_refused_with_its_number() -> None:
    with pytest.raises(
        ConfigError, match=r"line 1: input_length 33 with blocks of 64 tokens needs 1 hash_ids, it has 3"
    ):
        trace_of([Line(0, 33, [1, 2, 3])], 64)


def test_trace_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="t has no requests"):
        parse_trace(["", "\n"], "t")


def test_replay_of_an_unknown_policy_or_size_is_refused() -> None:
    trace = trace_of([Line(0, 33, [1, 2, 3])])
    with pytest.raises(ConfigError, match="policy 'fifo' is unknown; allowed: .*lru"):
        replay(trace, 0, "fifo")
    with pytest.raises(ConfigError, match="cache size -1"):
        replay(trace, -1)


def test_replay_of_published_traces_is_exact() -> None:
    """Mooncake's traces, where MOONCAKE_TRACES names their folder; the same rules on a made trace everywhere else."""
    folder = os.environ.get("MOONCAKE_TRACES")
    if folder is None:
        lines = make_trace(400, 512, seed=11)
        assert replay(trace_of(lines), UNBOUNDED).hit_blocks == naive_replay(lines, 512)[0]
        return
    for name, hits, blocks in (("conversation", 105_592, 288_500), ("synthetic", 77_740, 121_877)):
        with Path(folder, f"{name}.jsonl").open("rb") as file:
            trace = parse_trace(file, name)
        assert (trace.block_tokens, trace.num_blocks) == (512, blocks)
        assert replay(trace, UNBOUNDED).hit_blocks == hits
