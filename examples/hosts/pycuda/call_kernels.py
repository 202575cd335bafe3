"""Call the TwELL kernels from PyCUDA, through the C API: raw device pointers and a stream, no TensorRT.

    python call_kernels.py

Computes one gated feed-forward block in float16 and compares it with NumPy in float64.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pycuda.autoprimaryctx  # noqa: F401  (makes a context: the one that CUDA's runtime uses, too)
import pycuda.driver as cuda
from pycuda import gpuarray

from twellc.plugins import library

TOKENS, D_MODEL, D_FF = 64, 256, 1000


def main() -> None:
    """Run the block and end with exit status 1 if it is not right."""
    random = np.random.default_rng(0)
    x = random.standard_normal((TOKENS, D_MODEL))
    w_gate, w_up = random.standard_normal((2, D_FF, D_MODEL)) / D_MODEL**0.5
    b_gate = np.full(D_FF, -1.5)  # few neurons fire
    w_down = random.standard_normal((D_FF, D_MODEL)) / D_FF**0.5
    arrays = [array.astype(np.float16) for array in (x, w_gate, b_gate, w_up, w_down)]

    native = library.load()
    problem = library.Problem(
        tokens=TOKENS,
        d_model=D_MODEL,
        d_ff=D_FF,
        d_out=D_MODEL,
        compression=4,
        dtype=library.DTYPES["float16"],
        variant=library.VARIANTS["gated"],
        activation=library.ACTIVATIONS["relu"],
        threshold=0.0,
    )
    on_gpu = [gpuarray.to_gpu(array) for array in arrays]
    y = gpuarray.empty((TOKENS, D_MODEL), np.float16)
    names = ("x", "w_gate", "b_gate", "w_up", "w_down", "y")
    tensors = library.Tensors(**{name: int(a.gpudata) for name, a in zip(names, [*on_gpu, y], strict=True)})
    size = native.twell_workspace_bytes(ctypes.byref(problem))
    workspace = cuda.mem_alloc(size)
    stream = cuda.Stream()
    status = native.twell_mlp(
        ctypes.byref(problem), ctypes.byref(tensors), int(workspace), size, ctypes.c_void_p(stream.handle)
    )
    if status != 0:
        sys.exit(f"twell_mlp: CUDA error {status}")
    stream.synchronize()

    x, w_gate, b_gate, w_up, w_down = (array.astype(np.float64) for array in arrays)
    gate = np.maximum(x @ w_gate.T + b_gate, 0)
    expected = (gate * (x @ w_up.T)) @ w_down
    error = float(np.linalg.norm(y.get() - expected) / np.linalg.norm(expected))
    print(f"{np.mean(gate > 0):.1%} of the neurons fire; relative error {error:.2e}")
    if not error < 2e-3:
        sys.exit("the result is wrong")


if __name__ == "__main__":
    main()
