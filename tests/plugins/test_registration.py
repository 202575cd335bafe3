"""Every way in which the plugin library gets into a TensorRT, in real processes on a CPU."""

import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import TWELLC, captured, environment
from tests.runtimes import LEAN_VERSIONS
from twellc.base.errors import UserError
from twellc.plugins import registration
from twellc.plugins.library import ATTENTION_NAMES, attention_library_path, library_path

HERE = Path(__file__).resolve().parent
RUNTIMES = ("rtx", *LEAN_VERSIONS)
Folder = Callable[[str], Path]


def with_leans(lean_folder: Folder, names: list[str]) -> dict[str, str]:
    return environment(**{name.upper(): str(lean_folder(name)) for name in names if name in LEAN_VERSIONS})


def walk(lean_folder: Folder, *steps: str, preload: bool = False) -> tuple[list[Any], str]:
    """Take the steps in a new process; return what those that answer answered, and what went to standard error."""
    names = [step.removeprefix("import ") for step in steps if step.startswith("import ")]
    settings = with_leans(lean_folder, names)
    if preload:
        settings["LD_PRELOAD"] = str(library_path())
    command = [sys.executable, str(HERE / "registration_child.py"), *steps]
    done = captured(command, env=settings)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return [answer for answer in json.loads(done.stdout) if answer is not None], done.stderr


