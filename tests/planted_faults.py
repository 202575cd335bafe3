"""Plant faults in the product, one at a time, and see whether the default tests find them.

    python -m tests.planted_faults                    # all
    python -m tests.planted_faults passes features    # those of these parts of twellc

Each line of planted_faults.jsonl is a fault: in `function` of `file`, the text `old` where it occurs for the `nth` time
becomes `new`; `found` is the test that found it last, or null. A copy of the tree gets the fault, and pytest runs there
with -x: the test of `found` first, and where that finds nothing the tests of `TESTS`. Exit status 1: a fault was not
found which was found before. --write keeps what found them.

    python -m tests.planted_faults --draw 60 --seed 68

prints other faults: operators on compared values, constants, branches, indices and calls. Left out by hand are those
that change nothing, and those on lines that no default test executes.
"""

import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import pytest

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".jsonl")
# The tests of each part of twellc; the longest name counts.
TESTS = {
    "passes": ("tests/passes",),
    "passes/match": (
        "tests/passes/match",
        "tests/passes/test_drawn_blocks.py",
        "tests/passes/test_rewrite_ffn.py",
        "tests/passes/test_rewrite_linear.py",
    ),
    "passes/graph": ("tests/passes/graph", "tests/passes"),
    "passes/sizes": ("tests/passes/sizes", "tests/export"),
    "passes/onnx": ("tests/passes/onnx", "tests/twellc/compiling/test_onnx_models.py"),
    "decisions": ("tests/twellc/decisions", "tests/passes/test_decide.py"),
    "generation": ("tests/twellc/generation", "tests/twellc/commands/test_generate.py"),
    "loaders": ("tests/twellc/loaders",),
    "features": ("tests/twellc/test_features.py",),
    "training": ("tests/twellc/training",),
}
# Of those drawn, by how much code each part has.
WEIGHTS = {"passes": 13, "decisions": 6, "generation": 8, "loaders": 8, "features": 2, "training": 3}
# Of a processor, for the tests of one fault.
SECONDS = 1200


@dataclass(frozen=True)
class Fault:
    """A fault, and the test that found it."""

    file: str
    function: str
    old: str
    new: str
    nth: int = 0
    found: str | None = None

    @property
    def place(self) -> str:
        return str(Path(self.file).with_suffix("").relative_to("twellc"))


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, Function]]:
    """Return every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        name = f"{outer}.{node.name}".strip(".") if isinstance(node, Function | ast.ClassDef) else outer
        if isinstance(node, Function):
            yield name, node
        yield from _functions(node, name)


def _text_of(function: Function, source: str) -> tuple[int, str]:
    """Return where the text of a function begins in its file, and that text, with blanks for its docstring."""
    lines = source.splitlines(keepends=True)
    start = sum(map(len, lines[: function.lineno - 1]))
    if ast.get_docstring(function) is not None:
        for number in range(function.body[0].lineno - 1, function.body[0].end_lineno or 0):
            lines[number] = re.sub(r"[^\n]", " ", lines[number])
    return start, "".join(lines[function.lineno - 1 : function.end_lineno])


def _places(old: str, text: str) -> list[int]:
    return [found.start() for found in re.finditer(f"(?={re.escape(old)})", text)]


def plant(fault: Fault, root: Path) -> str:
    """Write a fault into a tree; return what the file held."""
    source = (root / fault.file).read_text(encoding="utf-8")
    function = dict(_functions(ast.parse(source))).get(fault.function)
    start, text = _text_of(function, source) if function else (0, "")
    places = _places(fault.old, text)
    if fault.nth >= len(places):
        raise click.ClickException(f"{fault.file}, {fault.function}: {fault.old!r} is not there: mend {FAULTS.name}")
    place = start + places[fault.nth]
    changed = source[:place] + fault.new + source[place + len(fault.old) :]
    (root / fault.file).write_text(changed, encoding="utf-8")
    return source


def run(fault: Fault, root: Path) -> str | None:
    """Plant a fault in a copy of the tree and run tests; return the test that finds it."""
    source = plant(fault, root)
    known = [fault.found] if fault.found and (root / fault.found.split("::")[0]).exists() else []
    try:
        return (known and _failed(known, root)) or _failed(tests_of(fault, root), root)
    finally:
        (root / fault.file).write_text(source, encoding="utf-8")


def tests_of(fault: Fault, root: Path) -> list[str]:
    """Return the test files of a fault's part, first those that name the module that has it."""
    part = max((part for part in TESTS if fault.place.startswith(part)), key=len)
    given = [root / name for name in TESTS[part]]
    files = [file for each in given for file in (sorted(each.rglob("test_*.py")) if each.is_dir() else [each])]
    module = f"twellc.{fault.place.replace('/', '.')} import"
    named = {file: module not in file.read_text(encoding="utf-8") for file in dict.fromkeys(files)}
    return [str(file.relative_to(root)) for file in sorted(named, key=lambda file: named[file])]


class _First:
    """A plugin for pytest that knows the first test that failed."""

    failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")

    pytest_collectreport = pytest_runtest_logreport


def _failed(tests: list[str], root: Path) -> str | None:
    """Return the first test that fails, or does not end, in a process that has the libraries imported already."""
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            _run_forked(tests, root, answer.fileno())
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            return f"{tests[0]} does not end"
        answer.seek(0)
        told = answer.read().decode()
        if not told:
            output.seek(0)
            raise click.ClickException(output.read().decode(errors="replace")[-3000:])
        return told.removeprefix("found: ") or None


