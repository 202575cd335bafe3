"""Answer a prompt greedily with a plan that has a key-value cache (`twellc compile --kv-cache`).

    python generate.py bytelm.plan --new 64 0 105 109 112 111 114 116 32 [--module tensorrt-rtx]

The prompt is token ids; what is printed are the ids of the answer. Each cache is an input and an output of the plan:
both are bound to one address, and the plan writes there in place. The prompt is fed in pieces of what the profile for
prompts takes, then one token a step through that for one token of one sequence. `twellc generate` does more than that.

Needs the TensorRT that built the plan, twellc for the plugins and torch for memory on the GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from twellc.base.errors import UserError
from twellc.export.runner import open_plan
from twellc.export.tensorrt_host import load_host

CACHE, UPDATED = "past_key_values.", "present."
DTYPES = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "FP8": torch.float8_e4m3fn}


class Sequence:
    """One sequence: the caches, and a context for prompts and one for single tokens."""

    def __init__(self, trt: Any, engine: Any) -> None:
        self.engine = engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.caches: dict[str, torch.Tensor] = {}
        for name in names:
            if name.startswith(CACHE):
                _, *shape = engine.get_tensor_shape(name)
                dtype = DTYPES[engine.get_tensor_dtype(name).name]
                memory = torch.zeros(1, *shape, dtype=dtype, device="cuda")
                # One address for what goes in and what comes out.
                self.caches[name] = self.caches[UPDATED + name.removeprefix(CACHE)] = memory
        self.length = next(iter(self.caches.values())).shape[2]
        self.stream = torch.cuda.Stream()
        # Of two profiles for as many tokens the later is for the fewest sequences, and the fastest with one.
        profiles = {
            engine.get_tensor_profile_shape("input_ids", profile)[2][1]: profile
            for profile in range(engine.num_optimization_profiles)
        }
        self.contexts = {most: engine.create_execution_context() for most in profiles}
        for most, context in self.contexts.items():
            context.set_optimization_profile_async(profiles[most], self.stream.cuda_stream)
            for name, memory in self.caches.items():
                if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
                    context.set_input_shape(name, tuple(memory.shape))
                context.set_tensor_address(name, memory.data_ptr())
        self.chunk = max(self.contexts)

    def feed(self, tokens: list[int], place: int) -> int:
        """Put tokens at the places from `place` on; return the likeliest next one."""
        context = self.contexts[min(most for most in self.contexts if most >= len(tokens))]
        inputs = {"input_ids": [tokens], "write_index": [place], "token_count": [len(tokens)]}
        with torch.cuda.stream(self.stream):
            tensors = {name: torch.tensor(value, device="cuda") for name, value in inputs.items()}
            for name, tensor in tensors.items():
                context.set_input_shape(name, tuple(tensor.shape))
                context.set_tensor_address(name, tensor.data_ptr())
            dtype = DTYPES[self.engine.get_tensor_dtype("logits").name]
            logits = torch.empty(tuple(context.get_tensor_shape("logits")), dtype=dtype, device="cuda")
            context.set_tensor_address("logits", logits.data_ptr())
            if not context.execute_async_v3(self.stream.cuda_stream):
                sys.exit("the plan fails")
            return int(logits.flatten(0, -2)[-1].argmax())


def main() -> None:
    """Answer the prompt on the command line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("plan", type=Path)
    arguments.add_argument("tokens", type=int, nargs="+")
    arguments.add_argument("--new", type=int, default=32, help="tokens of the answer")
    arguments.add_argument("--module", default="tensorrt", choices=["tensorrt", "tensorrt-rtx"])
    options = arguments.parse_args()
    try:
        host = load_host(options.module)
        plan = open_plan(host, options.plan, host.version)
    except (OSError, UserError) as error:
        sys.exit(str(error))

    sequence = Sequence(host.module, plan.engine)
    prompt = options.tokens
    if len(prompt) + options.new - 1 > sequence.length:
        sys.exit(f"{len(prompt)} tokens and {options.new} new ones do not fit into a cache of {sequence.length}")
    place, token = 0, 0
    while place < len(prompt):
        piece = prompt[place : place + sequence.chunk]
        token = sequence.feed(piece, place)
        place += len(piece)
    answer = [token]
    while len(answer) < options.new:
        answer.append(sequence.feed(answer[-1:], place))
        place += 1
    print(*answer)


if __name__ == "__main__":
    main()
