"""The laws of the house: folder order, sizes, what stays free of torch, and the public surface."""

from __future__ import annotations

import ast
import inspect
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import count
from pathlib import Path
from types import FrameType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script: the package beside these tests

import cgplan
from cgplan import errors

PACKAGE = Path(cgplan.__file__).parent
FOLDERS = (
    "version", "errors", "modes", "units", "config", "planning", "pricing", "traffic", "optimizer", "reports",
    "buffers", "backends", "models", "graphs", "piecewise", "captures", "runner", "measure",
    "distributed", "api", "drop_in", "cli",
)  # fmt: skip
WITHOUT_TORCH = FOLDERS[: FOLDERS.index("buffers")]
EXAMPLES = PACKAGE / "examples"  # there in the wheel alone, from configs/; not held to these laws
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if EXAMPLES not in path.parents)
TINY: set[str] = set()
BUDGET = {"tokens": 251_826, "words": 49_166, "files": 113, "files in a folder": 13}
DENSITY = 7.5  # tokens of a line of code, in each file
LAYOUT = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One imported module, and the names taken from it."""

    target: str
    names: tuple[str, ...]
    line: int
    at_import: (
        bool  # runs when the module is imported: not inside a function, not for type checkers alone
    )


def module_name(path: Path) -> str:
    parts = ("cgplan", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """``cgplan.config.load`` -> ``config``; the package itself and ``python -m cgplan`` stand outside the law."""
    return ([*module.split("."), ""])[1]


def _walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, (), child.lineno, at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports hide the layer"
            yield Import(
                child.module or "",
                tuple(alias.name for alias in child.names),
                child.lineno,
                at_import,
            )
        else:
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _walk(child, at_import and not deferred and not typing_only)


PATHS = {module_name(path): path for path in MODULES}


@cache
def imports_in(module: str) -> list[Import]:
    return list(_walk(ast.parse(PATHS[module].read_text(encoding="utf-8")), at_import=True))


def of_cgplan(module: str) -> list[Import]:
    return [i for i in imports_in(module) if i.target.split(".")[0] == "cgplan"]


def as_modules(found: Import) -> set[str]:
    """The modules that an import names: ``from cgplan.backends import tape`` names ``cgplan.backends.tape``."""
    inside = {f"{found.target}.{name}" for name in found.names}
    return {found.target} | {name for name in inside if name in PATHS}


def test_every_package_has_its_place_in_the_order() -> None:
    found = {layer_of(module) for module in PATHS} - {"", "__main__"}
    assert found == set(FOLDERS)


def test_folders_import_only_from_folders_above() -> None:
    """Deferred imports and those for type checkers count, too."""
    against = set()
    for module in PATHS:
        folder = layer_of(module)
        if folder in ("", "__main__"):
            continue
        above = {"", *FOLDERS[: FOLDERS.index(folder) + 1]}
        against |= {
            f"{module} -> {i.target}"
            for i in of_cgplan(module)
            if {layer_of(n) for n in as_modules(i)} - above
        }
    assert against == set()


@pytest.mark.parametrize("module", sorted(PATHS))
def test_private_names_stay_in_their_package(module: str) -> None:
    for found in of_cgplan(module):
        if layer_of(found.target) == layer_of(module):
            continue
        names = (*found.target.split("."), *found.names)
        private = [n for n in names if n.startswith("_") and not n.startswith("__")]
        assert not private, f"{module}:{found.line} imports {private}"


def test_only_the_choice_of_a_backend_names_one() -> None:
    named = {"cgplan.backends.cuda", "cgplan.backends.tape"}
    users = {m for m in PATHS for i in of_cgplan(m) if as_modules(i) & named}
    assert users == {"cgplan.backends"}


def test_the_name_of_the_tape_stands_in_one_place() -> None:
    users = {path.name for path in MODULES if "cpu (tape)" in path.read_text(encoding="utf-8")}
    assert users == {"schema.py"}


def test_nothing_imports_the_command_line() -> None:
    users = {
        m for m in PATHS for i in of_cgplan(m) if any(layer_of(n) == "cli" for n in as_modules(i))
    }
    assert {m for m in users if layer_of(m) not in ("cli", "__main__")} == set()


def test_no_import_cycles() -> None:
    """Deferred imports and those for type checkers count, too."""
    graph = {}
    for module in set(PATHS) - {"cgplan"}:
        named = set[str]().union(*map(as_modules, of_cgplan(module)))
        graph[module] = named - {module, "cgplan"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("module", [m for m in sorted(PATHS) if layer_of(m) in WITHOUT_TORCH])
def test_the_first_layers_do_not_mention_torch(module: str) -> None:
    assert [i for i in imports_in(module) if i.target.split(".")[0] == "torch"] == []


def test_planning_runs_without_torch() -> None:
    code = """
