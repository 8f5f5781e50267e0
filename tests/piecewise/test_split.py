"""Splitting a traced forward at operators: where the graph is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cgplan import CompilationConfig, ConfigError, select_backend
from cgplan.piecewise.backend import PiecewiseBackend
from cgplan.piecewise.split import Piece


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def pieces_of(forward: Callable[..., Any], *splitting_ops: str, rows: int = 4) -> tuple[Piece, ...]:
    """How a forward over [rows, 8] is split."""
    splitter = PiecewiseBackend(
        CompilationConfig(splitting_ops=splitting_ops or None), select_backend("cpu")
    )
    x = torch.randn(rows, 8)
    with torch.no_grad():
        expected = forward(x)
        try:
            found = torch.compile(forward, backend=splitter, fullgraph=True)(x)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise error.inner_exception from None
    assert torch.equal(found, expected)
    assert len(splitter.pieces) == 1
    return splitter.pieces[0]


def kinds(pieces: tuple[Piece, ...]) -> list[tuple[bool, int]]:
    return [(piece.eager, len(piece.operators)) for piece in pieces]


def test_segments_stand_around_a_splitting_op() -> None:
    pieces = pieces_of(lambda x: (x * 2).softmax(-1).relu() + 1, "aten::softmax")
    assert [(p.eager, p.operators) for p in pieces] == [
        (False, ("aten::mul",)),
        (True, ("aten::softmax",)),
        (False, ("aten::relu", "aten::add")),
    ]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (lambda x: x @ x.T, "aten::matmul"),
        (lambda x: 2 * x, "aten::mul"),
        (lambda x: x / 3, "aten::div"),
        (lambda x: x[:, :4], "aten::slice"),
        (lambda x: x[0], "aten::select"),
        (lambda x: x[x[:, 0].argsort()], "aten::index"),
    ],
)
def test_python_operators_have_the_names_of_pytorch(
    written: Callable[[Tensor], Tensor], name: str
) -> None:
    pieces = pieces_of(lambda x: written(x.exp()).relu().sum(), name)
    assert [p.eager for p in pieces] == [False, True, False]
    assert name in pieces[1].operators
    assert "aten::exp" in pieces[0].operators
    assert "aten::relu" in pieces[2].operators


def test_arithmetic_with_sizes_is_no_operator_of_tensors() -> None:
    with pytest.raises(ConfigError, match="'aten::add' does not occur") as caught:
        pieces_of(lambda x: x.new_zeros(x.shape[0] + 1).relu() * x[0, 0], "aten::add")
    assert "aten::mul, aten::new_zeros, aten::relu, aten::select" in str(caught.value.remedy)


@pytest.mark.parametrize("name", ["softmax", "aten.softmax", ""])
def test_an_operator_without_a_namespace(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist") as caught:
        pieces_of(lambda x: x.softmax(-1), name)
    assert str(caught.value.remedy).startswith(
        "Operators are named namespace::name, as in aten::softmax. "
    )


def test_pieces_without_work_are_merged() -> None:
    """A view between two splitting ops would be a graph without a kernel."""
    pieces = pieces_of(
        lambda x: (x + 1).softmax(-1).view(2, -1).transpose(0, 1).softmax(0) + 1, "aten::softmax"
    )
    assert kinds(pieces) == [(False, 1), (True, 4), (False, 1)]
    assert kinds(
        pieces_of(lambda x: (x + 1).softmax(-1).view(2, -1).mul(2).softmax(0), "aten::softmax")
    )[1:] == [
        (True, 1),
        (False, 2),
        (True, 1),
    ]


def test_items_of_a_tuple_stay_with_it() -> None:
    def forward(x: Tensor) -> Tensor:
        values, where = (x + 1).topk(3)
        a, b = values.chunk(2, 1)
        return a.sum() + b.sum() + where.float().sum()

    first, second, third = pieces_of(forward, "aten::topk")
    assert (first.eager, second.eager, third.eager) == (False, True, False)
    assert second.operators == ("aten::topk", "python::getitem", "python::getitem")


def test_mutations_keep_their_order() -> None:
    def forward(x: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        made.add_(x)
        y = made.softmax(-1)
        made.mul_(3)
        z = made.softmax(-1)
        made.zero_()
        return y + z * 2 + made

    assert [p.eager for p in pieces_of(forward, "aten::softmax")] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_default_splitting_ops_are_attention() -> None:
    def forward(x: Tensor) -> Tensor:
        q = (x * 2).view(1, 2, -1, 4)
        return F.scaled_dot_product_attention(q, q, q).reshape(x.shape) + 1

    assert [p.eager for p in pieces_of(forward)] == [False, True, False]
    assert kinds(pieces_of(lambda x: x * 2 + 1)) == [(False, 2)]


def test_a_splitting_op_that_is_not_there_is_answered_with_what_is() -> None:
    with pytest.raises(ConfigError, match="'aten::softmaxx' does not exist") as caught:
        pieces_of(lambda x: (x * 2).softmax(-1), "aten::softmaxx")
    assert "Did you mean aten::softmax" in caught.value.remedy
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match="'aten::topk' does not occur in the model") as caught:
        pieces_of(lambda x: (x * 2).softmax(-1), "aten::topk")
    assert "aten::softmax" in caught.value.remedy
