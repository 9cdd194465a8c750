"""Every construct of Python in a user's function: it works as on arrays, or is refused by name.

Never by another error than TypeError, never by a crash, and always with the line.
"""

from __future__ import annotations

import doctest
import functools
import importlib.util
import re
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.errors import TypingError

import nattn
from nattn.functions import constructs
from nattn.functions.binding import MASK_MOD, resolve
from nattn.functions.constructs import unsupported
from nattn.functions.on_lanes import explained

Q = np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype("f4")


def test_examples() -> None:
    result = doctest.testmod(constructs)
    assert result.failed == 0
    assert result.attempted > 1


def define(folder: Path, source: str) -> types.FunctionType:
    """Return the function f of a module, written to a file of its own so that its lines are known.

    Without a def of f the source is the body of a modifier.
    """
    source = textwrap.dedent(source).strip("\n")
    if "def f(" not in source:
        body = textwrap.indent(source, "    ")
        source = f"def f(score, b, h, q_idx, kv_idx):\n{body}"
    path = folder / "written.py"
    path.write_text(f"import numpy as np\n{source}\n")
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = module.f
    assert isinstance(function, types.FunctionType)
    return function


WORKS = {
    "lambda": "return (lambda x: 2 * x)(score)",
    "lambda with a closure": "g = lambda x: x + 0.01 * kv_idx\nreturn g(score)",
    "lambda of what changes later": "n = 1.0\ng = lambda x: x * n\nn = 5.0\nreturn g(score)",
    "def": "def g(x):\n    return x * (1 + 0.1 * q_idx)\nreturn g(score)",
    "def with a default": "def g(x, n=2.0):\n    return x * n\nreturn g(score)",
    "tuple": "x = (score, 2.0)\nreturn x[0] * x[-1]",
    "nested tuple": "x = ((score, 1.0), (2.0, 3.0))\nreturn x[0][0] * x[1][1]",
    "unpacking": "x, y = score, 2 * score\nx, y = y, x\nreturn x - 0.5 * y",
    "star in a call": "x = (score, 1.0)\nreturn np.minimum(*x)",
    "stars among arguments": "x = (score, -1.0)\nreturn np.clip(*x, 0.5)",
    "star in a tuple": "x = (score, 1.0)\ny = (*x, 2.0)\nreturn y[0] * y[2]",
    "in-place operators": "score *= 2\nscore += 0.1 * kv_idx\nreturn score",
    "annotation": "x: float = 2.0\ny: float\nreturn score * x",
    "for": "for n in range(3):\n    score = score * (n + 0.5)\nreturn score",
    "for over a tuple": "for n in (1.0, 2.0):\n    score = score * n\nreturn score",
    "for over a literal list": "for n in [1.0, 2.0]:\n    score = score * n\nreturn score",
    "for with else": "for n in (1, 2):\n    if n > 5:\n        break\n"
    "else:\n    score = -score\nreturn score",
    "enumerate and zip": "for n, (x, y) in enumerate(zip((1, 2), (3, 4))):\n"
    "    score = score * (n + 0.1 * x * y)\nreturn score",
    "continue": "for n in range(4):\n    if n == 1:\n        continue\n"
    "    score = score * (n + 0.5)\nreturn score",
    "while": "n = 3\nwhile n > 0:\n    n -= 1\n    score = score * (n + 0.5)\nreturn score",
    "while True": "while True:\n    score = -score\n    break\nreturn score",
    "if of numbers": "n = 3\nif n > 2:\n    return -score\nreturn score",
    "match of numbers": "match 2:\n    case 1 | 2:\n        return -score\nreturn score",
    "match that binds": "match 2:\n    case n if n > 1:\n        return score * n\nreturn score",
    "is": "return score if score is None else -score",
    "in of numbers": "return -score if 1 in (1, 2) else score",
    "docstring": '"""What it does."""\nreturn -score',
    "a local array": "return score * np.array((0.5, 2.0))[1]",
    "a tuple of the module": "W = (1.0, (2.0, None))\n"
    "def f(score, b, h, q_idx, kv_idx):\n    return score * W[1][0]",
    "a helper with stars": "def g(*x):\n    return x[0] * x[1]\n"
    "def f(score, b, h, q_idx, kv_idx):\n    return g(score, 2.0)",
    "only by position": "def f(score, b, h, q_idx, kv_idx, /):\n    return -score",
}


