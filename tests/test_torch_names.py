"""PyTorch's names that we use and that are private, new or of a GPU: each with a release that has it, none newer than we support.

No test runs on the oldest release, whose packages have several GB, and most calls of a GPU are made by no test.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from packaging.version import Version
from support import ROOT

# Public names of these are listed as well: they are the newest, or need a GPU.
LISTED = ("torch.accelerator", "torch.compiler", "torch.cuda", "torch.library", "torch.overrides")
# By the first of the releases 2.4, 2.6, 2.8, 2.9 and 2.11 whose package has it.
SINCE = {
    "torch.AcceleratorError": "2.8",
    "torch.OutOfMemoryError": "2.6",
    "torch.Tensor._make_wrapper_subclass": "2.4",
    "torch._C.DisableTorchFunctionSubclass": "2.4",
    "torch._C.DispatchKey": "2.4",
    "torch._C.DispatchKey.CompositeImplicitAutograd": "2.4",
    "torch._C._cuda_endAllocateToPool": "2.8",
    "torch._C._cuda_releasePool": "2.4",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "2.4",
    "torch._C._len_torch_dispatch_stack": "2.4",
    "torch._C._pop_torch_dispatch_stack": "2.4",
    "torch.compiler.disable": "2.1",
    "torch.compiler.is_compiling": "2.4",
    "torch.cuda.CUDAGraph": "2.4",
    "torch.cuda.Event": "2.4",
    "torch.cuda.ExternalStream": "2.4",
    "torch.cuda.Stream": "2.4",
    "torch.cuda.current_device": "2.4",
    "torch.cuda.current_stream": "2.4",
    "torch.cuda.default_generators": "2.4",
    "torch.cuda.device": "2.4",
    "torch.cuda.device_count": "2.4",
    "torch.cuda.get_device_capability": "2.4",
    "torch.cuda.get_device_name": "2.4",
    "torch.cuda.graph": "2.4",
    "torch.cuda.graph_pool_handle": "2.4",
    "torch.cuda.init": "2.4",
    "torch.cuda.is_available": "2.4",
    "torch.cuda.is_current_stream_capturing": "2.4",
    "torch.cuda.mem_get_info": "2.4",
    "torch.cuda.memory_allocated": "2.4",
    "torch.cuda.memory_reserved": "2.4",
    "torch.cuda.set_stream": "2.4",
    "torch.cuda.stream": "2.4",
    "torch.cuda.synchronize": "2.4",
    "torch.fx.experimental._config": "2.4",
    "torch.library.custom_op": "2.4",
    "torch.nn.modules.module._has_any_global_hook": "2.8",
    "torch.overrides.TorchFunctionMode": "2.4",
    "torch.utils._python_dispatch": "2.4",
    "torch.utils._python_dispatch.TorchDispatchMode": "2.4",
    "torch.utils._python_dispatch._get_current_dispatch_mode": "2.4",
    "torch.utils._pytree.TreeSpec": "2.4",
    "torch.utils._pytree.tree_flatten": "2.4",
    "torch.utils._pytree.tree_leaves": "2.4",
    "torch.utils._pytree.tree_map": "2.4",
    "torch.utils._pytree.tree_map_only": "2.4",
    "torch.utils._pytree.tree_unflatten": "2.4",
}
# Of objects, which a look at the code does not tell from ours.
MEMBERS = {
    "torch.Generator.clone_state": "2.4",
    "torch.Generator.graphsafe_set_state": "2.4",
    "torch.UntypedStorage._cdata": "2.4",
    "torch.cuda.CUDAGraph.pool": "2.4",
    "torch.cuda.CUDAGraph.reset": "2.4",
}
FOLDERS = ("injection", "operators", "cpu_backend", "rules")


def names_in(file: Path) -> set[str]:
    """Return the dotted names of PyTorch that a file imports or reaches, each up to its last attribute."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    known: dict[str, str] = {}
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in known:
            found.add(".".join([known[node.id], *parts]))
    return found


def is_listed(name: str) -> bool:
    private = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    return private or name.startswith(tuple(f"{each}." for each in LISTED)) or name.endswith("Error")


def used_names() -> set[str]:
    found = {name for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") for name in names_in(file) if is_listed(name)}
    return {name for name in found if name != "torch._C"}  # the module of the names in it


def test_the_table_has_every_such_name_and_no_other() -> None:
    used = used_names()
    assert used - set(SINCE) == set(), "add these, with the release that has them"
    assert set(SINCE) - used == set(), "these are used no more"
    code = "".join(file.read_text(encoding="utf-8") for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    assert [name for name in MEMBERS if not re.search(rf"\.{name.rpartition('.')[2]}\b", code)] == [], "these are used no more"


def test_no_name_is_newer_than_the_oldest_release_that_is_supported() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (oldest,) = (line.removeprefix("torch>=") for line in about["project"]["dependencies"] if line.startswith("torch>="))
    # The release alone: vendors' alphas of it have its names.
    newer = {name: since for name, since in (SINCE | MEMBERS).items() if Version(since) > Version(Version(oldest).base_version)}
    assert newer == {}, "guard these"


@pytest.mark.parametrize("name", [*SINCE, *MEMBERS])
def test_this_release_has_it(name: str) -> None:
    """`torch._C` has what is a GPU's in builds for one alone."""
    if name.startswith("torch._C._cuda_") and torch.version.cuda is None and torch.version.hip is None:
        pytest.skip("PyTorch was built for the CPU alone")
    assert resolve_name(name) is not None
