"""Records in memory, read and written by the names of their fields."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from lane_tools import jit

from nattn.vectors.lanes import Struct, view

RECORD = Struct("TestRecord", ("first", "second"), ("third",))


def test_struct() -> None:
    assert RECORD.dtype == np.dtype([("first", "i8"), ("second", "i8"), ("third", "f8")])
    with pytest.raises(KeyError):
        RECORD.field("fourth")

    def run(address: int) -> float:
        r = view(RECORD, address)
        r.second = r.first + 1
        r.third, total = 3, r.third + r.second
        return float(total)

    record = np.array([(41, 0, 0.5)], RECORD.dtype)
    assert jit(run)(record.ctypes.data) == 42.5
    assert record[0].tolist() == (41, 42, 3.0)

    def wrong(address: int) -> int:
        return view(RECORD, address).fourth  # type: ignore[no-any-return]

    with pytest.raises(numba.TypingError, match="fourth"):
        jit(wrong)(record.ctypes.data)
