"""The blocks of README and docs, each run as a reader would, and what they are said to print compared.

A comment before a block says what is special about it: ``<!-- gpu -->`` or ``<!-- gpu: 2 -->``,
``<!-- file: NAME -->`` (the block is that file), ``<!-- no-run: WHY -->``. Else the language says what to do:
``python`` and ``sh`` run, one after the other; ``console`` runs its lines that begin with ``$``, and the others are
their output; ``text`` is the output of the block before it, where a line ``...`` stands for any lines; ``yaml`` has to
load as a configuration.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from commands import cgplan_command
from ranks import free_port

from cgplan.config import load_config

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
API = {f"api/{page.stem}": page for page in sorted((ROOT / "docs" / "api").glob("*.md"))}
PAGES |= API
BLOCK = re.compile(
    r"^(?:<!-- ([\w-]+)(?:: (.*?))? -->\n)?^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE
)

FEW_CALLS = ("--set", "report.repeats=2", "--set", "report.warmups=1")  # that a bench times


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of the page: that of its first line of code
    mark: str
    of_mark: str
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{PAGES[self.page].relative_to(ROOT)}:{self.line}"


def blocks_of(page: str) -> Iterator[Block]:
    text = PAGES[page].read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        mark, of_mark, language, code = found.groups(default="")
        yield Block(page, text[: found.start(4)].count("\n") + 1, mark, of_mark, language, code)


def run_page(
    page: str, *, gpus: int = 0, after: Callable[[Block, ModuleType], None] | None = None
) -> ModuleType:
    """Run all blocks of a page in the current folder, and return the module that its Python code makes."""
    module = sys.modules[f"page_{page.replace('-', '_')}"] = ModuleType(
        f"page_{page.replace('-', '_')}"
    )
    module.__file__ = str(PAGES[page])
    printed = ""
    for block in blocks_of(page):
        if block.mark == "file":
            Path(block.of_mark).write_text(block.text, encoding="utf-8")
        elif block.mark == "no-run":
            assert block.of_mark, f"{block.place}: say why it is not run"
        elif block.mark == "gpu" and gpus < int(block.of_mark or 1):
            printed = ""
        elif block.language == "python":
            printed = run_python(block, module)
        elif block.language in ("sh", "console"):
            for command, claimed in commands_of(block):
                printed = run_command(block, command, fails="error:" in claimed)
                compare(block, claimed, printed, whole=bool(claimed))
        elif block.language == "text":
            compare(block, block.text, printed)
        elif block.language == "yaml":
            Path("shown.yaml").write_text(block.text, encoding="utf-8")
            load_config("shown.yaml")
        else:
            raise AssertionError(
                f"{block.place}: a block is python, sh, console, text or yaml, or has a mark"
            )
        if after is not None:
            after(block, module)
    return module


def run_python(block: Block, module: ModuleType) -> str:
    """What the code prints. Its lines keep their numbers in the page, for tracebacks and for Dynamo."""
    out = io.StringIO()
    with redirect_stdout(out):
        exec(
            compile("\n" * (block.line - 1) + block.text, str(PAGES[block.page]), "exec"),
            vars(module),
        )
    return out.getvalue()


def commands_of(block: Block) -> Iterator[tuple[str, str]]:
    """Each command, and the output that is claimed for it."""
    text = re.sub(r"\\\n\s*", "", block.text)
    if block.language == "sh":
        yield from (
            (line, "") for line in text.splitlines() if line.strip() and not line.startswith("#")
        )
    else:
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, claimed = part.partition("\n")
            yield command, claimed


def run_command(block: Block, command: str, fails: bool) -> str:
    """What a command prints, standard error included: in this process where it is cgplan's own."""
    words = shlex.split(command, comments=True)
    target = Path(words.pop()) if ">" in words and words[-2] == ">" else None
    words = [word for word in words if word != ">"]
    if words[0] == "cgplan":
        is_repeated = any(word.startswith("configs/") for word in words) and not any(
            w.startswith("--") for w in words
        )
        few = FEW_CALLS if words[1] == "bench" else ()
        result = (_repeated if is_repeated else cgplan_command)(*words[1:], *few)
        code, out, err = result.exit_code, result.stdout, result.output
    elif words[0] == "python" and words[1].endswith(".py"):
        code, out = 0, run_script(*words[1:])
        err = out
    else:
        ways = {
            "torchrun": [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--master-port",
                str(free_port()),
            ],
            "make": ["make", "--dry-run", "--directory", str(ROOT)],
        }
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        given = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        whole = [*ways[words[0]], *words[1:], *(FEW_CALLS if "bench" in words else ())]
        done = subprocess.run(
            whole, env=given, capture_output=True, text=True, timeout=280, check=False
        )
        code, out, err = done.returncode, done.stdout, done.stdout + done.stderr
    assert bool(code) == fails, f"{block.place}: {command}: exit code {code}\n{err}"
    if target is not None:
        target.write_text(out, encoding="utf-8")
    return err


_repeated = cache(cgplan_command)  # several pages begin with the same commands, which write no file


def run_script(path: str, *arguments: str) -> str:
    """What a program prints, here: torch is imported already."""
    out, argv = io.StringIO(), sys.argv
    sys.argv = [path, *arguments]
    try:
        with redirect_stdout(out):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = argv
    return out.getvalue()


VARY = (  # figures and names that differ from run to run, and from machine to machine
    (r"^( *(?:device|versions|made|free|time|config|checked) ).*(?:\n {8,}.*)*", r"\1-"),
    (r"\b[\d.]+ ?(?:[um]?s|[KMG]iB|B|x|us|%)(?![\w/])", "#"),
    (r"/\S*(?=/docs/troubleshooting)", ""),
    (r"-{3,}", "---"),
    (r"[ \t]+", " "),
)


def normal(text: str) -> list[str]:
    """Lines without what varies."""
    for pattern, instead in VARY:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return [line.strip() for line in text.strip().splitlines()]


def compare(block: Block, claimed: str, printed: str, whole: bool = True) -> None:
    """Raise AssertionError unless the claimed lines are those that were printed, but for what varies."""
    lines = [re.escape(line) + "\n" if line != "..." else r"(?:.*\n)*?" for line in normal(claimed)]
    found = "".join(line + "\n" for line in normal(printed))
    if whole:
        assert re.fullmatch("".join(lines), found), (
            f"{block.place} claims\n{claimed}\nprinted was\n{printed}"
        )
