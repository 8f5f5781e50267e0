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
def test_a_histogram_holds_each_shape_once_and_reads_back_equal(
    counts: list[tuple[StepShape, int]],
) -> None:
    if not any(count for _, count in counts):
        with pytest.raises(TrafficError, match="no batch with a count above 0"):
            Traffic.of(counts, "drawn")
        return
    traffic = Traffic.of(counts, "drawn", ["a note"])
    found = [shape for shape, _ in traffic.histogram]
    assert found == sorted(set(found))
    assert traffic.total == sum(count for _, count in counts)
    assert Traffic.from_json(traffic.model_dump_json(indent=2)) == traffic


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        (StepShape(1, 1), -1.0),
        (StepShape(1, 1), float("nan")),
        (StepShape(1, 1), float("inf")),
        (StepShape(0, 0), 1),
        (StepShape(1, 2), 1),
    ],
)
def test_shapes_and_counts_that_cannot_be(shape: StepShape, count: float) -> None:
    with pytest.raises(
        TrafficError, match=f"^here: {count} batches of {shape.num_tokens} tokens and .* cannot be"
    ):
        Traffic.of({shape: count}, "here")
