"""The value: a histogram of step shapes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgplan.errors import TrafficError
from cgplan.traffic.histogram import StepShape, Traffic

SHAPES = st.builds(
    lambda reqs, q, uniform, loras: StepShape(reqs * q, reqs, uniform, loras),
    st.integers(1, 50),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 3),
)


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.tuples(SHAPES, st.integers(0, 1000)), min_size=1))
def test_a_histogram_holds_each_shape_once_and_reads_back_equal(counts: list[tuple[StepShape, int]]) -> None:
    if not any(count for _, count in counts):
        with pytest.raises(TrafficError, match="no batch with a count above 0"):
            Traffic.of(counts, "drawn")
        return
    traffic = Traffic.of(counts, "drawn", ["a note"])
    found = [shape for shape, _ in traffic.histogram]
    assert found == sorted(set(found))
    assert traffic.total == sum(count for _, count in counts)
    assert traffic.max_tokens == max(shape.num_tokens for shape, count in counts if count)
    assert sum(traffic.by_tokens().values()) == traffic.total
    assert sum(traffic.by_tokens(uniform=True).values()) == sum(count for shape, count in counts if shape.uniform)
    assert Traffic.from_json(traffic.model_dump_json(indent=2)) == traffic


@pytest.mark.parametrize(
    ("shape", "count", "message", "remedy"),
    [
        (StepShape(1, 1), -1.0, "has count -1", "from 0 up"),
        (StepShape(1, 1), float("nan"), "has count nan", "from 0 up"),
        (StepShape(1, 1), float("inf"), "has count inf", "from 0 up"),
        (StepShape(4, 4), 1e300, "has count 1e\\+300", "from 0 up"),
        (StepShape(0, 0), 1, "cannot be a batch", "at least 1 request"),
        (StepShape(1, 2), 1, "cannot be a batch", "at least 1 token for each request"),
        (StepShape(1, 1, False, -1), 1, "cannot be a batch", "at least 1 request"),
        (StepShape(1 << 28, 4), 1, "tokens is too large", "At most 1048576 tokens"),
    ],
)
def test_shapes_and_counts_that_cannot_be(shape: StepShape, count: float, message: str, remedy: str) -> None:
    with pytest.raises(TrafficError, match=message) as caught:
        Traffic.of({shape: count}, "here")
    assert remedy in caught.value.remedy
