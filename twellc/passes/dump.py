"""Write the graphs between passes as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.export import ExportedProgram

from twellc.base.files import writing


class GraphDump:
    """A folder of graphs, `NN-NAME.txt` in the order in which they come; without a folder nothing is kept."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._count = 0

    def program(self, name: str, program: ExportedProgram) -> None:
        """Write the graph of a program.

        Raises:
            UserError: It cannot be written.
        """
        self.text(name, lambda: f"{program.graph_module.print_readable(print_output=False)}\n")

    def text(self, name: str, text: Callable[[], str]) -> None:
        """Write a graph that is text already, or that `text` makes text of.

        Raises:
            UserError: It cannot be written.
        """
        if self._folder is None:
            return
        path = self._folder / f"{self._count:02}-{name}.txt"
        with writing(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text(), encoding="utf-8")
        self._count += 1


NOWHERE = GraphDump()
