"""The errors of cgplan, each before those that inherit from it.

The command line ends with the exit code of the class, and with 2 for wrong options;
docs/troubleshooting.md has a section for each.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar


def first_line(error: BaseException) -> str:
    """The first line of an error's text, else its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def did_you_mean(
    name: str, known: Iterable[str], form: str = "Did you mean {!r}? ", most: int = 1
) -> str:
    """The ``most`` nearest names in the sentence ``form``; empty if none is near."""
    near = get_close_matches(name, list(known), most)
    return form.format(" or ".join(near)) if near else ""


class CgplanError(Exception):
    """Base of all errors that cgplan raises on purpose.

    Args:
        message: File, key and line if there are any, what was found, what is allowed.
        remedy: What the user can do, in one or two sentences.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message


class ConfigError(CgplanError):
    """The configuration has an unknown key, a wrong type, or contradictory values."""

    exit_code = 3


class ConfigFileError(ConfigError):
    """The configuration file is missing, unreadable, or not YAML."""

    exit_code = 4


class PlanError(CgplanError):
    """The configuration gives no plan: no capture size is left, say."""

    exit_code = 5


class ModeError(PlanError):
    """The model's attention does not support the cudagraph mode that was asked for."""

    exit_code = 6


class BudgetError(PlanError):
    """The budget does not pay for a single graph. The message says which budget would."""

    exit_code = 20


class PlanMismatchError(PlanError):
    """A saved plan was made for another configuration, machine or version; names what differs."""

    exit_code = 21


class TrafficError(CgplanError):
    """Traffic cannot be read, is empty, or makes no sense; the message names the row."""

    exit_code = 22


class StepTimeError(CgplanError):
    """Step times are missing for a size, not positive, or cannot be read."""

    exit_code = 23


class RegretError(CgplanError):
    """On other traffic the plan's steps are too long, compared with the best plan's."""

    exit_code = 24


class ModelError(CgplanError):
    """The model's target does not import, is not callable, or failed."""

    exit_code = 7


class InputError(CgplanError):
    """A batch does not match the declared inputs; raised before anything is launched."""

    exit_code = 8


class BackendError(CgplanError):
    """The device that was asked for is not available, or lacks a feature."""

    exit_code = 9


class CaptureError(CgplanError):
    """A graph could not be captured. A session frees all graphs, a serving runner that one."""

    exit_code = 10


class HostSyncError(CaptureError):
    """An operator in the captured region needs the host; names it and the user's source line."""

    exit_code = 11


class CaptureMemoryError(CaptureError):
    """Memory ran out during capture; names the key, what was free, and what to lower."""

    exit_code = 12


class OutputShapeError(CaptureError):
    """An output does not have the batch dimension first, so its padding cannot be cut off."""

    exit_code = 13


class SealedError(CaptureError):
    """A capture was asked for after the runner was sealed, or where captures are forbidden."""

    exit_code = 14


class DispatchMissError(CgplanError):
    """No captured graph serves the batch, and ``compilation.on_miss`` is ``error``."""

    exit_code = 15


class AddressError(CgplanError):
    """A tensor that a graph was captured with has moved or is gone; raised instead of a replay."""

    exit_code = 18


class NumbersError(CgplanError):
    """A replay gave other numbers than the model's own code, or padding reached real rows.

    Attributes:
        output: What the model's own code gave, where it ran.
    """

    exit_code = 19

    def __init__(self, message: str, *, remedy: str = "", output: object = None) -> None:
        super().__init__(message, remedy=remedy)
        self.output = output


class GradientError(CgplanError):
    """``backward`` was called on outputs of a graph, which has no gradients."""

    exit_code = 26


class AuditError(CgplanError):
    """Captured graphs point into memory that is free or not the runner's; lists them."""

    exit_code = 25


class DistributedError(CgplanError):
    """Ranks cannot work together; all ranks that take the step raise it."""

    exit_code = 40


class RendezvousError(DistributedError):
    """A rank did not come within the timeout, or came twice; the message names it."""

    exit_code = 41


class RankMismatchError(DistributedError):
    """Ranks differ where they must not; the message names the rank, and both values."""

    exit_code = 42


class RankFailedError(DistributedError):
    """A rank raised, or was late; the message names the step, and the rank where it is known."""

    exit_code = 43


class RegistrationError(DistributedError):
    """Memory that a graph reads is not shared with other ranks yet, or cannot be."""

    exit_code = 44


class AllReduceError(DistributedError):
    """The all-reduce that was asked for cannot work on this machine, or a rank left it."""

    exit_code = 45


class ReportError(CgplanError):
    """A saved file is not a report or plan, or has a schema version that is not read."""

    exit_code = 16


class OutputPathError(CgplanError):
    """The output path cannot be written."""

    exit_code = 17
