"""Costs of graphs: measured on the device, or estimated without a GPU from fake tensors.

Note [Chunks]
    The driver takes memory in chunks. Between readings ``n`` nodes and ``b`` bytes apart a node
    takes ``(b - chunk) / n`` to ``(b + chunk) / n`` bytes. Those before the first chunk do not
    count: freed graphs leave room.
"""

import itertools
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.backend import gc_paused
from cgplan.backends.blame import blamed_line
from cgplan.backends.context import CaptureScope, forward_context
from cgplan.backends.host_sync import (
    ALLOCATIONS,
    Args,
    DispatchMode,
    Function,
    Kwargs,
    Refusals,
    host_guard,
    implemented_in_python,
    is_composite,
    refuse_host,
    storages_of,
    tensors_in,
)
from cgplan.backends.replacing import replaced
from cgplan.buffers.static import example_batch
from cgplan.captures.capturer import Capturer
from cgplan.captures.failures import drop_locals, explain_eager_failure, raise_caused
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.config import Config
from cgplan.errors import CaptureError
from cgplan.graphs.wrapper import CUDAGraphWrapper
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.subset import restricted
from cgplan.piecewise.breakable import standing_in
from cgplan.piecewise.routes import SplitRoute, choose_route
from cgplan.planning import Plan
from cgplan.pricing import (
    NODE_BYTES,
    Allocation,
    GraphCosts,
    MeasuredKey,
    Recording,
    estimated_costs,
    representative_keys,
)
from cgplan.reports import GraphRecord

_NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)


def estimate(config: Config, model: Function, plan: Plan) -> GraphCosts:
    """Costs from representative keys on fake tensors, without temporaries of compiled operators.

    Args:
        model: On the CPU, or built in the block of ``fake_tensors`` around this call; tensors that
            it keeps become fake.

    Raises:
        CaptureError, ModelError: the model fails, or needs values of tensors.
    """
    is_compiled = config.compilation.compiler == "inductor"
    note = "recorded without inductor, which needs less" if is_compiled else ""
    config = config.with_values("compilation", compiler="eager", compile_shapes="static")
    with gc_paused(), detect_fake_mode() or fake_tensors() as fake, torch.no_grad():
        keys = representative_keys(plan.keys, plan.max_num_seqs)
        recorded = [
            _recorded(
                config,
                model,
                plan,
                key,
                fake,
            )
            for key in keys
        ]
        return estimated_costs(recorded, config, note)


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """A block in which new tensors have no memory and no values."""
    # Module.to exchanges no fake parameter with weak references, and torch keeps such
    unseen = SimpleNamespace(getweakrefs=lambda _: ())
    with warnings.catch_warnings(), replaced(torch.utils, weakref=unseen):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            yield fake


