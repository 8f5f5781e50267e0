"""The larger programs, run small: they serve every request, and the tokens are those of the model alone."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore
from types import ModuleType
from typing import Any

import pytest
import torch
from decoder import Decoder, build
from decoding import one_thread
from pages import blocks_of

from cgplan.backends.context import forward_context
from cgplan.config import Config, load_config
from cgplan.errors import AddressError
from cgplan.modes import CUDAGraphMode

pytestmark = pytest.mark.usefixtures("quiet_collector")
NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "serving": ROOT / "docs" / "examples" / "serving.py",
    "fastapi_server": ROOT / "docs" / "examples" / "fastapi_server.py",
    "picture_server": ROOT / "docs" / "examples" / "picture_server.py",
    "speculative": ROOT / "configs" / "speculative.py",
}
# Double precision, so that tokens do not depend on how requests are batched; varied ones need untied embeddings.
EXACT = ["--set", "model.kwargs.dtype=float64", "--set", "model.kwargs.tie_word_embeddings=false"]
EXACT += ["--set", "device=cpu"]  # the same weights as those of the model alone
SMALL = [
    *EXACT,
    "--set",
    "model.kwargs.num_layers=2",
    "--set",
    "compilation.cudagraph_capture_sizes=[2, 8, 32]",
]
DRAFTING = [
    *EXACT,
    "--set",
    "compilation.cudagraph_capture_sizes=[8, 32]",
    "--requests",
    "5",
    "--tokens",
    "14",
]
LOAD = [*SMALL, "--requests", "16", "--arrivals", "0.4", "--check", "0.4"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", PROGRAMS[name])
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(
        spec
    )  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def alone(config: str, settings: list[str]) -> Decoder:
    """The decoder of a configuration, with the same weights."""
    return build(**load_config(ROOT / "configs" / config, settings[1::2]).model.kwargs)


def would_say(model: Decoder, tokens: list[int]) -> list[int]:
    """The most probable token after each of these, in one eager pass over them."""
    size, places = model.config.block_size, torch.arange(len(tokens))
    metadata = {
        "slot_mapping": places,
        "block_tables": torch.arange(-(-len(tokens) // size), dtype=torch.int32)[None],
        "seq_lens": torch.tensor([len(tokens)], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, len(tokens)], dtype=torch.int32),
    }
    with torch.no_grad(), forward_context(metadata=metadata):
        return model(torch.tensor(tokens), places).argmax(-1).tolist()


# --- serving.py -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serving() -> ModuleType:
    return example("serving")


@pytest.fixture(scope="module")
def served(serving: ModuleType, quiet_collector: None) -> dict[str, Any]:
    torch._dynamo.reset()
    return serving.serve_all(serving.parse(LOAD))


def test_every_request_gets_the_tokens_of_the_model_alone(served: dict[str, Any]) -> None:
    model = alone("decoder_cpu.yaml", SMALL)
    reference = served["NONE"].requests
    assert len({token for request in reference for token in request.tokens[request.prompt :]}) > 20
    for request in reference[::3]:
        assert len(request.tokens) == request.length > request.prompt
        assert (
            would_say(model, request.tokens[:-1])[request.prompt - 1 :]
            == request.tokens[request.prompt :]
        )
    for found in served.values():
        assert [request.tokens for request in found.requests] == [
            request.tokens for request in reference
        ]
        assert found.generated == sum(request.length - request.prompt for request in reference)


def test_steps_run_as_each_mode_says(served: dict[str, Any]) -> None:
    shares = {
        name: [bool(found.steps[way]) for way in (NONE, PIECEWISE, FULL)]
        for name, found in served.items()
    }
    assert shares == {
        "NONE": [True, False, False],
        "FULL_DECODE_ONLY": [True, False, True],
        "FULL_AND_PIECEWISE": [False, True, True],
    }
    assert len({found.steps.total() for found in served.values()}) == 1, (
        "all modes see the same batches"
    )
    assert (
        served["NONE"].padding
        == 0
        < served["FULL_DECODE_ONLY"].padding
        < served["FULL_AND_PIECEWISE"].padding
    )


def test_nothing_grows_and_no_token_differs_from_eager(served: dict[str, Any]) -> None:
    for found in served.values():
        assert found.steps.total() > 50, "memory is compared from step 50 on"
        assert found.grown == 0
        assert found.checked > 20
        assert found.wrong == 0


def test_the_table_of_a_run(served: dict[str, Any], serving: ModuleType) -> None:
    lines = serving.table(served).splitlines()
    assert lines[0].split() == [
        "mode", "tokens/s", "generated", "steps", "eager", "PIECEWISE", "FULL", "padding", "wrong", "memory",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[2:]] == list(served)
    found = serving.serve_all(
        serving.parse([*SMALL, "--requests", "2", "--steps", "0", "--modes", "NONE"])
    )
    assert serving.table(found).splitlines()[2].split()[:5] == ["NONE", "0", "0", "0", "0%"]


def test_lengths_are_those_of_the_trace(serving: ModuleType) -> None:
    requests = serving.trace_requests(2, 8192, 10, 0.0, 0)
    assert [(r.prompt, r.length - r.prompt) for r in requests] == [
        (round(4808 * 0.75 * 8192 / 7437), 10),
        (2627, 8),
    ]
    small = serving.trace_requests(8819, 64, 10, 0.5, 0)
    assert max(r.length for r in small) == 64
    assert max(r.prompt for r in small) == 48
    assert min(r.prompt for r in small) == 1
    assert all(r.length > r.prompt for r in small)
    assert small[-1].arrival / 8819 == pytest.approx(2.0, rel=0.05)
    assert [r.arrival for r in small] == sorted(r.arrival for r in small)


def test_a_run_that_is_cut_short(serving: ModuleType) -> None:
    args = serving.parse(
        [
            *SMALL,
            "--requests",
            "30",
            "--steps",
            "5",
            "--modes",
            "FULL_DECODE_ONLY",
            "--budget",
            "16",
        ]
    )
    [found] = serving.serve_all(args).values()
    assert found.steps.total() == 5
    assert found.generated < sum(request.length - request.prompt for request in found.requests)
    assert max(request.computed for request in found.requests) <= 5 * 16


@pytest.mark.parametrize("policy", ["lazy", "adaptive"])
def test_graphs_on_demand_serve_the_same_tokens(
    policy: str, served: dict[str, Any], serving: ModuleType, tmp_path: Path
) -> None:
    times = tmp_path / "times.csv"
    rows = [("eager", 1, 900), ("eager", 64, 1000), ("PIECEWISE", 1, 200), ("PIECEWISE", 64, 800)]
    rows += [("FULL", 1, 90), ("FULL", 64, 700)]
    times.write_text(
        "mode,num_tokens,microseconds\n" + "".join(f"{m},{n},{us}\n" for m, n, us in rows)
    )
    torch._dynamo.reset()
    on_demand = ["--policy", policy, "--replan-every", "12", "--step-times", str(times)]
    results = serving.serve_all(serving.parse([*LOAD, "--modes", "FULL_AND_PIECEWISE", *on_demand]))
    [found] = results.values()
    assert [request.tokens for request in found.requests] == [
        request.tokens for request in served["NONE"].requests
    ]
    assert found.checked > 20
    assert found.wrong == 0
    assert found.grown <= 0 or policy == "lazy"
    text = serving.on_demand(results)
    assert f"0 wrong of {found.checked} tokens" in text
    if policy == "lazy":
        assert found.steps[NONE] == found.replans == found.evictions == 0
        assert {found.steps[PIECEWISE] > 0, found.steps[FULL] > 0} == {True}
    else:
        assert found.replans >= 3
        assert found.captures > 0 < found.evictions
        assert f"{found.replans} replans" in text


def test_blocks_are_given_back(serving: ModuleType) -> None:
    """More requests than the cache holds at once: they wait for blocks, and at the end all blocks are free."""
    args = serving.parse(
        [*SMALL, "--requests", "12", "--modes", "NONE", "--set", "model.kwargs.num_blocks=5"]
    )
    [found] = serving.serve_all(args).values()
    assert all(len(request.tokens) == request.length for request in found.requests)
    assert sum(len(request.blocks) for request in found.requests) > 5


# --- speculative.py -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "right"), [(1, False), (2, True)])
def test_speculation_gives_the_tokens_of_plain_decoding(layers: int, right: bool) -> None:
    """With all of the target's layers the draft is always right; with half of them now and then."""
    speculative = example("speculative")
    args = speculative.parse([*DRAFTING, "--draft-layers", str(layers)])
    found = speculative.decode_all(args)
    assert list(found) == [
        f"{way}, {graphs}"
        for graphs in ("without graphs", "with graphs")
        for way in ("plain", "speculative")
    ]
    wanted = found["plain, without graphs"].tokens
    assert all(way.tokens == wanted for way in found.values())
    assert [len(tokens) for tokens in wanted] == [14] * 5
    model = alone("speculative.yaml", EXACT)
    prompts = speculative.Workload.random(load_config(args.config), model, 5, 14).prompts
    for prompt, tokens in zip(prompts, wanted, strict=True):
        assert would_say(model, [*prompt, *tokens[:-1]])[len(prompt) - 1 :] == tokens
    for name, way in found.items():
        assert (way.graphs > 0) == name.endswith("with graphs")
        if name.startswith("speculative"):
            assert (way.acceptance == 1.0) == right
            assert way.acceptance > 0
            assert right or way.acceptance < 0.5
            assert way.steps == 4 if right else way.steps <= 13
        else:
            assert way.steps == 13
    lines = speculative.table(found).splitlines()
    assert [line.rsplit(None, 1)[1] for line in lines[2:]] == ["5/5"] * 4


