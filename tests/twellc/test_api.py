"""The functions of the package: models in memory, typed results, and what they do not import."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import twellc
from tests.conftest import run_here
from tests.models import Gated, Plain, Residual, export, llama
from tests.processes import captured, environment


def module() -> nn.Module:
    return Residual(Gated(d_ff=320)).bfloat16().eval()


def example() -> tuple[torch.Tensor]:
    return (torch.randn(4, 16).bfloat16(),)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, twellc.Manifest]:
    plan, model = tmp_path_factory.mktemp("api") / "m.plan", module()
    with pytest.MonkeyPatch.context() as patch:
        run_here(patch)
        return model, plan, twellc.compile(model, plan, args=example())


def imported_by(code: str) -> set[str]:
    """Return which of the large libraries a new process has imported after `code`."""
    code += "\nimport sys; print(*sys.modules.keys() & {'torch', 'onnx', 'onnx_ir', 'transformers', 'numpy', 'sympy'})"
    done = captured([sys.executable, "-P", "-c", code], check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_import_is_light() -> None:
    assert imported_by("import twellc; twellc.compile; twellc.inspect; twellc.Manifest; twellc.Layer") == set()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_inspecting_a_plan_imports_nothing_large(compiled: Any, options: list[str]) -> None:
    """Which is what makes it fast."""
    arguments = ["inspect", str(compiled[1]), *options]
    assert imported_by(f"from twellc.cli import main\nmain({arguments!r}, standalone_mode=False)") == set()


def test_every_public_name_is_there() -> None:
    for name in set(twellc.__all__) - {"__version__"}:
        assert getattr(twellc, name).__name__.removeprefix("twellc.") == name
    assert twellc.__version__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = twellc.nothing


def test_modules_need_no_import_of_their_own() -> None:
    """`import twellc` is enough for what the pages call twellc.plugins.register() and the like."""
    used = "twellc.plugins.register, twellc.torch_tensorrt.register, twellc.training.L1Penalty, twellc.vllm.register"
    assert imported_by("import twellc; twellc.plugins.register, twellc.torch_tensorrt, twellc.vllm") == set()
    subprocess.run([sys.executable, "-P", "-c", f"import twellc; {used}"], env=environment(), check=True)


def test_an_unknown_option_names_the_class_that_lists_them() -> None:
    with pytest.raises(TypeError, match=r"no option 'precision'; twellc.options.source.TracingOptions lists them"):
        twellc.rewrite(module(), args=example(), precision="bf16")  # type: ignore[call-arg]


def test_compile_a_module(compiled: Any) -> None:
    _, plan, manifest = compiled
    assert manifest.to_json() == json.loads(plan.with_name("m.plan.json").read_text())
    assert (manifest.model.name, manifest.model.kind) == ("Residual.pt2", "ExportedProgram in memory")
    assert [(layer.module, layer.decision) for layer in manifest.layers] == [("ffn", "twell")]
    assert manifest.plan is not None and manifest.plan.bytes == plan.stat().st_size


def test_inspection_of_a_plan_is_its_manifest(compiled: Any) -> None:
    _, plan, manifest = compiled
    found = twellc.inspect(plan, tokens=7, density=0.125)
    assert found.description.manifest == manifest
    assert found.kernels is not None
    assert found.to_json() == {
        "kind": "plan", **manifest.to_json(), "cost": found.cost.to_json(), "kernels": found.kernels.to_json()
    }  # fmt: skip
    assert (found.cost.tokens, found.cost.assumed_density) == (7, 0.125)


def test_inspect_module_and_program(compiled: Any) -> None:
    model, _, manifest = compiled
    for found in (twellc.inspect(model, args=example()), twellc.inspect(export(model, *example()))):
        assert found.description.kind == "ExportedProgram in memory"
        assert [(layer.module, layer.decision) for layer in found.layers] == [
            (layer.module, layer.decision) for layer in manifest.layers
        ]


def test_check_a_module(compiled: Any) -> None:
    model, plan, _ = compiled
    result = twellc.check(model, plan, args=example())
    assert result.within
    assert result.to_json()["blocks"][0]["diverges"] is False
    assert json.loads(json.dumps(result.to_json())) == result.to_json()
    other = module()
    with pytest.raises(twellc.UserError, match="was not built from"):
        twellc.check(other, plan, args=example())


def test_rewrite(tmp_path: Path) -> None:
    model, (x,) = module(), example()
    program = export(model, x)
    before = str(program.graph)
    torch.export.save(program, tmp_path / "m.pt2")
    for found in (twellc.rewrite(model, args=(x,)), twellc.rewrite(program), twellc.rewrite(tmp_path / "m.pt2")):
        assert [layer.decision for layer in found.layers] == ["twell"]
        assert "twell.gated_mlp" in str(found.program.graph)
        torch.testing.assert_close(found.program.module()(x), found.dense.module()(x), rtol=2e-2, atol=2e-2)
        assert json.loads(json.dumps(found.to_json()))["layers"][0]["module"] == "ffn"
    assert str(program.graph) == before
    assert twellc.rewrite(program, layers="none").layers[0].decision == "dense"


def refusals(folder: Path) -> dict[str, tuple[Any, type[Exception], str]]:
    model, inputs = Plain().eval(), (torch.randn(4, 16),)
    program = export(Plain(), *inputs)
    return {
        "no inputs": (lambda: twellc.inspect(model), twellc.UserError, "a module needs example inputs"),
        "training": (lambda: twellc.inspect(Plain(), args=inputs), twellc.UserError, "is in training mode"),
        "inputs that do not fit": (
            lambda: twellc.rewrite(model, args=(torch.randn(3),)), twellc.UserError, "cannot trace the model",
        ),
        "inputs of a program": (
            lambda: twellc.rewrite(program, args=inputs), twellc.UserError, "only a module needs example inputs",
        ),
        "inputs of a path": (
            lambda: twellc.inspect(folder, args=inputs), twellc.UserError, "only a module needs example inputs",
        ),
        "no model": (lambda: twellc.rewrite(3), twellc.UserError, "is not a model; got int"),  # type: ignore[arg-type]
        "optimized": (
            lambda: twellc.inspect(twellc.optimize(Plain().eval()), args=inputs), twellc.UserError, "twellc.restore",
        ),
        "its name": (
            lambda: twellc.profile(torch.nn.Linear(16, 16).eval(), {"input": inputs[0]}, args=inputs),
            twellc.UserError, "^Linear: has no feed-forward block",
        ),
        "unknown option": (
            lambda: twellc.compile(program, folder / "m.plan", precision="bf16"),  # type: ignore[call-arg]
            TypeError, "no option 'precision'",
        ),
        "unknown value": (
            lambda: twellc.compile(program, folder / "m.plan", dtype="int8"), twellc.UserError, "got 'int8'",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", refusals(Path()))
def test_refuses(tmp_path: Path, case: str) -> None:
    call, kind, message = refusals(tmp_path)[case]
    with pytest.raises(kind, match=message):
        call()
    assert list(tmp_path.iterdir()) == []


SCRIPTS = {
    "a process": "from twellc.base.isolation import run_isolated\nrun_isolated(print, 'child', progress=print)",
    "compile": "import torch, twellc\n"
    "model = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.ReLU(), torch.nn.Linear(40, 16)).eval()\n"
    "twellc.compile(model, backend='none', onnx='m.onnx', args=(torch.randn(2, 16),))\nprint('child')",
}


@pytest.mark.parametrize("script", ["a process", pytest.param("compile", marks=pytest.mark.slow)])
def test_script_without_a_guard(tmp_path: Path, script: str) -> None:
    """Processes that compile do not run the user's script again."""
    (tmp_path / "script.py").write_text(f"print('once')\n{SCRIPTS[script]}\n")
    done = captured([sys.executable, tmp_path / "script.py"], cwd=tmp_path, check=True)
    said = done.stdout + done.stderr
    assert said.count("once") == said.count("child") == 1
    assert (tmp_path / "m.onnx").is_file() == (script == "compile")