class AllocationLog(DispatchMode):
    """Logs a forward's allocations in a graph pool, of eager pieces their results, as a breakable
    capture.
    """

    def __init__(
        self,
        fake: FakeTensorMode,
        *,
        refuses: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Allocation] = []
        self.operators = 0
        self.eager_pieces = 0
        self.is_recording = True
        self.refusals = Refusals()
        self._fake = fake
        self._refuses = refuses
        self.hidden = Counter[str]()
        self._inside = ""
        self._held: dict[int, int] = {}  # bytes of blocks taken inside
        self._numbers = itertools.count()

    def run(
        self,
        route: SplitRoute,
        inputs: dict[str, Any],
    ) -> None:
        def in_wrapper(
            wrapper: CUDAGraphWrapper,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            is_segment = wrapper.runtime_mode is CUDAGraphMode.PIECEWISE
            with replaced(self, is_recording=self.is_recording or is_segment):
                return wrapper.runnable(*args, **kwargs)

        with ExitStack() as stack:
            if route.name == "full":
                stack.enter_context(host_guard(self.refusals))
            elif route.name == "wrappers":
                stack.enter_context(replaced(self, is_recording=False))
                stack.enter_context(replaced(CUDAGraphWrapper, __call__=in_wrapper))
            else:
                stack.enter_context(standing_in(self))
            if route.splitter:
                route.splitter.capture = self
                route.warm(**inputs)
                return
            stack.enter_context(self)
            route.forward(**inputs)

    def add_named(
        self,
        _: str,
        function: Function,
        args: Any,
        kwargs: Any,
        **__: Any,
    ) -> Any:
        self.eager_pieces += 1
        with replaced(self, is_recording=False):
            output = function(*args, **kwargs)
        self._take(output, set(storages_of(tensors_in((args, kwargs)))))
        return output

    def see(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if implemented_in_python(func, "CPU"):
            cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
            with replaced(self, _inside=self._inside or func._schema.name), self:
                result = func.redispatch(cpu, *args, **kwargs)
            if not self._inside:
                self.events += [Allocation(*item) for item in self._held.items()]
                self._held.clear()
            return result
        if is_composite(func, "CPU"):  # in inference mode these come whole
            with self:
                return func.decompose(*args, **kwargs)
        if not self.is_recording:
            return func(*args, **kwargs)
        if self._refuses:
            refuse_host(func, args, kwargs, self.refusals)
        args, kwargs = tree_map_only(
            torch.Tensor,
            lambda given: given if isinstance(given, FakeTensor) else self._fake.from_tensor(given),
            (args, kwargs),
        )
        # a graph copies constants of Python code
        is_constant = func is torch.ops.aten.lift_fresh.default
        given = set() if is_constant else set(storages_of(tensors_in((args, kwargs))))
        output = func(*args, **kwargs)
        is_fresh = self._take(output, given)
        writes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        is_view = not is_fresh and not writes and bool(tensors_in(output))
        name = func._schema.name.removeprefix("aten::")
        self.operators += not is_view and name not in ALLOCATIONS
        return output

    def _take(
        self,
        output: Any,
        known: set[int],
    ) -> bool:
        is_fresh = False
        for tensor in tensors_in(output):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                is_fresh = True
                block = next(self._numbers)
                if self._inside:
                    self._held[block] = storage.nbytes()
                else:
                    self.events.append(Allocation(block, storage.nbytes()))
                weakref.finalize(storage, self._give_back, block).atexit = False
        return is_fresh

    def _give_back(self, block: int) -> None:
        if block not in self._held:
            self.events.append(Allocation(block, None))
            return
        most = max(self.hidden[self._inside], sum(self._held.values()))
        self.hidden[self._inside] = most
        del self._held[block]


def _recorded(
    config: Config, model: Function, plan: Plan, key: Key, fake: FakeTensorMode
) -> Recording:
    mode, descriptor = key
    tokens = descriptor.num_tokens
    reqs = min(tokens, plan.max_num_seqs) if descriptor.num_reqs is None else descriptor.num_reqs
    specs = config.tensors_at(descriptor.sizes)
    tensors = example_batch(specs, tokens, reqs, torch.device("cpu"))
    inputs = {name: tensors[name] for name in config.inputs}
    metadata = {name: tensors[name] for name in config.metadata}
    route = SplitRoute("full", model, model, model)
    with ExitStack() as stack:
        try:
            context = stack.enter_context(forward_context(CUDAGraphMode.NONE, descriptor, metadata))
            first = AllocationLog(fake, refuses=mode is CUDAGraphMode.FULL)
            with first, standing_in(first):
                model(**inputs)  # makes tensors that are not in the pool
            if mode is CUDAGraphMode.PIECEWISE:
                backend = select_backend("cpu")
                route = choose_route(
                    plan,
                    config,
                    model,
                    backend,
                    lambda: first.eager_pieces > 0,
                )
            context.derived = {}
            log = AllocationLog(fake)
            log.run(route, inputs)
        except Exception as error:
            batch = f"{mode} {descriptor}"
            if isinstance(error, _NEEDS_VALUES):
                raise CaptureError(
                    f"an estimate of {batch} runs the model without values of tensors, at "
                    f"{blamed_line(error.__traceback__)}: {type(error).__name__}: {error}",
                    remedy="Use --costs measure, or torch.library.register_fake for an operator.",
                ) from error
            raise_caused(explain_eager_failure(error, batch, model, config.inputs), error)
    if log.refusals.first:  # the forward caught it
        raise log.refusals.first
    return Recording(
        mode,
        descriptor.has_lora,
        descriptor.elements,
        log.operators,
        tuple(log.events),
        log.hidden,
    )


FEWEST_CHUNKS = 4
FEWEST_CAPTURES = 16
MOST_CAPTURES = 48


def calibrate(
    config: Config, model: Callable[..., Any], backend: GraphBackend, plan: Plan
) -> GraphCosts:
    """Capture representative keys of a plan, and free them. Raises as CaptureSession.run.

    Each key is captured twice: first captures also trace and load kernels.
    """
    keys = representative_keys(plan.keys, plan.max_num_seqs)
    backend.release_cached()
    reserved = backend.memory().reserved
    graphs = ModelGraphs(restricted(plan, keys, config), config, model, backend)
    capturer = Capturer(graphs)
    pools: dict[CUDAGraphMode, dict[int, int]] = {mode: {} for mode, _ in keys}
    records = {}
    workspace = 0
    once = 0.0
    try:
        graphs.choose_route()
        with graphs.rehearsing(), backend.session(), torch.no_grad():
            for key in keys:
                first = _captured(graphs, capturer, key)
                graphs.drop_all()
                if backend.counts_driver_bytes:
                    taken = backend.memory().reserved - reserved
                    own = graphs.buffers.nbytes + graphs.copied_bytes
                    workspace = max(workspace, taken - own)
                again = _captured(graphs, capturer, key)
                records[key] = again
                once += max(first.seconds - again.seconds, 0.0)
                mode, descriptor = key
                size = descriptor.elements
                most = pools[mode].get(size, 0)
                pools[mode][size] = max(most, graphs.pools.nbytes)
                graphs.drop_all()
            rates = _driver_rates(graphs, capturer, keys)
            graphs.buffers.refill()
            backend.synchronize()
    except BaseException as error:
        drop_locals(error)
        raise
    finally:
        graphs.free()
    environment = backend.environment(plan.config_hash)
    measured = [
        MeasuredKey(
            mode,
            descriptor.num_active_loras,
            descriptor.elements,
            rates[mode] * (record.nodes or 1),
            record.seconds,
        )
        for (mode, descriptor), record in records.items()
    ]
    return GraphCosts(
        measured,
        {mode: list(sizes.items()) for mode, sizes in pools.items()},
        config,
        source=f"measured on {environment.device}, {environment.date}: {len(keys)} keys, captured "
        "and freed",
        workspace_bytes=workspace,
        once_seconds=once,
    )


def _captured(graphs: ModelGraphs, capturer: Capturer, key: Key) -> GraphRecord:
    found = capturer.capture(key)
    if not isinstance(found, GraphRecord):
        graphs.drop_all()
        found = capturer.capture(key)
    assert isinstance(found, GraphRecord), "a second try has a warm-up"
    return found


def _driver_rates(
    graphs: ModelGraphs,
    capturer: Capturer,
    keys: Sequence[Key],
) -> dict[CUDAGraphMode, float]:
    """Bytes of a node by mode (of a key if nodes are not counted)."""
    backend = graphs.backend
    scope = graphs.scope
    held = []
    rates = {mode: 0.0 for mode, _ in keys}
    if not backend.counts_driver_bytes:
        return rates
    try:
        # graphs of other modes stay: freed memory would hide the next mode's
        for mode in rates:
            of_mode = [key for key in keys if key[0] is mode]
            key = min(of_mode, key=lambda key: key[1].elements)
            readings = list[tuple[int, int]]()
            nodes = nbytes = 0
            chunks = since = 0
            while len(readings) < MOST_CAPTURES:
                if chunks >= FEWEST_CHUNKS and since >= FEWEST_CAPTURES:
                    break
                # wrappers capture a key again in another scope
                graphs.scope = CaptureScope(scope.pool, backend, address_check=scope.address_check)
                captured = _captured(graphs, capturer, key)
                held += graphs.scope.entries
                growth = max(captured.driver_bytes or 0, 0)
                nodes += captured.nodes or 1
                nbytes += growth
                chunks += growth > 0
                since += nbytes > 0
                readings.append((nodes, nbytes))
            rates[mode] = bytes_per_node(readings)
        return rates
    finally:
        graphs.drop_all()
        for entry in held:
            for graph in entry.segments:
                backend.reset(graph)
        backend.release_cached()
        graphs.scope = scope


def bytes_per_node(readings: Sequence[tuple[int, int]]) -> float:
    """See Note [Chunks]; readings are (nodes, bytes) so far."""
    points = [reading for reading in readings if reading[1]]
    if not points:
        return 0.0
    first_nodes, first_bytes = points[0]
    last_nodes, last_bytes = points[-1]
    growths = [first_bytes]
    for (_, before), (_, after) in pairwise(points):
        if after > before:
            growths.append(after - before)
    chunk = math.gcd(*growths)
    least = 0.0
    most = math.inf
    for (nodes_before, before), (nodes_after, after) in combinations(points, 2):
        nodes = nodes_after - nodes_before
        nbytes = after - before
        least = max(least, (nbytes - chunk) / nodes)
        most = min(most, (nbytes + chunk) / nodes)
    if least > most:  # chunks differ
        return (last_bytes - first_bytes) / (last_nodes - first_nodes)
    if len(growths) < FEWEST_CHUNKS:
        return min(max(NODE_BYTES, least), most)
    return (least + most) / 2