@pytest.mark.parametrize("name", WORKS)
def test_what_works_means_what_it_means_on_arrays(name: str, tmp_path: Path) -> None:
    function = define(tmp_path, WORKS[name])
    assert unsupported(function) is None
    got, want = (
        nattn.attention(Q, Q, Q, score_mod=function, backend=backend)
        for backend in ("cpu", "reference")
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    plain = nattn.attention(Q, Q, Q, backend="reference")
    assert np.abs(want - plain).max() > 1e-3  # or it would not tell whether anything was done


@pytest.mark.parametrize("name", [x for x in WORKS if "def f(" not in WORKS[x]])
def test_what_works_does_so_in_a_closure(name: str, tmp_path: Path) -> None:
    body = textwrap.indent("score = score * gain\n" + WORKS[name], " " * 8)
    source = f"def make(gain):\n    def f(score, b, h, q_idx, kv_idx):\n{body}\n    return f\n"
    function = define(tmp_path, source + "f = make(1.5)\n")
    got, want = (
        nattn.attention(Q, Q, Q, score_mod=function, backend=backend)
        for backend in ("cpu", "reference")
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


REFUSED = {
    # seen beforehand: the line is marked
    "import": ("import math  #\nreturn score", "`import`"),
    "from import": ("x = 1\nfrom math import pi  #\nreturn score * pi", "`import`"),
    "with": ("with np.errstate(all='ignore'):  #\n    return score", "`with`"),
    "try": ("try:\n    x = score\nexcept ValueError:\n    x = 0.0\nreturn x", "`try`"),
    "try of everything": ("try:\n    x = score\nfinally:\n    y = 1\nreturn x", "`try`"),
    "except*": ("try:\n    x = score\nexcept* ValueError:\n    x = 0.0\nreturn x", "`try`"),
    "raise": ("if 1 > 2:\n    raise ValueError('no')  #\nreturn score", "`raise`"),
    "raise from": ("raise ValueError('no') from None  #", "`raise`"),
    "assert": ("assert 1 > 0  #\nreturn score", "`assert`"),
    "yield": ("def f(score, b, h, q_idx, kv_idx):  #\n    yield score", "`yield`"),
    "yield from": ("def f(score, b, h, q_idx, kv_idx):  #\n    yield from (score,)", "`yield`"),
    "async def": ("async def f(score, b, h, q_idx, kv_idx):  #\n    return score", "`async def`"),
    "await": (
        "async def f(score, b, h, q_idx, kv_idx):  #\n    return await score",
        "`async def`",
    ),
    "async yield": ("async def f(score, b, h, q_idx, kv_idx):  #\n    yield 1", "`async def`"),
    "async for": (
        "async def f(score, b, h, q_idx, kv_idx):  #\n    async for x in score:\n        pass",
        "`async def`",
    ),
    "class": ("class A:  #\n    pass\nreturn score", "`class`"),
    "list": ("x = [score, 2 * score]  #\nreturn x[0]", "a list"),
    "empty list": ("x = []  #\nreturn score", "a list"),
    "list in a star": ("return np.minimum(*[score, 1.0])  #", "a list"),
    "list comprehension": ("return sum([score * n for n in range(3)])  #", "a list"),
    "nested comprehension": ("return sum([score for i in (1, 2) for j in (1, 2)])  #", "a list"),
    "set": ("x = {score}  #\nreturn score", "a set"),
    "set comprehension": ("x = {n for n in range(3)}  #\nreturn score", "a set"),
    "dict": ("x = {'a': score}  #\nreturn x['a']", "a dict"),
    "empty dict": ("x = {}  #\nreturn score", "a dict"),
    "dict comprehension": ("x = {n: score for n in range(3)}  #\nreturn x[1]", "a dict"),
    "two stars": ("return np.minimum(**{'x1': score, 'x2': 1.0})  #", "a dict"),
    "generator": ("return sum(score * n for n in range(3))  #", "a generator"),
    "f-string": ("x = f'{score}'  #\nreturn score", "f-string"),
    "f-string with a format": ("x = f'{kv_idx:>9}'  #\nreturn score", "f-string"),
    "global": ("global n\nn = 3  #\nreturn score", "`global`"),
    "del of a global": ("global n\ndel n  #\nreturn score", "`global`"),
    "nonlocal": (
        "n = 1.0\ndef g(x):\n    nonlocal n\n    n = n + 1  #\n    return x\nreturn g(score) * n",
        "`nonlocal`",
    ),
    "del": ("x = score\ndel x  #\nreturn score", "`del`"),
    "del of a parameter": ("del b  #\nreturn score", "`del`"),
    "del of an element": ("x = np.zeros(3)\ndel x[0]  #\nreturn score", "`del`"),
    "del of an attribute": ("del score.x  #\nreturn score", "`del`"),
    "starred assignment": ("a, *c = score, 2.0, 3.0  #\nreturn a", "`a, *rest"),
    "match of a class": ("match score:\n    case float():  #\n        return score", "`match`"),
    "match of a tuple": ("match (1, 2):\n    case (a, 2):  #\n        return score", "`match`"),
    "match of a dict": ("match score:\n    case {'a': x}:  #\n        return score", "`match`"),
    "print": ("print(score)  #\nreturn score", "`print`"),
    "import in a helper": (
        "def g(x):\n    import math  #\ndef f(score, b, h, q_idx, kv_idx):\n    return g(score)",
        "`import`",
    ),
    "list in a lambda": ("g = lambda x: [x][0]  #\nreturn g(score)", "a list"),
    # which Numba refuses, of which some have no line but that of the def
    "if": ("if score > 0:  #\n    return score\nreturn -score", "np.where"),
    "conditional expression": ("return score if score > 0 else -score  #", "np.where"),
    "while of a score": ("while score > 0:  #\n    score = score - 1\nreturn score", "np.where"),
    "and": ("return np.where((score > 0) and (score < 1), score, 0.0)  #", "np.where"),
    "chained comparison": ("return np.where(0 < score < 1, score, 0.0)  #", "np.where"),
    "match of a score": (
        "match score:\n    case 0:  #\n        return -score\nreturn score",
        "np.where",
    ),
    "in": ("return np.where(kv_idx in (1, 2), score, 0.0)", "np.where"),
    "for over a score": ("for x in score:  #\n    pass\nreturn score", "getiter"),
    "range of a score": ("for n in range(kv_idx):  #\n    pass\nreturn score", "range"),
    "a tuple that is too short": ("x = (1.0, 2.0)\nreturn score * x[5]  #", "out of range"),
    "a tuple indexed by lanes": ("x = (1.0, 2.0)\nreturn score * x[h]  #", "getitem"),
    "setitem": ("score[0] = 1.0  #\nreturn score", "setitem"),
    "setattr": ("score.x = 1  #\nreturn score", "setattr"),
    "attribute": ("return score.T  #", "'T'"),
    "matmul": ("return score @ score  #", "matmul"),
    "walrus": ("y = (x := 2.0) + score  #\nreturn y * x", "cannot be determined"),
    "recursive def": (
        "def g(x, n):\n    return g(x, n) if n else x\nreturn g(score, 3)",
        "cell",
    ),
    "recursion": (
        "def g(x):\n    return g(x)  #\ndef f(score, b, h, q_idx, kv_idx):\n    return g(score)",
        "recursion",
    ),
    "sorted": ("return sorted((score, 1.0))[0]", "overload"),
    "eval": ("return eval('score')", "'eval'"),
    "super": ("return super().x", "'super'"),
    "big integer": ("return score * 10**30", "too large"),
    "what NumPy has not": ("return np.nonsense(score)", "nonsense"),
    "undefined": ("return score * nowhere", "'nowhere'"),
    "unbound": ("x += 1\nreturn score", "'x'"),
    "nothing": ("pass", "a number to be returned"),
    "tuple returned": ("return score, score", "a number to be returned"),
}


def named_line(source: str) -> str:
    """Return the pattern of how an error names the marked line, or any: of `try` that of a handler,
    and of what Numba names none for that of the def."""
    marked = [n for n, line in enumerate(source.split("\n")) if line.endswith("#")]
    before = 2 if "def f(" in source else 3  # the import, and the def
    return rf"written\.py\", line {marked[0] + before}\b" if marked else r"written\.py\", line \d"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name: str, tmp_path: Path) -> None:
    source, reason = REFUSED[name]
    function = define(tmp_path, source)
    with pytest.raises(TypeError) as error:
        nattn.attention(Q, Q, Q, score_mod=function, backend="cpu")
    text = str(error.value)
    assert text.startswith("score_mod: expected a function that SIMD lanes can express: ")
    assert reason in text.split("got ", 1)[1]
    assert re.search(named_line(source), text), text


def test_it_is_refused_wherever_it_is_compiled(tmp_path: Path) -> None:
    """As a mask, in a block mask, in a composition, and for gradients."""
    mask_mod = define(tmp_path, "def f(b, h, q_idx, kv_idx):\n    import math\n    return h > 1")
    score_mod = define(tmp_path, "import math\nreturn score")
    half = functools.partial(nattn.mods.softcap, cap=2.0)
    both = nattn.mods.compose(half, score_mod)
    calls: list[Any] = [
        lambda: nattn.attention(Q, Q, Q, mask_mod=mask_mod, backend="cpu"),
        lambda: nattn.attention(Q, Q, Q, mask_mod=~nattn.mask(mask_mod), backend="cpu"),
        lambda: nattn.attention(Q, Q, Q, score_mod=both, backend="cpu"),
        lambda: nattn.attention_vjp(Q, Q, Q, score_mod=score_mod, backend="cpu")[1](Q),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"_mod: expected .*written.py\", line 3: import math"):
            call()


def test_what_a_module_calls_print_is_its_own(tmp_path: Path) -> None:
    source = "def print(x):\n    return -x\ndef f(a, b, h, q_idx, kv_idx):\n    return print(a)"
    assert unsupported(define(tmp_path, source)) is None


def test_texts_have_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba marks its texts for a terminal where a library for that is installed."""

    def branching(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx if q_idx > 3 else q_idx > 3

    marked = TypingError("\x1b[1mno such thing\x1b[0m")
    tree = resolve("mask_mod", branching, MASK_MOD)
    assert "\x1b" not in str(explained("mask_mod", tree, marked))
