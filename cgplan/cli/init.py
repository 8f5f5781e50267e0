"""`cgplan init`: reads a model's inputs off its forward and writes a starting configuration."""

from __future__ import annotations

import inspect
import sys
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import fx, nn

from cgplan.backends import select_backend
from cgplan.config.load import read_yaml
from cgplan.config.template import InputGuess, starting_yaml
from cgplan.drop_in import Graphed, graphed
from cgplan.errors import ConfigError, ModelError
from cgplan.models.loading import ForwardArgument, call_target, forward_signature, load_model

# Arguments that hold indices in most models, by the end of their name.
_INDEX_NAMES = ("_ids", "_idx", "_indices", "_index", "_tokens", "_positions", "_lengths", "_lens")
_IMAGE_SIDE = 224  # pixels, as most vision models take
_CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_PASS_THROUGH = (nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid)


def starting_config(target: str, kwargs_text: str, call: str | None = None) -> str:
    """YAML for a model, from its code, or from one call: of ``call``, a target that returns the
    arguments of the forward, a tensor, a sequence or a mapping by name. Raises ConfigError for
    wrong kwargs, ModelError if the model cannot be built, and what ``graphed`` raises.
    """
    kwargs = read_yaml(
        kwargs_text, f"--kwargs {kwargs_text!r}", "Write a mapping, such as '{hidden_size: 64}'."
    )
    if not isinstance(kwargs, dict):
        raise ConfigError(
            f"--kwargs {kwargs_text!r} is not a mapping of names to values",
            remedy="Write keyword arguments, such as '{hidden_size: 64}'.",
        )
    if call is not None:
        device = select_backend("auto").device
        with redirect_stdout(sys.stderr):
            made = load_model(target, kwargs, device=device).forward
            example = call_target(call, {}, device=device)
            try:
                graphs: Graphed = graphed(made, example=example)
            except TypeError as error:
                remedy = (
                    "Return a tensor, a sequence or a mapping by name, as the forward takes them."
                )
                raise ModelError(
                    f"{target} does not take what {call} returns: {error}", remedy=remedy
                ) from error
        return graphs.config_text(target, kwargs)
    if ":" not in target and not target.endswith(".py"):
        return _of_hugging_face(target, kwargs)
    with redirect_stdout(sys.stderr):  # a model's prints are not the result
        model = load_model(target, kwargs, device=torch.device("cpu"))
        layers = {} if model.module is None else _first_layers(model.module)
        arguments = forward_signature(model.forward)
    return starting_yaml(
        target, kwargs, [_guess(argument, *layers.get(argument.name, ())) for argument in arguments]
    )


def _of_hugging_face(name: str, kwargs: dict[str, Any]) -> str:
    from cgplan.models.hf import find_config, read_config

    if name != "transformers":
        kwargs = {"config_file": find_config(name), **kwargs}
    config = read_config(kwargs.get("config"), kwargs.get("config_file")).get_text_config(
        decoder=True
    )
    places, reason = (0, kwargs.get("max_cache_len", 512)), "the target takes one for each row"
    tokens = InputGuess(
        "input_ids",
        True,
        ("num_tokens",),
        "int64",
        reason,
        0,
        (0, getattr(config, "vocab_size", 1)),
    )
    positions = InputGuess(
        "positions", True, ("num_tokens",), "int64", f"{reason}; -1: padding", -1, places
    )
    return starting_yaml("transformers", kwargs, [tokens, positions])


def _first_layers(module: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """By argument, the layer of PyTorch that reads it first, and its name in the model; empty where
    the forward cannot be traced symbolically (it branches on values, say).
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
    found = {
        str(node.target): _first_layer(node, module)
        for node in graph.nodes
        if node.op == "placeholder"
    }
    return {name: layer for name, layer in found.items() if layer is not None}


def _first_layer(node: fx.Node, module: nn.Module) -> tuple[str, nn.Module] | None:
    """The first layer behind a traced value, seen through layers that change neither shape nor
    type.
    """
    for user in node.users:
        if user.op != "call_module":
            continue
        layer = module.get_submodule(str(user.target))
        if isinstance(layer, _PASS_THROUGH):
            return _first_layer(user, module)
        if (
            isinstance(layer, nn.Linear | nn.Embedding | nn.LayerNorm)
            or type(layer) in _CONVOLUTIONS
        ):
            return str(user.target), layer
    return None


def _guess(argument: ForwardArgument, path: str = "", layer: nn.Module | None = None) -> InputGuess:
    name, required, kind = argument.name, argument.required, type(layer).__name__
    dtype = "float32"
    shape: tuple[int | str, ...] = ("num_tokens",)
    if layer is not None:
        dtype = str(next((p.dtype for p in layer.parameters()), torch.float32)).removeprefix(
            "torch."
        )
    if isinstance(layer, nn.Embedding):
        rows = layer.num_embeddings
        reason = f"{path} is an {kind} of {rows} rows, one index a row of the batch"
        return InputGuess(name, required, shape, "int64", reason, layer.padding_idx or 0, (0, rows))
    if isinstance(layer, nn.Linear):
        shape, reason = (
            (*shape, layer.in_features),
            f"{path} is a {kind} with in_features {layer.in_features}",
        )
    elif isinstance(layer, nn.LayerNorm):
        shape, reason = (
            (*shape, *layer.normalized_shape),
            f"{path} is a {kind} over {list(layer.normalized_shape)}",
        )
    elif layer is not None:
        channels, sides = int(getattr(layer, "in_channels", 1)), _CONVOLUTIONS[type(layer)]
        shape = (*shape, channels, *([_IMAGE_SIDE] * sides))
        reason = f"{path} is a {kind} with in_channels {channels}; the {_IMAGE_SIDE} is only usual"
    elif f"_{name}".endswith(_INDEX_NAMES):
        dtype, reason = "int64", "by the name, one whole number a row"
    elif argument.annotation in ("int", "float", "bool", "str"):
        reason = (
            f"the forward says {argument.annotation}, but inputs are tensors; wrap the model in "
            "a function"
        )
    else:
        reason = "nothing in the code told it; correct it"
    return InputGuess(name, required, shape, dtype, reason)
