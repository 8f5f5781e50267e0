"""The models of zoo.yaml with random weights, each captured in every way, beside eager code and what torch offers.

    python docs/measure/zoo.py [--scale tiny|real] [--only bert,qwen*] [--ways FULL,PIECEWISE] [--out FOLDER] [--resume]
                               [--sizes 1,4,8] [--jobs 2] [--devices 0,1] [--timeout 900] [--report docs/zoo.md]
    python docs/measure/zoo.py --out FOLDER --only "" --report FILE     the page alone, from the JSONs there

Nothing is downloaded: configurations alone make the models. A row of a batch is one sequence, image or molecule. Each
model runs in a process of its own and writes FOLDER/NAME.json and NAME.log, so a crash ends that model alone. All ways
of a model stand ready in one process and are timed in turns. Medians; device time with calls queued behind one another,
host time until a call on an idle device returned. On a CPU graphs are those of the tape: what is captured and whether
it is right is of interest then, times are not.
"""

import argparse
import fnmatch
import importlib
import json
import multiprocessing
import os
import re
import time
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
from cgplan.captures.environment import describe_environment
from cgplan.measure.baselines import BenchBatch, Comparison, Way, bare, eager, reduce_overhead, used_bytes
from cgplan.modes import BatchDescriptor
from cgplan.reports.records import WayRecord

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
    """A way that captures the model with cgplan."""

    def prepare(bench, way):
        split = bench.zoo.model.split if compilation.get("cudagraph_mode") == "PIECEWISE" else {}
        runner = bench.zoo.runners[way.record.name] = bench.zoo.capture(bench.runner.model, **compilation, **split)
        way.undo.callback(runner.close)
        bench.first_calls(way, lambda batch: lambda: runner(**batch.tensors))

    return prepare


WAYS = {
    "eager": eager,
    "FULL": graphed(),
    "PIECEWISE": graphed(cudagraph_mode="PIECEWISE"),
    "inductor": graphed(compiler="inductor"),
    "dynamic": graphed(compiler="inductor", compile_shapes="dynamic"),
    "bare": bare,
    "reduce-overhead": reduce_overhead,
}
GRAPHED = [name for name in WAYS if name != "eager"]


class Zoo:
    """One model in all ways.

    Attributes:
        record: What becomes its JSON; written before each step, so that a crash leaves what was known.
        runners: Of the ways that cgplan captured.
    """

    def __init__(self, model, options):
        self.model, self.options, self.runners = model, options, {}
        self.path, self.backend = options.out / f"{model.name}.json", select_backend(options.device)
        self.dtype = at(model.dtype, options.scale)
        self.record = {"name": model.name, "family": model.family, "scale": options.scale, "dtype": self.dtype}
        environment = describe_environment(self.backend, "")
        self.record |= {key: getattr(environment, key) for key in ("backend", "device", "torch", "cgplan", "date")}
        self.record |= {"sizes": options.sizes, "ways": {}}

    def save(self, step=None, **more):
        """Write what is known, with the step that is about to begin."""
        print(f"== {step}", flush=True)
        self.record |= {"error": step and f"ended during: {step}", **more}
        self.path.write_text(json.dumps(self.record, indent=1))

    def capture(self, module, **compilation):
        inputs = {name: self.model.input(text, self.options.scale) for name, text in self.model.inputs.items()}
        top = max(self.options.sizes)
        return cgplan.capture(
            module,
            inputs,
            compilation={"cudagraph_capture_sizes": self.options.sizes, **compilation},
            scheduler={"max_num_seqs": top, "max_num_batched_tokens": top},
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
        self.runners["eager"] = self.capture(module, cudagraph_mode="NONE")
        batches = [self.batch(size) for size in options.sizes]
        self.record["largest_output"] = max(float(leaf.abs().max()) for leaf in tree_leaves(batches[-1].run(module)))
        bench = Comparison(self.runners["eager"], batches, 0, options.repeats)
        bench.zoo = self
        # Note [Graphs of several baselines in one process] says why reduce-overhead is the first.
        ways = [Way(WayRecord(name=name)) for name in sorted(options.ways, key=lambda name: name != "reduce-overhead")]
        for way in ways:
            self.attempt(way, "capture", self.price, bench)
        for number in range(options.rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                for size in options.sizes:
                    self.attempt(way, "timing", lambda way, size: bench.measure(way, size), size)
        for way in ways:
            self.attempt(way, "comparison", self.compare, bench)
        self.save(seconds=time.perf_counter() - start)

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
        name, before, start = way.record.name, used_bytes(self.backend), time.perf_counter()
        bench.restore()
        with fresh_inductor_cache():  # a cold start, whatever ran before
            WAYS[name](bench, way)
        seconds, entry = time.perf_counter() - start, self.record["ways"][name]
        entry |= {"captured": way.note is None, "note": way.note, "ready_seconds": seconds}
        entry["memory_bytes"] = used_bytes(self.backend) - before
        if name in self.runners and (report := self.runners[name].report).records:
            entry |= {"graphs": report.records[0].graphs, "warnings": list(report.warnings)}
            entry |= {"reported_bytes": report.total_bytes, "capture_seconds": report.session_seconds}
            entry["compile_seconds"] = sum(graph.compile_seconds for graph in report.records)

    def compare(self, way, bench):
        """Compare with eager code: batches of the sizes, and one between them, which a runner pads, on its padding."""
        bench.compare(way)
        entry, runner = self.record["ways"][way.record.name], self.runners.get(way.record.name)
        for size, found in way.results.items():
            medians = {f"{key}_us": getattr(found, key).median for key in ("device", "latency", "host")}
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


def run_one(model, options, device):
    """The body of a model's process: all that is printed goes into its log."""
    log = os.open(options.out / f"{model.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    torch.set_num_threads(options.threads)
    zoo = Zoo(model, options)
    with torch.no_grad():
        try:
            zoo.run()
        except ImportError as error:
            zoo.save(skipped=str(error))
        except Exception as error:
            zoo.save(error=f"{zoo.record['error']}: {type(error).__name__}: {error}")
            raise


# --- all of them ------------------------------------------------------------------------------------------------------


def run_all(models, options):
    """Run each model in a process; one that crashes or takes too long leaves a JSON that says so. Yields the JSONs."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # what is asked of CUDA before a fork must not start CUDA
    context = multiprocessing.get_context(options.start)
    if options.start == "forkserver":
        context.set_forkserver_preload(["torch", "transformers", "cgplan.models.hf", "torch._inductor.utils"])
    waiting, running = list(models), {}
    free = [device for _ in range(options.jobs) for device in options.devices or [None]]
    while waiting or running:
        while waiting and free:
            model, device = waiting.pop(0), free.pop(0)
            process = context.Process(target=run_one, args=(model, options, device))
            process.start()
            running[process] = model, device, time.monotonic() + options.timeout
        time.sleep(0.1)
        for process, (model, device, end) in list(running.items()):
            is_late = process.is_alive() and time.monotonic() > end
            if is_late:
                process.kill()
                process.join()
            if not process.is_alive():
                del running[process]
                free.append(device)
                yield finish(model, options.out, "took too long" if is_late else f"exit code {process.exitcode}")


def finish(model, folder, how):
    """The JSON of a model whose process has ended; an unfinished one is completed by how it ended."""
    path = folder / f"{model.name}.json"
    record = {"name": model.name, "family": model.family, "ways": {}, "error": "ended before it began"}
    record = json.loads(path.read_text()) if path.exists() else record
    if record["error"]:
        record["error"] += f" ({how}; {model.name}.log)"
        path.write_text(json.dumps(record, indent=1))
    return record


# --- tables -----------------------------------------------------------------------------------------------------------


def verdict(record, name):
    """What became of a way; FAILED is a way that failed after its capture."""
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
    return word if way["captured"] else f"part {word}"


def cells(record, what, names):
    """A row of a table: the verdicts of some ways, a figure of each at a size, or what it costs."""
    if what == "verdicts":
        return [record.get("skipped") or record["error"] or verdict(record, name) for name in names]
    ways = [record["ways"].get(name, {}) for name in names]
    if what == "costs":
        known = [way if "ready_seconds" in way else None for way in ways]
        return [f"{way['ready_seconds']:.1f} s, {way['memory_bytes'] >> 20} MiB" if way else "-" for way in known]
    size, key = what
    found = [way.get("sizes", {}).get(str(size)) for way in ways]
    return [f"{figures[key]:.0f}" if figures else "-" for figures in found]


def line(record):
    """A row for the terminal: the verdicts, and microseconds of the device at the largest size."""
    words = cells(record, "verdicts", GRAPHED)
    if record.get("skipped") or record["error"]:
        return f"{record['name']:21} {words[0]}"[:158]
    times = cells(record, (record["sizes"][-1], "device_us"), WAYS)
    head = f"{record['name']:21} " + " ".join(f"{word:11.11}" for word in words)
    return head + "".join(f"{time:>8.7}" for time in times) + f"{record['seconds']:5.0f} s"


def summary(records):
    """One line for each way: how many models it captured, and how many of those are right."""
    ran = [record for record in records if not record.get("skipped") and not record["error"]]
    yield f"{len(records)} models, {len(ran)} of them ran"
    for name in GRAPHED:
        words = [verdict(record, name) for record in ran]
        taken = [word for word in words if word not in ("-", "refused")]
        if taken:
            equal, near = words.count("equal"), sum(word.startswith("~") for word in words)
            rest = len(taken) - equal - near
            yield f"{name}: captured {len(taken)}, equal {equal}, within rounding {near}, else {rest}"


def markdown(records):
    """The page: what is captured and right, what is not and why, and times where there is a GPU."""
    ran = [record for record in records if "seconds" in record]
    first, names = ran[0], [name for name in WAYS if any(name in record["ways"] for record in ran)]
    tables = [("Captured, and equal to eager", "verdicts", names[1:])]
    if first["backend"] == "cuda":
        for size in first["sizes"]:
            tables.append((f"Device time at {size} rows, microseconds", (size, "device_us"), names))
            tables.append((f"Host time at {size} rows, microseconds", (size, "host_us"), names))
        tables.append(("Seconds until ready, and memory", "costs", names))
    lines = [
        "# The model zoo",
        "",
        f"Models with random weights, each captured in every way by `docs/measure/zoo.py --scale {first['scale']} "
        f"--report docs/zoo.md`, which wrote this page. {first['device']}, {first['backend']}, torch {first['torch']}, "
        f"rows of {', '.join(map(str, first['sizes']))}.",
        "",
        "`equal`: bit for bit as the model's own code, also for a batch between the sizes, on its padding. `~`: the "
        "largest difference, within what the dtype lets expect. `part`: torch left out some of its graphs. `bare`: "
        "`torch.cuda.graph` by hand; `dynamic`: `compiler: inductor` with one trace for all sizes.",
        "",
        *(f"- {text}" for text in summary(records)),
    ]
    for title, what, ways in tables:
        lines += ["", f"## {title}", "", f"| model | {' | '.join(ways)} |", f"|---|{'---|' * len(ways)}"]
        rows = records if what == "verdicts" else ran
        lines += [f"| {row['name']} | {' | '.join(cells(row, what, ways))} |" for row in rows]
    refused = {}
    for record in ran:
        for name, way in record["ways"].items():
            if "error" in way:
                error = re.sub(r"(?<= at )/\S*/(?=[^/]+/[^/]+\.py)", "", f"{way['error_type']}: {way['error']}")
                refused.setdefault(f"{name}: {error}", []).append(record["name"])
    lines += ["", "## Refused, and why", ""] if refused else []
    lines += [f"- {text} ({', '.join(models)})" for text, models in refused.items()]
    return "\n".join(lines) + "\n"


def parse(arguments=None):
    def words(text):
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=["tiny", "real"], help="absent: real on a GPU, else tiny")
    parser.add_argument("--only", type=words, default=["*"], help="names or patterns of models or families")
    parser.add_argument("--ways", type=words, help=f"of {', '.join(WAYS)}; absent: all, on a CPU the first three")
    parser.add_argument("--sizes", type=lambda text: sorted(map(int, text.split(","))), default=[1, 4, 8])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("zoo"))
    parser.add_argument("--resume", action="store_true", help="leave out models whose JSON is there")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of a model")
    parser.add_argument("--jobs", type=int, default=1, help="models at once on each device; times want 1")
    parser.add_argument("--devices", type=words, help="GPUs to spread models over, such as 0,1")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--repeats", type=int, help="timed calls in a round")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU")
    parser.add_argument("--start", choices=["forkserver", "spawn"], default="forkserver", help="of processes")
    parser.add_argument("--report", type=Path, help="page to write from all JSONs in --out")
    options = parser.parse_args(arguments)
    on_gpu = options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())
    options.scale = options.scale or ("real" if on_gpu else "tiny")
    options.ways = list(dict.fromkeys(["eager", *(options.ways or (WAYS if on_gpu else list(WAYS)[:3]))]))
    options.rounds = options.rounds or (5 if on_gpu else 2)
    options.repeats = options.repeats or (10 if on_gpu else 2)
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"no such ways: {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    return options


def main(arguments=None):
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    known = read_models()
    paths = {name: options.out / f"{name}.json" for name in known}
    models = [m for m in known.values() if any(fnmatch.filter((m.name, m.family), p) for p in options.only)]
    models = [model for model in models if not (options.resume and paths[model.name].exists())]
    for model in models:
        paths[model.name].unlink(missing_ok=True)
    print(f"{'model':21} " + " ".join(f"{n:11.11}" for n in GRAPHED) + "".join(f"{n:>8.7}" for n in WAYS))
    for record in run_all(models, options):
        print(line(record), flush=True)
    records = [json.loads(path.read_text()) for path in paths.values() if path.exists()]
    print("\n".join(summary(records)))
    if options.report:
        options.report.write_text(markdown(records))


if __name__ == "__main__":
    main()
