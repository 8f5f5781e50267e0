"""Who is told what by ``torch.cuda.is_current_stream_capturing``, and when the function is torch's own again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cgplan.backends.replacing import ALL_OTHERS, answering

HERE = __name__.partition(".")[0]


def test_blocks_of_several_threads_share_one_replacement() -> None:
    """Each thread has its own answers, and the last block to end gives torch its function back."""
    own = torch.cuda.is_current_stream_capturing
    with ThreadPoolExecutor(1) as other:
        here, there = answering([HERE], lambda _: True), answering([HERE], lambda _: False)
        here.__enter__()
        other.submit(there.__enter__).result()
        assert torch.cuda.is_current_stream_capturing()
        assert other.submit(lambda: torch.cuda.is_current_stream_capturing()).result() is False
        here.__exit__(None, None, None)
        assert other.submit(lambda: torch.cuda.is_current_stream_capturing()).result() is False
        other.submit(there.__exit__, None, None, None).result()
    assert torch.cuda.is_current_stream_capturing is own


def test_the_inner_block_counts_and_a_name_counts_before_all_others() -> None:
    asked = list[str]()
    with (
        answering([HERE], lambda package: asked.append(package) or False),
        answering([ALL_OTHERS], lambda _: True),
    ):
        assert torch.cuda.is_current_stream_capturing() is False
        with answering([HERE], lambda _: True):
            assert torch.cuda.is_current_stream_capturing() is True
        assert torch.cuda.is_current_stream_capturing() is False
    assert asked == [HERE] * 2
    with answering([ALL_OTHERS], lambda _: True):
        assert torch.cuda.is_current_stream_capturing() is True


def test_an_error_ends_a_block() -> None:
    own = torch.cuda.is_current_stream_capturing
    with pytest.raises(ValueError, match="no"), answering([HERE], lambda _: True):
        raise ValueError("no")
    assert torch.cuda.is_current_stream_capturing is own
