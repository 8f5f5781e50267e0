"""Output, files, progress and exit codes."""

from __future__ import annotations

import errno
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from contextvars import ContextVar
from pathlib import Path
from shutil import get_terminal_size
from time import perf_counter
from typing import TYPE_CHECKING

import typer

from cgplan.config.load import writing
from cgplan.errors import CgplanError, HostSyncError, ModelError, OutputPathError, first_line
from cgplan.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

INTERNAL_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells count
PLAIN_LINES = 10
Step = Callable[[int, int, str], None]
shows_progress = ContextVar("cgplan_shows_progress", default=True)


def note(text: str) -> None:
    """On standard error, without control characters."""
    plain = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    typer.echo(wrapped(plain), err=True)


def tell(
    text: str,
    *,
    in_logs: bool = True,
) -> None:
    if (in_logs or sys.stderr.isatty()) and shows_progress.get():
        note(text)


def show(*tables: RenderableType | None) -> None:
    from rich.console import Console

    from cgplan.reports.layout import TEXT_WIDTH, plain_text

    width = get_terminal_size((TEXT_WIDTH, 0)).columns
    console = Console()
    renderables = [table for table in tables if table is not None]
    for index, renderable in enumerate(renderables):
        if index:
            typer.echo()
        if console.is_terminal:
            console.print(renderable, crop=False)
        else:
            typer.echo(plain_text(renderable, width))


def check_outputs(
    outputs: Iterable[Path | None],
    inputs: Iterable[Path | str | None],
) -> None:
    """Raise OutputPathError for a file that is an input, is named twice, or cannot be written."""
    import tempfile  # 2 ms

    taken = {
        Path(given).resolve(): "is an input of the command" for given in inputs if given is not None
    }
    for file in outputs:
        if not file:
            continue
        with writing(file):
            path = file.resolve()
            problem = taken.get(path, "")
            if file.suffix in (".py", ".yaml", ".yml") and file.exists():
                problem = problem or "holds code or a configuration"
            if problem:
                raise OutputPathError(f"{file} {problem}", remedy="Give the path of another file.")
            taken[path] = "is to hold two results"
            if file.exists():  # a pipe may have no reader
                os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
            if file.is_file() or not file.exists():
                tempfile.TemporaryFile(dir=path.parent).close()


def save(path: Path, content: str | bytes) -> None:
    """The whole file or nothing. Raises OutputPathError."""
    data = content.encode() if isinstance(content, str) else content
    with writing(path):
        if path.exists() and not path.is_file():  # a pipe or device
            path.write_bytes(data)
        else:
            target = path.resolve()  # a link stays a link
            beside = target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
            file = beside.open("xb")  # fails for a file or link that is there
            try:
                with file:
                    file.write(data)
                if target.exists():
                    beside.chmod(target.stat().st_mode & 0o7777)
                beside.replace(target)
            except BaseException:
                with suppress(OSError):
                    beside.unlink(missing_ok=True)
                raise
    note(f"saved {path}")


@contextmanager
def failures_reported(show_traceback: bool) -> Iterator[None]:
    try:
        yield
    except (typer.BadParameter, typer.Exit, BrokenPipeError):
        raise
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if show_traceback:
            typer.echo("".join(traceback.format_exception(error)), err=True)
        if isinstance(error, SystemExit):
            ended = traceback.extract_tb(error.__traceback__)[-1]
            message = (
                f"the model's code ends the program, at {ended.filename}:{ended.lineno}: {error!r}"
            )
            error = ModelError(message, remedy="Raise another error there.")
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            problem = f"cannot write the output: {error.strerror}"
            error = OutputPathError(problem, remedy="Make room there.")
        if isinstance(error, CgplanError):
            message = f"error: {error}\n  more: {section_of(type(error))}"
            if isinstance(error, HostSyncError):
                message += "\n  next: `cgplan doctor` captures what it can, and lists the rest"
            exit_code = error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            message = "interrupted"
            exit_code = INTERRUPTED_EXIT_CODE
        else:
            message = (
                f"internal error: {type(error).__name__}: {first_line(error)}\n  remedy: This is a "
                "defect of cgplan. Run the command again with --traceback and report what it shows."
            )
            exit_code = INTERNAL_EXIT_CODE
        note(message)
        raise typer.Exit(exit_code) from None


def section_of(error: type[CgplanError]) -> str:
    package = Path(__file__).parents[1]
    docs = package / "docs" if (package / "docs").is_dir() else package.parent / "docs"
    return f"{docs}/troubleshooting.md#{error.__name__.lower()}"


def wrapped(text: str) -> str:
    """In the terminal's width; long paths stay whole."""
    wrapper = textwrap.TextWrapper(
        get_terminal_size().columns, break_long_words=False, break_on_hyphens=False
    )
    lines = []
    for line in text.splitlines():
        _, indent, label, rest = re.split(r"^( *)((?:\S+: )?)", line)
        wrapper.initial_indent, wrapper.subsequent_indent = indent + label, indent + "  "
        lines += wrapper.wrap(rest) or [line]
    return "\n".join(lines)


def prints_aside() -> AbstractContextManager[object]:
    return redirect_stdout(sys.stderr)


def has_ranks() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ


def is_first_rank() -> bool:
    return not has_ranks() or os.environ["RANK"] == "0"


@contextmanager
def progress(doing: str) -> Iterator[Step]:
    """One changing line in a terminal, else about ten; none if ``doing`` is empty."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    began = perf_counter()

    def show_line(index: int, total: int, name: str) -> None:
        text = f"{doing} {index + 1}/{total}: {name}"
        if status:
            if index:
                left = (perf_counter() - began) / index * (total - index)
                text += f", about {format_seconds(left)} left"
            status.update(Text(text))
        elif doing and (index * PLAIN_LINES % total < PLAIN_LINES or index == total - 1):
            tell(text)

    is_live = doing and console.is_terminal and shows_progress.get()
    with console.status(doing) if is_live else nullcontext() as status:
        yield show_line
