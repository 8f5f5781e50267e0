"""How an error ends a command: two lines on standard error, and the exit code of its class."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from cgplan.errors import CgplanError, OutputPathError

INTERNAL_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells count


@contextmanager
def failures_reported(show_traceback: bool = False) -> Iterator[None]:
    """Turn what the block raises into a message and an exit code.

    Args:
        show_traceback: Show where the error was raised, and its causes, before the message.
    """
    try:
        yield
    except CgplanError as error:
        _end(error, show_traceback, f"error: {error}", error.exit_code)
    except KeyboardInterrupt as error:
        _end(error, show_traceback, "interrupted", INTERRUPTED_EXIT_CODE)
    except BrokenPipeError:  # the reader of a pipe has gone; typer ends the program in silence
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            full = "error: no space left to write the result to\n  remedy: Free some, or write it elsewhere."
            _end(error, show_traceback, full, OutputPathError.exit_code)
        what = f"internal error: {type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
        advice = "This is a defect of cgplan. Run the command again with --traceback and report what it shows."
        _end(error, show_traceback, f"{what}\n  remedy: {advice}", INTERNAL_EXIT_CODE)


def _end(error: BaseException, show_traceback: bool, message: str, exit_code: int) -> None:
    if show_traceback:
        typer.echo("".join(traceback.format_exception(error)), err=True)
    typer.echo(message, err=True)
    raise typer.Exit(exit_code) from None
