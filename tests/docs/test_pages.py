"""Every code block of README and docs runs, commands in running text exist, and links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from pages import API, PAGES, ROOT, blocks_of, run_page

import cgplan
from cgplan import distributed, reports
from cgplan.cli.main import app

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
SHOWN = (
    *(
        "compile_piecewise",
        "eager_break_during_capture",
        "BreakableCUDAGraphCapture",
    ),
    *(
        " CUDAGraphWrapper(",
        "copied_arguments",
        '"piecewise": "wrappers"',
        "BreakableCUDAGraphWrapper(",
    ),
)
RUN = [page for page in PAGES if any(block.mark != "no-run" for block in blocks_of(page))]
MODEL = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(64, 8))

def example():
    return (torch.randn(3, 64),)
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a reader: the repository's files, and some of their own."""
    for name in ("configs", "docs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    data = ROOT / "tests" / "data"
    trace = (data / "azure_llm_code_2023.csv").read_text().splitlines(keepends=True)
    for name in ("requests.csv", "a.csv", "b.csv", "tomorrow.csv"):
        (tmp_path / name).write_text("".join(trace[:1000]))
    shutil.copy(data / "vllm.log", tmp_path)
    start = (data / "vllm_start.log").read_text()
    (tmp_path / "start.log").write_text(start)
    eager = start.replace("enforce_eager=False", "enforce_eager=True")
    (tmp_path / "both.log").write_text(start + eager)
    shutil.copy(data / "golden" / "bench_gpu.json", tmp_path / "bench.json")
    shutil.copy(data / "golden" / "plan_traffic.json", tmp_path / "plan-old.json")
    shutil.copy(ROOT / "configs" / "decoder_cpu.yaml", tmp_path / "serve.yaml")
    for name in ("decoder.py", "attention.py", "adapters.py"):
        shutil.copy(ROOT / "configs" / name, tmp_path)
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    torch.manual_seed(0)
    return tmp_path


@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page: str, desk: Path) -> None:
    made = run_page(page)
    if page == "graphed":
        assert len(made.g.report.records) == 1, "an example is a warm-up"
        assert "# input: float32 [batch, 64]" in (desk / "my.yaml").read_text()
    if page == "piecewise":
        assert len(made.capture.graphs) == 0, "the last one freed what it captured"


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_that_programs_are_in_the_repository(page: str) -> None:
    text = PAGES[page].read_text(encoding="utf-8")
    if "docs/examples/" in text or "](examples/" in text:
        assert "repository" in text


def test_pages_show_what_they_are_about() -> None:
    code = "".join(block.text for block in blocks_of("piecewise"))
    assert [name for name in SHOWN if name not in code] == []
    assert len(PAGES["README"].read_text().splitlines()) <= 110


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages of the site by their path."""
    for name in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("site")
    build = ["mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run([sys.executable, "-m", *build], check=True, cwd=ROOT)
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.html")
    }


def test_the_site_asks_no_other_host(site: dict[str, str]) -> None:
    assert len(site) >= len(PAGES)
    for text in site.values():
        assert not re.findall(
            r"<(?:script|img|iframe)[^>]*src=\"?https?:|<link rel=\"?stylesheet[^>]*https?:", text
        )
    assert f"cgplan {cgplan.__version__}" in site["index.html"]


def test_each_public_name_is_on_one_page() -> None:
    documented = Counter[object]()
    for path in API.values():
        for place in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            documented[place.removeprefix("cgplan.").removeprefix("drop_in.graphed.")] += 1
    public = {*cgplan.__all__} - {"__version__"}
    public |= {f"distributed.{name}" for name in distributed.__all__}
    public |= {
        f"reports.{name}"
        for name in reports.__all__
        if not inspect.ismodule(getattr(reports, name))
    }
    assert public - {*documented} == set()
    assert [name for name, times in documented.items() if times > 1] == []


def test_signatures_show_no_internals(site: dict[str, str]) -> None:
    """Neither what pydantic checks, nor a private name."""
    api = "".join(text for path, text in site.items() if path.startswith("api/"))
    signatures = re.findall(r'class="[^"]*doc-signature.*?</div>', api, re.DOTALL)
    assert len(signatures) > 100
    for signature in signatures:
        plain = re.sub(r"<[^>]+>", "", signature)
        assert not re.search(r"Annotated|Validator|Field\(|lambda|\b_[a-zA-Z]", plain), plain


@pytest.mark.gpu
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.mark == "gpu" for block in blocks_of(page))]
)
def test_blocks_for_a_gpu_run(page: str, desk: Path) -> None:
    """A mark ``gpu: 2`` asks for so many."""
    with torch.no_grad():
        run_page(page, gpus=torch.cuda.device_count())


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def inline_commands() -> Iterator[tuple[str, list[str]]]:
    for page, path in PAGES.items():
        text = without_blocks(path.read_text(encoding="utf-8"))
        for command in re.findall(r"`((?:cgplan|python|torchrun) [^`]+)`", text):
            yield page, command.split()


def test_commands_in_running_text_exist() -> None:
    for page, words in inline_commands():
        place = f"{page}: {' '.join(words)}"
        for word in words:
            if word.startswith(("docs/", "configs/")):
                assert (ROOT / word).exists(), place
        if "cgplan" not in words:
            continue
        command = typer.main.get_command(app)
        for word in words[words.index("cgplan") + 1 :]:
            name = word.split("=")[0]
            if name == "--":  # another program's words follow
                break
            if name.startswith("--"):
                known = [option for parameter in command.params for option in parameter.opts]
                assert name in known or name == "--help", place
            elif word in getattr(command, "commands", {}):
                command = command.commands[word]
        assert command.name != "cgplan" or words[1].startswith("--") or words[1:] == ["..."], place


def anchors(text: str) -> set[str]:
    """Of a page's headings: those that GitHub and the site, which joins hyphens, both make."""
    heads = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    made = {re.sub(r" ", "-", re.sub(r"[^\w\- ]", "", head.lower())) for head in heads}
    return {anchor for anchor in made if "--" not in anchor}


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", without_blocks(text))


def test_links_are_found_below_a_block_with_a_backtick() -> None:
    page = "# A & b\n## C `d`\n```sh\n# e\necho \\`\n```\n[a](#a--b) `b`"
    assert links(page) == ["#a--b"]
    assert anchors(page) == {"c-d"}


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    path = PAGES[page]
    for place in links(path.read_text(encoding="utf-8")):
        if place.startswith("http"):
            continue
        name, _, anchor = place.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), place
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), place


@pytest.mark.parametrize(
    "script", sorted((ROOT / "docs").rglob("*.py")), ids=lambda path: path.name
)
def test_scripts_import_names_that_are_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cgplan"):
            module = importlib.import_module(node.module or "")
            names = [
                name for name in (alias.name for alias in node.names) if not hasattr(module, name)
            ]
            for name in names:
                importlib.import_module(f"{node.module}.{name}")
