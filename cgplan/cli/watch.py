"""`cgplan watch`: a command whose processes tell what became of their graphs' memory."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from typer import Exit

from cgplan.cli.options import Shown, WatchRequest
from cgplan.cli.output import is_first_rank, note
from cgplan.errors import AuditError, ModelError
from cgplan.reports import load_report
from cgplan.reports.records import WatchReport
from cgplan.units import counted

_CHILD = Path(__file__).parent / "watched_child"  # its sitecustomize.py is run at the start


def run_watch(
    command: Sequence[str],
    request: WatchRequest,
) -> None:
    """Raises AuditError for pointers into freed memory, with `--fail-on-stale` into any stale."""
    code, found = _watched(command, request)
    fatal = ["free block", "unmapped"]
    if request.fail_on_stale:
        fatal += ["unowned block", "moved"]

    def failing(report: WatchReport) -> int:
        return sum(part.pointers for part in report.stale if part.problem in fatal)

    found.sort(
        key=lambda item: (failing(item[1]), len(item[1].stale), len(item[1].graphs)), reverse=True
    )
    is_saved = is_first_rank()  # the first process
    for process, report in found:
        if len(found) > 1:
            graphs = counted(len(report.graphs), "graph")
            note(f"process {process}, {graphs}, {counted(len(report.stale), 'stale tensor')}")
        if is_saved or not request.as_json:
            shown = request if is_saved else Shown()
            shown.publish(report)
        is_saved = False
    if code:
        note(f"cgplan watch: the command ended with exit code {code}.")
        raise Exit(code)
    fails = sum(failing(report) for _, report in found)
    if fails:
        raise AuditError(
            f"captured graphs have {counted(fails, 'pointer')} into memory that is not theirs now",
            remedy="Capture again after weights or caches are replaced, or write into them.",
        )


def _watched(
    command: Sequence[str],
    request: WatchRequest,
) -> tuple[int, list[tuple[str, WatchReport]]]:
    """Its exit code, and a report for each process with graphs, else an empty one."""
    with tempfile.TemporaryDirectory(prefix="cgplan-watch-") as folder:
        paths = [str(_CHILD), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "CGPLAN_WATCH": folder,
            "CGPLAN_WATCH_REPLAYS": "1" * request.every_replay,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        # standard output is for the JSON
        code = _run(command, environment, sys.stderr if request.as_json else None)
        found = []
        files = sorted(Path(folder).glob("*.json"))
        for file in files:
            report = load_report(file)
            if isinstance(report, WatchReport) and (report.graphs or report.gone):
                found.append((file.stem, report))
        left = os.listdir(folder)  # by sitecustomize.py
    if len(left) > 1 and not files:
        note("cgplan watch: a process died, or called os._exit, before it told of its graphs.")
    elif not found:
        from cgplan.captures.watched import watch

        if not files:
            lost = "no Python process got its PYTHONPATH, which `python -I` and `env -i` drop"
            why = "no process imported torch" if left else lost
            note(f"cgplan watch: nothing was watched, {why}.")
        with watch() as empty:
            found.append(("", empty.check()))
    return code if code >= 0 else 128 - code, found


def _run(command: Sequence[str], environment: dict[str, str], output: TextIO | None) -> int:
    try:
        process = subprocess.Popen(command, env=environment, stdout=output)
    except OSError as error:
        raise ModelError(
            f"{command[0]!r} cannot be run: {error.strerror}",
            remedy="Write a command of your PATH after --: `cgplan watch -- python serve.py`.",
        ) from None
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: process.send_signal(number))
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal has told the process, too
            continue
