"""Everything that can go wrong, on one screen.

    CgplanError                    1   base of all; itself for misuse from Python
    ├── ConfigError                3   the configuration says something that cannot be
    │   └── ConfigFileError        4   ... or its file cannot be read or parsed
    ├── PlanError                  5   no plan follows from the configuration
    │   ├── ModeError              6   ... because the model's attention does not support the mode
    │   ├── BudgetError           20   ... because the budget does not pay for a single graph
    │   └── PlanMismatchError     21   a saved plan was made for another configuration or machine
    ├── TrafficError              22   a file of traffic cannot be read, or holds no batch
    ├── StepTimeError             23   step times are missing, not positive, or of no use
    ├── RegretError               24   a plan is too far from the best one for other traffic
    ├── ModelError                 7   the model's target does not import, or failed
    ├── InputError                 8   a call with a wrong name, shape, dtype, device or count
    ├── BackendError               9   the device asked for is not there, or lacks a feature
    ├── CaptureError              10   a graph could not be captured
    │   ├── HostSyncError         11   ... because an operator needs the host
    │   ├── CaptureMemoryError    12   ... because memory ran out
    │   ├── OutputShapeError      13   ... because an output does not have the batch dimension
    │   └── SealedError           14   ... because no session is open, or captures are forbidden
    ├── DispatchMissError         15   no graph serves this batch and on_miss is `error`
    ├── AddressError              18   a tensor that a graph was captured with has moved
    ├── NumbersError              19   a replay differs from the model's own code
    ├── GradientError             26   backward through outputs of a graph
    ├── AuditError                25   captured graphs point into memory that is not the runner's
    ├── DistributedError          40   ranks cannot work together
    │   ├── RendezvousError       41   ... because one of them did not come
    │   ├── RankMismatchError     42   ... because they differ: configuration, torch, captures
    │   ├── RankFailedError       43   ... because one of them raised, left, or was late
    │   ├── RegistrationError     44   graph buffers are not shared or not registered yet
    │   └── AllReduceError        45   the all-reduce asked for cannot work here, or failed
    ├── ReportError               16   a saved file is not a report or plan that this version reads
    └── OutputPathError           17   the output path cannot be written

Exit code 2 is the command line's own (wrong options). Each error carries a remedy: what to do
about it, in one or two sentences. Only the command line turns an error into an exit code.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its class where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def did_you_mean(
    name: str, known: Iterable[str], form: str = "Did you mean {!r}? ", most: int = 1
) -> str:
    """The nearest of the known names, or at most so many, in a sentence of this form; empty if none
    is near.
    """
    near = get_close_matches(name, list(known), most)
    return form.format(" or ".join(near)) if near else ""


class CgplanError(Exception):
    """Base of all errors that cgplan raises on purpose.

    Args:
        message: What is wrong: file, key and line where there are any, what was found, what is
            allowed.
        remedy: What the user can do about it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __init_subclass__(cls, *, exit_code: int | None = None) -> None:
        if exit_code is not None:
            cls.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message


class ConfigError(CgplanError, exit_code=3):
    """The configuration holds an unknown key, a wrong type, or values that contradict each
    other.
    """


class ConfigFileError(ConfigError, exit_code=4):
    """The configuration file is missing, unreadable, or not YAML."""


class PlanError(CgplanError, exit_code=5):
    """No plan follows from the configuration: no capture size is left, say."""


class ModeError(PlanError, exit_code=6):
    """The model's attention does not support the cudagraph mode that was asked for."""


class BudgetError(PlanError, exit_code=20):
    """The budget does not pay for a single graph. The message says which budget would."""


class PlanMismatchError(PlanError, exit_code=21):
    """A saved plan was made for another configuration, model, driver or version; the message names
    what differs.
    """


class TrafficError(CgplanError, exit_code=22):
    """Traffic cannot be read, is empty, or makes no sense; the message names the row."""


class StepTimeError(CgplanError, exit_code=23):
    """Step times are missing for a size, not positive, or cannot be read."""


class RegretError(CgplanError, exit_code=24):
    """On other traffic, steps with a plan are longer than with the best one there by more than was
    allowed.
    """


class ModelError(CgplanError, exit_code=7):
    """The model's target does not import, is not callable, or failed while it was built or run."""


class InputError(CgplanError, exit_code=8):
    """A batch does not match the declared inputs; raised before anything is launched."""


class BackendError(CgplanError, exit_code=9):
    """The device that was asked for is not available, or lacks a feature."""


class CaptureError(CgplanError, exit_code=10):
    """A graph could not be captured. A session frees all its graphs; between batches only that key
    is given up.
    """


class HostSyncError(CaptureError, exit_code=11):
    """An operator inside the captured region needs the host; names it and the user's source
    line.
    """


class CaptureMemoryError(CaptureError, exit_code=12):
    """Memory ran out during capture; names the key, what was free, and what to lower."""


class OutputShapeError(CaptureError, exit_code=13):
    """An output of the model does not have the batch dimension first, so padding cannot be sliced
    off.
    """


class SealedError(CaptureError, exit_code=14):
    """A capture was asked for after the runner was sealed, or where ``capture_allowed(False)``
    forbids it.
    """


class DispatchMissError(CgplanError, exit_code=15):
    """No captured graph serves the batch, and ``compilation.on_miss`` is ``error``."""


class AddressError(CgplanError, exit_code=18):
    """Tensors that a graph was captured with have moved, are gone, or others have come; raised
    instead of a replay.
    """


class NumbersError(CgplanError, exit_code=19):
    """A replay gave other numbers than the model's own code, or padding reached real rows.

    Attributes:
        output: What the model's own code gave, where it ran.
    """

    def __init__(self, message: str, *, remedy: str = "", output: object = None) -> None:
        super().__init__(message, remedy=remedy)
        self.output = output


class GradientError(CgplanError, exit_code=26):
    """``backward`` was called on outputs of a graph, which has no gradients."""


class AuditError(CgplanError, exit_code=25):
    """Captured graphs hold pointers into memory that is free, gone, or somebody else's; the message
    lists them.
    """


class DistributedError(CgplanError, exit_code=40):
    """Ranks cannot work together; all ranks that take the step raise it."""


class RendezvousError(DistributedError, exit_code=41):
    """A rank did not come within the timeout, or came twice; the message names it."""


class RankMismatchError(DistributedError, exit_code=42):
    """Ranks differ where they must not; the message names the rank, and both values."""


class RankFailedError(DistributedError, exit_code=43):
    """A rank raised, or did not come within the timeout; the message names the step, and the rank
    where it is known.
    """


class RegistrationError(DistributedError, exit_code=44):
    """Memory that a graph reads cannot be handed to other processes, or a graph was replayed before
    it was.
    """


class AllReduceError(DistributedError, exit_code=45):
    """The all-reduce that was asked for cannot work on this machine, or a rank left it while
    another waited.
    """


class ReportError(CgplanError, exit_code=16):
    """A saved file is not a report or plan, or has a schema version that this cgplan does not
    read.
    """


class OutputPathError(CgplanError, exit_code=17):
    """The output path cannot be written."""
