"""Programs that print one figure each, to be run in new processes."""

_CLOCK = "import time, numpy as np, numba; clock = time.perf_counter; start = clock()\n"
_TINY = "x = np.zeros((1, 1, 16, 64), 'f4')\n"
IMPORT = _CLOCK + "import nattn\nprint(clock() - start)"
FIRST = _CLOCK + _TINY + "import nattn\nnattn.attention(x, x, x)\nprint(clock() - start)"
WARM = (
    _CLOCK
    + _TINY
    + """
import nattn, statistics
times = []
for _ in range(2000):
    start = clock()
    nattn.attention(x, x, x)
    times.append(clock() - start)
print(statistics.median(times))
"""
)

MODIFIED = (
    _CLOCK
    + """
from functools import partial
from numba.core import event
import nattn
x = np.zeros((1, 1, 64, 64), 'f4')

def known(score, b, h, q_idx, kv_idx, table):
    return score + table[q_idx] * np.tanh(score)

new = "def fresh(score, b, h, q_idx, kv_idx): return np.where(q_idx < kv_idx, score, {})"
exec(new.format(time.time()))  # no cache has seen it

def bound(n):
    nattn.attention(x, x, x, score_mod=partial(known, table=np.ones(n, 'f4')))

def built_in():
    for options in (
        {"softcap": 20.0},
        {"alibi_slopes": np.ones(1, 'f4')},
        {"mask_mod": nattn.masks.causal},
        {"mask_mod": partial(nattn.masks.document, doc=np.arange(64) // 9)},
        {"dropout_p": 0.1, "seed": 1},
    ):
        nattn.attention(x, x, x, **options)

def compilations(call):
    "Count the functions whose types Numba infers: the first thing it does to compile one."
    with event.install_recorder("numba:run_pass") as recorder:
        call()
    passes = [e for _, e in recorder.buffer if e.is_start]
    return sum("type_inference" in e.data["name"] for e in passes)

"""
)
"""The beginning of snippets about users' functions."""

NEW = (
    MODIFIED
    + "nattn.attention(x, x, x)\nstart = clock()\n"
    + "nattn.attention(x, x, x, score_mod=fresh)\nprint(clock() - start)"
)
REBOUND = MODIFIED + "bound(64)\nprint(compilations(lambda: (bound(64), bound(65), bound(1000))))"
LATER = MODIFIED + "print(compilations(built_in))"
