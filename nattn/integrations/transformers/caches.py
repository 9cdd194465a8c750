"""A cache of keys and values for generation that grows in place, in `nattn.KVCache`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from ...caches import KVCache
from ...call.tensors import as_tensor


class KVCacheLayer(DynamicLayer):
    """The keys and values of one layer: views of a `nattn.KVCache`, which is added to in place.

    transformers' own layer copies all keys and values for each token.

    Parameters
    ----------
    capacity : int, optional
        As of `nattn.KVCache`.
    """

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity
        self._cache: KVCache | None = None
        self._views: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values, and return all.

        Parameters
        ----------
        key_states, value_states : Tensor
            ``(B, Hkv, N, D)`` and ``(B, Hkv, N, Dv)`` in host memory.
        *args, **kwargs
            What else transformers passes, and which changes nothing.

        Returns
        -------
        keys, values : Tensor
            All that were added: views, which stay as they are.

        Raises
        ------
        ValueError
            If gradients are recorded for them, which they would not get.
        ValueError, TypeError
            As `nattn.KVCache` does.
        """
        for name, x in (("key_states", key_states), ("value_states", value_states)):
            if x.requires_grad:
                raise ValueError(
                    f"{name}: expected a tensor without a gradient, for a cache passes none on; "
                    "generate within torch.no_grad(), or train with use_cache=False"
                )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._cache is None or self._is_another():
            self._cache = self._filled(key_states, value_states)
        self._cache.append(key_states.transpose(1, 2), value_states.transpose(1, 2))
        n = int(self._cache.lengths[0]) if key_states.shape[0] else 0
        self.keys, self.values = (
            as_tensor(x[:, :n]).transpose(1, 2) for x in (self._cache.k, self._cache.v)
        )
        self._views = self.keys, self.values
        return self._views

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, as many as a number of at most 0 says.

        Parameters
        ----------
        tokens_to_remove : int
            The negative of how many.
        """
        ours = self._cache is not None and not self._is_another()
        super().crop(tokens_to_remove)
        if ours and self._cache is not None and self.keys is not None:
            self._cache.truncate(self.keys.shape[2])
            self._views = self.keys, self.values

    def _is_another(self) -> bool:
        """Whether transformers has put others in their place: for beams, or emptied."""
        return self._views is None or self.keys is not self._views[0]

    def _filled(self, k: Tensor, v: Tensor) -> KVCache:
        """Return a cache of what is there, with room for new keys and values."""
        dtype = str(k.dtype).removeprefix("torch.")
        cache = KVCache(
            k.shape[0], k.shape[1], k.shape[3], v.shape[3], dtype=dtype, capacity=self.capacity
        )
        if self.get_seq_length() and self.keys is not None and self.values is not None:
            cache.append(self.keys.transpose(1, 2), self.values.transpose(1, 2))
        return cache


class NattnCache(DynamicCache):
    """A cache for ``generate(cache=...)`` and ``past_key_values`` that grows in place.

    Layers with a sliding window keep transformers' own cache, which holds that window.

    Parameters
    ----------
    config : transformers.PreTrainedConfig, optional
        That of the model, which tells of sliding windows.
    capacity : int, optional
        Tokens to have room for from the start; it doubles when there is none left.

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
    >>> cache = NattnCache(config, capacity=64)
    >>> tokens = model.generate(
    ...     prompt, attention_mask=torch.ones_like(prompt), cache=cache,
    ...     max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0,
    ... )
    >>> tokens.shape, cache.get_seq_length()
    (torch.Size([1, 25]), 24)
    """

    layers: list[Any]
    layer_class_to_replicate: Any

    def __init__(self, config: Any = None, capacity: int | None = None) -> None:
        super().__init__(config=config)
        self._capacity = capacity
        self.layers = [self._new() if type(x) is DynamicLayer else x for x in self.layers]
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = self._new

    def _new(self, **kwargs: Any) -> KVCacheLayer:
        return KVCacheLayer(self._capacity)
