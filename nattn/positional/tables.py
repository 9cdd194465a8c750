"""What is added to the input: waves of fixed lengths, or rows that are learnt."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..call.checks import check_count, float_dtype
from .checks import number, placed_rows

_TABLE = 1
"""Beside a seed: a layer of the same seed draws other numbers."""


def sinusoidal_encoding(
    n: int, d_model: int, base: float = 10000.0, dtype: Any = np.float32, offset: int = 0
) -> NDArray[Any]:
    """Return sines and cosines of geometrically growing wavelengths, a row for each position.

    Parameters
    ----------
    n : int
        Number of positions, 0 or more.
    d_model : int
        Number of columns, 1 or more.
    base : float, default 10000.0
        The longest wavelength is nearly ``2 pi base`` positions; above 0.
    dtype : dtype, default float32
        float32 or float64. Angles are computed in float64 and the results rounded.
    offset : int, default 0
        Position of the first row, 0 or more.

    Returns
    -------
    ndarray
        ``(n, d_model)``: column ``2 i`` is ``sin(pos / base**(2 i / d_model))`` and column
        ``2 i + 1`` the cosine.

    Raises
    ------
    TypeError, ValueError
        For numbers or a dtype that are not as above.

    Notes
    -----
    Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.5. Some libraries put all
    sines before all cosines, which is the same up to the order of columns.

    Examples
    --------
    >>> sinusoidal_encoding(2, 4).round(4).tolist() == [
    ...     [0.0, 1.0, 0.0, 1.0],
    ...     np.float32([0.8415, 0.5403, 0.01, 1.0]).tolist(),
    ... ]
    True
    """
    n, d_model = check_count("n", n, 0), check_count("d_model", d_model)
    base = number("base", base, 0.0, above=True)
    offset = check_count("offset", offset, 0)
    table = np.empty((n, d_model), float_dtype("dtype", dtype))
    frequencies = base ** (-np.arange(0, d_model, 2) / d_model)
    angles = np.arange(offset, offset + n, dtype=np.float64)[:, None] * frequencies
    table[:, 0::2] = np.sin(angles)
    table[:, 1::2] = np.cos(angles[:, : d_model // 2])
    return table


class Sinusoidal:
    """Fixed waves added to the input: `sinusoidal_encoding`.

    Parameters
    ----------
    d_model : int
        Columns of the input.
    base : float, default 10000.0
        Sets the longest wavelength.

    Attributes
    ----------
    acts_on : str
        ``"x"``, the input before queries, keys and values are made of it.
    params : dict
        Empty: nothing is learnt.

    Examples
    --------
    >>> positions = Sinusoidal(8)
    >>> x = np.zeros((2, 5, 8), np.float32)
    >>> bool((positions(x)[1] == sinusoidal_encoding(5, 8)).all())
    True
    >>> bool((positions(x[:, 4:], offset=4) == positions(x)[:, 4:]).all())  # the last row alone
    True
    """

    acts_on: ClassVar[str] = "x"

    def __init__(self, d_model: int, base: float = 10000.0) -> None:
        self.d_model = check_count("d_model", d_model)
        self.base = number("base", base, 0.0, above=True)
        self.params: dict[str, NDArray[Any]] = {}

    def __call__(self, x: ArrayLike, offset: int = 0) -> NDArray[Any]:
        """Return ``x`` plus the encoding of its rows.

        Parameters
        ----------
        x : array_like
            ``(..., N, d_model)``, float32 or float64.
        offset : int, default 0
            Position of the first row.

        Returns
        -------
        ndarray
            Of x's shape and dtype.

        Raises
        ------
        TypeError, ValueError
            For another dtype or shape, or a negative offset.
        """
        array, first = placed_rows("x", x, self.d_model, offset)
        n = array.shape[-2]
        encoding = sinusoidal_encoding(n, self.d_model, self.base, array.dtype, first)
        return np.asarray(array + encoding)

    def backward(
        self, dx: ArrayLike, offset: int = 0
    ) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        """Return the gradient with respect to the input, which is `dx` itself, and of no params.

        Raises
        ------
        TypeError, ValueError
            As the call does.
        """
        return placed_rows("dx", dx, self.d_model, offset)[0], {}


class LearnedTable:
    """A learnt row for each position, added to the input, as in BERT and GPT-2.

    Parameters
    ----------
    max_len : int
        Number of positions.
    d_model : int
        Columns of the input.
    seed : int, default 0
        Of the initial table: normal, with the standard deviation 0.02.
    dtype : dtype, default float32
        float32 or float64.

    Attributes
    ----------
    acts_on : str
        ``"x"``, the input before queries, keys and values are made of it.
    params : dict
        ``{"table": (max_len, d_model)}``.

    Examples
    --------
    >>> positions = LearnedTable(10, 4)
    >>> x = np.zeros((3, 6, 4), np.float32)
    >>> y = positions(x, offset=2)
    >>> dx, dparams = positions.backward(np.ones_like(y), offset=2)
    >>> dparams["table"][:, 0].tolist()  # three sequences have a row at positions 2 to 7
    [0.0, 0.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.0, 0.0]
    """

    acts_on: ClassVar[str] = "x"

    def __init__(self, max_len: int, d_model: int, seed: int = 0, dtype: Any = np.float32) -> None:
        self.max_len = check_count("max_len", max_len)
        self.d_model = check_count("d_model", d_model)
        rng = np.random.default_rng([check_count("seed", seed, 0), _TABLE])
        table = 0.02 * rng.standard_normal((max_len, d_model))
        self.params: dict[str, NDArray[Any]] = {"table": table.astype(float_dtype("dtype", dtype))}

    def _place(self, name: str, value: Any, offset: Any) -> tuple[NDArray[Any], slice]:
        x, first = placed_rows(name, value, self.d_model, offset)
        end = first + x.shape[-2]
        if end > self.max_len:
            raise ValueError(
                f"{name}: expected rows for positions below max_len = {self.max_len}, got "
                f"{x.shape[-2]} from position {first} on"
            )
        return x, slice(first, end)

    def __call__(self, x: ArrayLike, offset: int = 0) -> NDArray[Any]:
        """Return ``x`` plus the rows of the table.

        Parameters
        ----------
        x : array_like
            ``(..., N, d_model)``, float32 or float64.
        offset : int, default 0
            Position of the first row; ``offset + N <= max_len``.

        Returns
        -------
        ndarray
            Of x's shape and dtype.

        Raises
        ------
        TypeError, ValueError
            For another dtype or shape, or positions that the table lacks.
        """
        array, rows = self._place("x", x, offset)
        return np.asarray(array + self.params["table"][rows].astype(array.dtype, copy=False))

    def backward(
        self, dx: ArrayLike, offset: int = 0
    ) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        """Return the gradient with respect to the input, which is `dx` itself, and of the table.

        Parameters
        ----------
        dx : array_like
            Gradient with respect to what the call returned.
        offset : int, default 0
            As in the call.

        Returns
        -------
        dx : ndarray
            The same.
        dparams : dict
            ``{"table": ...}``, of the table's shape and dtype; summed over all sequences in
            float64.

        Raises
        ------
        TypeError, ValueError
            As the call does.
        """
        array, rows = self._place("dx", dx, offset)
        table = np.zeros_like(self.params["table"])
        table[rows] = array.sum(axis=tuple(range(array.ndim - 2)), dtype=np.float64)
        return array, {"table": table}
