"""A drop-in for a model, learnt from its calls, which can be saved: a kind as a configuration, and
the target that calls its model.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import EllipsisType, MappingProxyType, MethodType, SimpleNamespace
from typing import Any, Literal, Never, Self, cast

import torch
import yaml
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from cgplan.backends.replacing import setting
from cgplan.config.load import writing
from cgplan.drop_in.call_form import (
    CONSTANTS,
    ByName,
    arguments_by_name,
    call_form,
    module_of,
    share,
)
from cgplan.drop_in.calls import Calls
from cgplan.drop_in.kinds import Kind
from cgplan.drop_in.learner import BATCH, Learner, Settings
from cgplan.errors import CgplanError, ConfigError, InputError, did_you_mean, refuse_others
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.models.loading import (
    CACHE_ARGUMENTS,
    beyond_positions,
    cache_argument,
    load_model,
    refuse_no_model,
)
from cgplan.modes import CUDAGraphMode
from cgplan.piecewise.breakable import submodules_matching
from cgplan.reports.layout import Column, Grid, TextColumn, plain_text
from cgplan.reports.records import CaptureReport
from cgplan.runner.runner import GraphRunner
from cgplan.units import counted, format_bytes, listed

_MOST_WITHOUT_GRAPHS = 4  # of the latest kinds


def graphed(
    model: Callable[..., Any] | EllipsisType = ...,
    *,
    sizes: Sequence[int] | str | None = None,
    max_size: int | None = None,
    example: Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    dynamic: Mapping[str, Mapping[int, Any]] | None = None,
    pad: Mapping[str, float] | None = None,
    max_graphs: int = 16,
    device: str | torch.device | None = None,
    compilation: Mapping[str, Any] | None = None,
    outputs: Literal["clone", "borrow"] = "clone",
    verify: Literal["off", "first", "rarely", "always"] = "rarely",
    strict: bool = False,
    ignore: Sequence[str] = (),
    grad: Literal["recompute"] | None = None,
    **others: Never,
) -> Any:
    """Runs a model or a function of tensors by captured graphs; also a decorator.

        g = cgplan.graphed(model, sizes=[1, 4, 16])
        y = g(x)

    A call returns what the model returns, within rounding. A kind's first two calls run the model's
    own code, the third captures. If weights move, the next call captures again.

    Arguments may be tensors, numbers, text, None, and pytrees and dataclasses of them. All but
    tensors are part of the kind: pass the same cache object in each call.

    Args:
        model: Absent: a decorator is returned. Of a method, each object has its own graphs.
        sizes: Capture sizes, or a ladder's name; absent: powers of two.
        max_size: A larger batch runs eagerly. Absent: that of ``sizes``, or graphs grow with the
            batches.
        example: Arguments of one call, for ``warm_up``: a tensor, a sequence, or a mapping by name.
        dynamic: Dimensions that vary, by input; parts of an argument are named ``obs.position``:
            ``{"x": {0: cgplan.Dim("batch", max=64), 1: "length"}}``. ``{}``: none. Absent:
            dimension 0 of the inputs that agree in it.
        pad: Harmless values of padding by input. Absent: copies of a row, or 0.
        max_graphs: Most graphs held; the least used go.
        device: Absent: the model's, or that of the tensors.
        compilation: More settings. ``capture_policy: eager``: the first call warms up.
        outputs: ``borrow``: valid until the next call; ``clone``: the caller's.
        verify: Replays that are compared with the model's own code, at its time and memory:
            ``off``, ``first``, ``rarely`` (1, 2, 4, 8, ...), ``always``.
        strict: Raise where a graph cannot be captured or differs.
        ignore: Paths of the model's Python values that decide nothing, such as ``model.calls``;
            ``*`` is one part. Arguments that change always count.
        grad: ``recompute``: backward runs the model's own code. Absent: it raises GradientError.

    Raises ConfigError for a wrong setting, ModelError for no model. Calls raise what the model
    raises; with ``strict`` CaptureError and NumbersError, too.
    """
    refuse_others(graphed, others, "The budget is max_graphs; other settings go into compilation.")
    settings = Settings(
        sizes=sizes,
        max_size=max_size,
        dynamic=dynamic,
        pad=pad,
        max_graphs=max_graphs,
        device=device,
        compilation=compilation,
        outputs=outputs,
        verify=verify,
        strict=strict,
        ignore=ignore,
        grad=grad,
    )
    if isinstance(example, Tensor):
        example = (example,)
    if example is not None and not isinstance(example, Sequence | Mapping):
        raise ConfigError(
            f"the example is a {type(example).__name__}",
            remedy="Give the arguments of one call: a tensor, a sequence, or a mapping by name.",
        )

    def made(model: Callable[..., Any]) -> Graphed:
        refuse_no_model(model)
        kind: Any = GraphedModule if isinstance(model, nn.Module) else Graphed
        g: Graphed = kind(model, settings)
        if isinstance(example, Mapping):
            g.warm_up(**example)
        elif example is not None:
            g.warm_up(*example)
        return g

    return made if model is ... else made(model)


class Graphed:
    """A model or a function that runs by captured graphs, as ``graphed`` promises.

    It has the model's attributes, and owns graphs, pool and static buffers.
    """

    _calls: Calls
    _learner: Learner
    _settings: Settings
    _name: str

    def __init__(self, model: Callable[..., Any], settings: Settings) -> None:
        module = module_of(model)
        compilation = settings.compilation
        if compilation.cudagraph_mode.has_mode(CUDAGraphMode.PIECEWISE):
            submodules_matching(module, compilation.splitting_modules)
        called = module.forward if module is model else model
        try:
            signature = inspect.signature(called)
        except ValueError:  # of a builtin
            signature = inspect.signature(lambda *args, **kwargs: None)  # noqa: ARG005
        by_itself = functools.partial(_forward, weakref.ref(self))
        title = getattr(model, "__qualname__", type(model).__name__)
        name = f"graphed {title.rpartition('<locals>.')[2]}"
        learner = Learner(model, signature, settings, name)
        self.__dict__.update(
            _untraced=_disable_dynamo(by_itself),  # imports Dynamo when it is called
            forward=functools.update_wrapper(by_itself, called),
            _wrapped=model,
            _module=module,
            _settings=settings,
            _name=name,
            _learner=learner,
            _calls=Calls(learner),
        )
        if module is not model:
            for attribute in functools.WRAPPER_ASSIGNMENTS:
                if hasattr(model, attribute):
                    self.__dict__[attribute] = getattr(model, attribute)
            self.__dict__["__signature__"] = signature
        known = signature.parameters
        takes_any = any(given.kind is given.VAR_KEYWORD for given in known.values())
        for argument, names in (("dynamic", settings.dynamic or {}), ("pad", settings.pad)):
            for named in names:
                if takes_any or named.partition(".")[0] in known:
                    continue
                remedy = did_you_mean(named, known) + f"Arguments are {', '.join(known)}."
                what = f"{argument} names {named!r}, which is not an argument of {name}"
                raise ConfigError(what, remedy=remedy)

    def __get__(
        self,
        owner: Any,
        kind: type | None = None,
    ) -> Any:
        if owner is None or isinstance(self._wrapped, nn.Module | MethodType | staticmethod):
            return self
        bound = MethodType(self._wrapped, owner)
        held = getattr(owner, "__dict__", None)
        if not isinstance(held, dict):
            return bound
        # a class below may have a method of the same name
        name = f"graphs of {self._wrapped.__qualname__}"
        graphs = held.get(name)
        # a copy has the first one's
        if graphs is None or graphs.made is None or graphs.made.__self__ is not owner:
            graphs = held[name] = _OfMethod()
            graphs.made = Graphed(bound, self._settings)
        return graphs.made

    def forward(
        self,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The model's output."""
        if torch.compiler.is_dynamo_compiling():
            return self._untraced(*args, **kwargs)
        return self._calls.run(args, kwargs)

    __call__ = forward

    # --- what users ask ---------------------------------------------------------------------------

    @property
    def runners(self) -> tuple[GraphRunner, ...]:
        """One for each kind with graphs, most calls first."""
        return tuple(
            sorted(self._learner.runners, key=lambda runner: runner.stats.calls, reverse=True)
        )

    @property
    def report(self) -> CaptureReport:
        """Of the kind with the most calls. Raises CgplanError before the third call."""
        report = cast(GraphRunner, self._busiest().runner).report
        kinds = len(self.runners)
        if kinds == 1:
            return report
        note = f"one of {kinds} kinds of calls with graphs; explain() lists all"
        plan = report.plan
        return report.changed(plan=plan.changed(notes=(*plan.notes, note)))

    def _busiest(self) -> Kind:
        runners = self.runners
        if not runners:
            raise CgplanError(
                f"{self._name} has no graphs",
                remedy="Warm it up, as by three calls; explain() says why calls ran eagerly.",
            )
        return next(kind for kind in self._learner.kinds if kind.runner is runners[0])

    @property
    def graph_calls(self) -> int:
        """Calls that graphs answered."""
        return self._calls.replayed

    @property
    def eager_calls(self) -> dict[str, int]:
        """Calls that the model's own code answered, by reason."""
        return dict(self._calls.eager)

    def explain(self) -> str:
        """Kinds of calls with their graphs, and why calls ran eagerly."""
        calls = self._calls
        learner = self._learner
        graphs = sum(len(runner.plan.keys) for runner in learner.runners)
        mode = self._settings.compilation.cudagraph_mode
        lines = [f"{self._name}: {graphs} of {self._settings.max_graphs} {mode} graphs"]
        lines += self._table_of_kinds()
        if learner.runners:
            nbytes = calls.pool.nbytes
            for runner in learner.runners:
                nbytes += runner.report.graph_bytes - runner.report.pool_bytes
            lines.append(f"graphs and their buffers take {format_bytes(nbytes)}")
        caches = getattr(vars(self).get("generate"), "caches", None)
        if caches:
            held = Fingerprint.of({"caches": caches}, torch.device("cpu")).tensors
            total = format_bytes(sum(tensor.nbytes for tensor in held))
            lines.append(f"memory of generate: {total} in {counted(len(caches), 'cache')}")
        told = dict(learner.notices)
        for subject, count in learner.changed.items():
            if count > 1:
                told[subject] += f"; {count} changes of {subject} freed graphs"
        lines += sorted({*told.values()} - calls.eager.keys())
        lines.append(f"graphs answered {counted(calls.replayed, 'call')}")
        for reason, count in calls.eager.most_common():
            lines.append(f"{counted(count, 'call')} ran eagerly: {reason}")
        return "\n".join(lines)

    def _table_of_kinds(self) -> Iterator[str]:
        learner = self._learner
        rows = []
        shown = [kind.notes for kind in learner.kinds if kind.stats]
        latest = learner.kinds[-_MOST_WITHOUT_GRAPHS:]
        older = 0
        for kind in reversed(learner.kinds):
            # states of one object are one row
            if not kind.stats and kind.notes in shown:
                continue
            shown.append(kind.notes)
            if not kind.stats and kind not in latest:
                older += 1
            else:
                keys = kind.runner.plan.keys if kind.runner else ()
                sizes = ", ".join(key.size for _, key in reversed(keys))
                none_yet = f"none yet ({counted(kind.first_calls, 'call')})"
                lost = "freed" if kind.stats else none_yet
                if kind.eager_reason:
                    lost = "eager"
                rows.append((sizes or lost, kind.stats and kind.stats.calls, self._notes_of(kind)))
        rows.reverse()
        common = set(rows[0][2] if len(rows) > 1 else ())
        for _, _, notes in rows:
            common &= {*notes}
        for note in sorted(common):
            yield f"all kinds: {note}"
        if rows:
            table = Grid(
                rows,
                TextColumn("sizes", "0"),
                Column("calls", "1"),
                TextColumn(
                    "kind", lambda row: "\n".join(note for note in row[2] if note not in common)
                ),
            )
            yield plain_text(table)
        if older:
            yield f"not shown: {counted(older, 'older kind')} without graphs"

    def _notes_of(self, kind: Kind) -> list[str]:
        notes = list(kind.notes)
        kinds = self._learner.kinds
        alike = [other.state for other in kinds if other.stats and other.notes == notes]
        differs = [place for place in kind.state if any(place not in state for state in alike)]
        # values and lengths
        told = [
            f"{path}: {value!s:.80}" for path, *_, value in differs if isinstance(value, str | int)
        ]
        if told:
            notes.append(listed(told, 2))
        outputs = zip_longest(kind.shapes, kind.keys, fillvalue="")
        for index, (shape, key) in enumerate(outputs):
            extents = ", ".join(map(str, shape))
            if kind.is_exact:
                extents = extents.replace(BATCH, str(kind.dims[BATCH].max))
            notes.append(f"output {index}{key}: [{extents}]")
        if True in kind.requires_grad and not self._settings.grad:
            notes.append("backward through its outputs raises GradientError")
        return notes

    def warm_up(
        self,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Make the graph for such a call; what that writes or draws is put back. Raises what the
        model raises, and InputError without arguments, or without a cache after
        ``graphed_generate``.
        """
        if "generate" in vars(self) and kwargs.keys().isdisjoint(CACHE_ARGUMENTS):
            raise InputError(
                f"{self._name} is warmed up by generate, which has its caches",
                remedy="For each number of rows call lm.generate(prompt, max_new_tokens=4, "
                "min_new_tokens=4).",
            )
        if self._learner.signature.parameters and not args and not kwargs:
            raise InputError(
                f"{self._name} is warmed up by the arguments of a call, and got none",
                remedy="Pass them for each size: g.warm_up(torch.zeros(4, 64)).",
            )
        self._calls.warm_up(args, kwargs)

    def save_config(self, path: str | Path) -> None:
        """Write ``config_text`` to a file. Raises as it does, and OutputPathError."""
        text = self.config_text()
        with writing(path):
            Path(path).write_text(text, encoding="utf-8")

    def config_text(
        self,
        target: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The configuration of the busiest kind, for `cgplan capture --config`.

        ``target`` and ``kwargs`` make the model; absent: its class, if that takes no arguments.
        Raises CgplanError without graphs; ConfigError where YAML has no form for an argument, or
        autocast was on.
        """
        kind = self._busiest()
        return config_text(
            kind, self._learner.signature, target or target_of(self._wrapped), kwargs
        )

    def recapture(self) -> None:
        """Free all graphs, and forget what was learnt of calls."""
        self._calls.recapture()

    # --- the model's outside ----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            value = getattr(self.__dict__["_wrapped"], name)
        except AttributeError as error:
            error.add_note(
                "graphed has explain(), graph_calls, eager_calls and runners (g.runners[0].stats); "
                f"of a method, its object has the rest: call {name} on the model"
            )
            raise
        if name != "generate" or not callable(value):
            return value

        @functools.wraps(value)
        def generate(*args: Any, **kwargs: Any) -> Any:
            self._learner.tell_once(
                "generate runs the model's own code. cgplan.graphed_generate(model, "
                "max_cache_len=...) sets up graphs"
            )
            return value(*args, **kwargs)

        return generate

    def __setattr__(
        self,
        name: str,
        value: Any,
    ) -> None:
        setattr(self._wrapped, name, value)  # which the forward may read
        self._learner.suspect()

    def __delattr__(self, name: str) -> None:
        delattr(self._wrapped, name)
        self._learner.suspect()

    def __reduce__(self) -> Any:
        name = getattr(self._wrapped, "__qualname__", "")
        # pickle finds it by name
        if name and getattr(sys.modules.get(self._wrapped.__module__), name, None) is self:
            return name
        made_of = self._wrapped, self._settings
        generate = vars(self).get("generate")
        return (_again, (*made_of, generate)) if generate else (type(self), made_of)


class GraphedModule(Graphed, nn.Module):
    """Graphed of a module, with its parameters and ``state_dict``."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
    ) -> None:
        nn.Module.__init__(self)
        share(self, model)
        super().__init__(model, settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
        ):
            return nn.Module.__call__(self, *args, **kwargs)
        # a microsecond faster
        return Graphed.forward(self, *args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The model's, for which pipelines ask."""
        return type(self.__dict__.get("_module", self))

    def __bool__(self) -> bool:
        return True  # also of an empty sequence

    def __len__(self) -> int:
        return len(self._module)

    def __getitem__(self, key: Any) -> Any:
        return self._module[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._module)

    def _apply(
        self,
        fn: Callable[..., Any],
        recurse: bool = True,
    ) -> Self:
        self._module._apply(fn, recurse)
        self._learner.suspect()
        return self

    def train(self, mode: bool = True) -> Self:
        self._module.train(mode)
        self.__dict__["training"] = mode
        self._learner.suspect()
        return self

    def state_dict(
        self,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The model's."""
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        self._learner.suspect()
        return self._module.load_state_dict(*args, **kwargs)


class _OfMethod:
    __graph_memory__ = True

    def __init__(self) -> None:
        self.made: Graphed | None = None

    def __reduce__(self) -> Any:
        return _OfMethod, ()


def _forward(graphs: weakref.ref[Graphed], *args: Any, **kwargs: Any) -> Any:
    # the bound method would keep its object
    return Graphed.forward(cast(Graphed, graphs()), *args, **kwargs)


_MOST_CACHES = 8
_NEW_TOKENS = 20  # of transformers' generate, without a setting
# its settings that need another cache, or return it
_OTHER_CACHES = (
    *CACHE_ARGUMENTS,
    "cache_implementation",
    "assistant_early_exit",
    "assistant_model",
    "use_mtp",
    "prompt_lookup_num_tokens",
    "custom_generate",
    "return_dict_in_generate",
)


def graphed_generate(
    model: Any,
    max_cache_len: int | None = None,
    **options: Any,
) -> Graphed:
    """Lets ``model.generate`` of transformers run by graphs; returns the graphed forward.

        cgplan.graphed_generate(lm, max_cache_len=1024)
        tokens = lm.generate(prompt, max_new_tokens=100)

    Tokens run by one graph for each number of rows, and prompts by one for each length that came
    twice before. Calls without ``past_key_values`` get a static cache, one for each of the last 8
    numbers of rows; with an encoder, one for each length and number of rows of prompts.

    Args:
        max_cache_len: Needed. In tokens, at least 1: those of the longest prompt and its answer;
            with an encoder, of the answer.
        options: As of ``graphed``, but ``dynamic``, ``sizes``, ``max_size``, ``pad`` and
            ``example``: no rows are padded.

    Raises ConfigError for other options, and for other models than those of transformers;
    ``generate`` raises InputError for more tokens than the cache holds.
    """
    known = {"max_cache_len": None, **(graphed.__kwdefaults__ or {})}
    for name in ("sizes", "max_size", "dynamic", "pad", "example"):
        del known[name]
    hint = "`sizes` and `dynamic` are not needed: each number of rows has a graph; `max_graphs` "
    refuse_others(graphed_generate, options, f"{hint}bounds them.", known)
    if type(max_cache_len) is not int or max_cache_len < 1:
        raise ConfigError(
            f"max_cache_len is {max_cache_len!r:.80}, no whole number from 1",
            remedy="Give the tokens of your longest prompt and its answer: max_cache_len=1024.",
        )
    if not hasattr(type(model), "generate") or not cache_argument(model):
        raise ConfigError(
            f"{type(model).__name__} is no model of transformers with a KV cache",
            remedy="Pass the model itself, with its LM head: `lm`, not `lm.generate`; "
            "`AutoModelForCausalLM.from_pretrained(...)`, `pipe.model`, "
            "`peft_model.get_base_model()`, or what you gave to `torch.compile` or `graphed`.",
        )
    forward = model.forward
    if isinstance(forward, Graphed):  # of an earlier call
        forward = vars(forward)["_wrapped"]
    g: Graphed = graphed(forward, dynamic={}, **options)
    compilation = vars(g)["_settings"].compilation
    is_piecewise = compilation.cudagraph_mode is CUDAGraphMode.PIECEWISE
    tracing = ""
    if is_piecewise and compilation.segments_from == "ops":
        tracing = "PIECEWISE by operators"
    if compilation.compiler != "eager":
        tracing = f"compiler {compilation.compiler}"
    if tracing:
        raise ConfigError(
            f"{tracing} traces the forward, and its cache is in no trace",
            remedy="Leave it out, or split the model by splitting_modules, such as "
            '["model.layers.*.self_attn"].',
        )
    learner = vars(g)["_learner"]
    too_long = beyond_positions(model, max_cache_len)
    if too_long:
        learner.tell_once(too_long)
    if getattr(model, "_compiled_call_impl", None):
        learner.tell_once(
            "lm.compile() has no effect: set lm.forward = torch.compile(lm.forward) before"
        )
    model.forward = g
    vars(g)["generate"] = model.generate = _Generate(model, max_cache_len)
    return g


def _again(
    forward: Callable[..., Any],
    settings: Settings,
    generate: _Generate,
) -> Graphed:
    """That of a copied model, or one for it."""
    g = generate.model.forward
    if not isinstance(g, Graphed):
        g = Graphed(forward, settings)
        vars(g)["generate"] = generate
    return g


class _Generate:
    """``generate`` with a static cache for each number of rows. Copies share none."""

    __graph_memory__ = True

    def __init__(
        self,
        model: Any,
        max_cache_len: int,
    ) -> None:
        functools.update_wrapper(self, type(model).generate)
        self.model = model
        self._max_cache_len = max_cache_len
        self.caches = dict[Any, Any]()
        self._lock = threading.Lock()
        self._thread = 0  # that generates

    def __reduce__(self) -> Any:
        return _Generate, (self.model, self._max_cache_len)

    def __call__(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *others: Any,
        **given: Any,
    ) -> Any:
        model = self.model
        learner = vars(model.forward).get("_learner")
        if learner:  # forward is not deleted
            learner.suspect()  # the first token compares everything
        places = {
            "": SimpleNamespace(**given),
            "generation_config.": generation_config,
            "lm.generation_config.": model.generation_config,
        }

        def option(name: str, default: Any = None, where: bool = False) -> Any:
            for place, settings in places.items():
                found = getattr(settings, name, None)
                if found is not None:
                    return place + name if where else found
            return default

        def run() -> Any:
            return type(model).generate(model, inputs, generation_config, *others, **given)

        ids = given.get("input_ids") if inputs is None else inputs
        prompt = option("inputs_embeds", ids)
        reason = self._why_eager(prompt, option)
        if reason:
            caches = map(given.get, CACHE_ARGUMENTS)
            if any(getattr(cache, "is_compileable", cache is not None) for cache in caches):
                self._tell(
                    "generate uses the cache that it is given: a new one has no graphs until its "
                    "third decode step"
                )
                return run()
            self._tell(reason)
            with setting(vars(model.forward)["_calls"].own_code_reason, reason):
                return run()
        if option("cache_implementation"):
            given["cache_implementation"] = None
        length = prompt.shape[1]
        encoded = 0
        if model.config.is_encoder_decoder:
            encoded = length
            start = torch.tensor(
                option("decoder_start_token_id", option("bos_token_id", -1)), device=prompt.device
            )
            begin = option("decoder_input_ids", start.expand(len(prompt))[:, None])
            # BART would ask the device for the length of its own
            given.setdefault("decoder_attention_mask", begin.new_ones(begin.shape))
            # transformers may add the start token, to the mask, too
            length = begin.shape[1] + int((begin[:, 0] != start).all())
        refuse = self._refuses_length(length, option)
        if refuse:
            given["custom_generate"] = refuse  # after transformers has looked at the arguments
            return run()
        if generation_config is None:
            given.setdefault("disable_compile", True)
        else:
            generation_config = copy.copy(generation_config)
            generation_config.disable_compile = True
        with self._lock:
            given[str(cache_argument(model))] = self._cache_of(
                len(prompt) * option("num_return_sequences", 1), encoded
            )
            self._thread = threading.get_ident()
            try:
                return run()
            finally:
                self._thread = 0

    def _refuses_length(
        self,
        length: int,
        option: Callable[..., Any],
    ) -> Callable[..., Never] | None:
        more = option("max_new_tokens")
        longest = option("max_length")
        asked = f"max_length is {longest}"
        if more or not longest:
            asked = f"max_new_tokens is {more or f'{_NEW_TOKENS}, the default of transformers'}"
            longest = length + (more or _NEW_TOKENS)
        longest -= 1  # the last token is not cached
        begun = "answer begins with" if self.model.config.is_encoder_decoder else "prompt has"
        hint = ""
        if 0 < self._window < longest:
            hint = (
                f" (above {self._window}, its window, this model has no graphs here: "
                "cgplan.load_model serves longer texts: docs/graphed.md, Beyond the window)"
            )

        def refuse(*_: Any, **__: Any) -> Never:
            raise InputError(
                f"the {begun} {length} tokens, and {asked}: {longest} to cache, and "
                f"max_cache_len is {self._max_cache_len}",
                remedy=f"Ask for fewer by max_new_tokens, set a larger max_cache_len{hint}, or "
                'pass cache_implementation="dynamic" for eager code.',
            )

        return refuse if longest > self._max_cache_len else None

    def _why_eager(self, prompt: Any, option: Callable[..., Any]) -> Any:
        model = self.model
        text = model.config.get_text_config(decoder=True)
        without = {
            "num_beams": option("num_beams", 1) > 1,
            # as from a logits processor
            "another one around it": self._thread == threading.get_ident(),
            "use_cache=False": not option("use_cache", True),
            "autocast": torch.is_autocast_enabled(model.device.type),  # a static cache: one dtype
            "alibi": getattr(model.config, "alibi", False),  # Falcon's mask has the prompt's length
            "no input_ids": prompt is None or model.main_input_name != "input_ids",
            f"input_ids of type {type(prompt).__name__} (pass a tensor)": not isinstance(
                prompt, Tensor | None
            ),
            # its tokens are others with a static cache
            "flex_attention": text._attn_implementation == "flex_attention",
            # transformers says which models may have static caches
            f"_can_compile_fullgraph=False of {type(model).__name__}": not getattr(
                model, "_can_compile_fullgraph", True
            ),
        }
        other = []
        for name in _OTHER_CACHES:
            value = option(name)
            if value not in (None, False, "static"):  # an empty cache counts as false
                shown = repr(value) if isinstance(value, str | int) else type(value).__name__
                other.append(f"{option(name, where=True)}={shown}")
        other += filter(without.get, without)
        hint = "; eager tokens are right: docs/graphed.md, Options and models without graphs"
        if not other and any(self._new_cache().is_sliding):  # they count tokens in Python
            other = ["sliding or chunked attention"]
            hint = "; no max_cache_len has graphs"
            if self._window:
                hint = (
                    f"; max_cache_len={self._window}, the window, has graphs; for longer texts: "
                    "docs/graphed.md, Beyond the window"
                )
        if not other and option("guidance_scale", 1) != 1:
            self._tell("with guidance_scale the unconditional half runs eagerly")
        return other and (
            f"generate with {' and '.join(other)} does not use the cache that "
            f"graphed_generate keeps for graphs{hint}"
        )

    @property
    def _window(self) -> int:
        config = self.model.config.get_text_config(decoder=True)
        return getattr(config, "sliding_window", None) or 0

    def _tell(self, text: str) -> None:
        vars(self.model.forward)["_learner"].tell_once(text)

    def _new_cache(self, encoded: int = 0) -> Any:
        from transformers.cache_utils import (
            EncoderDecoderCache,
            StaticCache,
            StaticLayer,
            StaticSlidingWindowLayer,
        )

        longest = self._max_cache_len
        cache: Any = StaticCache(self.model.config, max_cache_len=longest)
        for at, layer in enumerate(cache.layers):
            # each text is within the window
            if type(layer) is StaticSlidingWindowLayer and longest <= self._window:
                cache.layers[at] = StaticLayer(longest)
        if encoded:
            of_prompt = StaticCache(self.model.config, max_cache_len=encoded)
            cache = EncoderDecoderCache(cache, of_prompt)
        return cache

    def _cache_of(self, rows: int, encoded: int) -> Any:
        is_inference = torch.is_inference_mode_enabled()  # its tensors are not written outside
        key = rows, encoded, self.model.dtype, self.model.device, is_inference
        cache = self.caches.pop(key, None)
        if cache is None:
            if len(self.caches) >= _MOST_CACHES:
                oldest = self.caches.pop(next(iter(self.caches)))
                vars(self.model.forward)["_calls"].forget_object(oldest)
                self._tell(
                    f"generate keeps {_MOST_CACHES} caches with graphs, by number of rows and "
                    "inference_mode, and got more: fill batches up to a few numbers of rows"
                    f"{', and pad prompts to a few lengths' * bool(encoded)}"
                )
            cache = self._new_cache(encoded)
        self.caches[key] = cache  # the last one used
        cache.reset()
        return cache


_OF_GRAPHED = {
    "capture_policy",
    "strict",
    "ignore",
    "verify",
    "address_check",
}


class Name(str):
    """The name of a tensor, in its place."""


def as_called(
    target: str | None = None,
    *,
    call: Mapping[str, Any],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """The model with tensors by name. ``call``: constants, lists, mappings, `{$tuple: [...]}`, and
    `$name` for a tensor.
    """
    if target is None:
        raise ConfigError(
            "the configuration does not say what makes the model",
            remedy="Add model.kwargs.target: my_model.py:build.",
        )
    model = load_model(target, kwargs, device=torch.get_default_device())
    marks = dict[str, Tensor]()

    def filled(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("$"):
            return marks.setdefault(value[1:], torch.empty(0))
        if isinstance(value, list):
            return [filled(item) for item in value]
        if not isinstance(value, dict):
            return value
        items = {name: filled(item) for name, item in value.items()}
        return tuple(items["$tuple"]) if items.keys() == {"$tuple"} else items

    signature = inspect.signature(getattr(model, "forward", model))
    arguments = OrderedDict((name, filled(value)) for name, value in call.items())
    given = inspect.BoundArguments(signature, arguments)
    form, ordered = call_form(given.args, given.kwargs)
    made = ByName(
        model,
        len(given.args),
        given.kwargs,
        tuple(form),
    )
    name_of = {id(mark): name for name, mark in marks.items()}
    made.names = tuple(name_of[id(tensor)] for tensor in ordered)
    return made


def written(
    value: Any,
    path: str,
) -> Any:
    """As ``as_called`` reads it. Raises ConfigError where YAML has no form for it."""
    kind = type(value)
    if isinstance(value, Name):
        return f"${value}"
    if kind in (list, tuple):
        items = [written(item, f"{path}.{at}") for at, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: written(item, f"{path}.{key}") for key, item in value.items()}
    if kind in CONSTANTS and not str(value).startswith("$"):
        return value
    raise ConfigError(
        f"argument {path} is {value!r:.80}, of {kind.__name__}, which a YAML file cannot hold",
        remedy="`graphed` a function that makes the argument itself, as `cgplan examples copy "
        "transformers_qwen3_0_6b` does with a static cache.",
    )


def target_of(model: object) -> str | None:
    kind = type(model)
    found = getattr(sys.modules[kind.__module__], kind.__qualname__, None)
    if found is not kind or kind.__module__ == "__main__":
        return None
    if not isinstance(model, nn.Module):
        return None
    if kind.__init__ is not nn.Module.__init__ and inspect.signature(kind).parameters:
        return None
    return f"{kind.__module__}:{kind.__qualname__}"


def config_text(
    kind: Kind,
    signature: inspect.Signature,
    target: str | None,
    kwargs: Mapping[str, Any] | None,
) -> str:
    tail = kind.form[-1]
    if tail.autocast:
        raise ConfigError(
            "calls were made under torch.autocast, which a file cannot hold",
            remedy="Enter torch.autocast in the model's forward, and call it outside.",
        )
    assert kind.runner
    values = kind.runner.config.model_dump(
        mode="json",
        exclude_defaults=True,
        exclude={
            "dims": {"__all__": {"name"}},
            "compilation": _OF_GRAPHED,
        },
    )
    values["device"] = "auto"
    made_by = dict[str, Any]()
    if target:
        made_by["target"] = target
    if kwargs:
        made_by["kwargs"] = dict(kwargs)
    args, keywords = kind.forward.arguments(map(Name, kind.specs))
    call = arguments_by_name(signature, args, keywords)
    key = "model.target"
    if list(call.items()) != [(name, name) for name in kind.specs]:
        if target is not None:
            file = target.partition(":")[0]
            if file.endswith(".py"):
                made_by["target"] = str(Path(target).resolve())
        made_by["call"] = {name: written(value, name) for name, value in call.items()}
        made_by = {"target": "cgplan.drop_in:as_called", "kwargs": made_by}
        key = "model.kwargs.target"
    values["model"] = made_by | values.get("model", {})
    notes = ["Written by cgplan, which saw calls of this kind:", *kind.notes]
    captured = ", ".join(key.size for _, key in kind.runner.plan.keys)
    notes += [
        f"To correct: dims.{name}.max, a guess from calls; captured: {captured}"
        for name in sorted(kind.grows)
    ]
    if target is None:
        notes.append(
            f"To fill in: {key}, a function that returns the model, such as my_model.py:build"
        )
    text = "".join(f"# {note}\n" for note in notes)
    return text + yaml.safe_dump(
        values,
        sort_keys=False,
        default_flow_style=None,
        width=110,
    )