def test_a_draft_is_right_as_often_as_the_later_layers_let_it() -> None:
    speculative = example("speculative")
    acceptance = {}
    for scale in ("0.05", "0"):
        args = [*DRAFTING, "--draft-layers", "1", "--later-layers", scale]
        found = speculative.decode_all(speculative.parse(args))
        assert found["speculative, with graphs"].tokens == found["plain, without graphs"].tokens
        acceptance[scale] = found["speculative, with graphs"].acceptance
    assert 0.5 < acceptance["0.05"] < acceptance["0"] == 1.0


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("serving", ["--modes", "FOO"], "error: .*unknown cudagraph_mode 'FOO'"),
        ("serving", ["--set", "foo"], "error: --set 'foo' is not of the form"),
        ("serving", ["--step-times", "nope"], "error: no such file: nope"),
        (
            "serving",
            ["--config", str(ROOT / "configs/vision.yaml")],
            "declares no block_tables",
        ),
        ("speculative", ["--requests", "40"], "error: the batch has 40 requests"),
        ("speculative", ["--requests", "-1"], "--requests -1: give 1 at least"),
        ("speculative", ["--tokens", "64"], "do not hold 64 new ones"),
        ("speculative", ["--tokens", "1"], "--tokens 1: .* 2 at least"),
        ("speculative", ["--draft-layers", "9"], "error: no first 9 layers"),
        (
            "speculative",
            ["--set", "speculative.num_speculative_tokens=0"],
            "error: .* nothing is drafted",
        ),
    ],
)
def test_what_is_wrong_is_a_message(name: str, arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        example(name).main(arguments)


# --- fastapi_server.py ----------------------------------------------------------------------------------------


@pytest.fixture
def server() -> ModuleType:
    pytest.importorskip("fastapi")
    return example("fastapi_server")


def alone_with(server: ModuleType, model: torch.nn.Module, text: str, count: int) -> list[int]:
    """The tokens that the model's own code generates for one request."""
    tokens = [*text.encode()]
    with torch.no_grad():
        for place in range(len(tokens) + count - 1):
            at = (torch.tensor([number]) for number in (tokens[place], place))
            chosen = model(*(tensor.to(server.DEVICE) for tensor in at))[0].item()
            if place == len(tokens) - 1:
                tokens.append(chosen)
    return tokens[-count:]


@contextmanager
def one_step_at_a_time(server: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Semaphore]:
    """The engine's thread waits before each step for a permit; afterwards it runs freely."""
    step, permits = server.step, Semaphore(0)

    def when_permitted(*given: Any) -> None:
        permits.acquire()
        step(*given)

    monkeypatch.setattr(server, "step", when_permitted)
    try:
        yield permits
    finally:
        permits.release(10_000)


def test_the_metrics_of_a_handler_tell_prompts_of_embeddings() -> None:
    pytest.importorskip("fastapi")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    ends = {"eos_token_id": None, "pad_token_id": 0}
    config = transformers.LlamaConfig(vocab_size=9, num_hidden_layers=1, **sizes, **ends)
    lm = transformers.LlamaForCausalLM(config).eval()
    handler: dict[str, Any] = {"lm": lm, "device": "cpu", "__name__": "answer"}
    [page] = [block.text for block in blocks_of("serving") if '@app.post("/answer")' in block.text]
    exec(page.replace("(64, 128)", "(64,)"), handler)
    assert len(handler["answer"]([5, 6, 7])) == 100
    prompt = torch.ones(1, 7, dtype=torch.long)
    embeds = lm.get_input_embeddings()(prompt).detach()
    for _ in range(4):
        lm.generate(prompt, inputs_embeds=embeds, max_new_tokens=1)
    metrics = handler["metrics"]().decode()
    for label in ("0, 1 tokens, masked", ", 64 tokens, masked", ", 64 tokens", ", 7 tokens"):
        assert f'{label}"' in metrics
    assert 'own_code_calls{reason="the first calls of a kind"}' in metrics


def test_a_web_server_batches_requests_and_answers_each_as_alone(server: ModuleType) -> None:
    from fastapi.testclient import TestClient

    prompts = [(f"{'ab' * (number % 5)}{number}", 3 + number % 7) for number in range(40)]
    with TestClient(server.app) as client, ThreadPoolExecutor(20) as threads:

        def ask(prompt: tuple[str, int]) -> list[int]:
            answer = client.post("/generate", json={"text": prompt[0], "max_tokens": prompt[1]})
            assert answer.status_code == 200
            events = answer.text.split("\n\n")[:-1]
            return [int(event.removeprefix("data: ")) for event in events]

        answers = list(threads.map(ask, prompts))
        stats, model = server.app.state.runner.stats, server.app.state.runner.model
        assert answers == [alone_with(server, model, *prompt) for prompt in prompts]
        assert stats.eager.total() == 0
        assert max(key.num_tokens for _, key in stats.replays) > 1
        assert "cgplan_replays_total{" in client.get("/metrics").text
        for wrong in ({"text": ""}, {"text": "ü" * 256, "max_tokens": 1}):
            assert client.post("/generate", json=wrong).status_code == 422
    assert server.app.state.runner.is_closed


def test_a_web_server_streams_and_a_client_that_leaves_makes_room(
    server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve() -> None:
        async with server.lifespan(server.app):
            with one_step_at_a_time(server, monkeypatch) as permits:
                response = await server.generate(server.Prompt(text="a", max_tokens=256))
                permits.release(2)
                assert [await anext(response.body_iterator) for _ in range(2)]
                await response.body_iterator.aclose()
                replays = server.app.state.runner.stats.replays.total()
                assert replays == 2
            later = await server.generate(server.Prompt(text="b", max_tokens=1))
            assert len([event async for event in later.body_iterator]) == 1
            assert server.app.state.runner.stats.replays.total() <= replays + 2

    asyncio.run(serve())


def test_a_web_server_refuses_what_it_cannot_queue(
    server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastapi import HTTPException

    async def serve() -> None:
        async with server.lifespan(server.app):
            with one_step_at_a_time(server, monkeypatch):
                for _ in range(64):
                    last = await server.generate(server.Prompt(text="a", max_tokens=1))
                with pytest.raises(HTTPException, match="too many requests wait"):  # noqa: PT012
                    for _ in range(server.SLOTS + 1):
                        await server.generate(server.Prompt(text="a", max_tokens=1))
            assert len([event async for event in last.body_iterator]) == 1

    asyncio.run(serve())


def test_a_web_server_outlives_a_failed_step(server: ModuleType) -> None:
    async def tokens(text: str) -> list[str]:
        response = await server.generate(server.Prompt(text=text, max_tokens=2))
        return [event async for event in response.body_iterator]

    async def serve() -> None:
        async with server.lifespan(server.app):
            runner = server.app.state.runner
            wanted = await tokens("a")
            runner.invalidate("weights")
            with pytest.raises(AddressError, match="'weights' moved"):
                await tokens("a")
            runner.recapture()
            assert await tokens("a") == wanted

    asyncio.run(serve())


def test_a_temperature_near_0_fails_no_request_and_a_seed_too_large_is_refused(
    server: ModuleType,
) -> None:
    """Scores that were divided by it would be infinite."""
    from fastapi.testclient import TestClient

    with TestClient(server.app) as client:
        asked = [{"text": "ab", "temperature": near} for near in (0, 1e-45)]
        likeliest, near = (client.post("/generate", json=each).text for each in asked)
        assert likeliest.count("data:") == 16
        assert near == likeliest
        refused = client.post("/generate", json={"text": "ab", "seed": 1 << 70})
        assert refused.status_code == 422


def test_sampled_answers_do_not_depend_on_the_others_in_the_batch(server: ModuleType) -> None:
    from fastapi.testclient import TestClient

    with TestClient(server.app) as client, ThreadPoolExecutor(20) as threads:

        def ask(seed: int) -> str:
            prompt = {"text": "ab" * (1 + seed % 4), "max_tokens": 4 + seed % 5}
            return client.post("/generate", json={**prompt, "temperature": 0.8, "seed": seed}).text

        alone = [ask(seed) for seed in range(20)]
        assert [*threads.map(ask, range(20))] == alone
        assert len({*alone}) > 10
        assert [ask(seed) for seed in range(3)] == alone[:3]
        first = alone[0].partition("\n\n")[0].removeprefix("data: ")
        server.EOS.add(int(first))
        assert ask(0) == ""
        assert client.post("/generate", json={"text": "a", "max_tokens": 1}).status_code == 200


def test_a_model_of_transformers_takes_the_decoders_place_with_the_tokens_of_generate(
    server: ModuleType, tmp_path: Path
) -> None:
    """Greedy and sampled, for prompts of several lengths that share batches."""
    transformers = pytest.importorskip("transformers")
    from fastapi.testclient import TestClient

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=300, num_hidden_layers=2, **sizes)
    lm = transformers.LlamaForCausalLM(config).eval()
    config.save_pretrained(tmp_path / "model")
    [lines] = [block.text for block in blocks_of("serving") if "self.rows = rows" in block.text]
    lines = lines.replace(
        '"model/config.json"', f'"{tmp_path}/model/config.json", "dtype": "float32"'
    )
    exec(lines, vars(server))
    server.rows.model.load_state_dict(lm.state_dict())

    def ask(seed: int, temperature: float) -> list[int]:
        prompt = {"text": "ab" * (1 + seed % 4), "max_tokens": 6, "seed": seed}
        answer = client.post("/generate", json={**prompt, "temperature": temperature}).text
        return [int(event.removeprefix("data: ")) for event in answer.split("\n\n")[:-1]]

    def alone(seed: int, temperature: float) -> list[int]:
        prompt = torch.tensor([[*("ab" * (1 + seed % 4)).encode()]])
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
        found = lm.generate(prompt, max_new_tokens=6, min_new_tokens=6, **sampling)
        return found[0, prompt.shape[1] :].tolist()

    asked = [(seed, (0, 0.7)[seed % 2]) for seed in range(16)]
    with TestClient(server.app) as client, ThreadPoolExecutor(16) as threads:
        found = [*threads.map(lambda each: ask(*each), asked)]
    assert found == [alone(*each) for each in asked]


def test_a_web_server_loads_weights_once_its_answers_have_ended(
    server: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fastapi.testclient import TestClient

    monkeypatch.setattr(server, "WEIGHTS", tmp_path / "new.pt")
    with TestClient(server.app, raise_server_exceptions=False) as client:
        model = server.app.state.runner.model
        assert client.post("/reload").status_code == 500, "there is no file"
        weights = {name: -weight for name, weight in model.state_dict().items()}
        torch.save(weights, tmp_path / "new.pt")
        assert client.post("/reload").status_code == 200
        text = client.post("/generate", json={"text": "a", "max_tokens": 9}).text
        found = [int(event.removeprefix("data: ")) for event in text.split("\n\n")[:-1]]
        assert found == alone_with(server, model, "a", 9)
        torch.testing.assert_close(model.head.bias, weights["head.bias"])


def test_a_job_of_a_web_server_runs_between_answers(
    server: ModuleType,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def serve() -> None:
        async with server.lifespan(server.app):
            state = server.app.state
            model = state.runner.model
            wanted = alone_with(server, model, "a", 40)
            first = await server.generate(server.Prompt(text="a", max_tokens=40))
            weights = {name: -weight for name, weight in model.state_dict().items()}
            state.waiting.put(lambda: model.load_state_dict(weights))
            state.waiting.put(lambda: 1 / 0)
            later = await server.generate(server.Prompt(text="a", max_tokens=40))
            answers = []
            for response in (first, later):
                events = [event async for event in response.body_iterator]
                answers.append([int(event.removeprefix("data: ")) for event in events])
            assert answers == [wanted, alone_with(server, model, "a", 40)]
            assert answers[0] != answers[1]

    asyncio.run(serve())
    assert "a job failed" in caplog.text


# --- picture_server.py ----------------------------------------------------------------------------------------


@pytest.fixture
def pictures() -> ModuleType:
    pytest.importorskip("fastapi")
    return example("picture_server")


@pytest.mark.parametrize("shapes", [[(3, 32, 32)], [(3, 32, 32), (3, 32, 48)]])
def test_a_server_of_pictures_batches_requests_and_answers_each_as_alone(
    pictures: ModuleType, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastapi.testclient import TestClient

    answer = pictures.answer

    def slowly(*given: Any) -> None:
        time.sleep(0.02)  # meanwhile others wait
        answer(*given)

    monkeypatch.setattr(pictures, "answer", slowly)
    monkeypatch.setattr(pictures, "SIZES", {shape: [1, 4, 16] for shape in shapes})
    asked = [torch.randn(shapes[number % len(shapes)]) for number in range(40)]
    with TestClient(pictures.app) as client, ThreadPoolExecutor(20) as threads:

        def ask(picture: torch.Tensor) -> list[float]:
            answer = client.post("/classify", json=picture.tolist())
            assert answer.status_code == 200
            return answer.json()

        found = torch.tensor(list(threads.map(ask, asked)))
        runners = pictures.app.state.runners
        assert [*runners] == shapes
        with torch.no_grad():
            model = pictures.build().eval().to(pictures.DEVICE)
            wanted = torch.cat([model(each[None].to(pictures.DEVICE)) for each in asked]).cpu()
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        assert sum(runner.stats.eager.total() for runner in runners.values()) == 0
        assert sum(runner.stats.calls for runner in runners.values()) < 40
        for wrong, said in (
            (
                [[[0.5] * 16] * 16] * 3,
                f"the picture has shape (3, 16, 16), the model takes {shapes}",
            ),
            ([[[0.5], [0.5, 0.5]]], "expected sequence of length 1"),
        ):
            refused = client.post("/classify", json=wrong)
            assert refused.status_code == 422
            assert said in refused.json()["detail"]
        assert client.post("/classify", json=[1]).status_code == 422
        metrics = client.get("/metrics").text
        for shape in shapes:
            name = "x".join(map(str, shape))
            assert f'runner="{name}"' in metrics
            config = Config.model_validate(client.get(f"/config/{name}").json())
            assert config.inputs["x"].shape == ("num_tokens", *shape)
            assert config.scheduler.max_num_seqs == pictures.LARGEST
            assert config.scheduler.max_num_batched_tokens == pictures.LARGEST
        assert client.get("/config/8x8").status_code == 404
    assert all(runner.is_closed for runner in runners.values())


class Sentences(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.words = torch.nn.Embedding(50, 16)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = self.encoder(self.words(ids), src_key_padding_mask=mask == 0)
        kept = mask[:, :, None].to(found.dtype)
        return (found * kept).sum(1) / kept.sum(1)


def test_the_server_of_pictures_takes_sentences_by_the_lines_of_its_page(
    pictures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastapi.testclient import TestClient

    torch.manual_seed(0)
    model = Sentences().eval()
    [lines] = [block.text for block in blocks_of("serving") if "def sentence_of" in block.text]
    vars(pictures).update(VOCAB=50, build=lambda: model)
    exec(lines, vars(pictures))
    asked = [torch.randint(50, (1 + number % 64,)) for number in range(0, 120, 7)]
    with TestClient(pictures.app) as client, ThreadPoolExecutor(8) as threads:
        sent = threads.map(lambda ids: client.post("/embed", json=ids.tolist()).json(), asked)
        found = torch.tensor(list(sent))
        [runner] = pictures.app.state.runners.values()
        assert runner.stats.eager.total() == 0
        for wrong in ([], [50], [1] * 65):
            assert client.post("/embed", json=wrong).status_code == 422
    model.to("cpu")
    with torch.no_grad():
        wanted = [model(ids[None], torch.ones_like(ids[None])) for ids in asked]
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-3, atol=1e-3)


class Mixing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.mean((2, 3))
        return rows - rows.mean(0)


class Faint(Mixing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 1000  # as scores of a thousand classes


class Scores(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


class Wrapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": x.mean((2, 3))}


@pytest.mark.parametrize(
    ("sizes", "model", "said"),
    [
        ([1, 3, 16], Mixing, r"a batch of 2, shape \(3, 32, 32\): "),
        ([16], Mixing, "a batch of 1, "),
        ([1], Wrapped, "forward returns dict: return a tensor, m"),
        (
            [1],
            Mixing,
            "a picture beside others",
        ),  # larger batches have no graph, and are not padded
        ([*range(1, 17)], Mixing, "a picture beside others"),  # no batch is padded
        ([*range(1, 17)], Faint, "a picture beside others"),
        ([1], Scores, None),
    ],
)
def test_a_server_of_pictures_starts_only_if_its_graphs_are_right(
    pictures: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    model: type[torch.nn.Module],
    said: str | None,
) -> None:
    monkeypatch.setattr(pictures, "SIZES", {(3, 32, 32): sizes})
    monkeypatch.setattr(pictures, "build", model)
    if said is not None:
        with pytest.raises((AssertionError, AttributeError), match=said):
            pictures.capture()
        return
    [runner] = pictures.capture().values()
    assert runner.stats.calls == 0, "no traffic for plans"
    assert len(pictures.run(runner, [(torch.rand(3, 32, 32),)] * 5)) == 5
    runner.close()


def test_a_file_gets_the_largest_shape_that_fits_into_it(
    pictures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, wide, large = (3, 64, 64), (3, 32, 112), (3, 96, 96)
    monkeypatch.setattr(pictures, "SIZES", {large: [1], wide: [1], small: [1]})
    for height, width, shape in (
        (480, 640, large),
        (96, 96, large),
        (95, 200, small),
        (40, 200, wide),
        (20, 20, wide),
    ):
        assert pictures.shape_for(height, width) == shape
    [page] = [block.text for block in blocks_of("serving") if "async def files" in block.text]
    assert "shape_for(image.height, image.width)" in page


def test_the_page_shows_the_middle_of_that_server() -> None:
    source = PROGRAMS["picture_server"].read_text(encoding="utf-8")
    shown = [
        block.text
        for block in blocks_of("serving")
        if block.of_mark == "a part of picture_server.py" or block.text.startswith("def answer(")
    ]
    assert len(shown) == 2
    assert all(text in source for text in shown)


def test_a_server_of_pictures_runs_no_request_that_nobody_awaits(
    pictures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do late, refused and failed requests end the thread."""
    from fastapi import HTTPException

    answer, permits, batches = pictures.answer, Semaphore(0), list[int]()

    def when_permitted(runners: Any, batch: list[Any]) -> None:
        batches.append(len(batch))
        permits.acquire()
        answer(runners, batch)

    monkeypatch.setattr(pictures, "answer", when_permitted)
    [shape] = pictures.SIZES
    pixels = torch.zeros(shape).tolist()

    def ask() -> asyncio.Task[list[float]]:
        return asyncio.ensure_future(pictures.classify(pixels))

    async def status(task: asyncio.Task[list[float]]) -> int:
        with pytest.raises(HTTPException) as caught:
            await task
        return caught.value.status_code

    async def serve() -> None:
        async with pictures.lifespan(pictures.app):
            try:
                first = ask()
                while not batches:
                    await asyncio.sleep(0.01)
                monkeypatch.setattr(pictures, "PATIENCE", 0)
                assert await status(ask()) == 504
                monkeypatch.setattr(pictures, "PATIENCE", 10)
                *left, last, refused = [ask() for _ in range(64)]
                assert await status(refused) == 503
                for task in left:
                    task.cancel()
                await asyncio.wait(left)
            finally:
                permits.release(10_000)
            assert len(await first) == len(await last) == 10
            assert batches == [1, 1]
            with pytest.raises(KeyError):
                await pictures.scores_of(torch.zeros(3, 8, 8))  # where no handler refused it
            runner = pictures.app.state.runners[shape]
            runner.invalidate("head.weight")
            with pytest.raises(AddressError, match="weight' moved"):
                await ask()
            runner.recapture()
            assert len(await ask()) == 10

    asyncio.run(serve())