def _run_forked(tests: list[str], root: Path, answer: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 60))
        os.chdir(root)
        sys.path.insert(0, str(root))
        os.environ["PYTHONPATH"] = str(root)
        # An editable installation finds the package in this tree, whatever the path says.
        sys.meta_path[:] = [each for each in sys.meta_path if "twellc" not in getattr(each, "known_source_files", ())]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "twellc")]:
            del sys.modules[name]
        first = _First()
        options = ["-x", "-q", "-n0", "--tb=short", "-p", "no:cacheprovider", "--rootdir", str(root)]
        status = pytest.main([*options, *tests], plugins=[first])
        if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
            os.write(answer, f"found: {first.failed}".encode())
    finally:
        os._exit(0)


def _copied(root: Path) -> None:
    """Copy the tree, with the built library."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, root / name)
    library = Path("twellc", "plugins", "lib")
    (root / library).symlink_to(ROOT / library)


_OTHER: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
OPERATORS = ("compare", "constant", "branch", "index", "call")


def _changes(node: ast.AST) -> Iterator[tuple[str, Any, ast.AST]]:
    """Return how a node can be changed: the operator, what is replaced, and by what."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=others):
            yield "compare", node, ast.Compare(left, [_OTHER[type(operator)]()], others)
        case ast.Constant(value=bool(value)):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, ast.Constant(value + 1)
        case ast.BoolOp(op=operator, values=values):
            yield "branch", node, ast.BoolOp(_OTHER[type(operator)](), values)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield "branch", test, ast.UnaryOp(ast.Not(), test)
        case ast.Subscript(value=value, slice=ast.Constant(value=int(index)), ctx=context):
            yield "index", node, ast.Subscript(value, ast.Constant(index + 1 if index != -1 else 0), context)
        case ast.Subscript(value=value, slice=ast.Slice(), ctx=context):
            yield "index", node, ast.Subscript(value, ast.Slice(), context)
        case ast.Expr(value=ast.Call()):
            yield "call", node, ast.Pass()
        case ast.Call(func=ast.Name(), args=[argument], keywords=[]) if not isinstance(argument, ast.Starred):
            yield "call", node, argument


def _candidates(file: str) -> Iterator[tuple[str, Fault]]:
    """Return every fault that the operators make of a file."""
    source = (ROOT / file).read_text(encoding="utf-8")
    for name, function in _functions(ast.parse(source)):
        _, text = _text_of(function, source)
        lines = text.splitlines(keepends=True)
        for node in (each for statement in function.body for each in ast.walk(statement)):
            for operator, replaced, new in _changes(node):
                old = ast.get_source_segment(source, replaced)
                if old is None or "\n" in old:
                    continue
                above = lines[: replaced.lineno - function.lineno]
                place = sum(map(len, above)) + len(lines[len(above)].encode()[: replaced.col_offset].decode())
                if place in (places := _places(old, text)):  # not so inside of an f-string
                    yield operator, Fault(file, name, old, ast.unparse(new), places.index(place))


def drawn(count: int, seed: int) -> list[Fault]:
    """Draw faults: a part by its weight, an operator, and one of its places."""
    places: dict[tuple[str, str], list[Fault]] = {}
    for path in sorted((ROOT / "twellc").rglob("*.py")):
        file = path.relative_to(ROOT)
        part = file.with_suffix("").parts[1]
        for operator, fault in _candidates(str(file)) if part in WEIGHTS else ():
            places.setdefault((part, operator), []).append(fault)
    draw = random.Random(seed)
    faults: dict[Fault, None] = {}
    while len(faults) < count:
        (part,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
        faults[draw.choice(places[part, draw.choice(OPERATORS)])] = None
    return list(faults)


def _line(fault: Fault) -> str:
    return json.dumps(asdict(fault), ensure_ascii=False) + "\n"


@click.command()
@click.argument("parts", nargs=-1)
@click.option("--write", is_flag=True, help="Keep which tests found the faults.")
@click.option("--draw", type=int, help="Print so many new faults.")
@click.option("--seed", default=68)
def main(parts: tuple[str, ...], write: bool, draw: int | None, seed: int) -> None:
    """Plant the faults of these parts, or of all, and print which tests find them."""
    if draw is not None:
        sys.stdout.writelines(map(_line, drawn(draw, seed)))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for library in ("torch", "transformers", "onnx", "hypothesis"):
        __import__(library)
    faults = [Fault(**json.loads(line)) for line in FAULTS.read_text(encoding="utf-8").splitlines()]
    now: list[Fault] = []
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        _copied(Path(folder))
        for fault in faults:
            if parts and not any(fault.place.startswith(part) for part in parts):
                now.append(fault)
                continue
            now.append(replace(fault, found=run(fault, Path(folder))))
            lost += bool(fault.found and not now[-1].found)
            place = f"{fault.file} {fault.function}: {fault.old} → {fault.new}"
            click.echo(f"{place}: {now[-1].found or 'NOT FOUND'}")
            if write:
                FAULTS.write_text("".join(map(_line, [*now, *faults[len(now) :]])), encoding="utf-8")
    click.echo(f"{sum(bool(fault.found) for fault in now)} of {len(now)} are found")
    sys.exit(lost > 0)


if __name__ == "__main__":
    main()
