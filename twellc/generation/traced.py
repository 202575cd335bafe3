"""A Hugging Face directory as the program that `twellc compile --kv-cache` makes a plan of, run by torch.

    directory ─ traced with caches ─ passes ─ program with `twell` ops ─ caches written in place ─ torch

So a step has the very ops of a plan, whatever the passes find. What is computed when is `PlanBackend`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from twellc.base.caches import KeyValueCache
from twellc.base.devices import choose_device
from twellc.base.dtypes import DTYPES
from twellc.base.errors import UserError, first_few
from twellc.base.torch_private import schema_of
from twellc.compiling.fp8 import measure_errors, wish_of
from twellc.eager.optimization import refuse_other_weights
from twellc.generation.directory import compiled_call, device_name, precision_for, refuse_other_length
from twellc.generation.plan import PlanBackend
from twellc.loaders.cached import LARGEST_BATCH, NO_LIMIT, load_with_cache
from twellc.loaders.model import load_model
from twellc.loaders.precision import choose_dtype
from twellc.options.source import LAST_LOGITS, CacheOptions, TracingOptions
from twellc.options.weights import KEEP, refuse_samples
from twellc.passes.attention import CUDNN, OPERATOR
from twellc.passes.graph.device import on_device
from twellc.passes.graph.program import quiet_torch, user_inputs
from twellc.passes.pipeline import PassOptions, run_passes
from twellc.passes.report import reads_fp8
from twellc.passes.sizes.inputs import program_inputs
from twellc.plugins.cache_op import IN_PLACE
from twellc.plugins.library import load_attention
from twellc.samples.samples import Limits, read_text


class ProgramCalls:
    """Runs a program with caches in torch, see `PlanCalls`: steps and longer calls may be compiled apart."""

    def __init__(self, program: ExportedProgram, names: Sequence[str], device: torch.device, compiled: bool) -> None:
        """Take a program on `device`, and the names of its inputs in order; `compiled`: see `LLM`."""
        module = in_place(program)
        self.device, self._names = device, names
        self._decode = compiled_call(module, dynamic=False) if compiled else module
        self._fill = compiled_call(module, dynamic=True) if compiled else module
        self._caches: dict[str, Tensor] = {}

    def bind(self, caches: dict[str, Tensor]) -> None:
        """Take the caches; see `PlanCalls`."""
        self._caches = caches

    @torch.no_grad()
    def run(self, inputs: dict[str, Tensor]) -> Tensor:
        """Run the program; see `PlanCalls`."""
        given = {**inputs, **self._caches}
        call = self._decode if inputs[self._names[0]].shape[1] == 1 else self._fill
        logits: Tensor = call(*(given[name] for name in self._names))
        return logits


def in_place(program: ExportedProgram) -> GraphModule:
    """Return a module of a program with caches that writes these in place: it takes its inputs, and returns the logits.

    Nothing in the program reads a cache as it was before it is written.
    """
    module = program.module(check_guards=False)
    graph: Any = module.graph
    for node in [each for each in graph.nodes if each.target in IN_PLACE]:
        op = IN_PLACE[node.target]
        with graph.inserting_before(node):
            call = graph.call_function(op, node.args, node.kwargs)
        written = zip(node.args, schema_of(op).arguments, strict=False)  # others have defaults
        results = [call] * len(schema_of(op).returns) + [cache for cache, argument in written if argument.is_write]
        for item in list(node.users):
            item.replace_all_uses_with(results[item.args[1]])
    output = graph.output_node()
    logits, *caches = output.args[0]
    assert all(each.op == "placeholder" for each in caches), "an op that returns caches is not in IN_PLACE"
    output.args = (logits,)
    graph.set_codegen(CodeGen())  # inputs and outputs one by one, not as the traced function had them
    graph.eliminate_dead_code()
    return GraphModule(module, graph)  # without what checks inputs first


def load_traced(
    path: Path,
    device: str | torch.device | None = "auto",
    dtype: str | None = None,
    length: int | None = None,
    compiled: bool = False,
    layers: str = "auto",
    weights: str = KEEP,
    fp8_error: float | None = None,
    text: Path | None = None,
) -> tuple[PlanBackend, KeyValueCache, list[str]]:
    """Load a Hugging Face directory, its blocks and the linear layers outside of them by the `twell` ops.

    Its arguments are those of `load_directory`; `fp8` as `weights` means the linear layers, too.

    Returns:
        What computes it, what is known of its cache, and what the user should know.

    Raises:
        UserError: See `load_directory` and `load_with_cache`.
    """
    options = refuse_other_weights(weights, fp8_error)
    refuse_samples(options, {"--text": text})
    chosen = choose_device("auto" if device is None else device)
    if chosen.type == "cuda" and load_attention() is None:
        what = "libtwell_attention.so is not there, which appends to caches on a GPU"
        raise UserError("linear", what, fix="Leave it out, or build twellc with cuDNN's headers.")
    in_dtype, notes = precision_for(dtype, chosen)
    loaded = load_with_cache(path, CacheOptions(length or NO_LIMIT, LARGEST_BATCH), LAST_LOGITS, in_dtype, growing=True)
    cache = loaded.cache
    assert cache is not None
    refuse_other_length(length, cache.length)
    errors = None
    if text is not None:  # a model with a cache has other inputs than a text; its blocks are those of one without
        plain = load_model(TracingOptions(path))
        limits = Limits(program_inputs(plain.program), None, plain.vocabulary)
        samples = read_text(text, path, plain.language_model, limits).samples
        precision = cache.dtype if cache.dtype in DTYPES else None
        errors = measure_errors(plain, choose_dtype(plain, precision)[0], samples, lambda _: None)
    wish = wish_of(options, errors)
    wanted = PassOptions(layers=layers, attention=(CUDNN, OPERATOR), weights=wish, linear="twell")
    with quiet_torch():
        rewritten = run_passes(loaded.program, wanted)
    said = []
    for found, what in ((rewritten.layers, "feed-forward blocks"), (rewritten.linear, "linear layers")):
        taken = [each for each in found if each.decision == "twell"]
        fp8 = sum(reads_fp8(each.weights) for each in taken)
        said.append(f"{len(taken)} {what}{f' ({fp8} in FP8)' if fp8 else ''}")
        if not taken and (found is not rewritten.layers or layers != "none"):
            reasons = list(dict.fromkeys(each.reason for each in found))
            notes.append(f"no {what} run by the twell ops{': ' * bool(reasons)}{first_few(reasons)}")
    program = on_device(rewritten.program, chosen, {})
    names = [loaded.input_names[node.name] for node in user_inputs(program)]
    calls = ProgramCalls(program, names, chosen, compiled)
    name = f"torch on {device_name(chosen)}, {' and '.join(said)} by the twell ops{', compiled' * compiled}"
    notes = [*loaded.notes, *notes, *rewritten.notes]
    return PlanBackend(name, cache, calls, growing=length is None), cache, notes
