"""Includes of the C++ and CUDA sources point one way: each folder sees those that are said to be below it."""

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PLUGINS = Path(__file__).resolve().parents[1] / "plugins"
ROUTES = ("one_or_two_tokens", "few_tokens", "dense_block", "many_tokens")
BASE = {"device", "host", "format", "matmul"}  # below all routes
MANY = "many_tokens/"
# By folder of plugins/kernels, what it may include beside itself. The public header is below all of them.
KERNELS: dict[str, set[str]] = {
    "device": set(),
    "host": {"device"},
    "format": {"device"},
    "matmul": {"device", "host", "format"},
    "fp8": {"device", "host", "norm"},
    "norm": {"device", "host"},
    "one_or_two_tokens": BASE,
    "few_tokens": BASE,
    "dense_block": BASE | {"fp8"},
    MANY + "guard": BASE,
    MANY + "gate": BASE | {"fp8", MANY + "guard"},
    MANY + "dense": BASE | {"fp8", MANY + "guard"},
    MANY + "chunks": BASE,
    MANY + "schedule": BASE | {MANY + "guard", MANY + "dense", MANY + "chunks"},
    MANY + "sparse": BASE | {"fp8", MANY + "guard", MANY + "dense", MANY + "chunks"},
    "many_tokens": BASE
    | {"fp8"}
    | {MANY + each for each in ("guard", "gate", "dense", "chunks", "schedule", "sparse")},
    "split": BASE | {"dense_block", "many_tokens"},
    "features": BASE | {MANY + "gate"},
    "training": BASE | {MANY + "gate"},
    "linear": BASE | {"fp8", "norm"},
    "experts": BASE,
}
# The files above all folders: the C functions and the table of routes.
ALLOWED = {**KERNELS, "": {*KERNELS}}
# Of the other folders of plugins, likewise; headers that are not of this repository stand in angle brackets.
OTHERS: dict[str, set[str]] = {
    "include": set(),
    "tensorrt": {"include"},
    "attention": {"include", "kernels", "tensorrt"},
}
SOURCES = [
    path
    for path in sorted(PLUGINS.rglob("*"))
    if path.suffix in (".h", ".cuh", ".cu", ".cpp") and "stand_in" not in path.parts
]
IN_KERNELS = {path.relative_to(PLUGINS / "kernels").as_posix(): path for path in SOURCES if "kernels" in path.parts}


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def kernel_arrows() -> dict[str, set[str]]:
    """Return which folders of plugins/kernels include which; files at the top are the folder ""."""
    found: dict[str, set[str]] = {}
    for name, path in IN_KERNELS.items():
        included = {folder_of(each) for each in includes(path) if not each.startswith("twell/")}
        found.setdefault(folder_of(name), set()).update(included - {folder_of(name)})
    return found


def upward(arrows: dict[str, set[str]]) -> list[str]:
    return [
        f"{folder or 'kernels'} -> {each or 'kernels'}"
        for folder, found in arrows.items()
        for each in sorted(found - ALLOWED.get(folder, set()))
    ]


def test_every_folder_is_listed() -> None:
    assert kernel_arrows().keys() == ALLOWED.keys()
    assert {path.relative_to(PLUGINS).parts[0] for path in SOURCES} == {"kernels", *OTHERS}


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("device", "host/launch.h"),
        ("few_tokens", "many_tokens/many_tokens.h"),
        ("many_tokens/guard", "many_tokens/gate/gate.h"),
        ("matmul", "routes.h"),
        ("new_folder", "device/vector.cuh"),
    ],
)
def test_includes_between_kernel_folders_point_down(folder: str, name: str) -> None:
    """And one that is planted and does not is found."""
    assert not upward(kernel_arrows())
    assert upward({**kernel_arrows(), folder: {folder_of(name)}}) == [f"{folder} -> {folder_of(name) or 'kernels'}"]


def test_routes_do_not_know_each_other() -> None:
    for folder, found in kernel_arrows().items():
        route = folder.split("/")[0]
        if route in ROUTES:
            assert not {each.split("/")[0] for each in found} & set(ROUTES) - {route}, folder


@pytest.mark.parametrize("arrows", [KERNELS, kernel_arrows()], ids=("allowed", "found"))
def test_no_circle_of_folders(arrows: dict[str, set[str]]) -> None:
    TopologicalSorter(arrows).prepare()  # raises CycleError


def test_every_include_is_a_file_below() -> None:
    """Names are full: from plugins/kernels or plugins/include; elsewhere they may start from the file's folder."""
    for path in SOURCES:
        folder = path.relative_to(PLUGINS).parts[0]
        roots = [PLUGINS / "include", PLUGINS / "kernels", *([] if folder == "kernels" else [PLUGINS, path.parent])]
        for name in includes(path):
            found = next((root / name for root in roots if (root / name).is_file()), None)
            assert found is not None, f"{path}: {name}"
            owner = found.resolve().relative_to(PLUGINS).parts[0]
            assert owner in {folder, *OTHERS.get(folder, {"include"})}, f"{path}: {name}"


def test_kernels_see_neither_torch_nor_tensorrt() -> None:
    for path in IN_KERNELS.values():
        assert not re.search(r"#\s*include\s+<(torch|ATen|c10|NvInfer)", path.read_text(encoding="utf-8")), path


def test_device_code_stands_apart_from_the_choice() -> None:
    """Headers that say how a product is cut, and what routes offer, bring no kernel with them."""
    plain = ("matmul/tiling_sm90.h", "matmul/dense_sm90.h", *(f"{route}/" for route in ROUTES))
    for name, path in IN_KERNELS.items():
        if path.suffix == ".h" and name.startswith(plain) and "scratch" not in name:
            found = {each for each in includes(path) if each.endswith(".cuh")}
            assert not [each for each in found if "__global__" in IN_KERNELS[each].read_text("utf-8")], name
