"""A decoder behind FastAPI: requests join and leave the batch at each step, and their tokens are streamed.

uvicorn --app-dir docs/examples fastapi_server:app
curl --no-buffer localhost:8000/generate --json '{"text": "Once", "max_tokens": 8}'
"""

import asyncio
import logging
import math
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

import torch
from fastapi import FastAPI, HTTPException
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import BaseModel, Field
from torch import nn

import cgplan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, WIDTH, SIZES = 256, 64, [1, 2, 4, 8, 16]
SLOTS = max(SIZES)  # requests at once: no batch is too large
INPUTS = {"token": ("num_tokens", "int64", 0), "place": ("num_tokens", "int64", -1)}  # row i is slot i; -1: it is free
LONGEST = 512  # ids of a prompt and its answer, as a model's cache may hold
EOS = set()  # ids that end an answer, and are not sent
TOP_K = 50  # the likeliest ids that sampling chooses among, as `generate` of transformers does unless it is told
WEIGHTS = "weights.pt"  # of POST /reload


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(VOCAB, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("states", torch.zeros(SLOTS, WIDTH))  # by slots, as a KV cache would be

    def forward(self, token, place):
        """The likeliest ids, and the scores of all. Padding and free slots leave the state as it is."""
        kept = self.states[: len(token)]
        state = self.cell(self.embed(token), kept * (place > 0)[:, None])
        kept.copy_(torch.where((place >= 0)[:, None], state, kept))
        scores = self.head(state)
        return scores.argmax(-1), scores

    def load(self, path):
        self.load_state_dict(torch.load(path, map_location=DEVICE))  # in place


class Prompt(BaseModel):
    text: str = Field(min_length=1, max_length=256)
    max_tokens: int = Field(16, ge=1, le=256)
    temperature: float = Field(0, ge=0)  # 0: the likeliest token
    seed: int = Field(0, ge=0, lt=1 << 63)


class Generation:
    def __init__(self, prompt):
        self.prompt, self.tokens, self.place, self.is_wanted = prompt, list(prompt.text.encode()), 0, True
        self.length = len(self.tokens) + prompt.max_tokens
        self.random = torch.Generator().manual_seed(prompt.seed)  # its own: other requests change nothing
        self.loop, self.answers = asyncio.get_running_loop(), asyncio.Queue()

    def choose(self, likeliest, scores):
        if self.prompt.temperature < 0.01:  # scores divided by it may be infinite, which fails all requests
            return likeliest
        scores = scores.float().cpu() / self.prompt.temperature
        least = scores.topk(min(TOP_K, len(scores))).values[-1]
        chances = scores.masked_fill(scores < least, -math.inf).softmax(-1)
        return torch.multinomial(chances, 1, generator=self.random).item()

    def send(self, answer):  # from the other thread
        self.loop.call_soon_threadsafe(self.answers.put_nowait, answer)

    async def stream(self):
        try:
            for _ in range(self.prompt.max_tokens):
                answer = await self.answers.get()
                if isinstance(answer, Exception):
                    raise answer
                if answer in EOS:
                    return
                yield f"data: {answer}\n\n"
        finally:
            self.is_wanted = False  # the client may have left


def capture():
    sizes, requests = {"cudagraph_capture_sizes": SIZES}, {"max_num_seqs": SLOTS}
    return cgplan.capture(Decoder().eval().to(DEVICE), INPUTS, compilation=sizes, scheduler=requests)


def serve(runner, waiting):
    running = {}  # requests by slot
    job = None  # such as new weights: it waits for the running requests, and later ones wait for it
    while True:
        while job is None and len(running) < SLOTS and not (running and waiting.empty()):  # it waits where nothing runs
            each = waiting.get()
            if each is None:
                return runner.close()
            if callable(each):
                job = each
            else:
                running[min(set(range(SLOTS)) - running.keys())] = each
        try:
            if running:
                step(runner, running)
            else:
                due, job = job, None
                due()
        except Exception as error:  # these requests fail, and later ones are served
            logging.getLogger(__name__).exception("a step or a job failed")
            for each in running.values():
                each.send(error)
            running = {}
        running = {slot: each for slot, each in running.items() if each.is_wanted and len(each.tokens) < each.length}


def step(runner, running):
    """Run one token of each request, of its prompt or after it."""
    batch = [(0, -1)] * (max(running) + 1)
    for slot, each in running.items():
        batch[slot] = each.tokens[each.place], each.place
    likeliest, scores = runner(*torch.tensor(batch).unbind(1))  # the next call overwrites them
    likeliest = likeliest.tolist()
    for slot, each in running.items():
        each.place += 1
        if each.place == len(each.tokens):
            each.tokens.append(each.choose(likeliest[slot], scores[slot]))
            each.send(each.tokens[-1])


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


@app.post("/generate")
async def generate(prompt: Prompt):
    if app.state.waiting.full():
        raise HTTPException(503, "too many requests wait")
    generation = Generation(prompt)
    if generation.length > LONGEST:
        raise HTTPException(422, f"prompt and max_tokens are {generation.length} ids, the model takes {LONGEST}")
    app.state.waiting.put_nowait(generation)
    return StreamingResponse(generation.stream(), media_type="text/event-stream")


@app.post("/reload")
def reload():  # `def`: it waits in a thread of its own
    done = Future()

    def load():
        try:
            done.set_result(app.state.runner.model.load(WEIGHTS))
        except Exception as error:
            done.set_exception(error)

    app.state.waiting.put(load)  # it runs once the answers of the old weights have ended
    done.result()


@app.get("/metrics", response_class=PlainTextResponse)
def metrics():
    return app.state.runner.stats.prometheus()
