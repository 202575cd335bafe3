"""What `twellc compile` writes, with the options that ask for it, and what it must not replace."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from twellc.base.errors import UserError, first_few
from twellc.base.files import OutputFiles, digest, external_data, places, read_file, refuse_replacing
from twellc.base.records import of_json, parse_json
from twellc.compiling.manifest import Manifest, manifest_path, text_folder
from twellc.export.triton import CONFIG_NAME
from twellc.options.commands import CompileOptions, plan_of_rank

WEIGHTS = "weights of --onnx"
# Bytes at the end of a graph, where its metadata stands.
_METADATA = 1 << 24
# What an earlier run may have written into a model's folder, and may be written again.
_COMPILED = ("*.plan", "*.plan.json", "*.onnx", "*.onnx.data")
# What transformers reads a tokenizer, its chat templates and the defaults of generation from. config.json may be all
# that names a tokenizer's class.
_TEXT_FILES = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("chat_template.*", "additional_chat_templates/*"),
)


@dataclass(frozen=True)
class Destinations:
    """What a compilation writes, each time with the option that asks for it.

    Attributes:
        files: Where files go, in an order in which names that are made of another come after that one.
        graph_dump: The folder for the graph after each pass; None where it is not asked for.
        texts: Files of the model that turn text into tokens and back, each with the place that it is copied to.
        stale: Plans and graphs of ranks that an earlier compilation to the same place wrote, and this one does not.
    """

    files: list[tuple[str, Path]]
    graph_dump: Path | None
    texts: list[tuple[Path, Path]]
    stale: list[Path]

    def check(self, options: CompileOptions, outputs: OutputFiles) -> None:
        """Fail now rather than after the work is done if something cannot be written, or would be lost.

        Raises:
            UserError: It cannot, or would.
        """
        taken: dict[Path, str] = {}
        for option, path in self._paths():
            if path == self.graph_dump:
                outputs.check_folder(option, path)
            elif option != WEIGHTS:  # which stand in the ONNX file as long as they are small
                outputs.check(option, path)
            # A link is itself replaced, not what it leads to.
            twin = taken.setdefault(Path(os.path.realpath(path.parent)) / path.name, option)
            if twin != option:
                raise UserError(f"{option} {path}", f"is the same file as {twin}")
            refuse_replacing(option, path, (options.firing_profile, options.prune_check))
        if self.stale and not options.overwrite:
            where = f"--tensor-parallel {options.tensor_parallel}"
            got, fix = first_few([path.name for path in self.stale]), "Add --overwrite to remove these files."
            raise UserError(where, "an earlier compilation for more GPUs wrote to the same place", got=got, fix=fix)
        files = list(options.model.iterdir()) if options.model.is_dir() else []
        folder = Path(os.path.realpath(options.model))
        files += [path for _, path in self._paths() if any(folder in place.parents for place in places(path))]
        files = [file for file in files if file.is_file() and not any(map(file.match, _COMPILED))]
        self.refuse([options.model, *options.plugin_libraries, *files])
        if self.texts:
            outputs.check_folder("--output", self.texts[0][1].parent)

    def refuse(self, model_files: Iterable[Path]) -> None:
        """Fail if a file of the model would be replaced.

        Raises:
            UserError: It would.
        """
        taken = {place for file in model_files for place in places(file)}
        for option, path in self._paths():
            if taken & places(path):
                what = "belongs to the model, or stands among its files"
                raise UserError(f"{option} {path}", what, fix="Write to another place.")

    def _paths(self) -> list[tuple[str, Path]]:
        return self.files + ([] if self.graph_dump is None else [("--dump-graphs", self.graph_dump)])


def destinations_of(options: CompileOptions) -> Destinations:
    """Return what a compilation writes.

    Raises:
        UserError: An output is a folder without a name, such as `.`, of which no other name can be made.
    """
    for option, path in (("--output", options.output), ("--onnx", options.onnx)):
        if path is not None and not path.name:
            raise UserError(f"{option} {path}", "is a folder", expected="a file")
    return Destinations(list(_files(options)), options.dump_graphs, list(_texts(options)), list(_stale(options)))


def _files(options: CompileOptions) -> Iterator[tuple[str, Path]]:
    if options.output is not None:
        yield "--output" if options.triton is None else "--triton", options.output
        if options.tensor_parallel > 1:
            yield from (("--tensor-parallel", plan) for plan in options.plans)
        yield "manifest", manifest_path(options.output)
    if options.triton is not None:
        yield "--triton", options.triton / CONFIG_NAME
    if options.onnx is not None:
        for graph in options.graphs(options.onnx):
            yield "--onnx", graph
            yield WEIGHTS, external_data(graph)
    if options.manifest is not None:
        yield "--manifest", options.manifest
    if options.html is not None:
        yield "--html", options.html


def _texts(options: CompileOptions) -> Iterator[tuple[Path, Path]]:
    """Yield each file of the model that is kept beside a plan that generates text, and where."""
    name = text_folder(options)
    if name is None or options.output is None:
        return
    for pattern in _TEXT_FILES:
        for file in sorted(file for file in options.model.glob(pattern) if file.is_file()):
            yield file, options.output.with_name(name) / file.relative_to(options.model)


def _stale(options: CompileOptions) -> Iterator[Path]:
    """Yield plans and graphs of ranks that an earlier compilation to the same place wrote, and this one does not.

    Not those that another program may have written: a plan that differs from the manifest there, a graph whose metadata
    names no number of ranks.
    """
    output, onnx = options.output, options.onnx
    if output is not None and manifest_path(output).is_file():
        with suppress(ValueError, AttributeError):
            earlier = of_json(Manifest, parse_json(read_file(manifest_path(output)))).ranks or []
            for path, rank in [(plan_of_rank(output, number), rank) for number, rank in enumerate(earlier)]:
                plain = path.is_file() and not path.is_symlink()
                if plain and path not in options.plans and rank.plan is not None and rank.plan.sha256 == digest(path):
                    yield path
    if onnx is not None and onnx.parent.is_dir():
        of_rank = re.compile(rf"{re.escape(onnx.stem)}\.rank\d+{re.escape(onnx.suffix)}")
        found = sorted(path for path in onnx.parent.iterdir() if of_rank.fullmatch(path.name))
        for path in [each for each in found if each not in options.graphs(onnx) and each.is_file()]:
            if not path.is_symlink() and _is_of_a_rank(path):
                yield path
                if external_data(path).is_file():
                    yield external_data(path)


def _is_of_a_rank(graph: Path) -> bool:
    """Whether a file is a graph of ours for one of several ranks, by what the end of it says."""
    with graph.open("rb") as file:
        file.seek(max(0, graph.stat().st_size - _METADATA))
        end = file.read()
    return b'{"twellc": "' in end and b'"tensor_parallel": ' in end
