"""`cgplan init`: reads a model's inputs off its forward and writes a starting configuration."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import fx, nn

from cgplan.config.load import read_yaml
from cgplan.config.template import InputGuess, starting_yaml
from cgplan.errors import ConfigError
from cgplan.models.loading import ForwardArgument, forward_signature, load_model

# Arguments that hold indices in most models, by the end of their name.
_INDEX_NAMES = ("ids", "idx", "indices", "index", "tokens", "positions", "lengths", "lens")
_IMAGE_SIDE = 224  # pixels, as most vision models take
_CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_PASS_THROUGH = (nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid)


def starting_config(target: str, kwargs_text: str) -> str:
    """YAML for a model. Raises ConfigError for wrong kwargs, ModelError if the model cannot be built."""
    kwargs = _parse(kwargs_text)
    with redirect_stdout(sys.stderr):  # a model's prints are not the result
        model = load_model(target, kwargs, device=torch.device("cpu"))
        consumers = {} if model.module is None else _first_layers(model.module)
        arguments = forward_signature(model.forward)
    return starting_yaml(target, kwargs, [_guess(argument, consumers.get(argument.name)) for argument in arguments])


def _parse(text: str) -> dict[str, Any]:
    kwargs = read_yaml(text, f"--kwargs {text!r}", "Write a mapping, such as '{hidden_size: 64}'.")
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise ConfigError(
            f"--kwargs {text!r} is not a mapping of names to values",
            remedy="Write keyword arguments, such as '{hidden_size: 64}'.",
        )
    return kwargs


def _first_layers(module: nn.Module) -> Mapping[str, tuple[str, nn.Module]]:
    """By argument name, the layer of PyTorch that reads the argument first, and its name in the model.

    The forward is traced symbolically, with the arguments' own defaults. Where its code cannot be traced (it
    branches on values, say) there is nothing honest to tell.
    """
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    try:
        graph = fx.Tracer().trace(module, concrete_args=defaults)
    except Exception:  # tracing runs the model's own code, which may raise anything
        return {}
    layers: dict[str, tuple[str, nn.Module]] = {}
    for node in graph.nodes:
        found = _first_layer(node, module) if node.op == "placeholder" else None
        if found is not None:
            layers[str(node.target)] = found
    return layers


def _first_layer(node: fx.Node, module: nn.Module) -> tuple[str, nn.Module] | None:
    """The first layer behind a traced value, seen through layers that change neither shape nor type."""
    for user in node.users:
        if user.op != "call_module":
            continue
        layer = module.get_submodule(str(user.target))
        if isinstance(layer, _PASS_THROUGH):
            return _first_layer(user, module)
        if isinstance(layer, nn.Linear | nn.Embedding | nn.LayerNorm) or type(layer) in _CONVOLUTIONS:
            return str(user.target), layer
    return None


def _guess(argument: ForwardArgument, consumer: tuple[str, nn.Module] | None) -> InputGuess:
    name, required = argument.name, argument.required
    if consumer is not None:
        return _from_layer(name, required, *consumer)
    if any(name == ending or name.endswith(f"_{ending}") for ending in _INDEX_NAMES):
        reason = "by the name, one whole number a row"
        return InputGuess(name, required, ("num_tokens",), "int64", 0, None, reason)
    reason = "nothing in the code told it; correct it"
    if argument.annotation in ("int", "float", "bool", "str"):
        reason = f"the forward says {argument.annotation}, but inputs are tensors; wrap the model in a function"
    return InputGuess(name, required, ("num_tokens",), "float32", 0, None, reason)


def _from_layer(name: str, required: bool, path: str, layer: nn.Module) -> InputGuess:
    kind = type(layer).__name__
    dtype = str(next((p.dtype for p in layer.parameters()), torch.float32)).removeprefix("torch.")
    if isinstance(layer, nn.Embedding):
        reason = f"{path} is an {kind} of {layer.num_embeddings} rows, one index a row of the batch"
        pad = layer.padding_idx or 0
        return InputGuess(name, required, ("num_tokens",), "int64", pad, (0, layer.num_embeddings), reason)
    if isinstance(layer, nn.Linear):
        shape: tuple[int | str, ...] = ("num_tokens", layer.in_features)
        reason = f"{path} is a {kind} with in_features {layer.in_features}"
    elif isinstance(layer, nn.LayerNorm):
        shape = ("num_tokens", *layer.normalized_shape)
        reason = f"{path} is a {kind} over {list(layer.normalized_shape)}"
    else:
        channels, sides = int(getattr(layer, "in_channels", 1)), _CONVOLUTIONS[type(layer)]
        shape = ("num_tokens", channels, *([_IMAGE_SIDE] * sides))
        reason = f"{path} is a {kind} with in_channels {channels}; the {_IMAGE_SIDE} is only usual"
    return InputGuess(name, required, shape, dtype, 0, None, reason)
