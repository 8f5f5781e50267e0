"""`cgplan init`: a starting configuration from a model's forward, or from one call."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from cgplan.backends import select_backend
from cgplan.captures.failures import said_of_names
from cgplan.cli.output import prints_aside
from cgplan.config.reference import InputGuess, starting_yaml
from cgplan.drop_in import Graphed, graphed
from cgplan.errors import CgplanError, ModelError
from cgplan.models.loading import ForwardArgument, call_target, forward_signature, load_model

# ends of the names of arguments that mostly hold indices
_INDEX_NAMES = ("_ids", "_idx", "_indices", "_index", "_tokens", "_positions", "_lengths", "_lens")
_IMAGE_SIDE = 224  # pixels
_CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_TELLING = (nn.Linear, nn.Embedding, nn.LayerNorm)
_PASS_THROUGH = (nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid)


def starting_config(
    target: str,
    kwargs: dict[str, Any],
    call: str | None = None,
) -> str:
    """YAML for a model, from its code or from one call.

    ``call`` is a target that returns the arguments of the forward: a tensor, a sequence or a
    mapping by name. Raises ModelError, and what ``graphed`` raises.
    """
    if call is not None:
        return _of_call(target, kwargs, call)
    if ":" not in target and not target.endswith(".py"):
        return _of_hugging_face(target, kwargs)
    with prints_aside():
        model = load_model(target, kwargs, device=torch.device("cpu"))
        layers = _first_layers(model) if isinstance(model, nn.Module) else {}
        arguments = forward_signature(model)
    guesses = [_guess(argument, *layers.get(argument.name, ())) for argument in arguments]
    return starting_yaml(target, kwargs, guesses)


def _of_call(
    target: str,
    kwargs: dict[str, Any],
    call: str,
) -> str:
    device = select_backend("auto").device
    with prints_aside():
        made = load_model(target, kwargs, device=device)
        example = call_target(
            call, {}, device=device, to_fit="Let it take none, and return those of the forward."
        )
        try:
            graphs: Graphed = graphed(made, example=example)
        except CgplanError:
            raise
        except Exception as error:  # of the model's code
            raise ModelError(
                f"{target} does not take what {call} returns: {type(error).__name__}: {error}",
                remedy=f"{said_of_names(made, example if isinstance(example, Mapping) else ())}"
                "Return the forward's arguments: a tensor, sequence, or mapping by name.",
            ) from error
    return graphs.config_text(target, kwargs)


def _of_hugging_face(name: str, kwargs: dict[str, Any]) -> str:
    from cgplan.models.hf import build, find_config, read_config

    if name != "transformers":
        kwargs = {"config_file": find_config(name), **kwargs}
    whole = read_config(kwargs.get("config"), kwargs.get("config_file"))
    config = whole.get_text_config(decoder=True)
    words = getattr(config, "vocab_size", 1)
    declared = {**(build.__kwdefaults__ or {}), **kwargs}
    reason = "the target takes one for each row"
    row = (True, ("num_tokens",), "int64")
    tokens = InputGuess(
        "input_ids",
        *row,
        reason,
        0,
        (0, words),
    )
    positions = InputGuess(
        "positions",
        *row,
        f"{reason}; -1: padding",
        -1,
        (0, declared["max_cache_len"]),
    )
    return starting_yaml("transformers", kwargs, [tokens, positions], declared["max_batch_size"])


def _first_layers(module: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    parameters = inspect.signature(module.forward).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    try:
        graph = fx.Tracer().trace(module, concrete_args=defaults)
    except Exception:  # of the model's code
        return {}
    found = {}
    for node in graph.nodes:
        layer = _first_layer(node, module) if node.op == "placeholder" else None
        if layer:
            found[str(node.target)] = layer
    return found


def _first_layer(
    node: fx.Node,
    module: nn.Module,
) -> tuple[str, nn.Module] | None:
    for user in node.users:
        if user.op != "call_module":
            continue
        layer = module.get_submodule(str(user.target))
        if isinstance(layer, _PASS_THROUGH):
            return _first_layer(user, module)
        if isinstance(layer, _TELLING) or type(layer) in _CONVOLUTIONS:
            return str(user.target), layer
    return None


def _guess(
    argument: ForwardArgument,
    path: str = "",
    layer: nn.Module | None = None,
) -> InputGuess:
    name = argument.name
    kind = f"{path} is a {type(layer).__name__}"
    dtype = "float32"
    shape: tuple[int | str, ...] = ("num_tokens",)
    pad = 0
    example = None
    if layer is not None:
        weights = next(layer.parameters(), None)
        dtype = dtype if weights is None else str(weights.dtype).removeprefix("torch.")
    if isinstance(layer, nn.Embedding):
        rows = layer.num_embeddings
        dtype = "int64"
        reason = f"{path} is an Embedding of {rows} rows, one index a row of the batch"
        pad = layer.padding_idx or 0
        example = (0, rows)
    elif isinstance(layer, nn.Linear):
        shape = (*shape, layer.in_features)
        reason = f"{kind} with in_features {layer.in_features}"
    elif isinstance(layer, nn.LayerNorm):
        shape = (*shape, *layer.normalized_shape)
        reason = f"{kind} over {list(layer.normalized_shape)}"
    elif layer is not None:
        channels: Any = layer.in_channels
        sides = [_IMAGE_SIDE] * _CONVOLUTIONS[type(layer)]
        shape = (*shape, channels, *sides)
        reason = f"{kind} with in_channels {channels}; the {_IMAGE_SIDE} is only usual"
    elif f"_{name}".endswith(_INDEX_NAMES):
        dtype = "int64"
        reason = "by the name, one whole number a row"
    elif argument.annotation in ("int", "float", "bool", "str"):
        reason = (
            f"the forward says {argument.annotation}, but inputs are tensors; wrap the model in "
            "a function"
        )
    else:
        reason = "the code does not say it; correct it"
    return InputGuess(
        name,
        argument.required,
        shape,
        dtype,
        reason,
        pad,
        example,
    )
