"""A declarative planner for CUDA graphs; what needs torch is loaded on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cgplan.version import __version__

if TYPE_CHECKING:
    from cgplan.api import capture
    from cgplan.backends import select_backend
    from cgplan.backends.context import capture_allowed, forward_context, get_forward_context
    from cgplan.captures.watched import GraphWatch, watch
    from cgplan.config import CompilationConfig, Config, Dim, Input, load_config
    from cgplan.drop_in import Graphed, graphed, graphed_generate
    from cgplan.errors import (
        AddressError,
        AllReduceError,
        AuditError,
        BackendError,
        BudgetError,
        CaptureError,
        CaptureMemoryError,
        CgplanError,
        ConfigError,
        ConfigFileError,
        DispatchMissError,
        DistributedError,
        GradientError,
        HostSyncError,
        InputError,
        ModeError,
        ModelError,
        NumbersError,
        OutputPathError,
        OutputShapeError,
        PlanError,
        PlanMismatchError,
        RankFailedError,
        RankMismatchError,
        RegistrationError,
        RegretError,
        RendezvousError,
        ReportError,
        SealedError,
        StepTimeError,
        TrafficError,
    )
    from cgplan.graphs.wrapper import CUDAGraphEntry, CUDAGraphOptions, CUDAGraphWrapper, GraphPool
    from cgplan.measure.bench import bench
    from cgplan.models.loading import load_model
    from cgplan.modes import AttentionSupport, BatchDescriptor, CUDAGraphMode
    from cgplan.piecewise.breakable import (
        BreakableCUDAGraphCapture,
        BreakableCUDAGraphWrapper,
        eager_break_during_capture,
        in_breakable_capture,
    )
    from cgplan.piecewise.trace import compile_piecewise
    from cgplan.planning import CudagraphDispatcher, Plan, build_plan
    from cgplan.runner.auto import choose_mode
    from cgplan.runner.manager import CudaGraphManager, capture_together
    from cgplan.runner.runner import GraphRunner
    from cgplan.runner.session import CaptureSession

__all__ = [
    "AddressError",
    "AllReduceError",
    "AttentionSupport",
    "AuditError",
    "BackendError",
    "BatchDescriptor",
    "BreakableCUDAGraphCapture",
    "BreakableCUDAGraphWrapper",
    "BudgetError",
    "CUDAGraphEntry",
    "CUDAGraphMode",
    "CUDAGraphOptions",
    "CUDAGraphWrapper",
    "CaptureError",
    "CaptureMemoryError",
    "CaptureSession",
    "CgplanError",
    "CompilationConfig",
    "Config",
    "ConfigError",
    "ConfigFileError",
    "CudaGraphManager",
    "CudagraphDispatcher",
    "Dim",
    "DispatchMissError",
    "DistributedError",
    "GradientError",
    "GraphPool",
    "GraphRunner",
    "GraphWatch",
    "Graphed",
    "HostSyncError",
    "Input",
    "InputError",
    "ModeError",
    "ModelError",
    "NumbersError",
    "OutputPathError",
    "OutputShapeError",
    "Plan",
    "PlanError",
    "PlanMismatchError",
    "RankFailedError",
    "RankMismatchError",
    "RegistrationError",
    "RegretError",
    "RendezvousError",
    "ReportError",
    "SealedError",
    "StepTimeError",
    "TrafficError",
    "__version__",
    "bench",
    "build_plan",
    "capture",
    "capture_allowed",
    "capture_together",
    "choose_mode",
    "compile_piecewise",
    "eager_break_during_capture",
    "forward_context",
    "get_forward_context",
    "graphed",
    "graphed_generate",
    "in_breakable_capture",
    "load_config",
    "load_model",
    "select_backend",
    "watch",
]

_HOMES = {
    "cgplan.captures.watched": "GraphWatch watch",
    "cgplan.config": "CompilationConfig Config Dim Input load_config",
    "cgplan.modes": "AttentionSupport BatchDescriptor CUDAGraphMode",
    "cgplan.planning": "CudagraphDispatcher Plan build_plan",
    "cgplan.api": "capture",
    "cgplan.drop_in": "Graphed graphed graphed_generate",
    "cgplan.backends": "select_backend",
    "cgplan.graphs.wrapper": "CUDAGraphEntry CUDAGraphOptions CUDAGraphWrapper GraphPool",
    "cgplan.models.loading": "load_model",
    "cgplan.runner.auto": "choose_mode",
    "cgplan.runner.manager": "CudaGraphManager capture_together",
    "cgplan.measure.bench": "bench",
    "cgplan.piecewise.breakable": "BreakableCUDAGraphCapture BreakableCUDAGraphWrapper "
    "eager_break_during_capture in_breakable_capture",
    "cgplan.backends.context": "capture_allowed forward_context get_forward_context",
    "cgplan.runner.runner": "GraphRunner",
    "cgplan.runner.session": "CaptureSession",
    "cgplan.piecewise.trace": "compile_piecewise",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name, "cgplan.errors" if name in __all__ else None)
    if home is None:
        raise AttributeError(f"module 'cgplan' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return __all__
