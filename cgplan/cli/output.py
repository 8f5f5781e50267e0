"""Where results go: standard output, and files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import typer
from rich.console import Console, RenderableType

from cgplan.errors import OutputPathError
from cgplan.reports import Report, render
from cgplan.reports.layout import TEXT_WIDTH, plain_text


def note(text: str) -> None:
    """A line for people; standard output is kept for results."""
    typer.echo(text, err=True)


def show(*renderables: RenderableType) -> None:
    """Print tables: in colour and the terminal's width, or as plain text where there is no terminal. COLUMNS in the
    environment wins over either's width.
    """
    asked = os.environ.get("COLUMNS", "")
    width = int(asked) if asked.isdecimal() and int(asked) > 0 else None
    console = Console(width=width, _environ={name: os.environ[name] for name in os.environ if name != "COLUMNS"})
    for index, renderable in enumerate(renderables):
        if index:
            typer.echo()
        if console.is_terminal:
            console.print(renderable)
        else:
            typer.echo(plain_text(renderable, width or TEXT_WIDTH))


def publish(report: Report, output: Path | None, *, as_json: bool) -> None:
    """Save a report and show it. It is shown also where it could not be saved, so that nothing is lost."""
    text = report.model_dump_json(indent=2) + "\n"
    try:
        if output is not None:
            write_whole(output, text)
            note(f"saved {output}")
    finally:
        if as_json:
            typer.echo(text, nl=False)
        else:
            show(render(report))


def check_writable(path: Path) -> None:
    """Raise OutputPathError if ``path`` could not be written, by trying; nothing is left behind."""
    if path.is_dir():
        raise OutputPathError(f"cannot write {path}: it is a folder", remedy="Give the path of a file.")
    if not path.parent.is_dir():
        raise OutputPathError(
            f"cannot write {path}: there is no folder {path.parent}",
            remedy="Make the folder first, or correct the path.",
        )
    try:
        if not _replaceable(path):  # opening a pipe would end its reader
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        if path.exists():
            path.open("ab").close()  # for appending: the old content stays
        tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise _not_written(path, error) from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one step: it holds the old content or the new one, never a part. Raises OutputPathError."""
    data = content.encode() if isinstance(content, str) else content
    try:
        if not _replaceable(path):  # a pipe or device, /dev/stdout say
            path.write_bytes(data)
            return
        target = path.resolve()  # a link stays a link
        beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            beside.write_bytes(data)
            if target.exists():
                beside.chmod(target.stat().st_mode & 0o7777)
            beside.replace(target)
        except BaseException:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _not_written(path, error) from error


def _replaceable(path: Path) -> bool:
    return path.is_file() or not path.exists()


def _not_written(path: Path, error: OSError) -> OutputPathError:
    return OutputPathError(
        f"cannot write {path}: {error.strerror or error}", remedy="Give a path in a folder that you may write to."
    )