import sys
import cgplan, cgplan.planning, cgplan.config, cgplan.reports, cgplan.reports.records
plan = cgplan.build_plan(cgplan.Config())
cgplan.CudagraphDispatcher(plan).dispatch(3)
cgplan.Plan.from_json(plan.model_dump_json())
cgplan.load_config
cgplan.CaptureError, cgplan.CUDAGraphMode
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_the_public_surface_is_sorted_and_there() -> None:
    assert cgplan.__all__ == sorted(set(cgplan.__all__))
    for name in cgplan.__all__:
        assert getattr(cgplan, name) is not None, name
    assert dir(cgplan) == cgplan.__all__
    with pytest.raises(AttributeError, match="nonsense"):
        _ = cgplan.nonsense


def test_type_checkers_see_what_is_there() -> None:
    """The imports under TYPE_CHECKING name the public surface, from where it is loaded."""
    homes = {
        name: found.target
        for found in imports_in("cgplan")
        if found.target.startswith("cgplan.") and not found.at_import
        for name in found.names
    }
    assert set(homes) | {"__version__"} == set(cgplan.__all__)
    for name, home in homes.items():
        if name in cgplan._HOME_OF:
            assert cgplan._HOME_OF[name] == home, name


def subclasses(base: type[errors.CgplanError]) -> Iterator[type[errors.CgplanError]]:
    yield base
    for child in base.__subclasses__():
        yield from subclasses(child)


def test_each_error_has_its_own_exit_code() -> None:
    found = {
        cls.__name__: cls
        for cls in subclasses(errors.CgplanError)
        if cls.__module__ == "cgplan.errors"
    }
    codes = [cls.exit_code for cls in found.values()]
    free = next(code for code in count(3) if code not in codes)
    assert len(set(codes)) == len(codes), f"{free} is the next free exit code"
    assert not {0, 2} & set(codes), "0 is success, and 2 is the command line's own"
    for name, cls in found.items():
        assert "exit_code" in vars(cls), f"{name} inherits its exit code; {free} is free"
    assert set(found) <= set(cgplan.__all__)


def test_all_exceptions_of_cgplan_are_in_errors() -> None:
    for path in MODULES:
        if path.name == "errors.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base) for base in node.bases]
                assert not [b for b in bases if b.endswith(("Error", "Exception"))], (
                    f"{path}:{node.lineno}"
                )


def words_in(code: str) -> int:
    """Of docstrings, comments, and other strings with a space in them."""
    texts = [t.string[1:] for t in tokens_in(code) if t.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            texts.append(node.value)
    return sum(len(text.split()) for text in texts)


def docstring_lines(path: Path) -> set[int]:
    found: set[int] = set()
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            first = node.body[0]
            found.update(range(first.lineno, (first.end_lineno or 0) + 1))
    return found


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_no_file_is_squeezed(path: Path) -> None:
    tokens, lines = density_of(path)
    assert tokens <= DENSITY * lines, (
        f"{tokens} tokens on {lines} lines of code are {tokens / lines:.2f} a line; {DENSITY} are "
        "allowed. Write loops out and name what stands between; lines cost nothing."
    )


def density_of(path: Path) -> tuple[int, int]:
    """Tokens, and lines of code."""
    tokens = [t for t in tokens_in(path.read_text(encoding="utf-8")) if t.type not in LAYOUT]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(tokens), max(len(lines - docstring_lines(path)), 1)


def number_of_tokens(code: str) -> int:
    return sum(token.type not in LAYOUT for token in tokens_in(code))


MEASURES = {"tokens": number_of_tokens, "words": words_in}


def spent_by_file(measure: str) -> Counter[str]:
    count = MEASURES[measure]
    return Counter({name_of(path): count(path.read_text(encoding="utf-8")) for path in MODULES})


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE.parent).as_posix()


def spent() -> dict[str, int]:
    return {
        **{measure: spent_by_file(measure).total() for measure in MEASURES},
        "files": len(MODULES),
        "files in a folder": max(Counter(path.parent for path in MODULES).values()),
    }


def git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *words], capture_output=True, cwd=PACKAGE.parent, check=False)


