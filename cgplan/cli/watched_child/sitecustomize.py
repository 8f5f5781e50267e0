"""Python runs this when it starts under `cgplan watch`: torch is watched from its import on."""

import atexit
import os
import runpy
import signal
import sys
from contextlib import suppress
from functools import partial
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
    from multiprocessing import util

    try:
        from cgplan import watch as watch_graphs
        from cgplan.reports import render_text
    except ImportError as error:
        print(f"cgplan watch: this Python has no cgplan: {error}", file=sys.stderr)
        return
    begin = partial(
        watch_graphs,
        operators=True,
        every_replay=bool(os.environ.get("CGPLAN_WATCH_REPLAYS")),
    )
    watch = begin()
    process = os.getpid()
    folder = Path(os.environ["CGPLAN_WATCH"])
    (folder / str(process)).touch()  # until it tells

    def tell(*, prints: bool = False) -> None:
        if os.getpid() != process:  # a fork that has graphs of its parent alone
            return
        file = folder / str(process)
        try:
            report = watch.check()
            file.write_text(report.model_dump_json(), encoding="utf-8")
            file.replace(file.with_suffix(".json"))  # whole, or not at all
        except Exception as error:
            print(f"cgplan watch: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return
        if prints:
            print(render_text(report), file=sys.stderr, flush=True)

    def answer(
        number: int,
        frame: FrameType | None,  # noqa: ARG001
    ) -> None:
        tell(prints=number == signal.SIGUSR1)
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def in_fork(_: Any) -> None:
        nonlocal process, watch
        process = os.getpid()
        watch.close()  # its graphs are the parent's
        watch = begin()
        util.Finalize(None, tell, exitpriority=0)  # multiprocessing skips atexit

    atexit.register(tell)
    util.register_after_fork(tell, in_fork)
    with suppress(ValueError):  # torch was imported by another thread
        for number in (signal.SIGUSR1, signal.SIGTERM):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, answer)


if "CGPLAN_WATCH" in os.environ:
    sys.meta_path.insert(0, _TorchFinder())
    with suppress(OSError):  # the watch has ended
        Path(os.environ["CGPLAN_WATCH"], "python").touch()
_here = str(Path(__file__).parent)
_own = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != _here])
if _own and _own.origin is not None:
    runpy.run_path(_own.origin)
