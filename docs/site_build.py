"""What mkdocs.yml cannot say: the version, the repository's address, and plain signatures on the pages of docs/api."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]
SEVERAL = re.compile(r"^( +)([a-z_*]\w*)((?:, [a-z_*]\w*)+): (.*(?:\n\1 +.*)*)", re.MULTILINE)  # names on a line
ATTRIBUTES = re.compile(r"^Attributes:\n((?: +.*\n?|\n)+)", re.MULTILINE)
NAV = re.compile(r'aria-labelledby="__nav_\w+"(?=[^>]*>\s*<label[^>]*>\s*<span[^>]*></span>\s*([^<]+?)\s*<)')
WIDE = re.compile(r"<table>(?=\s*<thead>\s*<tr>(\s*<th\b[^\n]*){4})")
NAMED = ("Report", "DType", "Tensors")  # types that are shown by their name


def on_config(config: Any) -> Any:
    """A hook of MkDocs: the header names the version, the footer links to the repository that pyproject.toml names."""
    version = runpy.run_path(str(ROOT / "cgplan" / "version.py"))["__version__"]
    config.site_name = f"cgplan {version}"
    config.copyright = f"cgplan {version}, Apache-2.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, address in project.get("urls", {}).items():
        link = {"icon": "fontawesome/brands/git-alt", "link": address, "name": name}
        config.extra.setdefault("social", []).append(link)
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A hook of MkDocs: the wide tables of the model zoo, which a program writes, get the room of the contents."""
    if page.file.src_uri == "zoo.md":
        page.meta["hide"] = ["toc"]
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """A hook of MkDocs: names and paths may break behind "_", ".", "/", "|" and "(", and keys scroll wide tables."""
    html = WIDE.sub('<table tabindex="0">', html)
    parts = r"<pre.*?</pre>|<code>.*?</code>|<[^>]*>|\w+/[\w./]+"
    return re.sub(parts, breakable, html, flags=re.DOTALL)


def on_post_page(output: str, **_: Any) -> str:
    """A hook of MkDocs: names for a reader by ear, where the theme has none."""
    return NAV.sub(r'aria-label="\1"', output).replace('role="dialog"', 'role="dialog" aria-label="Search"')


def breakable(found: re.Match[str]) -> str:
    text = found.group()
    if text.startswith("<") and not text.startswith("<code>"):
        return text
    whole = re.sub(r"=[{\[]", r'<span class="whole">\g<0></span>', text)  # chromium would break there
    return re.sub(r"(?<=[\w)\\])([_./(|]+)(?=\w|&lt;)(?![^<]*>)", r"\1<wbr>", whole)


class PlainSignatures(griffe.Extension):
    """An extension of griffe: types and defaults as a caller writes them, without what pydantic checks.

    ``Annotated[int, Field(ge=1)]`` is shown as ``int``, ``Field(default_factory=dict)`` as ``dict()``, and a name for a
    type as that type. An error's text ends with its exit code.
    """

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        modules = loader.modules_collection
        for member in members_of(pkg):
            if member.docstring is not None:
                member.docstring.value = SEVERAL.sub(apart, member.docstring.value)
            if isinstance(member, griffe.Class):
                add_attributes(member)
                continue
            if isinstance(member, griffe.Function):
                member.returns = plain(member.returns, modules)
                for parameter in member.parameters:
                    parameter.annotation = plain(parameter.annotation, modules)
                    parameter.default = without_private(parameter.default, modules)
            elif isinstance(member.parent, griffe.Class):
                member.annotation = plain(member.annotation, modules)
                member.value = without_field(member.value)
            elif is_private(member.value) and not is_annotated(member.value):
                member.value = None  # its text says what it is
        for error in pkg["errors"].classes.values():
            error.docstring.value += f"\n\nA kind of {error.bases[0]}. Exit code {error['exit_code'].value}."


def members_of(parent: griffe.Module | griffe.Class) -> Iterator[griffe.Attribute | griffe.Class | griffe.Function]:
    for each in parent.members.values():
        if isinstance(each, griffe.Attribute | griffe.Class | griffe.Function):
            yield each
        if isinstance(each, griffe.Module | griffe.Class):
            yield from members_of(each)


def apart(found: re.Match[str]) -> str:
    """A line for each name, which griffe gives its type."""
    indent, first, others, text = found.groups()
    lines = [f"{indent}{first}: {text}"]
    for name in others.split(", ")[1:]:
        lines.append(f"{indent}{name}: See `{first}`.")
    return "\n".join(lines)


def add_attributes(member: griffe.Class) -> None:
    """Attributes of the docstring that __init__ does not set: griffe would show the type of the one before."""
    section = ATTRIBUTES.search(member.docstring.value) if member.docstring is not None else None
    for name in re.findall(r"^    (\w+): ", section.group(1), re.MULTILINE) if section else ():
        try:
            member[name]
        except KeyError:
            member.set_member(name, griffe.Attribute(name))


def plain(found: Any, modules: griffe.ModulesCollection) -> Any:
    """The expression of a type, with types in place of cgplan's names for them."""
    if isinstance(found, list | tuple):
        return type(found)(plain(each, modules) for each in found)
    if not isinstance(found, griffe.Expr):
        return found
    if isinstance(found, griffe.ExprName):
        meant = meaning(found, modules)
        return found if meant is None else plain(meant, modules)
    if is_annotated(found):
        return plain(found.slice.elements[0], modules)
    parts = {each.name: plain(getattr(found, each.name), modules) for each in fields(found) if each.name != "parent"}
    return replace(found, **parts)


def is_private(value: Any) -> bool:
    return re.search(r"\b_[A-Za-z]", str(value)) is not None


def is_annotated(found: object) -> bool:
    return isinstance(found, griffe.ExprSubscript) and found.canonical_path == "typing.Annotated"


def meaning(name: griffe.ExprName, modules: griffe.ModulesCollection) -> griffe.Expr | None:
    """The type behind a name; None if the name is a class, or has an entry of its own."""
    try:
        known = modules[name.canonical_path]
        is_alias = known.is_attribute and isinstance(known.parent, griffe.Module)
    except (KeyError, griffe.AliasResolutionError):
        return None
    if not is_alias or name.name in NAMED:
        return None
    return known.value if isinstance(known.value, griffe.ExprSubscript | griffe.ExprBinOp) else None


def without_field(value: Any) -> Any:
    """The default of a pydantic Field."""
    if not isinstance(value, griffe.ExprCall) or value.canonical_path != "pydantic.Field":
        return value
    given = {each.name: each.value for each in value.arguments if isinstance(each, griffe.ExprKeyword)}
    factory = given.get("default_factory")
    return given.get("default") if factory is None else griffe.ExprCall(factory, [])


def without_private(default: Any, modules: griffe.ModulesCollection) -> Any:
    """The default of a parameter; a private constant by its value."""
    if isinstance(default, griffe.ExprName) and is_private(default):
        return modules[default.canonical_path].value
    return default
