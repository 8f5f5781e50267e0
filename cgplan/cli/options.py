"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The YAML configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Override a value by its dotted key; the value is YAML. May be repeated.",
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also save the report as JSON in this file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]
Debug = Annotated[bool, typer.Option("--debug", help="Check everything, slowly (compilation.debug).")]
Traceback = Annotated[bool, typer.Option("--traceback", help="On an error, show where it was raised.")]
PlanPath = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="FILE", help="Capture exactly the keys of this saved plan, or refuse if it is not for this."
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="With --plan: capture it although it was made for something else.")
]
Costs = Annotated[
    str | None,
    typer.Option(
        "--costs",
        metavar="SOURCE",
        help="What graphs cost: a capture report; `estimate`, on the CPU; or `measure`, by a few captures.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="Short for --set device=DEVICE: auto, cpu, cuda, cuda:N."),
]


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan to capture in place of the one that follows from the configuration; ``force``: whether it fits or not."""

    path: Path
    force: bool = False

    @classmethod
    def of(cls, path: Path | None, force: bool) -> SavedPlan | None:
        """What --plan and --force say together. Raises BadParameter for --force alone, and for no file."""
        if path == Path():
            raise typer.BadParameter("--plan is empty, or the current folder: give the path of a file")
        if path is None and force:
            raise typer.BadParameter("--force is about a saved plan: give --plan FILE with it")
        return None if path is None else cls(path, force)
