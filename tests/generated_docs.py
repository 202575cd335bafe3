"""What docs, and a stub, hold of the program: `python -m tests.generated_docs` writes it, a test compares it."""

import dataclasses
import inspect
import json
import re
import textwrap
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import click

from tests.schemas import schema_of
from twellc.benchmarking.result import BenchResult
from twellc.checks.checking import CheckResult
from twellc.cli import main
from twellc.compiling.manifest import Manifest
from twellc.inspection.description import Description, Inspection
from twellc.options import commands, decisions, source, weights
from twellc.options.option import declared

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cli.md"
STUB = ROOT / "twellc" / "options" / "keywords.pyi"
# The options classes of functions, each behind its bases.
_KINDS = [
    source.Example, source.RunOptions, source.SourceOptions, source.TracingOptions, decisions.DecisionOptions,
    weights.WeightTypeOptions, weights.WeightOptions, source.SampleOptions, commands.CompileOptions,
    commands.InspectOptions, commands.CheckOptions, commands.ProfileOptions, commands.BenchOptions,
]  # fmt: skip
# Of inspect a flat form is printed, which no record has: of a plan with what its manifest holds.
_WITHOUT = ("description", "manifest")


def _inspected(of: type[Any]) -> type[Any]:
    """Return a record of what `inspect --json` prints: the fields of `of`, and those of an inspection."""
    own = [field for kind in (of, Inspection) for field in fields(kind) if field.name not in _WITHOUT]
    known = {
        name: form for kind in (of, Inspection) for name, form in get_type_hints(kind, include_extras=True).items()
    }
    kept = [(each.name, known[each.name], dataclasses.field(metadata=each.metadata)) for each in own]
    named = [] if of is Description else [("kind", str)]
    return make_dataclass(f"Inspected{of.__name__}", [*named, *kept], namespace={"__doc__": "What inspect prints."})


SCHEMAS: dict[str, dict[str, type[Any]]] = {
    "manifest": {"the manifest of a plan, or the report of a compilation": Manifest},
    "inspect": {"an inspected model": _inspected(Description), "an inspected plan": _inspected(Manifest)},
    "check": {"what twellc check found": CheckResult},
    "bench": {"what twellc bench found": BenchResult},
}
_WIDTH = 118
_TABLE = re.compile(r"(<!-- options of ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page() -> str:
    """Return docs/cli.md with the tables of options as the program has them."""
    return _TABLE.sub(lambda found: f"{found[1]}{table_of(found[2])}\n{found[3]}", PAGE.read_text(encoding="utf-8"))


def options_of(command: str) -> dict[str, click.Option]:
    """Return the options that a command shows in its help, each by its longest name."""
    options = main.params if command == "twellc" else main.commands[command].params
    return {max(each.opts, key=len): each for each in options if isinstance(each, click.Option) and not each.hidden}


def shared() -> dict[str, list[str]]:
    """Return the rows that several commands have, each with those commands."""
    found: dict[str, list[str]] = {}
    for command in main.commands:
        for option in options_of(command).values():
            found.setdefault(_row(option), []).append(command)
    return {row: commands for row, commands in found.items() if len(commands) > 1}


def table_of(command: str) -> str:
    """Return the options of a command as a table, those of the table of shared ones by name; `shared` for that one."""
    if command == "shared":
        rows = [f"{row} {', '.join(commands)} |" for row, commands in shared().items()]
        return "\n".join(["| option | meaning | of |", "| --- | --- | --- |", *rows])
    by_name = {name: _row(option) for name, option in options_of(command).items()}
    elsewhere = {} if command == "twellc" else shared()
    rows = [row for row in by_name.values() if row not in elsewhere]
    names = ", ".join(f"`{name}`" for name, row in by_name.items() if row in elsewhere)
    rows += [f"| {names} | See [options of several commands](#options-of-several-commands). |"] if names else []
    return "\n".join(["| option | meaning |", "| --- | --- |", *rows])


def _row(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*sorted(option.opts, key=len), *option.secondary_opts))
    value = "" if option.is_flag else f" `{_value(option)}`"
    default = ""
    if option.show_default and option.default is not None:
        shown = option.default if not option.is_bool_flag else option.opts[0]
        default = f" Default: {shown}."
    text = f"{(option.help or '').rstrip('.')}.{default}"
    return f"| {_cell(names + value)} | {_cell(text)} |"


