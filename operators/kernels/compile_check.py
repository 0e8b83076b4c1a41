"""What the kernels compile to, on a machine with no GPU: every launch within `recording` is compiled for a GPU and not run.

The launchers themselves are called, so types, alignments and constants are those that are shipped. Registers, spills and instructions are
read off the machine code with the disassembler that Triton brings.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moegraft.operators.kernels.availability import interpreted

WARP_THREADS = 32
# 227 KiB: the most shared memory that a program may have on sm_90; sm_80 has 163 KiB.
SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024}
REGISTER_FILE = 65536  # of a multiprocessor


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel for one kind of GPU.

    Attributes:
        registers: of a thread.
        spills: instructions that go to local memory.
        wide_loads: loads of 16 bytes a thread from global memory, straight or by way of shared memory.
        loads: all loads from global memory.
        tensor_cores: matrix instructions, `HGMMA` where the four warps of a group share one.
    """

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

    def problems(self, *, matrix_product: bool) -> list[str]:
        """What is wrong with it, for people; empty when nothing is."""
        found = []
        if self.spills or self.stack_bytes:
            found.append(f"{self.spills} spills, {self.stack_bytes} bytes of stack")
        if self.registers * self.warps * WARP_THREADS > REGISTER_FILE:
            found.append(f"{self.registers} registers in {self.warps} warps do not fit a multiprocessor")
        if self.shared_bytes > SHARED_LIMIT_BYTES[self.capability]:
            found.append(f"{self.shared_bytes} bytes of shared memory")
        if not self.wide_loads:
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
        return self._capability  # Triton keeps binaries by device: those for other GPUs must not be found

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def recording(capability: int) -> Iterator[list[Compiled]]:
    """Launches within it are compiled for compute capability `capability` (80, 90) and listed, once for each distinct binary.

    Tensors may be on the CPU or on meta. Not for several threads at once: Triton's launch function is replaced meanwhile.

    Raises:
        RuntimeError: kernels are interpreted in this process.
    """
    if interpreted():
        raise RuntimeError("TRITON_INTERPRET=1 is set: this process interprets kernels and cannot compile them")
    found: dict[str, Compiled] = {}
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in found:
            found[kernel.hash] = _inspect(self.__name__, capability, kernel)
        return kernel

    listed: list[Compiled] = []
    JITFunction.run = compile_only
    driver.set_active(_NoGpu(capability))
    try:
        yield listed
    finally:
        JITFunction.run = run
        driver._active = active
        listed += found.values()


def _inspect(name: str, capability: int, kernel: Any) -> Compiled:
    usage, code = _disassemble(kernel.asm["cubin"])
    sizes = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert sizes is not None, f"cuobjdump printed no resource usage for {name}: {usage[:200]}"
    opcodes = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE))
    count = Counter[str]()
    for opcode, times in opcodes.items():
        count[opcode.split(".")[0]] += times
    loads = {opcode: times for opcode, times in opcodes.items() if opcode.startswith(("LDG", "LDGSTS"))}
    return Compiled(
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
    """The resource usage and the machine code, as text."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def ask(option: str) -> str:
            return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout

        return ask("-res-usage"), ask("-sass")
