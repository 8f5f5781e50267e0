"""A model of pictures behind FastAPI: requests of one resolution that wait share a batch, which runs as one graph.

uvicorn --app-dir docs/examples picture_server:app
python -c "print([[[0.5] * 32] * 32] * 3)" | curl localhost:8000/classify --json @-
"""

import asyncio
import math
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

import torch
from fastapi import FastAPI, HTTPException
from fastapi.responses import PlainTextResponse
from prometheus_client import generate_latest
from torch import nn

import cgplan
from cgplan.runner.stats import StatsCollector

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {(3, 32, 32): [1, 4, 16]}  # batches with a graph, at most LARGEST, by shape: one for each resolution
LARGEST = 16  # pictures that run together; those above the largest size run without a graph
PATIENCE = 10  # seconds that a request waits


def build():
    """Your model: `timm.create_model("resnet18", pretrained=True)`, say, with (3, 224, 224) in SIZES, and `x` below."""
    torch.manual_seed(0)
    return Net()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def inputs_of(shape):
    return {"x": (("num_tokens", *shape), torch.float32, 0)}  # x as in your forward; num_tokens: pictures


def drawn(n, shape):
    """Of n pictures the inputs, for `check`."""
    return (torch.rand(n, *shape),)


def capture():
    assert SIZES, "SIZES lists no shape"
    model, runners = build().eval().to(DEVICE), {}
    largest = {"max_num_seqs": LARGEST, "max_num_batched_tokens": LARGEST}
    for shape, sizes in SIZES.items():
        graphs = {"cudagraph_capture_sizes": sizes}
        runners[shape] = cgplan.capture(model, inputs_of(shape), compilation=graphs, scheduler=largest)
        check(model, runners[shape], shape)
    return runners


@torch.no_grad()
def check(model, runner, shape):
    """The server does not start if a graph differs from your model, if that mixes rows, or if `run` does not fit it."""

    def own(*inputs):
        return model(*(each.to(DEVICE) for each in inputs))

    found = own(*drawn(1, shape))
    assert isinstance(found, torch.Tensor), f"forward returns {type(found).__name__}: return a tensor, m(x).logits, say"
    for n in filter(runner.padded, range(1, LARGEST + 1)):  # each graph, padded and full
        record = runner.verify(*drawn(n, shape))
        assert not record.failure, f"a batch of {n}, shape {shape}: {record.failure}"
    picture = tuple(each[0] for each in drawn(1, shape))
    pictures = [picture, *[tuple(map(torch.ones_like, picture))] * (LARGEST - 1)]
    run(runner, pictures[:1])
    alone, beside = (torch.tensor(run(own, pictures[:n])[0]) for n in (1, LARGEST))
    allowed = beside.abs().max().item() / 100
    assert torch.allclose(alone, beside, 1e-2, allowed), (
        f"shape {shape}: a picture beside others is answered otherwise: a layer mixes rows (call .eval() on it), "
        "or forward draws random numbers"
    )
    runner.stats.reset()


def run(runner, pictures):
    return runner(*map(torch.stack, zip(*pictures, strict=True))).tolist()  # read before the next call


def serve(runners, waiting):
    is_open = True
    while is_open:
        taken = [waiting.get()]
        while len(taken) < LARGEST and not waiting.empty():
            taken.append(waiting.get())
        if taken[-1] is None:  # the server ends
            is_open = taken.pop() is not None
        batches = {}
        for picture, waits in taken:
            if waits.set_running_or_notify_cancel():  # others do not wait any more
                batches.setdefault(picture[0].shape, []).append((picture, waits))
        for batch in batches.values():
            answer(runners, batch)
    for runner in runners.values():
        runner.close()


def answer(runners, batch):
    pictures = [picture for picture, _ in batch]
    try:
        scores = run(runners[pictures[0][0].shape], pictures)
    except Exception as error:  # these requests fail, and later ones are served
        for _, waits in batch:
            waits.set_exception(error)
    else:
        for (_, waits), row in zip(batch, scores, strict=True):
            waits.set_result(row)


@asynccontextmanager
async def lifespan(app):
    waiting = app.state.waiting = queue.Queue(maxsize=64)
    with ThreadPoolExecutor(max_workers=1) as thread:  # it alone touches the model and the runner
        runners = app.state.runners = await asyncio.wrap_future(thread.submit(capture))
        thread.submit(serve, runners, waiting)
        try:
            yield
        finally:
            waiting.put(None)  # leaving the block waits for the thread


app = FastAPI(lifespan=lifespan)


def picture_of(pixels):
    try:
        picture = torch.tensor(pixels, dtype=torch.float32)
    except ValueError as error:  # rows of several lengths
        raise HTTPException(422, str(error)) from None
    if picture.shape not in SIZES:
        raise HTTPException(422, f"the picture has shape {tuple(picture.shape)}, the model takes {[*SIZES]}")
    return (picture,)  # each input of the model


def shape_for(height, width):
    """Of a file: the largest shape that fits into the picture, else the smallest."""
    inside = [shape for shape in SIZES if shape[1] <= height and shape[2] <= width]
    return max(inside, key=math.prod, default=min(SIZES, key=math.prod))


@app.post("/classify")
async def classify(pixels: list[list[list[float]]]):
    return await scores_of(picture_of(pixels))


async def scores_of(picture):
    waits = Future()
    try:
        app.state.waiting.put_nowait((picture, waits))
    except queue.Full:
        raise HTTPException(503, "too many requests wait") from None
    try:
        return await asyncio.wait_for(asyncio.wrap_future(waits), PATIENCE)  # cancels it after that
    except TimeoutError:
        raise HTTPException(504, f"no answer within {PATIENCE} s") from None


@app.get("/metrics", response_class=PlainTextResponse)
def metrics():
    stats = {name: runner.stats for name, runner in named().items()}
    return generate_latest(StatsCollector(stats)).decode()


@app.get("/config/{name}", response_class=PlainTextResponse)
def config(name: str):
    if name not in named():
        raise HTTPException(404, f"the server has {', '.join(named())}")
    return named()[name].config.model_dump_json()  # for `cgplan bench` and `cgplan plan`: JSON is YAML


def named():
    return {"x".join(map(str, shape)): runner for shape, runner in app.state.runners.items()}
