"""The attention of all-MiniLM-L6-v2 against PyTorch's, on a batch of 64 sentences of 256 tokens.

    python bench/minilm.py [--threads 2] [--rounds 15] [--model]

For each of the model's six layers q, k and v are given as (64, 12, 256, 32), and its output is
made: by nattn, by PyTorch as BERT's plain ("eager") attention is written, and by PyTorch's fused
``scaled_dot_product_attention``. ``--model`` adds the whole model, from ready tokens to embeddings:
nattn's layers, and transformers with both kinds of attention; for this the model's package is
needed too.

Contestants take turns, each in a process of its own, and a figure is the median over the rounds of
the ratio within a round: above 1, nattn is faster.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nattn.applications.measure import (
    THREAD_VARIABLES,
    Case,
    Samples,
    check,
    interleave,
    processors,
    timed,
)

LAYERS = 6
BATCH, TOKENS = 64, 256
CASE = Case(B=BATCH, H=12, N=TOKENS, D=32)

Array = NDArray[Any]
Call = Callable[[], Array]


def ours() -> Call:
    import nattn

    q, k, v, _ = CASE.arrays()
    return lambda: [nattn.attention(q, k, v) for _ in range(LAYERS)][-1]


def tensors() -> tuple[Any, ...]:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_grad_enabled(False)
    return tuple(torch.from_numpy(x) for x in CASE.arrays()[:3])


def eager() -> Call:
    import torch

    q, k, v = tensors()

    def attend() -> Any:
        scores = torch.matmul(q, k.transpose(2, 3)) * CASE.D**-0.5
        weights = torch.nn.functional.softmax(scores, dim=-1)
        return torch.matmul(weights, v)

    return lambda: [attend() for _ in range(LAYERS)][-1].numpy()


def fused() -> Call:
    import torch

    q, k, v = tensors()
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: [attend(q, k, v) for _ in range(LAYERS)][-1].numpy()


def sentence_ids() -> Array:
    ids = np.random.default_rng(0).integers(2000, 30000, (BATCH, TOKENS))
    ids[:, 0], ids[:, -1] = 101, 102
    return ids


def our_model() -> Call:
    from nattn.applications.minilm import MiniLM, Tokens

    model = MiniLM.load()
    tokens = Tokens(sentence_ids(), np.full(BATCH, TOKENS), [])
    return lambda: model.embed(tokens)


def their_model(attention: str) -> Call:
    import torch
    from transformers import AutoModel

    from nattn.applications.minilm import package_folder

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_grad_enabled(False)
    model: Any = AutoModel.from_pretrained(
        package_folder(), attn_implementation=attention, dtype=torch.float32, local_files_only=True
    ).eval()
    ids = torch.from_numpy(sentence_ids())

    def embed() -> Array:
        mean = model(input_ids=ids).last_hidden_state.mean(dim=1)
        found: Array = torch.nn.functional.normalize(mean).numpy()
        return found

    return embed


def eager_model() -> Call:
    return their_model("eager")


def fused_model() -> Call:
    return their_model("sdpa")


ATTENTION = {"nattn": ours, "torch eager": eager, "torch fused": fused}
MODEL = {"nattn": our_model, "torch eager": eager_model, "torch fused": fused_model}


def serve(pipe: Connection, prepare: Callable[[], Call]) -> None:
    """Prepare a call, send its result, and then its time as often as asked."""
    call = prepare()
    pipe.send(call())
    sample = timed(call)
    while pipe.recv():
        pipe.send(sample())


def measure(contestants: dict[str, Callable[[], Call]], rounds: int) -> Samples:
    """Let contestants take turns, after checking that all give the same result."""
    context = multiprocessing.get_context("spawn")
    pipes, started, results = {}, [], {}
    try:
        for name, prepare in contestants.items():
            pipes[name], theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, prepare), daemon=True)
            process.start()
            started.append(process)
            theirs.close()
            results[name] = pipes[name].recv()
        for name, out in results.items():
            if out.ndim == 4:
                check(CASE, out)
            worst = float(np.abs(out - results["nattn"]).max())
            if not worst <= 1e-4:
                raise ArithmeticError(f"{name}: differs by {worst:.2g}")

        def ask(pipe: Connection) -> float:
            pipe.send(True)
            return float(pipe.recv())

        return interleave({x: functools.partial(ask, pipe) for x, pipe in pipes.items()}, rounds)
    finally:
        for process in started:
            process.terminate()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=min(2, processors()))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", action="store_true", help="the whole model, too")
    chosen = parser.parse_args()
    os.environ |= dict.fromkeys(THREAD_VARIABLES, str(chosen.threads))
    tables = {f"attention of {LAYERS} layers": ATTENTION}
    if chosen.model:
        tables["the whole model"] = MODEL
    for title, contestants in tables.items():
        samples = measure(contestants, chosen.rounds)
        print(f"{title}, {BATCH} sentences of {TOKENS} tokens, {chosen.threads} threads")
        for name in contestants:
            seconds, times = samples.median(name), samples.ratio(name, "nattn")
            print(f"  {name:12} {1000 * seconds:8.1f} ms   {times:5.2f} x nattn's time")


if __name__ == "__main__":
    main()
