"""What torch's users get: ``python bench/integrations.py [call|prefill|decoding|training ...]``.

    call        overhead of the adapter over `nattn.attention`, eager and compiled
    prefill     causal attention of a prompt, in the shapes of SmolLM2-135M
    decoding    one query on 4,096 keys of the same
    training    forward and backward

Each beside torch's own function. All take turns; a figure is a median over the rounds, a ratio that
of ratios within one. ``--small`` runs everything on short sequences, to see that it works.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import nattn
from nattn.applications.measure import interleave, timed

torch: Any = importlib.import_module("torch")
ours: Any = importlib.import_module("nattn.integrations.torch")

Run = Callable[[], object]

SMALL = "--small" in sys.argv
ROUNDS = 2 if SMALL else 9
HEADS, KV_HEADS, D = 9, 3, 64
PAUSE = 0.2 if not SMALL else 0.005
"""Seconds between turns: torch's threads spin after a call, and would take part in the others'."""


def table(title: str, columns: tuple[str, ...]) -> None:
    print(f"\n{title:44}" + "".join(f"{x:>16}" for x in columns), flush=True)


def row(name: str, cells: list[str]) -> None:
    print(f"{name:44}" + "".join(f"{x:>16}" for x in cells), flush=True)


def tensors(
    B: int, H: int, Hkv: int, Nq: int, Nk: int, dtype: str, *, gradients: bool = False
) -> list[Any]:
    """Return q, k and v, standard normal."""
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, D)
    made = [torch.randn(s, generator=generator).to(getattr(torch, dtype)) for s in shapes]
    return [x.requires_grad_() for x in made] if gradients else made


def compiled(function: Callable[..., Any], *args: Any) -> Callable[..., Any] | None:
    """Return a compiled function that has run once; None where that does not work."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        try:
            made: Callable[..., Any] = torch.compile(function, fullgraph=True)
            made(*args)
        except Exception as error:  # without a C++ compiler, for one
            print(f"torch.compile: {type(error).__name__}: {str(error).splitlines()[0][:60]}")
            return None
    return made


def call() -> None:
    """Print times of a short call, and what the adapter adds to it."""
    N = 32 if SMALL else 128
    q, k, v = tensors(1, 8, 8, N, N, "float32")
    arrays = [x.numpy() for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    runs: dict[str, Run] = {
        "nattn.attention, arrays": lambda: nattn.attention(*arrays),
        "nattn.attention, tensors": lambda: nattn.attention(q, k, v),
        "adapter, eager": lambda: ours.scaled_dot_product_attention(q, k, v),
        "torch, eager": lambda: sdpa(q, k, v),
    }

    def compiled_ours(q: Any, k: Any, v: Any) -> Any:
        return ours.scaled_dot_product_attention(q, k, v)

    made = compiled(compiled_ours, q, k, v)
    if made is not None:
        runs["adapter, compiled"] = lambda: made(q, k, v)
        made_torch = compiled(lambda q, k, v: sdpa(q, k, v), q, k, v)
        if made_torch is not None:
            runs["torch, compiled"] = lambda: made_torch(q, k, v)
    with torch.no_grad():
        samples = interleave({x: timed(run) for x, run in runs.items()}, ROUNDS, pause=PAUSE)
    table(f"(1, 8, {N}, {D}) float32", ("time", "over arrays"))
    base = "nattn.attention, arrays"
    for name in runs:
        over = (samples.median(name) - samples.median(base)) * 1e6
        row(name, [f"{samples.median(name) * 1e6:.1f} us", f"{over:+.1f} us"])


def compare(cases: dict[str, tuple[Run, Run]], unit: str) -> None:
    """Print times of nattn and of torch, and the ratio."""
    factor = {"ms": 1e3, "us": 1e6}[unit]
    for name, (own, peer) in cases.items():
        runs = {"nattn": timed(own), "torch": timed(peer)}
        samples = interleave(runs, ROUNDS, pause=PAUSE)
        times = [f"{samples.median(x) * factor:.2f} {unit}" for x in runs]
        row(name, [*times, f"{samples.ratio('torch', 'nattn'):.2f}x"])


def attention(function: Any, qkv: list[Any], causal: bool) -> Run:
    """Return a call on heads that share keys, without gradients."""

    def run() -> object:
        with torch.no_grad():
            return function(*qkv, is_causal=causal, enable_gqa=True)

    return run


def both(qkv: list[Any], causal: bool) -> tuple[Run, Run]:
    """Return the same call of nattn and of torch."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    functions = ours.scaled_dot_product_attention, sdpa
    own, peer = (attention(f, qkv, causal) for f in functions)
    return own, peer


def prefill() -> None:
    """Print times of a prompt, all queries at once."""
    table(f"prefill, {HEADS} heads on {KV_HEADS}, D={D}, causal", ("nattn", "torch", "faster"))
    for N in (64, 100) if SMALL else (4096, 8000):
        for dtype in ("float32", "bfloat16"):
            qkv = tensors(1, HEADS, KV_HEADS, N, N, dtype)
            compare({f"N={N} {dtype}": both(qkv, True)}, "ms")


def decoding() -> None:
    """Print times of one query."""
    N = 100 if SMALL else 4096
    table(f"decoding, one query on {N} keys", ("nattn", "torch", "faster"))
    for dtype in ("float32", "bfloat16"):
        qkv = tensors(1, HEADS, KV_HEADS, 1, N, dtype)
        compare({f"{HEADS} heads on {KV_HEADS}, {dtype}": both(qkv, False)}, "us")


def training() -> None:
    """Print times of forward and backward."""
    N = 100 if SMALL else 2048
    table(f"forward and backward, N={N}, 8 heads, D={D}", ("nattn", "torch", "faster"))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for dtype in ("float32", "bfloat16"):
        qkv = tensors(1, 8, 8, N, N, dtype, gradients=True)
        dout = tensors(1, 8, 8, N, N, dtype)[0]
        for causal in (False, True):

            def step(function: Any, qkv: Any = qkv, dout: Any = dout, causal: Any = causal) -> Run:
                return lambda: torch.autograd.grad(function(*qkv, is_causal=causal), qkv, dout)

            what = f"{dtype}{', causal' if causal else ''}"
            compare({what: (step(ours.scaled_dot_product_attention), step(sdpa))}, "ms")


PARTS: dict[str, Callable[[], None]] = {
    "call": call,
    "prefill": prefill,
    "decoding": decoding,
    "training": training,
}


def main() -> None:
    """Print what is asked for, or everything."""
    wanted = [x for x in sys.argv[1:] if x != "--small"]
    if any(x not in PARTS for x in wanted):
        sys.exit(__doc__)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in wanted or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
