"""Which TensorRT is chosen, and what is said where none can be used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twellc.base.errors import UserError
from twellc.export import tensorrt_host
from twellc.export.tensorrt_host import Host, choose_host, load_host, why_not_here, write_plan

Pretend = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Return a function that pretends what is installed, and which GPU there is."""

    def pretend(*installed: str, capability: tuple[int, int] | None = None) -> None:
        modules = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
        monkeypatch.setattr(tensorrt_host, "python_module", lambda name: modules[name] if name in installed else None)
        monkeypatch.setattr(tensorrt_host, "has_gpu", lambda: capability is not None)
        monkeypatch.setattr(tensorrt_host, "compute_capability", lambda: capability)

    return pretend


BOTH = ("tensorrt", "tensorrt-rtx")


@pytest.mark.parametrize(
    ("backend", "installed", "capability", "chosen"),
    [
        ("auto", BOTH, (9, 0), "tensorrt"),
        ("auto", BOTH, None, "tensorrt-rtx"),  # TensorRT cannot build without a GPU
        ("auto", ("tensorrt-rtx",), (8, 9), "tensorrt-rtx"),
        ("tensorrt-rtx", BOTH, (9, 0), "tensorrt-rtx"),
        ("tensorrt", BOTH, (9, 0), "tensorrt"),
    ],
)
def test_choice(backend: str, installed: tuple[str, ...], capability: Any, chosen: str, machine: Pretend) -> None:
    machine(*installed, capability=capability)
    assert choose_host(backend) == chosen


@pytest.mark.parametrize("backend", ["auto", "tensorrt", "tensorrt-rtx"])
def test_nothing_installed(backend: str, machine: Pretend) -> None:
    machine(capability=(9, 0))
    with pytest.raises(UserError, match=rf"--backend {backend}: tensorrt.* not found\. Install"):
        choose_host(backend)
    with pytest.raises(UserError, match="is not installed"):
        load_host("tensorrt")


def test_tensorrt_without_a_gpu(machine: Pretend) -> None:
    machine("tensorrt")
    with pytest.raises(UserError, match="builds on the GPU that it builds for, and there is none here"):
        choose_host("tensorrt")
    with pytest.raises(UserError, match="not found"):
        choose_host("auto")


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0), (12, 1), (7, 5), (8, 7), (9, 0), (10, 0), None])
def test_gpus_that_run_plans(capability: tuple[int, int] | None, machine: Pretend) -> None:
    machine(capability=capability)
    nothing = "there is no GPU on this machine"
    assert why_not_here("tensorrt") == ("" if capability else nothing)
    if capability in ((8, 6), (8, 9), (12, 0), (12, 1)):
        assert why_not_here("tensorrt-rtx") == ""
    else:
        reason = nothing if capability is None else f"this GPU has {capability[0]}.{capability[1]}"
        assert reason in why_not_here("tensorrt-rtx")


def test_what_is_installed_here() -> None:
    host = load_host(choose_host("tensorrt-rtx"))
    assert host.name == "tensorrt-rtx"
    assert host.version == str(host.module.__version__)


@pytest.mark.parametrize("plan", [b"a plan", None])
def test_builder_that_writes_no_stream(plan: bytes | None, tmp_path: Path) -> None:
    """As of older TensorRTs, which give the whole plan, or nothing where they refuse the network."""

    class Builder:
        def build_serialized_network(self, network: object, config: object) -> bytes | None:
            return plan

    host = Host("tensorrt", None, "10.0")
    assert write_plan(host, Builder(), None, None, tmp_path / "m.plan") == (plan is not None)
    assert (tmp_path / "m.plan").read_bytes() == (plan or b"")
