"""Triton model repositories, and plans that carry their plugins; parsed with Triton's own protobuf."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from tests.conftest import Cli
from tests.processes import TWELLC, environment
from tests.runtimes import install
from twellc.base.errors import UserError
from twellc.export.plan import Backend, Plan, PlanTensor
from twellc.export.triton import model_config, model_folder
from twellc.plugins.registration import how_to_register


@pytest.fixture(scope="module")
def schema(request: pytest.FixtureRequest) -> Any:
    """Triton's protobuf module, from the wheel of its client; the rest of that needs gRPC."""
    folder = install(request, "tritonclient-2.73.0", "tritonclient==2.73.0")
    spec = importlib.util.spec_from_file_location(
        "model_config_pb2", folder / "tritonclient" / "grpc" / "model_config_pb2.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(schema: Any, text: str) -> Any:
    return text_format.Parse(text, schema.ModelConfig())


def plan(*tensors: PlanTensor) -> Plan:
    return Plan(Backend("tensorrt", "10"), list(tensors[:-1]), [tensors[-1]], ["mlp"])


def test_types_and_shapes(schema: Any) -> None:
    types = {
        "float": "FP32", "half": "FP16", "bf16": "BF16", "int8": "INT8", "int32": "INT32", "int64": "INT64",
        "uint8": "UINT8", "bool": "BOOL",
    }  # fmt: skip
    inputs = [PlanTensor(f"in_{name}", name, [-1, 8]) for name in types]
    config = parse(schema, model_config("m", plan(*inputs, PlanTensor("scalar", "half", [])), 1, None))
    assert (config.name, config.backend, config.max_batch_size) == ("m", "tensorrt", 0)
    found = {each.name: schema.DataType.Name(each.data_type) for each in config.input}
    assert found == {f"in_{name}": f"TYPE_{triton}" for name, triton in types.items()}
    assert all(list(each.dims) == [-1, 8] for each in config.input)
    # Rank 0: Triton's clients send one element, and the engine gets none of the dimensions.
    (scalar,) = config.output
    assert (list(scalar.dims), scalar.HasField("reshape"), list(scalar.reshape.shape)) == ([1], True, [])
    assert not config.input[0].HasField("reshape")
    assert not config.instance_group


def test_a_type_that_triton_does_not_have() -> None:
    with pytest.raises(UserError, match="--triton: Triton has no tensors of this type; got x in fp8"):
        model_config("m", plan(PlanTensor("x", "fp8", [8]), PlanTensor("y", "half", [8])), 1, None)


def test_every_profile_is_in_one_instance(schema: Any) -> None:
    tensors = PlanTensor("x", "bf16", [-1, 8]), PlanTensor("y", "bf16", [-1, 8])
    config = parse(schema, model_config("m", plan(*tensors), 3, None))
    (group,) = config.instance_group
    assert (group.count, group.kind, list(group.profile)) == (1, group.KIND_GPU, ["0", "1", "2"])


def test_several_gpus(schema: Any) -> None:
    tensors = PlanTensor("x", "bf16", [-1, 8]), PlanTensor("y", "bf16", [-1, 8])
    config = parse(schema, model_config("m", plan(*tensors), 1, None, ranks=4))
    (group,) = config.instance_group
    assert (group.count, group.kind) == (1, group.KIND_MODEL)
    assert {key: value.string_value for key, value in config.parameters.items()} == {
        "enable_multi_device": "true", "multi_device_gpus": "0,1,2,3", "multi_device_per_rank_engines": "true",
    }  # fmt: skip


def test_names_are_quoted(schema: Any) -> None:
    name = 'a"b\\c\nd'
    tensors = PlanTensor(name, "bf16", [8]), PlanTensor("y", "bf16", [8])
    assert parse(schema, model_config("m", plan(*tensors), 1, None)).input[0].name == name


def test_cure_is_named_where_plugins_are_needed() -> None:
    tensors = PlanTensor("x", "bf16", [8]), PlanTensor("y", "bf16", [8])
    register = how_to_register("m.plan", "tensorrt", ["TwellMlp"], ["libother.so"])
    cure = "tritonserver '--backend-config=tensorrt,plugins=libtwell_plugins.so;libother.so'"
    assert cure in model_config("m", plan(*tensors), 1, register)
    assert "plugins" not in model_config("m", plan(*tensors), 1, None)


@pytest.mark.parametrize(
    ("model", "name"),
    [("llama-7b.v2.pt2", "llama-7b.v2"), ("my model (1).pt2", "my_model__1_"), ("..pt2", "model"), (".pt2", "pt2")],
)
def test_name_of_the_model(tmp_path: Path, model: str, name: str) -> None:
    assert model_folder(tmp_path, tmp_path / model) == tmp_path / name


def twellc(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*TWELLC, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment())


@pytest.fixture(scope="module")
def repository(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that is made by the command, of a plan that carries its plugins."""
    pytest.importorskip("tensorrt_rtx_bindings")
    folder = tmp_path_factory.mktemp("triton") / "new" / "repository"
    done = twellc("compile", archive, "--backend", "tensorrt-rtx", "--triton", folder, "--embed-plugins")
    assert done.returncode == 0, done.stderr
    assert "Triton's TensorRT backend runs plans of TensorRT, not of TensorRT-RTX" in done.stderr
    assert "the plan carries native code, the plugins" in done.stderr
    return folder


def test_repository_holds_a_model(repository: Path, schema: Any) -> None:
    files = sorted(str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file())
    assert files == ["gated/1/model.plan", "gated/1/model.plan.json", "gated/config.pbtxt"]
    assert [path.name for path in repository.rglob(".*")] == []
    config = parse(schema, (repository / "gated" / "config.pbtxt").read_text())
    manifest = json.loads((repository / "gated" / "1" / "model.plan.json").read_text())
    assert config.name == "gated"
    for tensors, expected in ((config.input, manifest["plan"]["inputs"]), (config.output, manifest["plan"]["outputs"])):
        found = [(each.name, schema.DataType.Name(each.data_type), list(each.dims)) for each in tensors]
        assert found == [(each["name"], "TYPE_BF16", each["shape"]) for each in expected]
    assert list(config.input[0].dims) == [-1, 3, 16]


def test_plan_says_what_it_needs(repository: Path) -> None:
    plan = (repository / "gated" / "1" / "model.plan").read_bytes()
    assert b"needs the TensorRT plugins in libtwell_plugins.so; `twellc plugins` says where it is" in plan
    plugins = json.loads((repository / "gated" / "1" / "model.plan.json").read_text())["plugins"]
    assert plugins["names"] == ["TwellGatedMlp"]
    assert plugins["register"]["trtexec"] == "trtexec --dynamicPlugins=libtwell_plugins.so --loadEngine=model.plan"
    assert plugins["register"]["find"] == "twellc plugins"
    printed = "Cannot find plugin: TwellGatedMlptwell, version: twellc-3, namespace:twell."
    assert printed in plugins["register"]["missing"]
    assert printed in (Path(__file__).resolve().parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
    assert plugins["register"]["any program"] == "LD_PRELOAD=libtwell_plugins.so"
    python = [sys.executable, "-P", "-c", plugins["register"]["python"]]
    done = subprocess.run(python, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_plugins_are_in_the_plan(repository: Path) -> None:
    plan = (repository / "gated" / "1" / "model.plan").read_bytes()
    assert b"\x7fELF" in plan and b"initLibTwellPlugins" in plan
    assert json.loads((repository / "gated" / "1" / "model.plan.json").read_text())["plugins"]["embedded"] is True


def test_existing_model_is_kept(repository: Path, archive: Path) -> None:
    done = twellc("compile", archive, "--backend", "tensorrt-rtx", "--triton", repository)
    assert done.returncode == 2
    plan = repository / "gated" / "1" / "model.plan"
    assert f"--triton {plan}: the file exists already. Add --overwrite" in done.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "x.plan", "--triton", "R"], "--triton: the plan goes into the repository; got --output, too"),
        (["--backend", "none", "--onnx", "x.onnx", "--triton", "R"], "--triton: no plan is built; got --backend none"),
        (["--backend", "none", "--onnx", "x.onnx", "--embed-plugins"], "--embed-plugins: no plan is built"),
        (["--backend", "tensorrt-rtx", "--triton", "R", "--optimization-profile", "nothing:1:2:3"], "nothing"),
    ],
)
def test_bad_options_leave_nothing(cli: Cli, archive: Path, tmp_path: Path, options: list[str], message: str) -> None:
    if "tensorrt-rtx" in options:
        pytest.importorskip("tensorrt_rtx_bindings")
    folder = tmp_path / "repository"
    done = cli("compile", archive, *(folder if option == "R" else option for option in options))
    assert done.exit_code == 2, done.stderr
    assert message in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []
