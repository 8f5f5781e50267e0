"""A model of pictures behind FastAPI: requests that wait share a batch, which runs as one graph.

uvicorn --app-dir docs/examples picture_server:app
python -c "print([[[0.5] * 32] * 32] * 3)" | curl localhost:8000/classify --json @-
"""

import asyncio
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

import torch
from fastapi import FastAPI, HTTPException
from fastapi.responses import PlainTextResponse
from torch import nn

import cgplan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [1, 4, 16]  # of batches with a graph, in pictures
LARGEST = 16  # pictures that run together; above max(SIZES) they run without a graph
PATIENCE = 10  # seconds that a request waits
SHAPE = 3, 32, 32  # of a picture


def build():
    """Your model: `timm.create_model("resnet18", pretrained=True)`, say, with SHAPE 3, 224, 224 and `x` as below."""
    torch.manual_seed(0)
    return Net()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def capture():
    inputs = {"x": (("num_tokens", *SHAPE), torch.float32, 0)}  # by the name in the forward; num_tokens: pictures
    sizes, largest = {"cudagraph_capture_sizes": SIZES}, {"max_num_seqs": LARGEST, "max_num_batched_tokens": LARGEST}
    return cgplan.capture(build().eval().to(DEVICE), inputs, compilation=sizes, scheduler=largest)


def serve(runner, waiting):
    is_open = True
    while is_open:
        batch = [waiting.get()]
        while len(batch) < LARGEST and not waiting.empty():
            batch.append(waiting.get())
        if batch[-1] is None:  # the server ends
            is_open = batch.pop() is not None
        batch = [each for each in batch if each[1].set_running_or_notify_cancel()]  # others do not wait any more
        if batch:
            answer(runner, batch)
    runner.close()


def answer(runner, batch):
    try:
        scores = runner(torch.stack([picture for picture, _ in batch])).tolist()  # read before the next call
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
        runner = app.state.runner = await asyncio.wrap_future(thread.submit(capture))
        thread.submit(serve, runner, waiting)
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
    if picture.shape != SHAPE:  # else the others of its batch would fail, too
        raise HTTPException(422, f"the picture has shape {tuple(picture.shape)}, the model takes {SHAPE}")
    return picture


@app.post("/classify")
async def classify(pixels: list[list[list[float]]]) -> list[float]:
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
    return app.state.runner.stats.prometheus()


@app.get("/config", response_class=PlainTextResponse)
def config():
    return app.state.runner.config.model_dump_json()  # for `cgplan bench` and `cgplan plan`: JSON is YAML
