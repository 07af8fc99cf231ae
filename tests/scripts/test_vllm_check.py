"""scripts/vllm_check.py: its prompts and what it expects of a cache. vLLM itself is not needed."""

from __future__ import annotations

import pytest


@pytest.fixture
def check(scripts_on_path):
    import vllm_check

    return vllm_check


def test_prompts_share_blocks_as_the_requests_do(check):
    from common.requests import requests_of

    prompts = check.prompts_of(None, 20)
    assert prompts == check.prompts_of(None, 20)
    for prompt, request in zip(prompts, requests_of(None, 20), strict=True):
        blocks = request.hash_ids[: check.MAX_BLOCKS]
        assert len(prompt) == check.BLOCK_TOKENS * len(blocks) + 5
    first, last = (requests_of(None, 20)[i].hash_ids[0] for i in (0, 19))
    size = check.BLOCK_TOKENS
    assert (prompts[0][:size] == prompts[19][:size]) == (first == last)


def test_expected_hits(check):
    size = check.BLOCK_TOKENS
    one, two = [3] * (2 * size + 5), [3] * size + [4] * size
    assert check.expected_hits([one]) == 0
    assert check.expected_hits([one, one]) == 2 * size
    assert check.expected_hits([one, two]) == size
    assert check.expected_hits([one, one[: 2 * size]]) == size  # one token is always computed


def test_conversations_extend_whole_prompts(check):
    prompts = check.conversations(8)
    assert len(prompts) == 8
    for first, last in zip(prompts[:6], prompts[2:], strict=True):
        assert last[: len(first)] == first and len(last) == len(first) + check.TURN_TOKENS
    cached = [len(p) - check.TURN_TOKENS - 5 for p in prompts]
    assert check.expected_hits(prompts) == sum(cached)
