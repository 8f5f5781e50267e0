"""The target `transformers`: a causal language model, one token a row."""

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from cgplan.errors import InputError, ModelError, did_you_mean, first_line
from cgplan.models.loading import (
    CACHE_ARGUMENTS,
    beyond_positions,
    cache_argument,
    find_file,
    parse_dtype,
)

try:
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
    )
    from transformers.cache_utils import Cache, CacheLayerMixin
    from transformers.utils.hub import cached_file
except ImportError as error:
    raise ModelError(
        f"model target transformers: {error}", remedy="Install it: pip install cgplan[transformers]"
    ) from error

logger = logging.getLogger(__name__)
_NEAR = 0.72  # other tools' keys are less alike
_ATTENTION_TYPES = ("full_attention", "sliding_attention")


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """[max_rows, heads, max_len + 1, size]; each row writes to its own ``slots``."""

    is_compileable = True

    def __init__(self, max_rows: int, max_len: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.max_rows = max_rows
        self.max_len = max_len
        self.slots: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            states.new_zeros(self.max_rows, states.shape[1], self.max_len + 1, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.slots is None:
            raise InputError(
                "the cache was used outside the adapter",
                remedy="Call the adapter, not its inner model.",
            )
        slots = self.slots[:, None, None, None]

        def written(cached: Any, states: Tensor) -> Tensor:
            rows: Tensor = cached[: len(states)]
            try:
                rows.scatter_(2, slots.expand_as(states), states)
            except RuntimeError as error:  # without a GPU
                if "out of bounds" not in str(error):
                    raise
                raise InputError(
                    f"a position is {int(slots.max()) - 1}, and max_cache_len is {self.max_len}",
                    remedy="Raise model.kwargs.max_cache_len, or end the request before.",
                ) from error
            return rows[:, :, : self.max_len]

        return written(self.keys, key_states), written(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 (passed by name)
        """Length and offset of the keys."""
        return self.max_len, 0

    def get_seq_length(self) -> int:
        """0: rows have no common length."""
        return 0

    def get_max_length(self) -> int:
        return self.max_len


class RowDecoder(nn.Module):
    """A causal LM that decodes one token a row; row i is request i, begun anew at position 0."""

    def __init__(
        self,
        model: Any,
        max_batch_size: int,
        max_cache_len: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.max_batch_size = max_batch_size
        self.max_cache_len = max_cache_len
        text = model.config.get_text_config(decoder=True)
        window = getattr(text, "sliding_window", None)
        usual = "full_attention" if window is None else "sliding_attention"
        kinds = dict.fromkeys(getattr(text, "layer_types", None) or [usual])
        own = {str(kind) for kind in getattr(text, "attention_layers", None) or ()}
        other = sorted((set(kinds) - set(_ATTENTION_TYPES)) | (own - {"global"}))
        if other or getattr(text, "attention_chunk_size", None) is not None:
            raise ModelError(
                f"{text.model_type} has layers of kind {', '.join(other) or 'chunked_attention'}",
                remedy=f"load_model has caches for {' and '.join(_ATTENTION_TYPES)} alone; "
                "graphed_generate(lm, ...) may serve this model (docs/graphed.md).",
            )
        rope = str(getattr(text, "rope_parameters", None))
        if "longrope" in rope or "dynamic" in rope:
            found = re.findall(r"original_max_position_embeddings': (\d+)", rope)
            length = min([text.max_position_embeddings, *map(int, found)])
            if max_cache_len > length:
                raise ModelError(
                    f"{text.model_type} chooses its rotary factors by the longest row of a batch",
                    remedy=f"Set max_cache_len to {length}, below which they are the same, or use "
                    "cgplan.graphed_generate(lm, ...), which runs it without graphs.",
                )
        too_long = beyond_positions(model, max_cache_len)
        if too_long:
            logger.warning(too_long)
        self._windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
        self._additive = model.config._attn_implementation == "eager"
        count = text.num_hidden_layers
        layers: list[Any] = [_RowLayer(max_batch_size, max_cache_len) for _ in range(count)]
        self.cache: Any = Cache(layers=layers)
        self._cache_argument = cache_argument(model) or CACHE_ARGUMENTS[-1]

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Returns logits [num_tokens, vocab_size] in the model's dtype.

        Args:
            input_ids: [num_tokens] int64, of rows 0, 1, ...
            positions: [num_tokens] int64, below ``max_cache_len`` (the device checks); -1: padding.

        Raises:
            InputError: more tokens than ``max_batch_size``.
        """
        if input_ids.shape[0] > self.max_batch_size:
            raise InputError(
                f"{input_ids.shape[0]} tokens, but the cache has {self.max_batch_size} rows",
                remedy="Raise model.kwargs.max_batch_size, list sizes up to "
                f"{self.max_batch_size}, or send fewer tokens.",
            )
        # padding writes after the last place; too large positions move out of range: the device
        # raises
        end = self.max_cache_len
        slots = torch.where(positions < 0, end, positions + (positions >= end))
        for layer in self.cache.layers:
            layer.slots = slots
        # a row that sees nothing gives NaN in some kernels
        clamped = positions.clamp(min=0)
        masks = {kind: self._mask(clamped, window) for kind, window in self._windows.items()}
        output = self.model(
            input_ids=input_ids[:, None],
            position_ids=clamped[:, None],
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            use_cache=True,
            **{self._cache_argument: self.cache},
        )
        for layer in self.cache.layers:
            layer.slots = None  # no state of the model
        logits: Tensor = output.logits[:, 0]
        return logits

    def _mask(self, positions: Tensor, window: int | None) -> Tensor:
        """[num_tokens, 1, 1, max_cache_len]: True (or 0.0) where a row sees a place."""
        keys = torch.arange(self.max_cache_len, device=positions.device)
        seen = keys <= positions[:, None]
        if window is not None:
            seen = seen & (keys > positions[:, None] - window)
        if self._additive:
            dtype = self.model.dtype
            return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, None, None]
        return seen[:, None, None]


def find_config(name: str) -> str:
    """In a folder or Hugging Face's cache. Raises ModelError."""
    with suppress(OSError):
        found = cached_file(name, "config.json", local_files_only=True)
        if found:
            return str(found)
    raise ModelError(
        f"{name} is neither a target nor a Hugging Face model on this machine",
        remedy="Write module:callable or file.py:callable, or name a folder with a config.json.",
    )


def read_config(config: Mapping[str, Any] | None, config_file: str | None) -> Any:
    if (config is None) == (config_file is None):
        raise ModelError(
            "the transformers target needs either `config` or `config_file`",
            remedy="Give model.kwargs.config, or the path of a published config.json.",
        )
    where = "model.kwargs.config"
    if config_file is not None:
        path = find_file(config_file, None)
        where = str(path)
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{where} cannot be read: {error}", remedy="Give a config.json of transformers."
            ) from error
    if not isinstance(config, Mapping):
        raise ModelError(
            f"{where} holds no mapping",
            remedy="Give the contents of a config.json of transformers.",
        )
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{where} has model_type {kind!r}, of which this transformers builds no causal LM",
            remedy="Give a model_type such as qwen3 or llama. For another model write a function "
            "that returns it: `cgplan init my_model.py:build`.",
        )
    try:
        found = CONFIG_MAPPING[kind].from_dict(dict(config))
        usual = CONFIG_MAPPING[kind]()
    except Exception as error:
        raise ModelError(
            f"{where} does not describe a {kind}: {error}",
            remedy="Compare it with a published config.json.",
        ) from error
    if found.is_encoder_decoder:
        logger.warning(
            "the model has an encoder, and this is its decoder alone; for the whole model: "
            "docs/graphed.md, Models with an encoder"
        )
    for name in map(str, config):
        hint = did_you_mean(name, vars(usual), cutoff=_NEAR)
        is_known = hasattr(usual, name) or hasattr(usual, f"_{name}")
        if hint and config_file is None and not is_known:
            raise ModelError(f"{where}: unknown key {name!r}", remedy=f"{hint}Or remove it.")
    return found


def build(
    config: Mapping[str, Any] | None = None,
    config_file: str | None = None,
    *,
    dtype: str = "bfloat16",
    max_cache_len: int = 512,
    max_batch_size: int = 64,
    seed: int = 0,
    attn_implementation: str | None = None,
) -> RowDecoder:
    """A causal LM with random weights on the default device; the caller's random state stays.

    Args:
        config, config_file: Contents or path of a config.json.
        max_cache_len: Tokens of a row.

    Raises:
        ModelError: no known config, or no causal LM with a KV cache.
    """
    if attn_implementation not in (None, "sdpa", "eager"):
        raise ModelError(
            f"attn_implementation is {attn_implementation!r}", remedy="Choose sdpa or eager."
        )
    for name, value in {"max_cache_len": max_cache_len, "max_batch_size": max_batch_size}.items():
        if type(value) is not int or value < 1:
            raise ModelError(
                f"{name} is {value!r:.40}, no whole number above 0",
                remedy="Correct model.kwargs.",
            )
    values = read_config(config, config_file)
    torch_dtype = parse_dtype(dtype)
    device = torch.get_default_device()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                values, dtype=torch_dtype, attn_implementation=attn_implementation
            )
        except Exception as error:
            raise ModelError(
                f"transformers builds no causal LM from {values.model_type}: "
                f"{type(error).__name__}: {first_line(error)}",
                remedy="Choose a decoder-only language model.",
            ) from error
    decoder = RowDecoder(
        model.to(device).eval().requires_grad_(False), max_batch_size, max_cache_len
    )
    remedy = "Choose a model whose layers are attention with a key-value cache."
    try:
        # layers allocate now, not inside a capture
        with torch.no_grad():
            decoder(torch.zeros(1, dtype=torch.int64), torch.full((1,), -1))
    except Exception as error:
        failed = (
            f"{values.model_type} does not run on a key-value cache: {type(error).__name__}: "
            f"{error}"
        )
        raise ModelError(failed, remedy=remedy) from error
    if not any(layer.is_initialized for layer in decoder.cache.layers):
        raise ModelError(
            f"{values.model_type} does not use the key-value cache that it was given", remedy=remedy
        )
    return decoder