def grown(measure: str) -> Counter[str]:
    """By file, since the last commit; if nothing is changed since, by that commit. Empty without
    the repository.
    """
    is_changed = git("status", "--porcelain", "cgplan").stdout
    archive = git("archive", "HEAD" if is_changed else "HEAD~1", "cgplan").stdout
    if not archive:
        return Counter()
    found = spent_by_file(measure)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            file = files.extractfile(member)
            if file is not None and member.name in found:
                found[member.name] -= MEASURES[measure](file.read().decode())
    return +found


def too_much(name: str, amount: int) -> str:
    text = f"{amount:,} {name}, {amount - BUDGET[name]:,} more than the budget of {BUDGET[name]:,}"
    if name in MEASURES:
        for said, by_file in (("grown", grown(name)), ("largest", spent_by_file(name))):
            listed = [f"{file} {count:,}" for file, count in by_file.most_common(5)]
            text += f"\n  {said}: {', '.join(listed) or 'none'}"
    return text


def test_the_package_keeps_its_budget() -> None:
    over = [too_much(name, amount) for name, amount in spent().items() if amount > BUDGET[name]]
    assert not over, "\n".join(
        [
            *over,
            "Say it in less, here or elsewhere. If users get something for more, raise BUDGET, and "
            "tell in the commit what they get.",
        ]
    )


@pytest.mark.parametrize(("mode", "most"), [("FULL", 9), ("PIECEWISE", 18)])
def test_a_call_like_the_one_before_is_short(mode: str, most: int) -> None:
    """Calls of our functions, one eager piece included."""

    def count(frame: FrameType, event: str, _: object) -> None:
        found.extend(
            [frame.f_code.co_qualname]
            if event == "call" and str(PACKAGE) in frame.f_code.co_filename
            else []
        )

    found: list[str] = []
    config = {
        "cudagraph_capture_sizes": [4],
        "cudagraph_mode": mode,
        "splitting_ops": ["aten::softmax"],
    }
    inputs = {"x": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
    x = torch.ones(3, 8)
    with closing(
        cgplan.capture(lambda x: (x + 1).softmax(-1) * 2, inputs, compilation=config, device="cpu")
    ) as runner:
        runner(x=x)
        runner(x=x)
        sys.setprofile(count)
        try:
            runner(x=x)
        finally:
            sys.setprofile(None)
    assert 0 < len(found) <= most, found


def tokens_in(code: str) -> Iterator[tokenize.TokenInfo]:
    """An f-string is one token, as it is before Python 3.12."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        name = tokenize.tok_name[token.type]
        if not depth:
            yield token
        depth += name.endswith("STRING_START") - name.endswith("STRING_END")


def test_no_file_is_tiny() -> None:
    files = [p for p in MODULES if not p.name.startswith("__") and p.name != "version.py"]
    tiny = {
        str(p.relative_to(PACKAGE))
        for p in files
        if len(p.read_text(encoding="utf-8").splitlines()) < 40
    }
    assert tiny == TINY


def test_no_folder_has_the_name_of_a_public_name() -> None:
    """Importing ``cgplan.capture.key`` would put the module in place of ``cgplan.capture``."""
    assert not {m.split(".")[1] for m in PATHS if m != "cgplan"} & set(cgplan.__all__)


def test_public_names_have_docstrings() -> None:
    for name in cgplan.__all__:
        value = getattr(cgplan, name)
        if not callable(value):
            continue
        assert value.__doc__, name
        methods = (
            {n: m for n, m in vars(value).items() if inspect.isfunction(m)}
            if inspect.isclass(value)
            else {}
        )
        inherited = (
            {n for base in inspect.getmro(value)[1:] for n in vars(base)} if methods else set()
        )
        assert not [
            n
            for n, m in methods.items()
            if not m.__doc__ and not n.startswith("_") and n not in inherited
        ], name


if __name__ == "__main__":
    for name, amount in spent().items():
        print(f"{name}: {amount:,} of {BUDGET[name]:,}")
    for name in MEASURES:
        for file, count in grown(name).most_common():
            print(f"{file}: {count:+,} {name}")
    densities = {path: density_of(path) for path in MODULES}
    by_density = sorted(MODULES, key=lambda path: -densities[path][0] / densities[path][1])
    for path in by_density[:5]:
        tokens, lines = densities[path]
        print(f"{name_of(path)}: {tokens / lines:.2f} tokens a line of {DENSITY}")