def _value(option: click.Option) -> str:
    if option.metavar:
        return option.metavar
    if isinstance(option.type, click.Choice):
        return "|".join(map(str, option.type.choices))
    return option.name or ""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", r"\|")


def keywords() -> str:
    """Return the keywords of the functions of `twellc.api`, as a type checker reads them."""
    parts = [
        '"""Keywords of the functions in `twellc.api`, from the options classes: `python -m tests.generated_docs`."""',
        "",
        "import os",
        "from collections.abc import Callable, Mapping, Sequence",
        "from typing import Any, TypedDict",
        "",
        "from twellc.export.shapes import Shape, ShapeRange",
        "from twellc.options.declared_inputs import InputDeclaration",
        "",
        "AnyPath = str | os.PathLike[str]",
    ]
    for kind in _KINDS:
        bases = [_keywords_of(base) for base in kind.__bases__ if base is not object]
        bases += ["RunKeywords"] if kind.__module__ == commands.__name__ else []
        given = {name: _given_as(text) for name, text in inspect.get_annotations(kind).items() if name in _own(kind)}
        parts += ["", f"class {_keywords_of(kind)}({', '.join(bases or ['TypedDict'])}, total=False):"]
        parts += [f'    """See `{kind.__name__}`."""', "", *(f"    {name}: {text}" for name, text in given.items())]
    parts += ["", "class RewriteKeywords(TracingKeywords, ExampleKeywords, total=False):", '    """See `rewrite`."""']
    return "\n".join(parts) + "\n"


def _own(kind: type[Any]) -> set[str]:
    """Return the fields of an options class that are keywords; `output` is an argument."""
    return {field.name for field in (declared(kind) or fields(kind))} - {"output"}


def _keywords_of(kind: type[Any]) -> str:
    return f"{kind.__name__.removesuffix('Options')}Keywords"


def _given_as(text: str) -> str:
    """Return the type that is given for one that a field holds: texts, and several of what is in a tuple."""
    several = re.fullmatch(r"tuple\[(.*), \.\.\.\]", text)
    if several is None or several[1] == "Any":
        return re.sub(r"\bPath\b", "AnyPath", text)
    kinds = dict.fromkeys(["AnyPath"] if several[1] == "Path" else ["str", several[1]])
    return f"Sequence[{' | '.join(kinds)}]"


def schema(name: str, strict: bool = False) -> dict[str, Any]:
    return schema_of(SCHEMAS[name], f"{name}.json", strict)


def written_schema(name: str) -> dict[str, Any]:
    """Return the schema in docs/: records that the manifest has, too, are referred to in its schema."""
    found, shared_records = schema(name), schema("manifest")["$defs"]
    if name == "manifest":
        return found
    kept = {kind: form for kind, form in found["$defs"].items() if form != shared_records.get(kind)}

    def refer(reference: re.Match[str]) -> str:
        return reference[0] if reference[1] in kept else f'"manifest.json#/$defs/{reference[1]}"'

    text = json.dumps(found | {"$defs": kept})
    referred: dict[str, Any] = json.loads(re.sub(r'"#/\$defs/(\w+)"', refer, text))
    return referred


def schema_file(name: str) -> Path:
    return ROOT / "docs" / "schema" / f"{name}.json"


def write() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    STUB.write_text(keywords(), encoding="utf-8")
    for name in SCHEMAS:
        schema_file(name).parent.mkdir(exist_ok=True)
        schema_file(name).write_text(_compact(written_schema(name)) + "\n", encoding="utf-8")


def _compact(content: Any, indent: str = "") -> str:
    """Return JSON in which an object or an array that fits a line is on one, and words fill lines."""
    line = json.dumps(content)
    if len(indent) + len(line) <= _WIDTH or not isinstance(content, (dict, list)):
        return line
    inner = indent + " "
    if isinstance(content, list) and all(isinstance(each, str) and " " not in each for each in content):
        return f"\n{inner}".join(textwrap.wrap(line, _WIDTH - len(inner), break_on_hyphens=False))
    parts = (
        [f"{inner}{json.dumps(key)}: {_compact(each, inner)}" for key, each in content.items()]
        if isinstance(content, dict)
        else [f"{inner}{_compact(each, inner)}" for each in content]
    )
    start, end = "{}" if isinstance(content, dict) else "[]"
    return ",\n".join(parts).join((f"{start}\n", f"\n{indent}{end}"))


if __name__ == "__main__":
    write()
