"""Gradients of what users' functions are bound to, from the gradient of the scores.

A tile function of its own runs once the gradient of the scores is known: on the scores as they were
before all modifiers, with the modifiers put together. For each site at which a function reads a
learnt value (`nattn.vectors.learnt`) it adds ``ds * d(score) / d(what was read)`` where that value
has its gradient, in memory of the task's own.

Lanes that add to one number, or to numbers side by side, do so as vectors, and what the next key
would add to the same place stays in a register meanwhile: per-head gains are read in one place, the
weights of queries at places that stay the same from key to key, and tables of distances at places
side by side. All others add one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...call.problem import Problem
from ...functions.learning import PREFIX, learnt_tree
from ...functions.on_lanes import evaluator
from ...vectors.dual import as_dual, chain
from ...vectors.lanes import (
    Tile,
    clear_outside,
    lane_of,
    load,
    load_index,
    read,
    read_int64,
    splat,
    store,
    uniform_index,
    view,
    write,
)
from ...vectors.learnt import (
    FALLING,
    ONE,
    RISING,
    SCATTERED,
    look_for_site,
    new_tape,
    pattern_of,
    places_of,
    reverse,
    sites_passed,
)
from .jit import device, fleeting, kernel
from .score import CONTEXT, SIGNATURE, TOOLS, compiled, head_reader


@device
def add_to(tile, pattern, place, total):
    """Add lanes to numbers in memory that lie as a pattern says, the first at an address."""
    if pattern == RISING:
        store(place, load(tile, place) + total)
    elif pattern == FALLING:
        last = place - (tile.W - 1) * tile.itemsize
        store(last, load(tile, last) + reverse(tile, total))
    elif pattern == ONE:
        result = lane_of(tile, total, 0)
        for lane in range(1, tile.W):
            result += lane_of(tile, total, lane)
        write(tile, place, read(tile, place) + result)


@device
def add_each(tile, places, x_ptr, count):
    """Add numbers in memory to others, each to that of its address."""
    for lane in range(count):
        at = read_int64(places + 8 * lane)
        write(tile, at, read(tile, at) + read(tile, x_ptr + lane * tile.itemsize))


@kernel(SIGNATURE)
def learn(tile, source, index):
    """Add up the gradients of learnt values; `deriv` is the gradient of the scores after all.

    For the parameters see `score.modify`; the lanes of a tile belong to one head.
    """
    evaluate, _ = evaluator(source.tree, 0, TOOLS, as_dual)
    head = head_reader(False, index)
    size, width = tile.itemsize, tile.W

    def derivative(tile, params, tape, at, ds, args):
        r = as_dual(tile, evaluate(tile, params, tape, (load(tile, at), *args)))
        return chain(tile, load(tile, ds), r)

    derivative = fleeting(derivative)

    def function(scores, deriv, context, params):
        c = view(CONTEXT, context)
        row = c.vectors * width * size
        tape = new_tape(tile)
        places = places_of(tile, tape)
        clear_outside(tile, tape)
        batch = uniform_index(tile, index, c.batch)
        for i in range(c.vectors):
            lane = i * width
            valid = min(c.n_valid - lane, width)
            if valid <= 0:
                break
            h = head(tile, c, lane)
            position = load_index(tile, index, c.rows_ptr + 8 * lane, c.offset)
            site = 0
            while True:
                pattern, place, total = SCATTERED, 0, splat(tile, 0.0)
                for n in range(c.n_keys):
                    offset = n * row + lane * size
                    key = uniform_index(tile, index, c.first_key + n)
                    args = (batch, h, position, key)
                    look_for_site(tile, tape, site, c.learnt_ptr)
                    x = derivative(tile, params, tape, scores + offset, deriv + offset, args)
                    if sites_passed(tile, tape) <= site:
                        break
                    own = pattern_of(tile, tape) if valid == width else SCATTERED
                    first = read_int64(places)
                    if own == SCATTERED:
                        store(c.temp_ptr, x)
                        add_each(tile, places, c.temp_ptr, valid)
                    elif own == pattern and first == place:
                        total += x
                    else:
                        add_to(tile, pattern, place, total)
                        pattern, place, total = own, first, x
                add_to(tile, pattern, place, total)
                site += 1
                if site >= sites_passed(tile, tape):
                    break
        return 0

    return function


class Learning:
    """The gradients of bound values in one backward pass.

    Parameters
    ----------
    problem : Problem
        The call.
    wrt : frozenset of str
        Names of gradients; those of bound values are picked out.
    tile : Tile
        What the pass runs on.

    Attributes
    ----------
    n_bytes : int
        Bytes of the gradients, of which each task has its own.
    functions : tuple of int
        The list of tile functions that add them up, as `score.FUNCTIONS`.
    """

    def __init__(self, problem: Problem, wrt: frozenset[str], tile: Tile) -> None:
        p = problem
        self._names = sorted(x for x in wrt if x.startswith(PREFIX) or x == "alibi_slopes")
        self._compute = p.compute
        self.n_bytes, self.functions = 0, (0, 0)
        if not self._names:
            return
        places = [p.place_of(name) for name in self._names]
        tree, self._gradients = learnt_tree(p.score_mods, places, p.compute.itemsize)
        far = int(np.abs(p.q_offset).max(initial=0)) + max(p.Nq, p.Nk)
        self._function = compiled("score_mod", learn, tree, tile, far)
        pair = [(self._function.address, self._function.params.ctypes.data)]
        self._table = np.array(pair, np.int64)
        self.functions = self._table.ctypes.data, 1
        self.n_bytes = self._gradients.n_bytes
        self._total = np.zeros(self.n_bytes // p.compute.itemsize)

    def tables(self, n_tasks: int, most: int) -> NDArray[Any]:
        """Return gradients of 0 for each task, or if they took more than so many bytes for one."""
        rows = n_tasks if n_tasks * self.n_bytes <= most else 1
        return np.zeros((rows, self.n_bytes // self._compute.itemsize), self._compute)

    def add(self, tables: NDArray[Any]) -> None:
        """Add what tasks have found, in their order."""
        if self._names:
            with np.errstate(all="ignore"):
                self._total += tables.sum(axis=0, dtype=np.float64)

    def gradients(self) -> dict[str, NDArray[Any]]:
        """Return the gradient of each name, in the compute dtype."""
        if not self._names:
            return {}
        total = self._total.astype(self._compute)
        parts = self._gradients.parts(total, self._compute.itemsize)
        return dict(zip(self._names, parts, strict=True))
