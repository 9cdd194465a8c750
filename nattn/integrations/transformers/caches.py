"""A cache of keys and values for generation that grows in place: nattn's own, of all kinds."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ...caches import KVCache, PagedKVCache, PagedView
from ...caches.settings import check_quantize
from ...call.checks import check_count
from ...call.tensors import as_tensor
from .lazy import LazyTensor

_TOKENS = 256
"""What a cache of pages has room for at first, as `nattn.KVCache` has."""


class CachedRows(LazyTensor):
    """Keys or values ``(B, Hkv, N, D)`` in a cache of nattn.

    `attention_forward` reads them where they lie. An operation of torch gets a copy, in which they
    are numbers of the model's dtype, one behind the other.

    Attributes
    ----------
    layer : KVCacheLayer
        Whose they are.
    begin, end : int
        Which, of all that the layer was given.
    """

    layer: KVCacheLayer
    begin: int
    end: int
    _place: int
    _layer_was: int

    @staticmethod
    def __new__(
        cls, shape: Any, dtype: torch.dtype, layer: KVCacheLayer, version: int, place: int, end: int
    ) -> CachedRows:
        """Make a tensor without elements: of keys, place 0, or of values, 1."""
        made: CachedRows = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        return made

    def __init__(
        self,
        shape: Any,
        dtype: torch.dtype,
        layer: KVCacheLayer,
        version: int,
        place: int,
        end: int,
    ) -> None:
        self.layer, self.begin, self.end = layer, end - shape[2], end
        self._place, self._layer_was = place, version

    def __repr__(self, **kwargs: Any) -> str:
        return f"<CachedRows of shape {tuple(self.shape)}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedRows:
        layer = copy.deepcopy(self.layer, memo)
        return CachedRows(self.shape, self.dtype, layer, self._layer_was, self._place, self.end)

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def dense(self) -> Tensor:
        """Return a copy as a plain tensor.

        Raises
        ------
        ValueError
            If the cache was cropped, reordered or written over since.
        """
        if self.layer.version != self._layer_was:
            raise ValueError(
                f"{self._name}: expected rows of a cache that has only been added to since, got "
                "some from before it was cropped, reordered or reset; take them from its layer anew"
            )
        rows = self.layer.cache.read(self.begin)[self._place]
        return as_tensor(rows[:, : self.end - self.begin]).transpose(1, 2)

    def is_current(self, value: Any) -> bool:
        """Whether these are the keys, and those the values, that the cache would attend to now."""
        return (
            isinstance(value, CachedRows)
            and value.layer is self.layer
            and (self._place, value._place) == (0, 1)
            and (self.begin, self.end) == (value.begin, value.end)
            and self._layer_was == value._layer_was == self.layer.version
            and self.end == self.layer.get_seq_length()
        )

    def before(self, func: Any, is_written: bool) -> None:
        """Raise if an operator would write to a copy."""
        if is_written:
            raise ValueError(
                f"{self._name}: expected an operation that leaves rows of a cache as they are, got "
                f"{func}; clone() them, or add rows with update()"
            )

    @property
    def _name(self) -> str:
        return ("keys", "values")[self._place]


class KVCacheLayer(DynamicLayer):
    """The keys and values of one layer: a `nattn.KVCache` or `nattn.PagedKVCache`.

    It is added to in place, where transformers' own layers copy all for each token.

    Parameters
    ----------
    capacity : int, optional
        Tokens to have room for from the start.
    sliding_window : int, optional
        Keys that a row sees, its own included: a ring of so many is kept.
    quantize : {None, "int8"}, default None
        "int8" rounds to 8 bits, as `nattn.KVCache` does.
    page_size : int, optional
        Tokens of a page; not with a sliding window.

    Attributes
    ----------
    cache : nattn.KVCache or nattn.PagedView or None
        What holds them, from the first `update` on; its `error` bounds what int8 changes.
    keys, values : Tensor or None
        ``(B, Hkv, N, D)``: what attention sees.

    Raises
    ------
    ValueError, TypeError
        For arguments that `nattn.KVCache` refuses, and for pages beside a sliding window.
    """

    cache: Any
    keys: Tensor | None
    values: Tensor | None

    def __init__(
        self,
        capacity: int | None = None,
        *,
        sliding_window: int | None = None,
        quantize: str | None = None,
        page_size: int | None = None,
    ) -> None:
        super().__init__()
        self.capacity = None if capacity is None else check_count("capacity", capacity)
        self.is_sliding = sliding_window is not None
        if sliding_window is not None:
            sliding_window = check_count("sliding_window", sliding_window)
            if page_size is not None:
                raise ValueError(
                    f"page_size: expected None beside a sliding window, got {page_size!r}; keys in "
                    "a window are kept in a ring"
                )
        self.sliding_window = sliding_window
        self.quantize = check_quantize(quantize)
        self.page_size = None if page_size is None else check_count("page_size", page_size)
        self.cache = None
        self.version = 0  # grows when keys are taken away, not when they are added
        self._length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the cache, of the sizes and the dtype of what is to be put in.

        Parameters
        ----------
        key_states, value_states : Tensor
            ``(B, Hkv, N, D)`` and ``(B, Hkv, N, Dv)``.
        """
        super().lazy_initialization(key_states, value_states)
        self.dtype = key_states.dtype
        B, Hkv, _, D = key_states.shape
        sizes = Hkv, D, value_states.shape[3]
        how: Any = {"dtype": str(self.dtype).removeprefix("torch."), "quantize": self.quantize}
        if self.page_size is None:
            window = None if self.sliding_window is None else self.sliding_window - 1
            self.cache = KVCache(B, *sizes, **how, capacity=self.capacity, window=window)
        else:
            pages = max(1, B * -(-(self.capacity or _TOKENS) // self.page_size))
            pool = PagedKVCache(pages, self.page_size, *sizes, **how, grow=True)
            self.cache = pool.view([pool.new() for _ in range(B)])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values, and return those that their queries may see.

        Parameters
        ----------
        key_states, value_states : Tensor
            ``(B, Hkv, N, D)`` and ``(B, Hkv, N, Dv)`` in host memory.
        *args, **kwargs
            What else transformers passes, and which changes nothing.

        Returns
        -------
        keys, values : Tensor
            All that were added or, with a sliding window, these and the last before them: views of
            a cache in one piece, otherwise `CachedRows`.

        Raises
        ------
        ValueError
            If gradients are recorded for them, which they would not get.
        ValueError, TypeError
            As `nattn.KVCache.append` does. Nothing changes then.
        """
        for name, x in (("key_states", key_states), ("value_states", value_states)):
            if x.requires_grad:
                raise ValueError(
                    f"{name}: expected a tensor without a gradient, for a cache passes none on; "
                    "generate within torch.no_grad(), or train with use_cache=False"
                )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cache.append(key_states.transpose(1, 2), value_states.transpose(1, 2))
        begin = self._first()
        self._length += key_states.shape[2]
        return self._show(begin)

    def get_seq_length(self) -> int:
        """Return how many tokens were added, and not cropped."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys so many new queries will see, and the position of the first.

        Parameters
        ----------
        query_length : int
            How many.
        """
        begin = self._first()
        return self._length + query_length - begin, begin

    def get_max_length(self) -> int:
        """Return the length of the sliding window, -1 without one."""
        return -1 if self.sliding_window is None else self.sliding_window

    def reset(self) -> None:
        """Give the cache up; the next `update` makes another."""
        super().reset()
        self.cache = None
        self._length = 0
        self.version += 1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, as many as a number of at most 0 says.

        Parameters
        ----------
        tokens_to_remove : int
            The negative of how many.

        Raises
        ------
        ValueError
            If it is above 0, or if with a sliding window keys are written over that the next
            query would see: no more can be removed than the last `update` added.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                "tokens_to_remove: expected at most 0, the negative of how many tokens to remove, "
                f"got {tokens_to_remove}"
            )
        if tokens_to_remove and self._length:
            kept = max(self._length + tokens_to_remove, 0)
            self.cache.truncate(kept)
            self._length = kept
            self._change()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each item be what another one was; pages are shared, and not copied.

        Parameters
        ----------
        beam_idx : Tensor
            ``(B,)`` integers: which.
        """
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each item.

        Parameters
        ----------
        repeats : int
            How many times it is to be there.
        """
        self._select([b for b in range(self.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some items.

        Parameters
        ----------
        indices : Tensor
            Which: integers, or ``(B,)`` bool.
        """
        self._select(torch.arange(self.batch)[indices.cpu()].tolist())

    @property
    def batch(self) -> int:
        """How many items there are."""
        return 0 if self.cache is None else int(self.cache.batch)

    @property
    def pool(self) -> KVCache | PagedKVCache:
        """The cache or, of one with pages, the pool that they are in."""
        found: KVCache | PagedKVCache
        found = self.cache.cache if isinstance(self.cache, PagedView) else self.cache
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, whether they are full or not."""
        return 0 if self.cache is None else self.pool.nbytes

    def _first(self) -> int:
        """Return the first key that the next query sees."""
        return 0 if self.sliding_window is None else max(self._length - self.sliding_window + 1, 0)

    def _show(self, begin: int) -> tuple[Tensor, Tensor]:
        """Set `keys` and `values`, from one on."""
        if isinstance(self.pool, KVCache) and self.quantize is None and not self.is_sliding:
            keys, values = (
                as_tensor(x[:, : self._length]).transpose(1, 2) for x in (self.pool.k, self.pool.v)
            )
        else:
            sizes = self.batch, self.pool.Hkv, self._length - begin
            keys, values = (
                CachedRows((*sizes, width), self.dtype, self, self.version, n, self._length)
                for n, width in enumerate((self.pool.D, self.pool.Dv))
            )
        self.keys, self.values = keys, values
        return keys, values

    def _change(self) -> None:
        """Make known that keys were taken away."""
        self.version += 1
        self._show(self._first())

    def _select(self, items: list[int]) -> None:
        if self._length and items != list(range(self.batch)):
            self.cache.select(items)
            self._change()


class NattnCache(DynamicCache):
    """A cache for ``generate(cache=...)`` and ``past_key_values`` that grows in place.

    With ``attn_implementation="nattn"`` pages, int8 and rings are read where they lie. With another
    implementation, or a mask that a window is not recognised in, a layer's keys and values are
    gathered at each step.

    Parameters
    ----------
    config : transformers.PreTrainedConfig, optional
        That of the model, which tells of sliding windows. Layers with one keep a ring.
    capacity : int, optional
        Tokens to have room for from the start; it doubles when there is none left.
    quantize : {None, "int8"}, default None
        "int8" rounds keys and values to 8 bits, with a scale for each row of each head: about a
        quarter of float32's memory. ``layers[n].cache.error(q)`` bounds what that changes.
    page_size : int, optional
        Tokens of a page. Beams then share the pages of what they have in common; layers with a
        sliding window have none.

    Raises
    ------
    ValueError, TypeError
        For arguments that `nattn.KVCache` refuses, and with `quantize` or `page_size` if a layer of
        the model keeps keys in a way of its own.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from nattn.integrations.transformers import NattnCache, register
    >>> register()
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...     num_attention_heads=2, bos_token_id=1, eos_token_id=2, attn_implementation="nattn",
    ... )
    >>> model = LlamaForCausalLM(config).eval()
    >>> prompt = torch.randint(3, 50, (1, 20))
    >>> cache = NattnCache(config, capacity=64, quantize="int8")
    >>> tokens = model.generate(
    ...     prompt, attention_mask=torch.ones_like(prompt), cache=cache,
    ...     max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0,
    ... )
    >>> tokens.shape, cache.get_seq_length(), cache.nbytes
    (torch.Size([1, 25]), 24, 10240)
    """

    layers: list[Any]
    layer_class_to_replicate: Any

    def __init__(
        self,
        config: Any = None,
        capacity: int | None = None,
        *,
        quantize: str | None = None,
        page_size: int | None = None,
    ) -> None:
        super().__init__(config=config)
        self._options: dict[str, Any] = {"capacity": capacity, "quantize": quantize}
        self._page_size = page_size
        self._new()  # raises if one of the options is wrong
        self.layers = [self._in_place_of(n, x) for n, x in enumerate(self.layers)]
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = self._new

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, whether their arrays are full or not."""
        found = 0
        for x in self.layers:
            if isinstance(x, KVCacheLayer):
                found += x.nbytes
            else:
                rows = (getattr(x, name, None) for name in ("keys", "values"))
                found += sum(y.nbytes for y in rows if y is not None)
        return found

    def _new(self, **kwargs: Any) -> KVCacheLayer:
        return KVCacheLayer(**self._options, page_size=self._page_size)

    def _in_place_of(self, n: int, layer: Any) -> Any:
        if type(layer) is DynamicLayer:
            return self._new()
        if type(layer) is DynamicSlidingWindowLayer:
            return KVCacheLayer(**self._options, sliding_window=layer.sliding_window)
        asked = self._options["quantize"] or self._page_size
        if asked and isinstance(layer, CacheLayerMixin) and not isinstance(layer, DummyLayer):
            raise ValueError(
                "config: expected layers that see all keys or a window of them, to be kept in "
                f"pages or in int8, got {type(layer).__name__} in layer {n}; make the cache "
                "without quantize and page_size"
            )
        return layer
