"""Which keys query rows see, as device functions; `a` is the argument record of a kernel."""

from __future__ import annotations

from .target import device, read_int64

FIELDS = (
    # addresses of int64 (B,): position of row 0, lengths
    *("q_offset_ptr", "q_lens_ptr", "kv_lens_ptr"),
    # 0 or 1; keys to the left and to the right of a row's position, -1 where that is open
    *("causal", "left", "right"),
)
"""Fields of the argument record that say what is visible."""


@device
def keys_of(a, b, i):
    """Return a row's position and the keys lo <= j < hi that causal, window and lengths leave it.

    None are left to what is no row: ``i < 0``, or past the item's last.
    """
    pos = i + read_int64(a.q_offset_ptr + 8 * b)
    lo = 0 if a.left < 0 else max(0, pos - a.left)
    hi = read_int64(a.kv_lens_ptr + 8 * b)
    if a.causal:
        hi = min(hi, pos + 1)
    if a.right >= 0:
        hi = min(hi, pos + a.right + 1)
    if i < 0 or i >= read_int64(a.q_lens_ptr + 8 * b):
        hi = 0
    return pos, lo, hi


@device
def keys_of_rows(a, b, i_first, i_last):
    """Return the keys lo <= j < hi that some of these rows may see."""
    q_len = read_int64(a.q_lens_ptr + 8 * b)
    _, lo, _ = keys_of(a, b, min(i_first, q_len - 1))
    _, _, hi = keys_of(a, b, min(i_last, q_len - 1))
    return lo, hi if i_first < q_len else 0


@device
def packed_row(a, kv_head, row):
    """Return head and row of one of the rows that are numbered through all heads of a group.

    Row -1 of head 0 stands for what is past the last.
    """
    if row >= a.group * a.Nq:
        return 0, -1
    return kv_head * a.group + row // a.Nq, row % a.Nq


@device
def keys_of_packed_rows(a, b, first, n_rows):
    """Return the keys that some of `n_rows` packed rows may see, or more if they span heads."""
    last = min(first + n_rows, a.group * a.Nq) - 1
    if first // a.Nq != last // a.Nq:
        return keys_of_rows(a, b, 0, a.Nq - 1)
    return keys_of_rows(a, b, first % a.Nq, last % a.Nq)


@device
def rows_of_keys(a, b, k_first, k_end):
    """Return the rows lo <= i < hi of a head that may see some keys k_first <= j < k_end."""
    offset = read_int64(a.q_offset_ptr + 8 * b)
    lo, hi = 0, read_int64(a.q_lens_ptr + 8 * b)
    if a.causal:
        lo = max(lo, k_first - offset)
    if a.right >= 0:
        lo = max(lo, k_first - a.right - offset)
    if a.left >= 0:
        hi = min(hi, k_end + a.left - offset)
    return lo, hi
