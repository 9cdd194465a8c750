"""What is compiled for an instruction set: ``python instruction_sets.py NAME``, as a child.

The child prints one line of JSON: the facts that test_cpu_kernel.py asserts.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import children
import llvmlite.binding as llvm

WIDE = re.compile("avx512|avx10|evex|amx")
BASELINE = {"64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2", "x87"}

SETS: dict[
    str, tuple[str, Callable[[str], bool], str]
] = {  # the processor's name, and what it has of which features
    "avx512": ("skylake-avx512", lambda f: not WIDE.search(f), "f bw cd dq vl"),
    "pairs": ("znver4", lambda f: not WIDE.search(f), "f bw cd dq vl bf16"),
    "avx2": ("haswell", lambda f: not WIDE.search(f), ""),
    "no fma": ("ivybridge", lambda f: not WIDE.search(f) and not f.startswith("fma"), ""),
    "sse2": ("x86-64", lambda f: f in BASELINE, ""),
}


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def host() -> dict[str, bool]:
    found: dict[str, bool] = dict(llvm.get_host_cpu_features())
    return found


def features(name: str) -> dict[str, bool]:
    """Return every feature that LLVM knows of this machine's, switched on or off for a set."""
    _, keep, more = SETS[name]
    chosen = {f: on and keep(f) for f, on in host().items()}
    if name in ("avx2", "avx512", "pairs"):
        chosen |= dict.fromkeys(("avx", "avx2", "fma"), True)
    return chosen | {f"avx512{part}": True for part in more.split()}


def can_run(name: str) -> bool:
    here = host()
    return all(here.get(f, False) for f, on in features(name).items() if on)


def is_own(name: str) -> bool:
    """Whether code for a set is what this machine gets anyway: all the other tests run that."""
    here = host()
    widest = "avx512" if here.get("avx512f") else "avx2" if here.get("fma") else ""
    return name == widest


def command(name: str) -> list[str]:
    return [sys.executable, __file__, name]


def environment(name: str) -> dict[str, str]:
    """Return the environment of a child that compiles for a set, and never from the cache."""
    switches = ",".join(("+" if on else "-") + f for f, on in features(name).items())
    return children.environment(
        NUMBA_CPU_NAME=SETS[name][0], NUMBA_CPU_FEATURES=switches, NATTN_CACHE_DIR=os.devnull
    )


def innermost_loops(assembly: str) -> Iterator[list[str]]:
    """Yield the instructions of each loop that is one block and jumps back to its own label."""
    block: list[str] = []
    label = None
    for line in assembly.splitlines():
        text = line.strip()
        if found := re.match(r"(\.?L\w+):", text):
            label, block = found[1], []
            continue
        if not text or text[0] in ".#":
            continue
        block.append(text)
        if text[0] == "j" and label is not None:
            if text.split()[1:2] == [label]:
                yield block
            label, block = None, []


def product_loops(assembly: str) -> list[list[str]]:
    """Return the loops that do nothing but multiply and add vectors."""
    other = re.compile(r"v?(blend|p?and|p?or|cmpp|psll|psra|max|min|round|div)")
    found = []
    for loop in innermost_loops(assembly):
        fused, products, sums = (
            sum(x.startswith(names) for x in loop)
            for names in (("vfmadd", "vfnmadd"), ("mulp", "vmulp"), ("addp", "vaddp"))
        )
        if fused + min(products, sums) >= 8 and not any(other.match(x) for x in loop):
            found.append(loop)
    return found


def count(lines: list[str], pattern: str) -> int:
    return sum(bool(re.search(pattern, x)) for x in lines)


def assembly_of(storage: str, gradients: bool) -> str:
    """Compile the wide kernel for arrays that are stored so."""
    from nattn.backends.cpu import tiles

    tile = tiles.choose_tile(storage, 1 << 20)
    if gradients:
        backward: Any = importlib.import_module("nattn.backends.cpu.backward")
        return str(backward.backward_worker.inspect_asm(tile, tiles.wide_tile(storage)))
    forward: Any = importlib.import_module("nattn.backends.cpu.forward")
    return str(forward.forward_worker.inspect_asm(tile))