def test_mistakes_in_example_inputs() -> None:
    (x,) = example()
    with torch.device("meta"):
        meta = module()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (module(), {"args": x}, r"args: are not a tuple; got Tensor; .* Write args=\(x,\)"),
        (module(), {"args": [x]}, "args: are not a tuple; got list"),
        (module(), {"kwargs": [x]}, "kwargs: is not a dictionary; got list"),
        (meta, {"args": (x,)}, "has tensors on the meta device"),
        (torch.compile(module()), {"args": (x,)}, "Pass the module itself: its _orig_mod"),
        (nn.DataParallel(module()), {"args": (x,)}, "Pass the module itself: its module"),
        (module(), {"args": (x,), "dynamic_shapes": [1, 2]}, "dynamic_shapes has the form of the inputs"),
        (module(), {"args": (x,), "import_modules": "no_such"}, "--import no_such: cannot be imported"),
    ]
    for function in (twellc.inspect, twellc.rewrite):
        for model, given, message in cases:
            with pytest.raises(twellc.UserError, match=message):
                function(model, **given)


def test_paths_that_are_none() -> None:
    with pytest.raises(twellc.UserError, match="output: is not a path; got int"):
        twellc.compile("m.pt2", 3)  # type: ignore[arg-type]
    with pytest.raises(twellc.UserError, match=r"output x\.onnx: a plan is not an ONNX file\. Add --backend none"):
        twellc.compile("m.pt2", "x.onnx")


def test_files_that_would_be_folders(tmp_path: Path) -> None:
    """pathlib drops the slash at the end."""
    folder = f"{tmp_path}/a/"
    for call in (
        lambda: twellc.compile("m.pt2", folder),
        lambda: twellc.compile("m.pt2", backend="none", onnx=folder),
        lambda: twellc.profile("m.pt2", "t.txt", folder),
        lambda: twellc.report(folder),
        lambda: twellc.bench("m.pt2", plot=folder),
        lambda: twellc.FiringProfile(None, [], "", "", [], {}).write(folder),  # type: ignore[arg-type]
    ):
        with pytest.raises(twellc.UserError, match="a/: is a folder; expected a file"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_model_of_transformers_keeps_its_cache_switched_on() -> None:
    model = llama(num_hidden_layers=1)
    found = twellc.inspect(model, args=(torch.ones(1, 7, dtype=torch.int64),))
    assert [layer.decision for layer in found.description.layers] == ["twell"]
    assert model.config.use_cache
