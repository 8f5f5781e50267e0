"""Python runs this when it starts under `cgplan watch`: torch is watched from its import on.

The report is written at exit, on SIGTERM, and on SIGUSR1, which also prints it on standard error.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


class _TorchFinder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            _watch()

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _watch() -> None:
    try:
        import cgplan
        from cgplan.reports import render_text
    except ImportError as error:
        print(f"cgplan watch: this Python has no cgplan: {error}", file=sys.stderr)
        return
    watch = cgplan.watch(
        operators=True,
        every_replay=bool(os.environ.get("CGPLAN_WATCH_REPLAYS")),
    )

    def tell(*, prints: bool) -> None:
        folder = Path(os.environ["CGPLAN_WATCH"])
        try:
            report = watch.check()
        except Exception as error:
            print(f"cgplan watch: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return
        (folder / f"{os.getpid()}.json").write_text(report.model_dump_json(), encoding="utf-8")
        if prints:
            print(render_text(report), file=sys.stderr, flush=True)

    def show(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        tell(prints=True)

    def end(
        number: int,
        frame: FrameType | None,  # noqa: ARG001
    ) -> None:
        tell(prints=False)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    atexit.register(tell, prints=False)
    with suppress(ValueError):  # torch was imported by another thread
        signal.signal(signal.SIGUSR1, show)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, end)


if "CGPLAN_WATCH" in os.environ:
    sys.meta_path.insert(0, _TorchFinder())
_here = str(Path(__file__).parent)
_own = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != _here])
if _own is not None and _own.origin is not None:
    runpy.run_path(_own.origin)
