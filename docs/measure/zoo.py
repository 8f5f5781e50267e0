"""The models of zoo.yaml with random weights, each captured in every way, beside eager code and what torch offers.

    python docs/measure/zoo.py [--scale tiny|real] [--only bert,qwen*] [--ways FULL,PIECEWISE] [--out FOLDER] [--resume]
                               [--sizes 1,4,8] [--jobs 14] [--devices 0,1] [--timeout 900] [--limit 500]
                               [--report docs/zoo.md] [--html zoo.html]
    python docs/measure/zoo.py --out FOLDER --only "" --report FILE --html FILE     the pages alone, from all.json there

Nothing is downloaded: configurations alone make the models. A row of a batch is one sequence, image or molecule. Each
model runs in a process of its own and writes FOLDER/NAME.json and NAME.log, so a crash ends that model alone; all.json
there has all of them. All ways of a model stand ready in one process and are timed in turns. With several jobs, models
compile side by side, and one at a time is timed on each device. Medians; device time with calls queued one after
another, host time until a call on an idle device returned. On a CPU graphs are those of the tape: what is captured and
whether it is right is of interest then, times are not.
"""

import argparse
import difflib
import fcntl
import fnmatch
import importlib
import json
import math
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import yaml
from torch import nn
from torch._inductor.utils import fresh_inductor_cache
from torch.utils._pytree import tree_leaves, tree_map_only

import cgplan
from cgplan.backends import select_backend
from cgplan.buffers.compare import deviation
from cgplan.buffers.static import example_batch
from cgplan.measure.bench import Baseline, BenchBatch, Comparison, bare, eager, reduce_overhead, used_bytes
from cgplan.modes import BatchDescriptor
from cgplan.reports.html import Page, Section, chart, html_of, table_of
from cgplan.runner import auto
from cgplan.units import counted, format_microseconds, format_ratio

TOLERANCES = {"float32": 2e-3, "bfloat16": 5e-2}  # of the largest value of eager's output

# --- models -----------------------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """A model of another library: the tensors among its outputs that have a row for each row of the batch."""

    KEYS = (
        "logits", "last_hidden_state", "encoder_last_hidden_state", "pooler_output", "image_embeds", "text_embeds",
        "pred_boxes", "prediction_output", "prediction_outputs", "action_preds", "sample",
    )  # fmt: skip

    def __init__(self, inner, **fixed):
        super().__init__()
        self.inner, self.fixed = inner, fixed

    def forward(self, **inputs):
        output = self.inner(**inputs, **self.fixed)
        if isinstance(output, torch.Tensor):
            return output
        found = {key: getattr(output, key, None) for key in self.KEYS}
        return {key: value for key, value in found.items() if value is not None}


class Policy(nn.Module):
    """Actor and critic of a robot's policy: normalised observations, a trunk, mean and spread of actions, a value."""

    def __init__(self, observations=48, actions=12, width=256):
        super().__init__()
        self.register_buffer("mean", torch.randn(observations))
        self.register_buffer("spread", torch.rand(observations) + 0.5)
        layers = [nn.Linear(observations, width), nn.ELU(), nn.Linear(width, width), nn.ELU(), nn.LayerNorm(width)]
        self.trunk, self.actor, self.critic = nn.Sequential(*layers), nn.Linear(width, 2 * actions), nn.Linear(width, 1)

    def forward(self, observations):
        hidden = self.trunk(((observations - self.mean) / self.spread).clamp(-5, 5))
        mean, spread = self.actor(hidden).chunk(2, -1)
        return {"action": mean.tanh(), "spread": spread.clamp(-5, 2).exp(), "value": self.critic(hidden)[:, 0]}


class Atoms(nn.Module):
    """An interatomic potential: messages along edges, energies of molecules, and forces by autograd where asked for.

    A row is a molecule of a fixed number of places for atoms and edges. Species 0 is a place without an atom, and an
    edge from an atom to itself is one that is not there.
    """

    def __init__(self, width=64, layers=3, basis=16, forces=False):
        super().__init__()
        self.forces, self.embedding = forces, nn.Embedding(10, width)
        self.register_buffer("centers", torch.linspace(0, 5, basis))
        self.filters = nn.ModuleList(nn.Linear(basis, width) for _ in range(layers))
        self.updates = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(layers))
        self.readout = nn.Linear(width, 1)

    def energies(self, species, positions, edges):
        count, places = species.shape
        offsets = torch.arange(count, device=edges.device)[:, None] * places
        source, target = ((edges[..., side] + offsets).flatten() for side in (0, 1))
        there = ((source != target) & (species.flatten()[source] > 0) & (species.flatten()[target] > 0))[:, None]
        flat = positions.reshape(-1, 3)
        lengths = (flat[source] - flat[target]).square().sum(-1, keepdim=True).add(1e-6).sqrt()
        radial = torch.exp(-(lengths - self.centers).square()) * there
        hidden = self.embedding(species.flatten())
        for weights, update in zip(self.filters, self.updates, strict=True):
            messages = hidden[source] * weights(radial) * there
            hidden = hidden + update(torch.zeros_like(hidden).index_add(0, target, messages))
        return (self.readout(hidden)[:, 0] * (species.flatten() > 0)).reshape(count, places).sum(-1)

    def forward(self, species, positions, edges):
        if not self.forces:
            return self.energies(species, positions, edges)
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energies = self.energies(species, positions, edges)
            (slope,) = torch.autograd.grad(energies.sum(), positions)
        return energies.detach(), -slope


@dataclass(frozen=True)
class Model:
    """One model of zoo.yaml, which says what the fields are."""

    name: str
    family: str
    make: str
    inputs: dict
    tiny: dict = field(default_factory=dict)
    real: dict = field(default_factory=dict)
    library: str = "transformers"
    fixed: dict = field(default_factory=dict)
    split: dict = field(default_factory=dict)
    dtype: str = "float32"

    def build(self, scale, dtype):
        """The model with random weights on the current default device; ImportError where a library lacks it."""
        config = self.real if scale == "real" else self.tiny
        if self.library == "here":
            return globals()[self.make](**config)
        if self.library == "decode":
            from cgplan.models import hf

            length = 256 if scale == "real" else 64
            return hf.build({"model_type": self.make, **config}, max_cache_len=length, dtype=dtype)
        try:
            library = importlib.import_module(self.library)
            made = partial(library.create_model, self.make) if self.library == "timm" else getattr(library, self.make)
        except (ImportError, AttributeError, RuntimeError) as error:  # diffusers raises the last where an import fails
            raise ImportError(f"{self.library} is missing or has no {self.make}: {error}") from error
        inner = made(made.config_class(**config)) if self.library == "transformers" else made(**config)
        return Rows(inner, **self.fixed)

    def input(self, text, scale):
        """The Input of one line of ``inputs``."""
        kind, *dims = at(text, scale).split()
        spec = {"dtype": "int64", "pad": 0}
        if kind == "float":
            spec = {"dtype": at(self.dtype, scale), "pad": 0}
        elif kind == "below":
            spec["example"] = [0, int(dims.pop(0))]
        elif kind == "positions":
            spec |= {"pad": -1, "example": "arange"}
        else:
            spec |= {"pad": 1, "example": 1 if kind == "mask" else [2, 60]}
        return {"shape": ["num_tokens", *map(int, dims)], **spec}


def at(text, scale):
    """A text of zoo.yaml with the side of its pairs that a scale has."""
    return re.sub(r"(\w+)/(\w+)", r"\2" if scale == "real" else r"\1", text)


def read_models():
    """Models by name."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return {name: Model(name, **{**table["families"][row["family"]], **row}) for name, row in table["models"].items()}


# --- one model, in its own process ------------------------------------------------------------------------------------


def graphed(**compilation):
    """A way that captures the model with cgplan, for the sizes of its batches."""

    def prepare(bench, way):
        split = bench.zoo.model.split if compilation.get("cudagraph_mode") == "PIECEWISE" else {}
        sizes = [batch.size for batch in bench.batches]
        runner = bench.zoo.capture(bench.runner.model, sizes, **compilation, **split)
        bench.zoo.runners[way.record.name] = runner
        way.undo.callback(runner.close)
        bench.first_calls(way, lambda batch: lambda: runner(**batch.tensors))

    return prepare


def one_line(bench, way):
    """``cgplan.graphed``, which is told nothing."""
    call = cgplan.graphed(bench.runner.model)
    way.undo.callback(call.recapture)
    bench.first_calls(way, lambda batch: lambda: call(**batch.tensors))
    for batch in 2 * bench.batches:  # a kind's third call captures
        call(**batch.tensors)
    served = {key.num_tokens for runner in call.runners for _, key in runner.plan.keys}
    if not served.issuperset(batch.size for batch in bench.batches):
        way.note = call.explain()


WAYS = {
    "eager": eager,
    "FULL": graphed(),
    "PIECEWISE": graphed(cudagraph_mode="PIECEWISE"),
    "dynamic": graphed(compiler="inductor", compile_shapes="dynamic"),
    "inductor": graphed(compiler="inductor"),
    "AUTO": graphed(cudagraph_mode="AUTO"),
    "graphed": one_line,
    "bare": bare,
    "reduce-overhead": reduce_overhead,
}
GRAPHED = [name for name in WAYS if name != "eager"]
BY_SIZE = {"inductor", "bare", "reduce-overhead"}  # each of their sizes costs as much: they get those that are timed
RUNS = {
    "eager": "the model's own code",
    "FULL": "one graph of cgplan for each size",
    "PIECEWISE": "graphs of cgplan with eager pieces between them",
    "dynamic": "FULL of what torch's inductor compiled once for all sizes (`compile_shapes: dynamic`)",
    "inductor": "FULL of what inductor compiled for each timed size (`compiler: inductor`)",
    "AUTO": "the fastest of cgplan's ways; it times them in turn, so its seconds include waits",
    "graphed": "`cgplan.graphed`",
    "bare": "`torch.cuda.graph` by hand, for the timed sizes",
    "reduce-overhead": '`torch.compile(mode="reduce-overhead")`, for the timed sizes',
}
WORDS = {  # the way that may have the word; None: any
    "`equal` | equal to the model's own code bit for bit, also for a padded batch between the sizes": None,
    "`~9e-02` | the largest difference, within the rounding of the dtype": None,
    "`WRONG 5e-01` | a larger one; where reduce-overhead differs as much, the cause is inductor's rounding: a mixture "
    "of experts chooses other experts where values are nearly equal": None,
    "`refused` | the capture failed: the last section says why": None,
    "`part` | torch left out some of its graphs": "reduce-overhead",
    "`eager` | it captured nothing, as no graph is faster": "AUTO",
    "`no basis` | not compared: the outputs have another form, or differ from run to run": None,
    "`-` | not measured": None,
}


@contextmanager
def alone(path, waits):
    """A block that one process at a time is in. A process that dies in it frees it, which a semaphore would not do.

    Args:
        path: A file, the same for all that share a device.
        waits: Shared memory, 1 while this process waits.
    """
    with path.open("a") as file:
        waits.value = 1
        fcntl.flock(file, fcntl.LOCK_EX)
        waits.value = 0
        yield


class Zoo:
    """One model in all ways.

    Attributes:
        record: What becomes its JSON; written before each step, so that a crash leaves what was known.
        runners: Of the ways that cgplan captured.
        turn: A block in which no other model is timed on the device.
        caches: Those of inductor for the way that is prepared.
    """

    def __init__(self, model, options, turn):
        self.model, self.options, self.turn, self.runners, self.caches = model, options, turn, {}, ExitStack()
        self.path, self.backend = options.out / f"{model.name}.json", select_backend(options.device)
        self.dtype = at(model.dtype, options.scale)
        self.record = {"name": model.name, "family": model.family, "scale": options.scale, "dtype": self.dtype}
        environment = self.backend.environment()
        self.record |= {key: getattr(environment, key) for key in ("backend", "device", "torch", "cgplan", "date")}
        self.record |= {"sizes": options.sizes, "timed": options.timed, "jobs": options.jobs, "ways": {}}

    def save(self, step=None, **more):
        """Write what is known, with the step that is about to begin."""
        print(f"== {step}", flush=True)
        self.record |= {"error": step and f"ended during: {step}", **more}
        self.path.write_text(json.dumps(self.record, indent=1))

    def capture(self, module, sizes, **compilation):
        inputs = {name: self.model.input(text, self.options.scale) for name, text in self.model.inputs.items()}
        return cgplan.capture(
            module,
            inputs,
            compilation={"cudagraph_capture_sizes": sizes, **compilation},
            scheduler={"max_num_seqs": max(sizes), "max_num_batched_tokens": max(sizes)},
            device=str(self.backend.device),
        )

    def build(self):
        """The model; zeros among its parameters would hide what is computed, and become random."""
        torch.manual_seed(0)
        torch.set_default_dtype(getattr(torch, self.dtype))
        try:
            with self.backend.device:
                module = self.model.build(self.options.scale, self.dtype)
        finally:
            torch.set_default_dtype(torch.float32)
        for parameter in module.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
        self.record["weight_bytes"] = sum(parameter.nbytes for parameter in module.parameters())
        return module.eval().requires_grad_(False)

    def batch(self, size):
        tensors = example_batch(self.runners["eager"].config.inputs, size, size, self.backend.device)
        if (given := tensors.get("attention_mask")) is not None:
            given[:, given.shape[1] * 4 // 5 :] = 0
        return BenchBatch(size, tensors, {}, {}, BatchDescriptor(size))

    def run(self):
        """All ways: prepared one after the other, timed in turns, compared at last."""
        start, options = time.perf_counter(), self.options
        self.save("building the model")
        module = self.build()
        self.save("eager code")
        self.runners["eager"] = self.capture(module, options.sizes, cudagraph_mode="NONE")
        batches = [self.batch(size) for size in options.sizes]
        self.record["largest_output"] = max(float(leaf.abs().max()) for leaf in tree_leaves(batches[-1].run(module)))
        timed = [batch for batch in batches if batch.size in options.timed]
        benches = {is_by_size: Comparison(self.runners["eager"], timed if is_by_size else batches)
                   for is_by_size in (False, True)}  # fmt: skip
        # Note [Workspaces] says why reduce-overhead is the first.
        ways = [Baseline(name) for name in sorted(options.ways, key=lambda name: name != "reduce-overhead")]
        for bench in benches.values():
            bench.zoo = self
        auto.time_on_padding = self.turn()(auto.time_on_padding)  # AUTO decides by times
        for way in ways:
            self.attempt(way, "capture", self.price, benches[way.record.name in BY_SIZE])
        self.caches.close()
        self.save("a turn on the device")
        with self.turn():
            self.record["timed_at"] = [time.time()]
            self.time_in_turns(ways, timed, benches[True])
            self.record["timed_at"].append(time.time())
        for way in ways:
            self.attempt(way, "comparison", self.compare, benches[way.record.name in BY_SIZE])
        self.save(seconds=time.perf_counter() - start)

    def time_in_turns(self, ways, batches, bench):
        """Time all ways on some batches, about ``options.seconds`` together: fewer calls of a slow model."""
        options, end = self.options, time.perf_counter() + self.options.seconds
        bench.restore()
        each = sum(sum(self.backend.time_calls(lambda: batch.run(bench.runner.model), 1)[0]) for batch in batches) / 1e6  # noqa: B023
        bench.repeats = int(options.seconds / (options.rounds * len(ways) * 2 * each)) - 1
        bench.repeats = self.record["repeats"] = max(2, min(bench.repeats, options.repeats))
        for number in range(options.rounds):
            if number < 2 or time.perf_counter() < end:
                self.record["rounds"] = number + 1
                for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                    for batch in batches:
                        self.attempt(way, "timing", bench.measure, batch.size)

    def attempt(self, way, step, action, *args):
        """A step of a way; its error becomes the way's record, with its type and its whole text."""
        entry = self.record["ways"].setdefault(way.record.name, {"captured": False, "sizes": {}})

        def noted(way):
            try:
                action(way, *args)
            except Exception as error:
                text = str(error)
                first = next((line for line in text.splitlines() if line.strip()), "")
                entry.update(step=step, error_type=type(error).__name__, error=first, detail=text[:4000])
                raise

        if way.record.failure is None:
            self.save(f"{way.record.name}, {step}")
            way.attempt(noted)

    def price(self, way, bench):
        """Prepare a way: seconds until it is ready, and the memory that it takes beside those that are there."""
        name, before, start = way.record.name, self.used_bytes(), time.perf_counter()
        bench.restore()
        if name != "AUTO":  # a cold start, whatever ran before; AUTO comes after inductor and compiles the same again
            self.caches.close()
            self.caches.enter_context(fresh_inductor_cache())
        WAYS[name](bench, way)
        seconds, entry = time.perf_counter() - start, self.record["ways"][name]
        entry |= {"captured": way.note is None, "note": way.note, "ready_seconds": seconds}
        entry["memory_bytes"] = self.used_bytes() - before
        if name == "AUTO":
            entry |= self.chosen(self.runners[name])
        if name in self.runners and (report := self.runners[name].report).records:
            entry |= {"graphs": report.records[0].graphs, "warnings": list(report.warnings)}
            entry |= {"reported_bytes": report.total_bytes, "capture_seconds": report.session_seconds}
            entry["compile_seconds"] = sum(graph.compile_seconds for graph in report.records)

    def used_bytes(self):
        """Memory that is taken; beside other models that of torch's allocator alone."""
        taken = used_bytes(self.backend)
        return taken if self.options.jobs == 1 else self.backend.memory().reserved

    def chosen(self, runner):
        """What AUTO took for each size, and what it says about that."""
        made, plan = runner.config.compilation, runner.report.plan
        name = made.cudagraph_mode.name + "".join(f" without {module}" for module in made.splitting_modules)
        name += f" with {made.compiler}" if made.compiler != "eager" else ""
        largest = max((graph.descriptor.num_tokens for graph in runner.report.records), default=0)
        by_size = {size: name if size <= largest else "eager" for size in self.options.sizes}
        return {"chosen": by_size, "reason": plan.changes[0].reason, "notes": list(plan.notes)}

    def compare(self, way, bench):
        """Compare with eager code: batches of the sizes, and one between them, which a runner pads, on its padding."""
        for batch in bench.batches:
            way.times.setdefault(batch.size, ([math.nan],) * 3)  # compared, and not timed
        bench.compare(way)
        entry, runner = self.record["ways"][way.record.name], self.runners.get(way.record.name)
        for size, found in way.results.items():
            keys = ("device", "latency", "host") if size in self.options.timed else ()
            medians = {f"{key}_us": getattr(found, key).median for key in keys}
            difference = {"difference": found.deviation, "not_comparable": found.not_comparable}
            entry["sizes"][size] = {**medians, "first_call_seconds": found.first_call_seconds, **difference}
        between = max(self.options.sizes) - 1
        if runner is not None and between and between not in self.options.sizes:
            batch, results = self.batch(between), []
            for call in (runner, runner.run_eagerly):
                bench.restore()
                torch.manual_seed(0)
                results.append(tree_map_only(torch.Tensor, torch.Tensor.clone, call(**batch.tensors)))
            entry["padded"] = {"size": between, "difference": deviation(*results)}


def run_one(model, options, device, turns, waits):
    """The body of a model's process: all that is printed goes into its log."""
    log = os.open(options.out / f"{model.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    torch.set_num_threads(options.threads)
    zoo = Zoo(model, options, partial(alone, turns / str(device), waits))
    with torch.no_grad():
        try:
            zoo.run()
        except ImportError as error:
            zoo.save(skipped=str(error))
        except Exception as error:
            zoo.save(error=f"{zoo.record['error']}: {type(error).__name__}: {error}")
            raise


# --- all of them ------------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """The process of a model.

    Attributes:
        waits: Shared memory, 1 while it waits for its turn to be timed.
        left: Seconds that it may still take; those in which it waits do not count.
    """

    model: Model
    device: str | None
    waits: object
    left: float
    process: multiprocessing.Process


def run_all(models, options):
    """Run each model in a process; one that crashes or takes too long leaves a JSON that says so. Yields the JSONs.

    A model that waits for its turn on the device leaves its place to another, which compiles meanwhile.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # what is asked of CUDA before a fork must not start CUDA
    devices = options.devices or [None]
    if (jobs := options.jobs * len(devices)) > 1:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
    context = multiprocessing.get_context(options.start)
    if options.start == "forkserver":
        context.set_forkserver_preload(["torch", "transformers", "cgplan.models.hf", "torch._inductor.utils"])
    waiting, running, start, now = list(models), [], time.monotonic(), time.monotonic()
    with tempfile.TemporaryDirectory() as turns:
        while waiting or running:
            if now - start >= options.limit:
                for model in waiting:
                    yield finish(model, options.out, "not begun before --limit", limited=True)
                waiting = []
            for device in devices:
                here = [one for one in running if one.device == device]
                busy = sum(not one.waits.value for one in here)
                if waiting and busy < options.jobs and len(here) < options.jobs + options.jobs // 2:
                    model, waits = waiting.pop(0), context.RawValue("b", 0)
                    arguments = model, options, device, Path(turns), waits
                    process = context.Process(target=run_one, args=arguments)
                    process.start()
                    running.append(Running(model, device, waits, options.timeout, process))
            time.sleep(0.05)
            before, now = now, time.monotonic()
            is_over = now - start > options.limit + 60
            for one in list(running):
                one.left -= 0 if one.waits.value else now - before
                is_late = one.left < 0
                if one.process.is_alive() and (is_late or is_over):
                    one.process.kill()
                    one.process.join()
                    how = "took too long" if is_late else "stopped by --limit"
                    more = {} if is_late else {"limited": True}
                elif not one.process.is_alive():
                    how, more = f"exit code {one.process.exitcode}", {}
                else:
                    continue
                running.remove(one)
                yield finish(one.model, options.out, how, **more)


def finish(model, folder, how, **more):
    """The JSON of a model whose process has ended; an unfinished one is completed by how it ended."""
    path = folder / f"{model.name}.json"
    record = {"name": model.name, "family": model.family, "ways": {}, "error": "ended before it began"}
    record = json.loads(path.read_text()) if path.exists() else record
    if record["error"]:
        record |= {"error": f"{record['error']} ({how}; {model.name}.log)", **more}
        path.write_text(json.dumps(record, indent=1))
    return record


# --- tables -----------------------------------------------------------------------------------------------------------


def verdict(record, name):
    """What became of a way; FAILED is a way that failed after its capture, eager an AUTO that captured nothing."""
    way = record["ways"].get(name)
    if way is None:
        return "-"
    if "error" in way:
        return "refused" if way["step"] == "capture" else "FAILED"
    found = [*way["sizes"].values(), *filter(None, [way.get("padded")])]
    found = [size["difference"] for size in found if size.get("not_comparable") is None]
    if not found or None in found:
        return "WRONG form" if found else "no basis"
    worst, bound = max(found), TOLERANCES[record["dtype"]] * max(1.0, record["largest_output"])
    word = "equal" if worst == 0 else f"~{worst:.0e}" if worst <= bound else f"WRONG {worst:.0e}"
    if set(way.get("chosen", {}).values()) == {"eager"} and not word.startswith("WRONG"):
        return "eager"
    return word if way["captured"] else f"part {word}"


def figure(record, name, size, key):
    """A figure of a way at a size; None where it is not known."""
    return record["ways"].get(name, {}).get("sizes", {}).get(str(size), {}).get(key)


def ratio(record, size, key, way, base):
    """A figure of a way over that of another; None where one of them is not known."""
    over, under = (figure(record, name, size, key) for name in (way, base))
    return over / under if over and under else None


def kernels(record, size, base):
    """Device time of FULL over that of ``base``; None where eager code is held up by the host."""
    device, host = (figure(record, base, size, key) for key in ("device_us", "host_us"))
    is_held_up = base == "eager" and device is not None and device < 1.2 * host
    return None if is_held_up else ratio(record, size, "device_us", "FULL", base)


def compiling(record, size, way):
    """Compile seconds of a way for all its sizes, over those of one size of reduce-overhead until it is ready."""
    seconds, base = (record["ways"].get(name, {}) for name in (way, "reduce-overhead"))
    one = base.get("sizes", {}).get(str(size), {}).get("first_call_seconds")
    return seconds["compile_seconds"] / one if seconds.get("compile_seconds") and one else None


def comparisons(sizes):
    """Tables of ratios: their titles, and of each column the head, the ratio of a record, and the aim, if any."""
    beside, full = [], []
    for size in sizes:
        for way, aim in (("inductor", 1.02), ("dynamic", 1.15)):
            for key, most in (("device", aim), ("host", 0.2)):
                found = partial(ratio, size=size, key=f"{key}_us", way=way, base="reduce-overhead")
                beside.append((f"{way}, {key}, {size}", found, most))
        full += [(f"{base}, {size}", partial(kernels, size=size, base=base), 1.02) for base in ("eager", "bare")]
    for way, aim in (("inductor", None), ("dynamic", 1.3)):
        beside.append((f"{way}, compiling", partial(compiling, size=sizes[-1], way=way), aim))
    return {"Beside reduce-overhead": beside, "FULL against the kernels of eager": full}


def medians(records, head, found, aim):
    """The median of a column, and the models that miss its aim."""
    known = {record["name"]: value for record in records if (value := found(record)) is not None}
    text = f"{head}: median {statistics.median(known.values()):.2f} of {len(known)} models"
    if aim is None:
        return text
    missed = [f"{name} {value:.2f}" for name, value in known.items() if value > aim]
    return f"{text}, above {aim}: {', '.join(missed) or 'none'}"


def cells(record, what, names):
    """A row of a table: the verdicts of some ways, a figure of each at a size, or what it costs."""
    if what == "verdicts":
        return [record.get("skipped") or record["error"] or verdict(record, name) for name in names]
    if what == "costs":
        known = [way if "ready_seconds" in way else None for way in (record["ways"].get(name, {}) for name in names)]
        return [f"{way['ready_seconds']:.1f} s, {way['memory_bytes'] >> 20} MiB" if way else "-" for way in known]
    found = [figure(record, name, *what) for name in names]
    return [f"{value:.0f}" if value else "-" for value in found]


def line(record):
    """A row for the terminal: the verdict of each way, and its device time over that of eager code."""
    words = cells(record, "verdicts", GRAPHED)
    if record.get("skipped") or record["error"]:
        return f"{record['name']:21} {words[0]}"[:158]
    times = [ratio(record, record["timed"][-1], "device_us", name, "eager") for name in GRAPHED]
    both = [f"{word:.11} {time:.2f}" if time else word for word, time in zip(words, times, strict=True)]
    return f"{record['name']:21} " + "".join(f"{text:16.15}" for text in both) + f"{record['seconds']:4.0f} s"


def summary(records):
    """One line for each way: how many models it captured whole, how many of those are right; then what AUTO took."""
    ran = [record for record in records if not record.get("skipped") and not record["error"]]
    yield f"{len(records)} models, {len(ran)} of them ran"
    for name in GRAPHED:
        words = [verdict(record, name) for record in ran]
        taken = [word for word in words if word not in ("-", "refused", "eager") and not word.startswith("part ")]
        if taken:
            equal, near = words.count("equal"), sum(word.startswith("~") for word in words)
            rest = len(taken) - equal - near
            yield f"{name}: captured {len(taken)}, of them equal {equal}, within rounding {near}, neither {rest}"
    steps = {}
    for record in ran:
        for size in record["timed"]:
            for way in ("AUTO", "FULL"):
                if (found := ratio(record, size, "latency_us", way, "eager")) is not None:
                    steps.setdefault(way, {}).setdefault(record["name"], {})[size] = found
    if auto := steps.get("AUTO"):
        slow = [f"{name} {by[size]:.2f} at {size}" for name, by in auto.items() for size in by if by[size] > 1.01]
        gained = [name for name, by in steps.get("FULL", {}).items() if name in auto and min(by.values()) <= 1 / 1.02]
        left = [record["name"] for record in ran if record["name"] in gained and verdict(record, "AUTO") == "eager"]
        yield f"AUTO: steps of {len(auto)} models timed, slower than eager by more than 1%: {', '.join(slow) or 'none'}"
        yield (f"AUTO: of {len(gained)} models on which FULL gains 2%, {len(gained) - len(left)} are captured; "
               f"left out: {', '.join(left) or 'none'}")  # fmt: skip


def table(title, head, rows):
    """Lines of a table with a title; the first of its columns are names of models."""
    yield from ("", f"## {title}", "", f"| model | {' | '.join(head)} |", f"|---|{'---|' * len(head)}")
    yield from (f"| {name} | {' | '.join(texts)} |" for name, texts in rows)


def markdown(records):
    """The page: what is captured and right, what is not and why, and times where there is a GPU."""
    ran = [record for record in records if "seconds" in record]
    first, names = ran[0], [name for name in WAYS if any(name in record["ways"] for record in ran)]
    tables = [("Captured, and equal to eager?", "verdicts", names[1:])]
    if first["backend"] == "cuda":
        for size in first["timed"]:
            tables.append((f"Device time, {counted(size, 'row')}, microseconds", (size, "device_us"), names))
            tables.append((f"Host time, {counted(size, 'row')}, microseconds", (size, "host_us"), names))
        tables.append(("Seconds until ready, and memory", "costs", names))
    shapes = "Shapes are those of published models, most with fewer layers; mamba and rwkv read 8 tokens. "
    beside = (
        f" {first['jobs']} models at a time ran on each device: others compiled while one was timed, so host times are "
        "those of a busy machine."
    )
    timed = (
        "Device times are of calls queued one after another, host times until a call on an idle device returned. "
        "Memory is that of torch's allocator alone."
    )
    meanings = [word for word, needs in WORDS.items() if needs is None or needs in names]
    away = {}  # why some did not run
    for record in records:
        if reason := record.get("skipped") or record["error"]:
            away.setdefault(reason, []).append(record["name"])
    lines = [
        "# The model zoo",
        "",
        "Can graphs hold your model, do its numbers stay right, and how long do calls take? Find it, or one like it, "
        "in the tables below, which compare these ways to run it:",
        "",
        "| way | what runs |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in RUNS.items() if name in names),
        "",
        *(f"- {text}" for text in summary(records)),
        *(f"- did not run: {', '.join(models)} ({reason})" for reason, models in away.items()),
        "",
        f"`docs/measure/zoo.py --scale {first['scale']} --report docs/zoo.md` wrote this page, on {first['device']} "
        f"({first['backend']}) with torch {first['torch']}. Weights are random. {shapes * (first['scale'] == 'real')}"
        f"Batches have {', '.join(map(str, first['sizes']))} rows; those of {', '.join(map(str, first['timed']))} are "
        f"timed.{beside * (first['jobs'] > 1)}",
        "",
        timed,
        "",
        "| cell | what it means |",
        "|---|---|",
        *(f"| {word} |" for word in meanings),
    ]
    for title, what, ways in tables:
        lines += table(title, ways, [(row["name"], cells(row, what, ways)) for row in ran])
    notes = {
        "Beside reduce-overhead": "The time of a way, divided by that of reduce-overhead, at each timed size: below 1 "
        "is faster. *Compiling* is the time until all sizes of the way are ready, divided by that until "
        f"reduce-overhead is ready for {first['timed'][-1]} rows alone. The models after *above* miss the aim, which "
        "is the number there.",
        "FULL against the kernels of eager": "The device time of FULL, divided by that of eager code, where eager code "
        "keeps the device busy, and by that of graphs by hand (`bare`).",
    }
    for title, columns in comparisons(first["timed"]).items() if first["backend"] == "cuda" else ():
        known = [column for column in columns if any(column[1](record) is not None for record in ran)]
        rows = [(record["name"], [found(record) for _, found, _ in known]) for record in ran]
        texts = [(name, ["-" if value is None else f"{value:.2f}" for value in row]) for name, row in rows if any(row)]
        if texts:
            lines += table(title, [head for head, _, _ in known], texts)
            lines[-len(texts) - 2 : -len(texts) - 2] = [
                notes[title], "", *(f"- {medians(ran, *column)}" for column in known), "",
            ]  # fmt: skip
    chosen = [(record["name"], record["ways"].get("AUTO", {})) for record in ran]
    if rows := [(name, [*way["chosen"].values(), way["reason"]]) for name, way in chosen if "chosen" in way]:
        lines += table("What AUTO took, by size", [*map(str, first["sizes"]), "why"], rows)
    refused = {}
    for record in ran:
        for name, way in record["ways"].items():
            if "error" in way:
                error = re.sub(r"(?<= at )/\S*/(?=[^/]+/[^/]+\.py)", "", f"{way['error_type']}: {way['error']}")
                refused.setdefault(f"{name}: {error}", []).append(record["name"])
    cures = "[HostSyncError](troubleshooting.md#hostsyncerror), [CaptureError](troubleshooting.md#captureerror)"
    lines += ["", "## Refused, and why", "", f"What to do about them: {cures}.", ""] if refused else []
    lines += [f"- {text} ({', '.join(models)})" for text, models in refused.items()]
    return "\n".join(lines) + "\n"


def shown(records):
    """The HTML file: verdicts and reasons in lists that can be searched, device times as a map."""
    ran = [record for record in records if "seconds" in record]
    first, names = ran[0], [name for name in WAYS if any(name in record["ways"] for record in ran)]
    source = f"Measured on {first['device']}, {first['backend']}, torch {first['torch']}."
    about = "equal: bit for bit as the model's own code; ~: within the rounding of the dtype."
    verdicts = [(record["name"], record["family"], *cells(record, "verdicts", names[1:])) for record in records]
    verdicts = table_of(verdicts, dict.fromkeys(("model", "family", *names[1:]), str))
    sections = [Section("Captured, and equal to eager", about, verdicts)]
    for size in first["timed"] if first["backend"] == "cuda" else ():
        times = [(record["name"], name, ratio(record, size, "device_us", name, "eager"), figure(record, name, size,
                 "device_us")) for record in ran for name in names[1:]]  # fmt: skip
        formats = {"model": str, "way": str, "of eager's": format_ratio, "device time": format_microseconds}
        drawn = chart("heat", "Device time, as a ratio to eager code", "way", "of eager's", by="model")
        about = "Device time of a call over that of eager code, calls queued one after another: below 1x is faster."
        known = table_of([row for row in times if row[2] is not None], formats)
        sections.append(Section(f"Device time at {size} rows", about, known, [drawn]))
    refused = [(record["name"], name, f"{way['error_type']}: {way['error']}") for record in ran
               for name, way in record["ways"].items() if "error" in way]  # fmt: skip
    refused = table_of(refused, dict.fromkeys(("model", "way", "error"), str))
    sections.append(Section("Refused, and why", "Ways that did not capture a model.", refused))
    lines = list(summary(records))
    return html_of(Page("The model zoo", source, [("", text) for text in lines], sections), "\n".join(lines))


def parse(arguments, known):
    def words(text):
        return [word for word in text.split(",") if word]

    def numbers(text):
        return sorted(map(int, text.split(",")))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=["tiny", "real"], help="absent: real on a GPU, else tiny")
    parser.add_argument("--only", type=words, default=["*"], help="names or patterns of models or families")
    parser.add_argument("--ways", type=words, help=f"of {', '.join(WAYS)}; absent: all, on a CPU the first three")
    parser.add_argument("--sizes", type=numbers, default=[1, 4, 8], help="rows of batches that are compared")
    parser.add_argument("--timed", type=numbers, help="those of them that are timed; absent: the ends")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("zoo"))
    parser.add_argument("--resume", action="store_true", help="leave out models that all.json has, but for --limit")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of a model, without waits for its turn")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds: no model begins later; 60 more end all")
    parser.add_argument("--jobs", type=int, default=1, help="models that compile at once for each device")
    parser.add_argument("--devices", type=words, help="GPUs to spread models over, such as 0,1")
    parser.add_argument("--seconds", type=float, default=6, help="about those in which a model is timed")
    parser.add_argument("--rounds", type=int, help="at most")
    parser.add_argument("--repeats", type=int, help="timed calls in a round, at most")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU")
    parser.add_argument("--start", choices=["forkserver", "spawn"], default="forkserver", help="of processes")
    parser.add_argument("--report", type=Path, help="page to write from all.json in --out")
    parser.add_argument("--html", type=Path, help="the same as one HTML file, with charts")
    options = parser.parse_args(arguments)
    on_gpu = options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())
    options.scale = options.scale or ("real" if on_gpu else "tiny")
    options.ways = list(dict.fromkeys(["eager", *(options.ways or (WAYS if on_gpu else list(WAYS)[:3]))]))
    options.timed = options.timed or sorted({options.sizes[0], options.sizes[-1]})
    options.rounds = options.rounds or (5 if on_gpu else 2)
    options.repeats = options.repeats or (10 if on_gpu else 2)
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"no such ways: {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    if unknown := set(options.timed) - set(options.sizes):
        parser.error(f"timed, and not among --sizes: {', '.join(map(str, sorted(unknown)))}")
    names = [*known, *{model.family for model in known.values()}]
    for pattern in options.only:
        if not fnmatch.filter(names, pattern):
            close = difflib.get_close_matches(pattern, names, 5, 0.5)
            parser.error(f"no model or family is {pattern}; close are {', '.join(close) or 'none, see zoo.yaml'}")
    return options


def main(arguments=None):
    known = read_models()
    options = parse(arguments, known)
    options.out.mkdir(parents=True, exist_ok=True)
    everything = options.out / "all.json"
    records = {one["name"]: one for one in json.loads(everything.read_text())} if everything.exists() else {}
    for path in (options.out / f"{name}.json" for name in known):
        if path.exists():  # one of a run that was cut off, too
            records[path.stem] = json.loads(path.read_text())
    models = [m for m in known.values() if any(fnmatch.filter((m.name, m.family), p) for p in options.only)]
    if options.resume:
        models = [m for m in models if m.name not in records or records[m.name].get("limited")]
    for model in models:
        records.pop(model.name, None)
        (options.out / f"{model.name}.json").unlink(missing_ok=True)
    print(f"each way: is it as eager code, and its device time over that of eager, at {options.timed[-1]} rows")
    print(f"{'model':21} " + "".join(f"{name:16}" for name in GRAPHED))
    for record in run_all(models, options):
        records[record["name"]] = record
        print(line(record), flush=True)
        everything.write_text(json.dumps(list(records.values())))  # now: a run may be cut off
    found = [records[name] for name in known if name in records]
    everything.write_text(json.dumps(found))
    print("\n".join(summary(found)))
    if options.report and any("seconds" in record for record in found):
        options.report.write_text(markdown(found))
    if options.html and any("seconds" in record for record in found):
        options.html.write_text(shown(found))


if __name__ == "__main__":
    main()
