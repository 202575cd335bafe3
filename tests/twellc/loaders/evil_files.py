"""Small files that make a reader without bounds compute, unpack or allocate without end, by name."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file

HUGE = 10**12
Json = dict[str, Any]


# ---- archives ----


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.relu(self.up(x))), x.shape[0] * x.shape[0]


def good_archive(path: Path) -> None:
    dims = ({0: torch.export.Dim("n", min=2, max=64)},)
    torch.export.save(torch.export.export(_Block(), (torch.randn(4, 64),), dynamic_shapes=dims), path)


def _archive(
    change: Callable[[str, Any], Any] = lambda name, content: content,
    extra: dict[str, int] | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> Callable[[Path], None]:
    """Write a good archive with a change of each record of JSON, and other records besides."""

    def write(path: Path) -> None:
        good = path.with_name("good.pt2")
        good_archive(good)
        with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w", compression) as target:
            for entry in source.infolist():
                data = source.read(entry)
                if entry.filename.endswith(".json"):
                    changed = change(entry.filename, json.loads(data))
                    data = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
                target.writestr(entry.filename, data)
            folder = source.namelist()[0].partition("/")[0]
            for name, size in (extra or {}).items():
                target.writestr(f"{folder}/{name}", bytes(size))

    return write


def _graph(change: Callable[[Json], None]) -> Callable[[Path], None]:
    def changed(name: str, content: Json) -> Json:
        if "models/" in name:
            change(content)
        return content

    return _archive(changed)


def _guard(text: str) -> Callable[[Path], None]:
    return _graph(lambda model: model.update(guards_code=[text]))


def _multiply(target: str, *arguments: Json, times: int = 1) -> Callable[[Path], None]:
    """Let the graph compute with its last size, again and again."""

    def change(model: Json) -> None:
        graph = model["graph_module"]["graph"]
        last = next(node for node in reversed(graph["nodes"]) if node["target"] == "_operator.mul")
        name = last["outputs"][0]["as_sym_int"]["as_name"]
        for index in range(times):
            own = {"as_sym_int": {"as_name": name}}
            given = [arguments[0] if arguments else own, arguments[1] if len(arguments) > 1 else own]
            name = f"more_{index}"
            inputs = [{"name": each, "arg": value, "kind": 1} for each, value in zip("ab", given, strict=True)]
            node = last | {"target": target, "name": name, "inputs": inputs}
            graph["nodes"].append(node | {"outputs": [{"as_sym_int": {"as_name": name}}]})
            graph["sym_int_values"][name] = graph["sym_int_values"]["mul"]

    return _graph(change)


def _sizes(record: str, **described: list[int]) -> Callable[[Path], None]:
    def changed(name: str, content: Json) -> Json:
        if name.endswith(record):
            meta = content["config"]["up.weight"]["tensor_meta"]
            meta.update({key: [{"as_int": size} for size in sizes] for key, sizes in described.items()})
        return content

    return _archive(changed)


def _nested_json(name: str, content: Json) -> Json | bytes:
    return b"[" * 100_000 + b"]" * 100_000 if "models/" in name else content


ARCHIVES: dict[str, Callable[[Path], None]] = {
    "power": _guard("9**9**9**9 > 0"),
    "power in the graph": _multiply("_operator.pow", {"as_int": 9}, {"as_int": 9**9}),
    "squares in the graph": _multiply("_operator.mul", times=60),
    "shift in the graph": _multiply("_operator.lshift", {"as_int": 1}, {"as_int": 10**11}),
    "factorial in the graph": _multiply("math.comb", {"as_int": 10**9}, {"as_int": 10**8}),
    "text in the graph": _multiply("_operator.mul", {"as_string": "a"}, {"as_int": 10**11}),
    "list in the graph": _multiply("_operator.mul", {"as_ints": [1]}, {"as_int": 10**11}),
    "weight of stride 0": _sizes("weights_config.json", sizes=[10**6, 10**6], strides=[0, 0]),
    "compressed constants": _archive(
        extra={"data/constants/tensor_0": 1 << 30}, compression=zipfile.ZIP_DEFLATED
    ),
    "nested JSON": _archive(_nested_json),
}  # fmt: skip


# ---- ONNX ----


def _onnx(
    weight: list[onnx.NodeProto],
    *initializers: onnx.TensorProto,
    sparse: list[onnx.SparseTensorProto] | None = None,
    functions: list[onnx.FunctionProto] | None = None,
    d_model: int = 64,
    opset: int = 21,
) -> Callable[[Path], None]:
    """Write a block whose first weight `w` is what nodes or initializers say."""

    def write(path: Path) -> None:
        nodes = [
            *weight,
            helper.make_node("MatMul", ["x", "w"], ["a"]),
            helper.make_node("Relu", ["a"], ["r"]),
            helper.make_node("MatMul", ["r", "v"], ["y"]),
        ]
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", d_model])
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 64])
        v = numpy_helper.from_array(np.ones((128, 64), np.float32), "v")
        graph = helper.make_graph(nodes, "g", [x], [y], [v, *initializers], sparse_initializer=sparse)
        opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid("f", 1)] if functions else [])]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions or [])
        path.write_bytes(model.SerializeToString())

    return write


def good_onnx(path: Path) -> None:
    _onnx([], numpy_helper.from_array(np.ones((64, 128), np.float32), "w"))(path)


def _array(name: str, *shape: int, dtype: Any = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(shape, dtype), name)


def _integers(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def _promised(*dims: int) -> onnx.TensorProto:
    return TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, raw_data=b"")


def _sparse(*dims: int) -> onnx.SparseTensorProto:
    return helper.make_sparse_tensor(_array("w", 1), _integers("i", 3), list(dims))


def _function(index: int, calls: list[int]) -> onnx.FunctionProto:
    names = ["a", *(f"t{i}" for i in range(len(calls) - 1)), "b"]
    nodes = [
        helper.make_node(f"f{call}" if call else "Relu", [names[i]], [names[i + 1]], domain="f" if call else "")
        for i, call in enumerate(calls)
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    return helper.make_function("f", f"f{index}", ["a"], ["b"], nodes, opsets)


def _call(count: int) -> onnx.NodeProto:
    return helper.make_node(f"f{count}", ["w0"], ["w"], domain="f")


def _nested_graphs(depth: int) -> onnx.NodeProto:
    inner = helper.make_node("Identity", ["w0"], ["w"])
    for index in range(depth):
        graph = helper.make_graph([inner], f"g{index}", [], [onnx.ValueInfoProto(name=inner.output[0])])
        other = helper.make_node("Identity", ["w0"], [f"o{index}"])
        branch = helper.make_graph([other], f"o{index}", [], [onnx.ValueInfoProto(name=f"o{index}")])
        inner = helper.make_node("If", ["c"], [f"w{index + 1}"], then_branch=graph, else_branch=branch)
    inner.output[0] = "w"
    return inner


ONNX: dict[str, Callable[[Path], None]] = {
    "promised shape": _onnx([], _promised(10**6, 10**6)),
    "negative shape": _onnx([], _promised(-1, -1)),
    "empty and endless shape": _onnx([], _promised(0, 2**62, 2**62)),
    "sparse": _onnx([], sparse=[_sparse(10**6, 10**6)]),
    "sparse constant": _onnx([helper.make_node("Constant", [], ["w"], sparse_value=_sparse(2**20, 2**20))]),
    "sparse of overflowing shape": _onnx([], sparse=[_sparse(2**40, 2**40)]),
    "functions that double": _onnx(
        [_call(60)], _array("w0", 64, 128), functions=[_function(i, [i - 1, i - 1]) for i in range(1, 61)]
    ),
    "functions that call themselves": _onnx([_call(1)], _array("w0", 64, 128), functions=[_function(1, [1, 1])]),
    "functions in depth": _onnx(
        [_call(5000)], _array("w0", 64, 128), functions=[_function(i, [i - 1]) for i in range(1, 5001)]
    ),
    "Split": _onnx([helper.make_node("Split", ["w0"], ["w"], num_outputs=HUGE, axis=0)], _array("w0", 64, 128)),
    "rank": _onnx([], _promised(*[1] * 100_000)),
}  # fmt: skip
# What computes a weight that a reader need not compute: the block stays as it is, or is rewritten.
HARMLESS_ONNX: dict[str, Callable[[Path], None]] = {
    "nested graphs": _onnx([_nested_graphs(25)], _array("w0", 64, 128), numpy_helper.from_array(np.array(True), "c")),
    "outer product": _onnx([helper.make_node("MatMul", ["a0", "b0"], ["w"])], _array("a0", 10**6, 1),
                           _array("b0", 1, 10**6), d_model=10**6),
    "scales of other sizes": _onnx(
        [helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=1)],
        _array("q", 10**6, 1, dtype=np.int8), _array("s", 10**6), d_model=10**6),
    "blocks of scales": _onnx(
        [helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=1, block_size=HUGE)],
        _array("q", 64, 128, dtype=np.int8), _array("s", 64, 1)),
    "ConstantOfShape": _onnx([helper.make_node("ConstantOfShape", ["s"], ["w"])], _integers("s", 10**6, 10**6)),
    "Expand": _onnx([helper.make_node("Expand", ["w0", "s"], ["w"])], _array("w0", 1, 1), _integers("s", HUGE, HUGE)),
    "Range": _onnx([helper.make_node("Range", ["a0", "b0", "c0"], ["r0"]), helper.make_node("Identity", ["w0"], ["w"])],
                   _array("w0", 64, 128), *(numpy_helper.from_array(np.array(value, np.int64), name)
                                            for name, value in (("a0", 0), ("b0", HUGE), ("c0", 1)))),
    "chain of a weight": _onnx(
        [helper.make_node("Neg", [f"w{i}" if i < 4999 else "w4999"], [f"w{i + 1}" if i < 4999 else "w"])
         for i in range(5000)], _array("w0", 64, 128)),
}  # fmt: skip


# ---- directories ----

_CONFIG = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 32, "vocab_size": 64, "word_embed_proj_dim": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64, "hidden_act": "relu",
}  # fmt: skip


def _tensors(config: Json) -> dict[str, torch.Tensor]:
    import transformers

    made = getattr(transformers, config["architectures"][0])(transformers.AutoConfig.for_model(**config))
    return {name: tensor.contiguous() for name, tensor in made.state_dict().items() if name != "lm_head.weight"}


def _directory(base: Json = _CONFIG, text: str | None = None, **changed: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.mkdir()
        save_file(_tensors(base), path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(base | changed) if text is None else text)

    return write


def good_directory(path: Path) -> None:
    _directory()(path)


def _header(path: Path) -> None:
    _directory()(path)
    header = json.dumps({"w": {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def _index(path: Path) -> None:
    _directory()(path)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text("[" * 100_000)


DIRECTORIES: dict[str, Callable[[Path], None]] = {
    "layers": _directory(num_hidden_layers=10**9),
    "layers of a llama": _directory(_LLAMA, num_hidden_layers=10**9),
    "vocabulary": _directory(vocab_size=HUGE),
    "positions": _directory(max_position_embeddings=HUGE),
    "heads": _directory(_LLAMA, head_dim=10**10),
    "hidden": _directory(hidden_size=10**10, word_embed_proj_dim=10**10),
    "widths": _directory(_LLAMA, intermediate_size=10**15),
    "digits": _directory(text=json.dumps(_CONFIG).replace('"ffn_dim": 64', '"ffn_dim": 1' + "0" * 10_000)),
    "large number": _directory(ffn_dim=10**400),
    "nested config": _directory(text='{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "nested less": _directory(text='{"a": ' + "[" * 900 + "]" * 900 + "}"),
    "labels": _directory(num_labels=10**9),
    "safetensors header": _header,
    "index": _index,
}  # fmt: skip


# ---- autoencoders ----


def _gemma_scope(**arrays: Any) -> dict[str, Any]:
    return {
        "W_enc": np.ones((8, 16), np.float32), "W_dec": np.ones((16, 8), np.float32), "b_dec": np.ones(8, np.float32),
        "b_enc": np.ones(16, np.float32), "threshold": np.ones(16, np.float32), **arrays,
    }  # fmt: skip


def good_autoencoder(path: Path) -> None:
    path.mkdir()
    np.savez(path / "params.npz", **_gemma_scope())


def _bomb(path: Path) -> None:
    path.mkdir()
    np.savez_compressed(path / "params.npz", **_gemma_scope(W_enc=np.zeros((8, 1 << 25), np.float32)))


def _npz_header(path: Path) -> None:
    path.mkdir()
    with zipfile.ZipFile(path / "params.npz", "w") as archive:
        for name, array in _gemma_scope().items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            data = buffer.getvalue()
            if name == "W_enc":
                data = data.replace(b"(8, 16), }       ", b"(8000000, 160000), }"[:17] + b"", 1)
                header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**6}, {10**6}), }}".encode()
                header = header.ljust(117) + b"\n"
                data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)
            archive.writestr(f"{name}.npy", data)


def _expanded(path: Path) -> None:
    folder = path / "SAE-L0_5"
    folder.mkdir(parents=True)
    content = {
        "W_enc": torch.zeros(1).expand(10**6, 10**6), "W_dec": torch.zeros(1).expand(10**6, 10**6),
        "b_enc": torch.zeros(1).expand(10**6), "b_dec": torch.zeros(1).expand(10**6),
    }  # fmt: skip
    torch.save(content, folder / "layer0.sae.pt")


AUTOENCODERS: dict[str, Callable[[Path], None]] = {
    "compressed arrays": _bomb,
    "promised array": _npz_header,
    "expanded tensors": _expanded,
}
