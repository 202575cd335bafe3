"""Keep key-value caches in FP8, with one scale a layer for keys and one for values.

    keys, values [batch, kv_heads, length, width] ─ twell.append_caches ─ twell.cached_attention

become float8_e4m3fn, and both ops get the scales: the first one rounds what is new, the other one reads the bytes.

Refused: a cache that anything else reads, such as attention in another form.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.base.errors import UserError
from twellc.passes.graph.program import editable, finish, infer
from twellc.plugins.cache_op import APPEND, CACHED_ATTENTION
from twellc.plugins.fp8 import E4M3


def caches_in_fp8(program: ExportedProgram, scales: Mapping[str, float], others: str = "") -> ExportedProgram:
    """Return the program with its caches in FP8.

    Args:
        program: The program, behind `rewrite_attention`.
        scales: That of each cache, by the name of its placeholder.
        others: What attention is in other forms and why, for messages.

    Raises:
        UserError: A cache has other readers.
    """
    program = editable(program)
    for node in program.graph.find_nodes(op="call_function", target=APPEND):
        caches = node.args[:2]
        key_scale, value_scale = (scales[cache.name] for cache in caches)
        parts = [user for user in node.users if user.target is operator.getitem]
        readers = [reader for part in parts for reader in part.users if reader.op != "output"]
        foreign = [reader for reader in readers if reader.target is not CACHED_ATTENTION]
        foreign += [reader for cache in caches for reader in _readers(cache) if reader is not node]
        if foreign:
            what = "a cache in FP8 is read only by attention over the places that a sequence has filled"
            raise UserError("--kv-cache-dtype fp8", what, got=others or foreign[0].name, fix="Leave it out.")
        for cache in caches:
            cache.meta["val"] = _in_fp8(cache.meta["val"])
        for each in dict.fromkeys((node, *readers)):
            each.kwargs = {**each.kwargs, "key_scale": key_scale, "value_scale": value_scale}
        for each in (node, *parts):
            infer(each)
    return finish(program)


def _readers(cache: Node) -> Iterator[Node]:
    """Yield what reads the numbers of a cache, and not just its sizes."""
    return (user for user in cache.users if user.target is not torch.ops.aten.sym_size.int)


def _in_fp8(value: Tensor) -> Tensor:
    with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        return value.to(E4M3)