def facts_of_pairs() -> dict[str, Any]:
    """Compile both bfloat16 kernels and describe their loops over dot products of pairs."""
    from nattn.backends.cpu import tiles

    return {
        "product": tiles.bfloat16_product(),
        **{
            "gradients" if gradients else "forward": [
                {
                    "products": count(loop, r"^vdpbf16ps"),
                    "broadcast": count(loop, r"^vbroadcastss|\{1to16\}"),
                    "loads": count(loop, r"^vmovup"),
                    "length": len(loop),
                    "stack": count(loop, r"\(%[er]sp"),
                }
                for loop in innermost_loops(assembly_of("bfloat16", gradients))
                if count(loop, r"^vdpbf16ps")
            ]
            for gradients in (False, True)
        },
    }


def facts() -> dict[str, Any]:
    """Compile the wide float32 kernel and describe it."""
    from nattn.backends.cpu import tiles

    tile = tiles.choose_tile("float32", 1 << 20)
    assembly = assembly_of("float32", False)
    registers = {(x, int(n)) for x, n in re.findall(r"%([xyz]mm)(\d+)", assembly)}

    loops = [
        {
            "length": len(loop),
            "fma": count(loop, r"^vfn?madd\w+ps"),
            "mul": count(loop, r"^v?mulps"),
            "add": count(loop, r"^v?addps"),
            "broadcast": count(loop, r"^vbroadcastss|\{1to16\}"),
            "stack": count(loop, r"\(%[er]sp"),
        }
        for loop in product_loops(assembly)
    ]
    return {
        "tile": [tile.W, tile.MV, tile.NR],
        "vector_bytes": tiles.cpu().vector_bytes,
        "fma": tiles.cpu().fma,
        "zmm": any(x == "zmm" for x, _ in registers),
        "ymm": any(x == "ymm" for x, _ in registers),
        "highest register": max(n for _, n in registers),
        "vex": count(assembly.splitlines(), r"^\s+v[a-z]"),
        "fma instructions": count(assembly.splitlines(), r"^\s+vfn?m"),
        "calls of fma": count(assembly.splitlines(), r"\bfmaf?\b"),
        "loops": loops,
    }


def run_checks(gradients: bool) -> None:
    """Check a few calls against the reference, and the elementary functions."""
    import numpy as np
    import test_elementary
    from cases import CASES, check, check_gradients

    names = ["odd sizes", "many blocks", "causal, more keys", "window", "mask", "bias, float16"]
    names += ["softcap", "ALiBi", "sinks", "mask_mod", "dropout"]
    for name in (*names, "everything"):
        case = next(c for c in CASES if c.name == name)
        q, k, v, options = case.make(np.float32)
        check("cpu", q, k, v, **options)
        poisoned = v.copy()
        poisoned[..., -1, :] = np.nan
        check("cpu", q, k, poisoned, **options)
        # Vectors of AVX2 and products without fma are those of other sets, too.
        if gradients and name in ("odd sizes", "causal, more keys", "softcap"):
            check_gradients("cpu", q, k, v, **options)
    for dtype in ("float32", "float64"):
        test_elementary.test_special_values(dtype)
        for function in test_elementary.FUNCTIONS:
            test_elementary.test_accuracy_in_decimals(function, dtype)
        test_elementary.test_power_of_special_values(dtype)
        test_elementary.test_fma(8, dtype)


if __name__ == "__main__":
    if sys.argv[1] == "pairs":
        print(json.dumps(facts_of_pairs()))
        sys.exit()
    result = facts()
    if can_run(sys.argv[1]) and not is_own(sys.argv[1]):
        run_checks(gradients=sys.argv[1] != "no fma")
    print(json.dumps(result))