# name: steps, answers; N stands for the runtime
WAYS: dict[str, tuple[list[str], list[Any]]] = {
    "never": (["import N", "show"], [[]]),
    "load_library": (["import N", "load N", "show"], [True, ["N"]]),
    "load_library-twice": (["import N", "load N", "load N", "show"], [True, False, ["N"]]),
    "dlopen": (["import N", "open", "show"], [["N"]]),
    "dlopen-twice": (["import N", "open", "open", "show"], [["N"]]),
    # TensorRT refuses what is there already and returns null; no harm.
    "dlopen-then-load_library": (["import N", "open", "load N", "show"], [False, ["N"]]),
    "load_library-then-dlopen": (["import N", "load N", "open", "show", "init "], [True, ["N"], True]),
    "dlclose": (["import N", "open", "close", "show", "open", "show"], [["N"], ["N"]]),
    "before-tensorrt": (["open", "init twell", "import N", "show", "init twell", "show"], [False, [], True, ["N"]]),
    "before-tensorrt-for-all": (["open-global", "import N", "show", "use N", "show", "load N"], [[], ["N"], False]),
    "init-twice": (["import N", "open", "init ", "init twell", "show"], [True, True, ["N"]]),
    "init-of-another-namespace": (["import N", "open", "init mine"], [False]),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("way", WAYS)
def test_way_in(lean_folder: Folder, runtime: str, way: str) -> None:
    steps, expected = WAYS[way]
    answers, _ = walk(lean_folder, *(step.replace("N", runtime) for step in steps))
    assert answers == [[runtime] if answer == ["N"] else answer for answer in expected]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_preloaded_into_a_program_that_opens_tensorrt_later(lean_folder: Folder, runtime: str) -> None:
    answers, _ = walk(lean_folder, f"import {runtime}", f"use {runtime}", "show", f"load {runtime}", preload=True)
    assert answers == [[runtime], False]


def test_preloaded_into_a_program_that_makes_a_builder(lean_folder: Folder) -> None:
    assert walk(lean_folder, "import rtx", "show", "build", "show", preload=True)[0] == [[], ["rtx"]]


def test_several_tensorrts_in_one_process(lean_folder: Folder) -> None:
    imports = [f"import {runtime}" for runtime in RUNTIMES]
    assert walk(lean_folder, *imports, "open", "show")[0] == [[*RUNTIMES]]
    assert walk(lean_folder, *imports, "load lean10", "show", "load rtx", "show")[0] == [
        True,
        ["lean10"],
        True,
        ["rtx", "lean10"],
    ]
    assert walk(lean_folder, *imports, "use lean11", "show", preload=True)[0] == [[*RUNTIMES]]


def test_into_a_registry_of_its_own(lean_folder: Folder) -> None:
    answers, _ = walk(lean_folder, "import rtx", "open", "load-local", "show")
    assert answers == [True, ["rtx"]]


def test_messages_reach_the_logger_without_one_that_was_given(lean_folder: Folder) -> None:
    # After dlopen there is no ILoggerFinder: the library asks TensorRT itself.
    (answer,), errors = walk(lean_folder, "import rtx", "open", "log")
    assert [text.partition(":")[0] for text in answer if "activation" in text] == ["TwellMlp 'layer0'"]
    assert "[twell]" not in errors


PROGRAM = r"""
#include <stdio.h>
void* getPluginRegistry(void);
int getInferLibVersion(void);
int main(void) {
    void* registry = getPluginRegistry();
    int slot = getInferLibVersion() / 10000 == 10 ? 14 : 10;
    typedef void* (*Get)(void*, char const*, char const*, char const*);
    puts((*(Get**)registry)[slot](registry, "TwellMlp", "twellc-3", "twell") ? "there" : "missing");
    return 0;
}
"""


def compiler() -> str:
    found = shutil.which("gcc")
    if found is None:
        pytest.skip("no gcc")
    return found


def core_library(lean_folder: Folder, runtime: str) -> Path:
    if runtime == "rtx":
        libs = pytest.importorskip("tensorrt_rtx_libs")
        return Path(libs.__file__).with_name("libtensorrt_rtx.so.1")
    return lean_folder(runtime) / "tensorrt_lean_libs" / f"libnvinfer_lean.so.{runtime.removeprefix('lean')}"


@pytest.mark.parametrize("binding", ["lazy", "now"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_preloaded_into_a_program_linked_with_tensorrt(
    lean_folder: Folder, tmp_path: Path, runtime: str, binding: str
) -> None:
    (tmp_path / "main.c").write_text(PROGRAM)
    core, program = core_library(lean_folder, runtime), tmp_path / "program"
    link = [str(core), f"-Wl,-rpath,{core.parent}", f"-Wl,-z,{binding}"]
    subprocess.run([compiler(), str(tmp_path / "main.c"), "-o", str(program), *link], check=True)
    for preload, expected in ((None, "missing\n"), (str(library_path()), "there\n")):
        settings = {**os.environ, **({"LD_PRELOAD": preload} if preload else {})}
        done = captured([program], env=settings, check=True)
        assert done.stdout == expected


def test_no_program_links_with_the_hooks(tmp_path: Path) -> None:
    # Else a program that names the plugin library first would lose its dependency on TensorRT.
    (tmp_path / "main.c").write_text(PROGRAM)
    command = [compiler(), str(tmp_path / "main.c"), "-o", str(tmp_path / "program"), str(library_path())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "undefined reference to `getPluginRegistry'" in done.stderr


def test_unknown_layout_is_left_alone(tmp_path: Path) -> None:
    # A registry without a vtable: a call of it crashes.
    source = "long registry[2]; void* getPluginRegistry(void) { return registry; }"
    (tmp_path / "host.c").write_text(f"{source} int getInferLibVersion(void) {{ return 120000; }}")
    host = tmp_path / "libnvinfer.so.12"
    subprocess.run([compiler(), "-shared", "-fPIC", str(tmp_path / "host.c"), "-o", str(host)], check=True)
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1]); sys.exit(ctypes.CDLL(sys.argv[2]).initLibTwellPlugins(0, b''))"
    )
    done = captured([sys.executable, "-P", "-c", code, host, library_path()])
    assert done.returncode == 0
    assert done.stderr == (
        f"[twell] warning: no plugins for {host}, version 120000: this library knows TensorRT 10, TensorRT 11 and "
        "TensorRT-RTX from 1.5\n"
    )


class Registry:
    """A plugin registry that has the plugins or not, and takes them or not."""

    def __init__(self, has: bool, takes: bool) -> None:
        self.has, self.takes = has, takes

    def get_creator(self, name: str, version: str, namespace: str) -> object | None:
        assert (version, namespace) == ("twellc-3", "twell")
        return object() if self.has else None

    def load_library(self, path: str) -> None:
        assert path == str(library_path())
        self.has = self.has or self.takes


def tensorrt(has: bool, takes: bool) -> types.ModuleType:
    module = types.ModuleType("tensorrt")
    registry = Registry(has, takes)
    module.__dict__.update(__version__="10.0", get_plugin_registry=lambda: registry)
    return module


def test_register_in_a_module() -> None:
    module = tensorrt(has=False, takes=True)
    assert registration.register(module) == [registration.Registration("tensorrt", "10.0", "registered")]
    assert registration.register(module) == [registration.Registration("tensorrt", "10.0", "already registered")]


def test_register_in_what_is_imported(lean_folder: Folder) -> None:
    # In one process, register() meets the plugins of a plain dlopen and a fresh TensorRT.
    code = (
        "import ctypes, os, sys, tensorrt_rtx_bindings; from twellc.plugins import register\n"
        "from twellc.plugins.library import attention_library_path, library_path\n"
        "for path in filter(None, (library_path(), attention_library_path())): ctypes.CDLL(str(path))\n"
        "sys.path.insert(0, os.environ['LEAN11']); import tensorrt_lean_bindings\n"
        "print(*((r.host, r.state) for r in register()), 'torch' in sys.modules, flush=True); os._exit(0)"
    )
    done = captured([sys.executable, "-P", "-c", code], env=with_leans(lean_folder, ["lean11"]), check=True)
    assert done.stdout == (
        "('tensorrt_lean_bindings', 'registered') ('tensorrt_rtx_bindings', 'already registered') False\n"
    )


def test_register_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the plugins do not register in tensorrt 10\.0; expected TensorRT 10, "):
        registration.register(tensorrt(has=False, takes=False))
    with pytest.raises(UserError, match=r"json is not a TensorRT: it has no plugin registry"):
        registration.register(json)
    with pytest.raises(UserError, match=r"'tensorrt' is not a TensorRT: it has no plugin registry"):
        registration.register("tensorrt")  # type: ignore[arg-type]
    monkeypatch.setattr(registration, "imported_modules", list)
    with pytest.raises(UserError, match=r"no TensorRT is imported; expected tensorrt or .*Import it first"):
        registration.register()
    broken = tmp_path / "libtwell_plugins.so"
    broken.write_text("no library")
    module = tensorrt(has=False, takes=False)
    module.get_plugin_registry().load_library = lambda path: None
    monkeypatch.setenv("TWELLC_LIBRARY", str(broken))
    with pytest.raises(UserError, match=r"libtwell_plugins.so: the plugin library is damaged .*expected a 64-bit ELF"):
        registration.register(module)
    monkeypatch.setenv("TWELLC_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(UserError, match=r"none.so: the plugin library is missing \(named by \$TWELLC_LIBRARY\)"):
        registration.register(module)


def test_how_to_register_names_what_a_plan_needs() -> None:
    assert registration.how_to_register("m.plan", "tensorrt", ["TwellMlp", "TwellAttention"], []) == {
        "missing": "TensorRT prints «Cannot find plugin: TwellGatedMlptwell, version: twellc-3, namespace:twell.», or "
        "TwellMlp instead, where they are not registered",
        "find": "twellc plugins",
        "python": "import tensorrt, twellc.plugins; twellc.plugins.register()",
        "trtexec": "trtexec --dynamicPlugins=libtwell_plugins.so --dynamicPlugins=libtwell_attention.so "
        "--loadEngine=m.plan",
        "triton": "tritonserver '--backend-config=tensorrt,plugins=libtwell_plugins.so;libtwell_attention.so'",
        "c++": 'dlopen("libtwell_plugins.so", RTLD_NOW), dlopen("libtwell_attention.so", RTLD_NOW), '
        "once TensorRT is loaded",
        "any program": "LD_PRELOAD=libtwell_plugins.so:libtwell_attention.so",
    }
    assert registration.how_to_register("m.plan", "tensorrt", [], ["libother.so"]) == {
        "python": "import tensorrt; tensorrt.get_plugin_registry().load_library('libother.so')",
        "trtexec": "trtexec --dynamicPlugins=libother.so --loadEngine=m.plan",
        "triton": "tritonserver --backend-config=tensorrt,plugins=libother.so",
        "c++": 'getPluginRegistry()->loadLibrary("libother.so")',
    }


def plugins_command(*options: str, folder: str | Path = "", **settings: str) -> subprocess.CompletedProcess[str]:
    command = [*TWELLC, "plugins", *options]
    settings = environment(*filter(None, [folder]), **settings)
    return captured(command, env=settings)


def test_plugins_prints_what_the_library_is() -> None:
    done = plugins_command()
    assert (done.returncode, done.stderr) == (0, "")
    attention = attention_library_path()
    assert done.stdout.splitlines() == [
        f"library    {library_path()}",
        *([f"attention  {attention}"] if attention else []),
        "version    0.1.0",
        "namespace  twell",
        "plugin     TwellGatedMlp, version twellc-3",
        "plugin     TwellMlp, version twellc-3",
        "plugin     TwellLinear, version twellc-3",
        "plugin     TwellExperts, version twellc-3",
        *(f"plugin     {name}, version twellc-3" for name in (ATTENTION_NAMES if attention else ())),
    ]
    found = json.loads(plugins_command("--json").stdout)
    assert found == {
        "library": str(library_path()),
        "attention_library": attention and str(attention),
        "version": "0.1.0",
        "namespace": "twell",
        "plugins": [
            {"name": "TwellGatedMlp", "version": "twellc-3"},
            {"name": "TwellMlp", "version": "twellc-3"},
            {"name": "TwellLinear", "version": "twellc-3"},
            {"name": "TwellExperts", "version": "twellc-3"},
            *({"name": name, "version": "twellc-3"} for name in (ATTENTION_NAMES if attention else ())),
        ],
    }


def test_plugins_check_finds_modules_and_libraries(lean_folder: Folder) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    done = plugins_command(
        "--check", folder=lean_folder("lean11"), LD_LIBRARY_PATH=str(lean_folder("lean10") / "tensorrt_lean_libs")
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok", "FAILED"))]
    assert "ok         tensorrt_lean_bindings 11.4.0.106: registered" in lines
    assert "ok         libnvinfer_lean.so.10 10.16.1: registered" in lines
    assert any(line.startswith("ok         tensorrt_rtx") for line in lines)


def test_plugins_check_reports_failures(tmp_path: Path) -> None:
    # One that cannot be imported, and one that takes its process with it.
    (tmp_path / "tensorrt.py").write_text("raise ImportError('no such driver')")
    (tmp_path / "tensorrt_lean.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    done = plugins_command("--check", "--json", folder=tmp_path)
    assert done.returncode == 1
    checks = {check["host"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["tensorrt"]["state"] == "cannot be imported (no such driver)"
    assert checks["tensorrt_lean"]["state"].startswith("the process ended with signal 11")
    assert not checks["tensorrt"]["good"]
    assert not checks["tensorrt_lean"]["good"]


def test_plugins_without_a_library_is_one_message(tmp_path: Path) -> None:
    done = plugins_command(TWELLC_LIBRARY=str(tmp_path / "none.so"))
    assert done.returncode == 2
    assert "none.so: the plugin library is missing" in done.stderr
    assert "Traceback" not in done.stderr
