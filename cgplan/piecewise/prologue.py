"""What the code that Dynamo made does around a traced graph, found out by running it once on stand-ins.

Note [Code around a graph]
    Dynamo's code reads from the model and the inputs whatever the graph is given, calls the graph, and puts the model's
    result together. It reads each parameter on each call, although segments that are replayed read none: for a decoder
    that is most of what a step costs the host. What it does is not taken from its bytecode, which differs from Python
    to Python, but seen: it runs once, with stand-ins for all that it can reach. A stand-in remembers how it was
    reached, by attributes, items and sizes, and can do nothing else. So code that does more (it binds an attribute that
    the forward has bound, makes an object, calls another function) fails, and is called as it is, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any

_UTILS = "__import_torch_dot__dynamo_dot_utils"
_CONSTANTS = frozenset({int, float, bool, str, type(None)})
Path = tuple[str, ...]  # a root's name, and what is written behind it: "._buffers", "['x']", ".size(0)"


@dataclass(frozen=True, slots=True)
class Prologue:
    """How a function that Dynamo traced calls its graph. Paths begin with ``inputs``, ``model`` or ``names``, the
    globals of the function.

    Attributes:
        arguments: The path of each argument of the graph.
        result: The source text of what the function returns, from the names of the graph's results.
    """

    arguments: tuple[Path, ...]
    result: Callable[[Sequence[str]], str]

    def read(self, wanted: Mapping[int, str]) -> list[str]:
        """Lines that read some arguments into variables of these names; what paths have in common is read once."""
        lines: list[str] = []
        known: dict[Path, str] = {}
        for index, name in wanted.items():
            path = self.arguments[index]
            above = path[0]
            for end in range(2, len(path)):
                if path[:end] not in known:
                    known[path[:end]] = f"read_{len(known)}"
                    lines.append(f"{known[path[:end]]} = {above}{path[end - 1]}")
                above = known[path[:end]]
            lines.append(f"{name} = {above}{path[-1] if len(path) > 1 else ''}")
        return lines


def read_prologue(code: CodeType, names: Mapping[str, Any], inputs: Sequence[str], num_results: int) -> Prologue | None:
    """See Note [Code around a graph].

    Args:
        code: What Dynamo made of a function ``forward(**inputs)`` with nothing but ``model`` in its closure.
        names: That function's globals.
        inputs: The names of the inputs.
        num_results: How many results the graph has.

    Returns:
        None for code that does more than to read, call and put together.
    """
    calls: list[tuple[Any, ...]] = []

    def graph(*args: Any) -> tuple[_Result, ...]:
        calls.append(args)
        return tuple(_Result(index) for index in range(num_results))

    known: dict[str, Any] = {"__builtins__": {}}
    for name in code.co_names:
        if name.startswith("__compiled_fn"):
            known[name] = graph
        elif name == _UTILS:
            known[name] = _HELPERS
        elif name in names:
            known[name] = _StandIn(("names", f"[{name!r}]"))
    cells = tuple(CellType(_StandIn((name,))) for name in code.co_freevars)
    try:
        run = FunctionType(code, known, "forward", None, cells)
        returned = run(**{name: _StandIn(("inputs", f"[{name!r}]")) for name in inputs})
        _text(returned, [""] * num_results)
        if len(calls) != 1 or {*code.co_freevars} - {"model"}:
            return None
        return Prologue(tuple(map(_path, calls[0])), lambda results: _text(returned, results))
    except Exception:  # it does something else; whatever that raises on a stand-in
        return None


class _StandIn:
    """A value that remembers by which path it was reached."""

    __slots__ = ("cgplan_path",)
    cgplan_path: Path

    def __init__(self, path: Path) -> None:
        object.__setattr__(self, "cgplan_path", path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol, of which a stand-in has none
            raise AttributeError(name)
        return _StandIn((*self.cgplan_path, f".{name}"))

    def __getitem__(self, key: Any) -> _StandIn:
        if type(key) not in (str, int):
            raise TypeError
        return _StandIn((*self.cgplan_path, f"[{key!r}]"))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    def __bool__(self) -> bool:
        raise TypeError

    def __iter__(self) -> Any:  # else Python would ask for items until there are no more
        raise TypeError

    def __eq__(self, _: object) -> bool:
        raise TypeError

    __hash__ = None  # type: ignore[assignment]


class _Result:
    """One result of the graph."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _asked(method: str) -> Callable[..., _StandIn]:
    def ask(value: _StandIn, *index: int) -> _StandIn:
        return _StandIn((*value.cgplan_path, f".{method}({', '.join(map(repr, index))})"))

    return ask


_HELPERS = SimpleNamespace(
    record_pregraph_bytecode_enter=lambda: None,  # marks for the profiler
    record_pregraph_bytecode_exit=lambda _: None,
    call_size=_asked("size"),
    call_stride=_asked("stride"),
    call_storage_offset=_asked("storage_offset"),
)


def _path(value: Any) -> Path:
    if type(value) is not _StandIn:
        raise TypeError
    return value.cgplan_path


def _text(value: Any, results: Sequence[str]) -> str:
    """The source of a value made of the graph's results. Raises TypeError for what cannot be written."""
    if type(value) is _Result:
        return results[value.index]
    if type(value) is _StandIn:
        return "".join(value.cgplan_path)
    if type(value) is tuple:
        return f"({''.join(f'{_text(item, results)}, ' for item in value)})"
    if type(value) is list:
        return f"[{', '.join(_text(item, results) for item in value)}]"
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return f"{{{', '.join(f'{key!r}: {_text(item, results)}' for key, item in value.items())}}}"
    if type(value) in _CONSTANTS and value == value and value not in (float("inf"), -float("inf")):
        return repr(value)
    raise TypeError


__all__ = ["Path", "Prologue", "read_prologue"]
