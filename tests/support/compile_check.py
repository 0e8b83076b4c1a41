"""Compilation of Triton kernels without a GPU: every launch within `recording` is compiled for a GPU and not run.

The product's launchers are called, so types, alignments and constants are the shipped ones. Registers, spills and instructions are read
from the machine code with the disassembler that Triton includes. The key of a launch covers everything that its binary depends on except
the compiler, so that a known launch is not compiled again.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import tempfile
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moegraft.operators.kernels.launch import interpreted
from moegraft.operators.kernels.units import Decoder

WARP_THREADS = 32
# The most shared memory that a program may have; sm_86 and sm_89 are GeForce's.
SHARED_LIMIT_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
REGISTER_FILE = 65536  # registers of a multiprocessor


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel for one kind of GPU.

    Attributes:
        key: the key of the launch, equal for equal source, types, constants and GPU.
        registers: registers per thread.
        spills: instructions that access local memory.
        wide_loads: loads of 16 bytes per thread from global memory, to registers or to shared memory.
        loads: all loads from global memory.
        tensor_cores: matrix instructions, `HGMMA` where the four warps of a group share one.
    """

    key: str
    kernel: str
    capability: int
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    spills: int
    loads: int
    wide_loads: int
    barriers: int
    tensor_cores: str

    def problems(self, *, matrix_product: bool, narrow: bool = False) -> list[str]:
        """Describe what is wrong with the kernel; empty where nothing is. `narrow`: a thread has less than 16 bytes to load."""
        found = []
        if self.spills or self.stack_bytes:
            found.append(f"{self.spills} spills, {self.stack_bytes} bytes of stack")
        if self.registers * self.warps * WARP_THREADS > REGISTER_FILE:
            found.append(f"{self.registers} registers in {self.warps} warps do not fit a multiprocessor")
        if self.shared_bytes > SHARED_LIMIT_BYTES[self.capability]:
            found.append(f"{self.shared_bytes} bytes of shared memory")
        if not self.wide_loads and not narrow:
            found.append("no load of 16 bytes")
        if matrix_product and not self.tensor_cores:
            found.append("no tensor-core instruction")
        return found


class _NoGpu:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self._target = GPUTarget("cuda", capability, WARP_THREADS)

    def get_current_device(self) -> int:
        return self._capability  # Triton caches binaries by device, so every capability needs another number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@dataclass(slots=True)
class Recording:
    """The launches within `recording`.

    Attributes:
        launched: the kernels' names by key, compiled or not.
        compiled: the compiled kernels, filled when the recording ends.
    """

    launched: dict[str, str] = field(default_factory=dict)
    compiled: list[Compiled] = field(default_factory=list)


@contextmanager
def recording(capability: int, wanted: Collection[str] | None = None) -> Iterator[Recording]:
    """Compile the launches in the body for compute capability `capability` (80, 90) and list them, once per key.

    Tensors may be on the CPU or on meta. Triton's launch function is replaced meanwhile, so only one thread may use this.

    Args:
        wanted: keys to compile; launches with other keys are only listed.

    Raises:
        RuntimeError: kernels are interpreted in this process.
    """
    if interpreted():
        raise RuntimeError("TRITON_INTERPRET=1 is set: this process interprets kernels and cannot compile them")
    found = Recording()
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        key = launch_key(self, args, kwargs, capability)
        if key in found.launched or (wanted is not None and key not in wanted):
            found.launched[key] = self.__name__.strip("_")
            return None
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.launched[key] = self.__name__.strip("_")
        found.compiled.append(_inspect(key, self.__name__, capability, kernel))
        return kernel

    JITFunction.run = compile_only
    driver.set_active(_NoGpu(capability))
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = active


def launch_key(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], capability: int) -> str:
    """Return a key of a launch: the source of the kernel and of all it calls, the types of its arguments, its constants and options."""
    variables = {parameter.name for parameter in kernel.params if not parameter.is_constexpr}
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    named = [f"{name}={_kind(value) if name in variables else value}" for name, value in sorted(given.items())]
    sources = _sources(kernel, {})
    for each in given.values():
        for decoder in (part for part in (each if isinstance(each, tuple) else ()) if isinstance(part, Decoder)):
            for function in (decoder.number, decoder.scales, decoder.expand):
                if function is not None:
                    _sources(function, sources)
    text = "\0".join([*sorted(sources.values()), *named, str(capability)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _kind(value: Any) -> str:
    """Return the properties of an argument that Triton specialises on."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.data_ptr() % 16 == 0}"
    return f"int {value == 1} {value % 16 == 0}" if isinstance(value, int) else type(value).__name__


def _sources(kernel: Any, found: dict[int, str]) -> dict[int, str]:
    """Return the source of a kernel, of those it calls, and of the module constants that they use."""
    found[id(kernel)] = kernel.src
    for node in ast.walk(ast.parse(textwrap.dedent(kernel.src))):
        value = kernel.fn.__globals__.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(value, tl.constexpr):
            found[id(value)] = f"{node.id} = {value.value}"  # type: ignore[attr-defined]
        elif isinstance(value, JITFunction) and id(value) not in found and value.fn.__module__.split(".")[0] != "triton":
            _sources(value, found)
    return found


def _inspect(key: str, name: str, capability: int, kernel: Any) -> Compiled:
    usage, code = _disassemble(kernel.asm["cubin"])
    sizes = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert sizes is not None, f"cuobjdump printed no resource usage for {name}: {usage[:200]}"
    opcodes = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE))
    count = Counter[str]()
    for opcode, times in opcodes.items():
        count[opcode.split(".")[0]] += times
    loads = {opcode: times for opcode, times in opcodes.items() if opcode.startswith(("LDG", "LDGSTS"))}
    return Compiled(
        key=key,
        kernel=name.strip("_"),
        capability=capability,
        warps=kernel.metadata.num_warps,
        registers=int(sizes[1]),
        stack_bytes=int(sizes[2]),
        shared_bytes=kernel.metadata.shared,
        spills=count["LDL"] + count["STL"],
        loads=sum(loads.values()),
        wide_loads=sum(times for opcode, times in loads.items() if ".128" in opcode),
        barriers=count["BAR"],
        tensor_cores=next((opcode for opcode in ("HGMMA", "IGMMA", "HMMA", "IMMA") if count[opcode]), ""),
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Return the resource usage and the machine code as text."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def ask(option: str) -> str:
            return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout

        return ask("-res-usage"), ask("-sass")
