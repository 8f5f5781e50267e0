"""The errors of cgplan, and their exit codes."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, ClassVar


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def did_you_mean(
    name: str,
    known: Iterable[str],
    form: str = "Did you mean {!r}? ",
    most: int = 1,
    cutoff: float = 0.6,
) -> str:
    """The ``most`` nearest names in ``form``, parts of it first; empty: none is near."""
    near = get_close_matches(name, list(known), max(most, 3), cutoff)
    near.sort(key=lambda other: other not in name)
    return form.format(" or ".join(near[:most])) if near else ""


class CgplanError(Exception):
    """Base of cgplan's errors; ``remedy`` says what the user can do."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message


class ConfigError(CgplanError):
    """The configuration has an unknown key, a wrong type, or contradictions."""

    exit_code = 3


def refuse_others(function: Any, given: Iterable[str], hint: str, known: Any = None) -> None:
    """Raise ConfigError if the function lacks such an argument."""
    known = known or function.__kwdefaults__
    for name in given:
        if name not in known:
            remedy = f"{did_you_mean(name, known)}{hint} Arguments are {', '.join(known)}."
            raise ConfigError(f"{function.__name__} has no argument {name!r}", remedy=remedy)


class ConfigFileError(ConfigError):
    """The file is missing, unreadable, or not YAML."""

    exit_code = 4


class PlanError(CgplanError):
    """The configuration gives no plan."""

    exit_code = 5


class ModeError(PlanError):
    """The model's attention does not support the cudagraph mode."""

    exit_code = 6


class ModelError(CgplanError):
    """The model does not import, is not callable, or failed."""

    exit_code = 7


class InputError(CgplanError):
    """A batch does not match the declared inputs; nothing was launched."""

    exit_code = 8


class BackendError(CgplanError):
    """The device is not available, or lacks a feature."""

    exit_code = 9


class CaptureError(CgplanError):
    """A graph could not be captured. A session frees all graphs, a serving runner that one."""

    exit_code = 10


class HostSyncError(CaptureError):
    """An operator in a capture needs the host; names it and the source line."""

    exit_code = 11


class CaptureMemoryError(CaptureError):
    """Memory ran out during a capture."""

    exit_code = 12


class OutputShapeError(CaptureError):
    """An output's dimension 0 is not the batch: padding cannot be cut."""

    exit_code = 13


class SealedError(CaptureError):
    """The runner is sealed, or captures are forbidden."""

    exit_code = 14


class DispatchMissError(CgplanError):
    """No graph serves the batch, and ``compilation.on_miss`` is ``error``."""

    exit_code = 15


class ReportError(CgplanError):
    """The file is not a report or plan, or its schema version differs."""

    exit_code = 16


class OutputPathError(CgplanError):
    """The output path cannot be written."""

    exit_code = 17


class AddressError(CgplanError):
    """A tensor of a graph has moved or is gone; raised instead of a replay."""

    exit_code = 18


class NumbersError(CgplanError):
    """A replay differs from the model's own code, or padding reached real rows.

    ``output`` is what the model's own code gave, where it ran.
    """

    exit_code = 19

    def __init__(self, message: str, *, remedy: str = "", output: object = None) -> None:
        super().__init__(message, remedy=remedy)
        self.output = output


class BudgetError(PlanError):
    """The budget does not pay for one graph."""

    exit_code = 20


class PlanMismatchError(PlanError):
    """A saved plan is for another configuration, machine or version."""

    exit_code = 21


class TrafficError(CgplanError):
    """Traffic is unreadable, empty, or wrong."""

    exit_code = 22


class StepTimeError(CgplanError):
    """Step times are missing, not positive, or unreadable."""

    exit_code = 23


class RegretError(CgplanError):
    """The plan's steps are too long on other traffic."""

    exit_code = 24


class AuditError(CgplanError):
    """Graphs point into memory that is free or not the runner's; ``report``: of an audit."""

    exit_code = 25
    report: Any = None


class GradientError(CgplanError):
    """``backward`` was called on outputs of a graph, which has no gradients."""

    exit_code = 26


class DistributedError(CgplanError):
    """Ranks cannot work together; all ranks that take the step raise it."""

    exit_code = 40


class RendezvousError(DistributedError):
    """A rank did not come within the timeout, or came twice."""

    exit_code = 41


class RankMismatchError(DistributedError):
    """Ranks differ where they must not."""

    exit_code = 42


class RankFailedError(DistributedError):
    """A rank raised, or was late."""

    exit_code = 43


class RegistrationError(DistributedError):
    """Memory of a graph is not shared with other ranks."""

    exit_code = 44


class AllReduceError(DistributedError):
    """The all-reduce cannot work on this machine, or a rank left it."""

    exit_code = 45
