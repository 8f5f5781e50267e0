"""Typed errors of a session, with the key, the user's line and the remedy."""

import inspect
import re
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn

from cgplan.backends.blame import Line, blamed_line
from cgplan.backends.host_sync import remedy_at
from cgplan.config import Input
from cgplan.errors import (
    BackendError,
    CaptureError,
    CaptureMemoryError,
    CgplanError,
    HostSyncError,
    ModelError,
    did_you_mean,
    first_line,
)
from cgplan.units import format_bytes

# torch's words for a host sync
_HOST_PHRASES = ("stream is capturing", "CUDA graph capture", "previous error during capture")
_NO_KERNEL = re.compile(r'"(?P<operator>\w+)" not implemented for \'(?P<dtype>\w+)\'')
_TOO_OLD = re.compile(
    r"only supported (on|for) CUDA devices with compute capability|Device does not support"
)
_FOREIGN_GENERATOR = re.compile(r"generator.*capture mode|offset.*graph capture", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def drop_locals(error: BaseException) -> None:
    """Clear locals of passed frames: they hold tensors."""
    passed = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is not None and id(found) not in passed:  # an error can be its own cause
            passed.add(id(found))
            traceback.clear_frames(found.__traceback__)
            waiting += [found.__cause__, found.__context__]


def raise_caused(failure: CgplanError, error: Exception) -> NoReturn:
    raise failure from (error if failure is not error else error.__cause__)


def explain_failure(
    error: Exception,
    key: str,
    *,
    capturing: bool = False,
    free: int | None = None,
    host_sync: CaptureError | None = None,
    all_freed: bool = True,
    model: Any = None,
    inputs: Mapping[str, Input] = MappingProxyType({}),
) -> CgplanError:
    """``all_freed``: the session gives up what it captured; ``model`` failed on ``inputs``."""
    where = blamed_line(error.__traceback__)
    text = first_line(error)
    if isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error):
        freed = "; everything captured in this session was freed" if all_freed else ""
        had = "" if free is None else f" with {format_bytes(free)} free on the device"
        return CaptureMemoryError(
            f"out of memory at {key}{had}{freed}: {text}",
            remedy="Lower compilation.max_cudagraph_capture_size, give fewer "
            "cudagraph_capture_sizes or LoRA cases, "
            "or leave more memory free (a smaller KV cache, say).",
        )
    needs_host = any(phrase in str(error) for phrase in _HOST_PHRASES)
    if isinstance(error, CaptureError):
        told = error
        # the forward caught the host sync's error
        if type(error) is CaptureError and needs_host and host_sync:
            told = host_sync
        return type(told)(f"capture of {key}: {told.message}", remedy=told.remedy)
    if isinstance(error, CgplanError):
        return error
    if not capturing or _lacking_dtype(error, where) is not None:
        return explain_eager_failure(error, key, model, inputs)
    if _FOREIGN_GENERATOR.search(str(error)):
        return CaptureError(
            f"capture of {key}: the forward draws from a torch.Generator that the graph does not "
            f"know, at {where}",
            remedy="Hold it in an attribute of the model, or pass it to "
            "backend.register_generator first.",
        )
    if needs_host and host_sync:
        return HostSyncError(f"capture of {key}: {host_sync.message}", remedy=host_sync.remedy)
    if needs_host:
        return HostSyncError(
            f"capture of {key}: an operator needs the host, at {where}: {text}",
            remedy=remedy_at(where),
        )
    return CaptureError(
        f"capture of {key} failed, at {where}: {type(error).__name__}: {text}",
        remedy="It ran eagerly: look for what it does only under capture.",
    )


def explain_eager_failure(
    error: Exception, batch: str, model: Any, inputs: Mapping[str, Input]
) -> CgplanError:
    if isinstance(error, CgplanError):
        return error
    where = blamed_line(error.__traceback__)
    lacking = _lacking_dtype(error, where)
    if lacking:
        return lacking
    remedy = said_of_names(model, inputs) + "Check the declared inputs"
    for name, declared in inputs.items():
        remedy += f", {name} [{', '.join(map(str, declared.shape))}] padded with {declared.pad}"
        if not any(extent.symbol for extent in declared.extents):
            remedy += " (no dimension is num_tokens)"
    remedy += ", against the model's forward"
    known = [re.split("[:=]", str(each))[0] for each in _arguments(model).values()]
    if known:
        remedy += f"({', '.join(known)})"
    remedy += "."
    if not isinstance(model, nn.Module):
        remedy += " Pass a model, not a function that builds it."
    return ModelError(
        f"the model failed on a batch padded to {batch}, at {where}: {type(error).__name__}: "
        f"{first_line(error)}",
        remedy=remedy,
    )


def said_of_names(model: Any, names: Iterable[str]) -> str:
    """Which names ``**kwargs`` took, as the forward has no such arguments."""
    said = ""
    known = _arguments(model)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
    for name in names:
        if takes_any and name not in known:
            said += (
                f"The forward has no argument {name!r}: its **kwargs took it. "
                f"{did_you_mean(name, known)}"
            )
    return said


def _arguments(model: Any) -> Mapping[str, inspect.Parameter]:
    with suppress(TypeError, ValueError):  # of no model; of a builtin
        return inspect.signature(getattr(model, "forward", model)).parameters
    return {}


def _lacking_dtype(error: Exception, where: Line) -> BackendError | None:
    text = first_line(error)
    found = _NO_KERNEL.search(text)
    if found is None and not _TOO_OLD.search(text):
        return None
    what = "lacks an operator for a dtype"
    if found:
        what = f"has no {found['operator']} for {found['dtype']}"
    return BackendError(
        f"the device {what}, at {where}: {text}",
        remedy="Convert there (8-bit weights: weight.to(torch.bfloat16) * scale), load "
        "the model in another dtype, or choose another device.",
    )
