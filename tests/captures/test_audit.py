"""Who owns the pointers of captured graphs: faults of public bug threads, each found, and nothing else."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from devices import limited
from torch import Tensor, nn

import cgplan
from cgplan import GraphRunner
from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.blame import Line
from cgplan.backends.graph_nodes import GraphNodes, Launch
from cgplan.backends.tape import TapePool
from cgplan.captures.audit import Pointer, ReadGraph, launch_of
from cgplan.errors import AuditError, CgplanError
from cgplan.reports import AuditReport, load_report

X = {"x": ("num_tokens", torch.float32, 0)}
SLOTS: dict[str, Tensor] = {}


@pytest.fixture
def device(backend: GraphBackend) -> str:
    return backend.device.type


class Block(nn.Module):
    """A layer with state of every kind; ``extra`` is what a fault puts into its forward."""

    def __init__(self, device: str, extra: Callable[[Block, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 64, device=device)
        self.register_buffer("mask", torch.ones(64, device=device))
        self.scale = torch.full((64,), 2.0, device=device)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.lin(x[:, None].expand(-1, 64))) * self.mask + self.scale
        return y if self.extra is None else self.extra(self, y)


def opened(model: nn.Module, device: str, audit: str = "report", **settings: Any) -> GraphRunner:
    sizes = {"cudagraph_capture_sizes": (4, 8), "audit": audit, "address_check": "first"}
    return cgplan.capture(model.eval(), X, compilation={**sizes, **settings}, device=device)


def problems(report: AuditReport) -> set[str]:
    return {finding.problem for finding in report.findings}


def test_an_address_of_the_hosts_stack_is_no_finding() -> None:
    """Seen in cuBLAS's reductions, whose kernels get pointers to scalars of the caller."""
    address = 0x7F5EBAC76784
    words, node = numpy.array([address], numpy.uint64), numpy.array([0])
    nodes = GraphNodes(("splitKreduce",), 0, words, node, numpy.array([True]))
    word = Pointer(ReadGraph("key", 0, nodes, ()), 0, is_certain=True, address=address)
    assert launch_of(word, "free block")[1]
    assert not launch_of(word, "unmapped")[1]
    launch = Launch(0, 1, "aten::mm", Line("model.py", 1), frozenset({address}))
    given = word._replace(graph=word.graph._replace(launches=(launch,)))
    assert launch_of(given, "unmapped") == (launch, True)


def test_every_pointer_has_an_owner(device: str) -> None:
    with torch.no_grad():
        report = opened(Block(device), device).audit()
    assert report.findings == ()
    names = {(owner.kind, owner.name) for owner in report.owners}
    assert names >= {
        ("parameter or buffer", "model.lin.weight"),
        ("parameter or buffer", "model.mask"),
        ("state", "model.scale"),
        ("static buffer", "x"),
    }
    assert "graph pool" in {owner.kind for owner in report.owners}
    for key in report.keys:
        assert key.opaque == 0
        assert sum(key.kinds.values()) == key.words > 0
        assert sum(key.kernels.values()) == key.nodes > 0


def rebound(model: Block, name: str) -> None:
    setattr(model, name, getattr(model, name) + 1)


def swapped_weight(model: Block, name: str) -> None:
    model.lin.weight = nn.Parameter(model.lin.weight.detach() + 1)


def new_memory(model: Block, name: str) -> None:
    """``load_state_dict(assign=True)`` and ``.data =`` of a weight loader."""
    model.lin.weight.data = model.lin.weight.detach() + 1


def larger_cache(model: Block, name: str) -> None:
    model.scale = torch.zeros(4096, device=model.scale.device)[:64]


def resized(model: Block, name: str) -> None:
    storage = model.scale.untyped_storage()
    storage.resize_(0)
    storage.resize_(1 << 22)


CHANGES = [
    pytest.param(rebound, "mask", "model.mask", id="a rebound buffer"),
    pytest.param(rebound, "scale", "model.scale", id="a rebound attribute"),
    pytest.param(swapped_weight, "", "model.lin.weight", id="a swapped weight"),
    pytest.param(new_memory, "", "model.lin.weight", id="new memory of a weight"),
    pytest.param(larger_cache, "", "model.scale", id="a reallocated cache"),
]


@pytest.mark.parametrize(("change", "name", "path"), CHANGES)
def test_state_that_moved_is_found_by_its_path(
    device: str, change: Callable[[Block, str], None], name: str, path: str
) -> None:
    with torch.no_grad():
        model = Block(device)
        runner = opened(model, device)
        change(model, name)
        report = runner.audit()
    assert {finding.key for finding in report.findings} == set(runner.plan.keys)
    for finding in report.findings:
        assert path in finding.detail
        assert finding.operator is not None
        assert finding.line is not None
        assert "test_audit.py" in finding.line


@pytest.mark.gpu
def test_a_resized_storage() -> None:
    with torch.no_grad():
        model = Block("cuda")
        runner = opened(model, "cuda")
        resized(model, "")
        assert any("model.scale" in finding.detail for finding in runner.audit().findings)


def test_memory_that_somebody_else_still_holds(device: str) -> None:
    """An old adapter that another object keeps is not free, and not the model's."""
    with torch.no_grad():
        model = Block(device)
        runner, old = opened(model, device), model.scale
        model.scale = old + 1
        report = runner.audit()
    assert problems(report) == {"unowned block"}
    assert float(old[0]) == 2


def test_a_tensor_of_the_forward_context(device: str) -> None:
    """Metadata that is made for each step: the graph reads that of the capture."""

    def reads(model: Block, y: Tensor) -> Tensor:
        return y + SLOTS["now"]

    with torch.no_grad():
        SLOTS["now"] = torch.ones(64, device=device)
        runner = opened(Block(device, reads), device)
        assert runner.audit().findings == ()
        SLOTS["now"] = torch.ones(64, device=device)
        assert problems(runner.audit()) == {"free block"}


def test_a_tensor_that_only_a_dropped_closure_held(device: str) -> None:
    def adding(held: Tensor) -> Callable[[Block, Tensor], Tensor]:
        return lambda model, y: y + held

    with torch.no_grad():
        model = Block(device, adding(torch.ones(64, device=device)))
        runner = opened(model, device)
        assert runner.audit().findings == ()
        model.extra = None
        assert problems(runner.audit()) == {"free block"}


def test_what_a_graph_reads_and_nobody_else_holds_any_longer(device: str) -> None:
    """A weight in a place that no walk enters, dropped after the capture: the runner keeps it."""
    held = {torch.ones(64, device=device)}  # sets are not looked at

    def reads(model: Block, y: Tensor) -> Tensor:
        return y * next(iter(held))

    with torch.no_grad():
        runner = opened(Block(device, reads), device)
        before = runner(x=torch.ones(4, device=device)).clone()
        held.clear()
        report = runner.audit()
        assert report.findings == ()
        torch.testing.assert_close(runner(x=torch.ones(4, device=device)), before)


def test_an_output_of_another_runner(device: str) -> None:
    """A draft's borrowed output in the target's state: the draft's next capture may take its memory."""
    with torch.no_grad():
        draft = opened(Block(device), device)
        model = Block(device, lambda model, y: y + model.draft[0])
        model.draft = draft(x=torch.ones(4, device=device))
        report = opened(model, device).audit()
    assert problems(report) == {"free block"}
    assert all(
        "another graph pool, where model.draft was" in finding.detail for finding in report.findings
    )


def test_a_workspace_of_an_evicted_graph(device: str) -> None:
    """Scratch memory that is made inside the first capture, in its pool, and that a later graph uses, too."""
    kept = set[Tensor]()  # which no capture looks into

    def scratch(model: Block, y: Tensor) -> Tensor:
        if not kept and cgplan.get_forward_context().runtime_mode is cgplan.CUDAGraphMode.FULL:
            kept.add(y + 1)
        return y + (next(iter(kept))[:4] if len(y) == 4 and kept else model.scale)

    with torch.no_grad():
        runner = opened(Block(device, scratch), device, pool="per_graph")
        assert runner.audit().findings == ()
        kept.clear()
        runner.exchange(evicted=runner.plan.keys[:1])
        report = runner.audit()
    assert {finding.descriptor.num_tokens for finding in report.findings} == {4}


@pytest.mark.gpu
def test_a_host_buffer_that_was_dropped() -> None:
    def uploads(model: Block, y: Tensor) -> Tensor:
        return y + torch.ones(64).pin_memory().to(y.device, non_blocking=True)

    def keeps(model: Block, y: Tensor) -> Tensor:
        return y + model.host.to(y.device, non_blocking=True)

    with torch.no_grad():
        report = opened(Block("cuda", uploads), "cuda").audit()
        assert {finding.kernel for finding in report.findings} == {"memcpy"}
        model = Block("cuda", keeps)
        model.host = torch.ones(64).pin_memory()
        report = opened(model, "cuda").audit()
    assert report.findings == ()
    assert "host memory" in {owner.kind for owner in report.owners}


@pytest.mark.gpu
def test_a_workspace_of_cublas_that_was_dropped() -> None:
    """A product on a side stream computes in a workspace of that stream, which torch may drop."""
    side = torch.cuda.Stream(
        priority=-1
    )  # of another pool of streams than the capture's, which torch gives out in turn

    def beside(model: Block, y: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = model.half.view(64, -1)[:8] @ model.half.view(
                -1, 64
            )  # split along the inner dimension of 16,384
        torch.cuda.current_stream().wait_stream(side)
        return y + z[0]

    with torch.no_grad():
        model = Block("cuda", beside)
        model.half = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
        runner = opened(model, "cuda")
        report = runner.audit()
        assert report.findings == ()
        assert "memory that no Python object holds" in {owner.name for owner in report.owners}
        torch._C._cuda_clearCublasWorkspaces()
        assert problems(runner.audit()) == {"free block"}


@pytest.mark.gpu
def test_words_that_no_kernel_reads() -> None:
    """``cat`` takes its tensors in an array by value, whose rest is left from the last launch."""

    def joined(model: Block, y: Tensor) -> Tensor:
        return y + torch.cat([model.mask[None], model.scale[None]]).sum(0)

    many = [torch.ones(i + 1, 64, device="cuda") for i in range(60)]
    with torch.no_grad():
        runner = opened(Block("cuda", joined), "cuda")
        torch.cat(many)
        runner.recapture()
        del many
        report = runner.audit()
    assert report.findings == ()


def test_memory_in_memory_is_the_models(device: str) -> None:
    """Tensors of one buffer whose storages begin alike, or lie inside one another, as those of NumPy may."""
    if device == "cuda":
        pytest.skip("storages of CUDA tensors do not overlap")
    array = numpy.ones(8192, numpy.float32)
    with torch.no_grad():
        model = Block(
            device, lambda model, y: y + model.whole[4096:4160] + model.part[0] + model.middle[0]
        )
        model.part, model.middle = torch.from_numpy(array[:4]), torch.from_numpy(array[100:110])
        model.whole = torch.from_numpy(array)
        assert opened(model, device).audit().findings == ()


def test_graphs_on_demand_are_audited(device: str) -> None:
    held = {torch.ones(64, device=device)}

    def reads(model: Block, y: Tensor) -> Tensor:
        is_capture = cgplan.get_forward_context().runtime_mode is cgplan.CUDAGraphMode.FULL
        return y * (held.pop() if held and is_capture else model.scale)

    with torch.no_grad():
        runner = opened(Block(device, reads), device, audit="error", capture_policy="lazy")
        with pytest.raises(AuditError):
            runner(x=torch.ones(4, device=device))
        assert runner.plan.keys == ()
        runner(x=torch.ones(4, device=device))
        assert runner.report.audit is not None
        assert [key.descriptor.num_tokens for key in runner.report.audit.keys] == [4]


def test_a_session_may_refuse(device: str) -> None:
    """With ``audit: error`` a capture that already points into freed memory ends with an error, and frees all."""
    held = {torch.ones(64, device=device)}

    def reads(model: Block, y: Tensor) -> Tensor:
        is_capture = cgplan.get_forward_context().runtime_mode is cgplan.CUDAGraphMode.FULL
        return y * (held.pop() if held and is_capture else model.scale)

    model = Block(device, reads)
    with (
        torch.no_grad(),
        pytest.raises(AuditError, match=r"aten::mul at .*test_audit.py:\d+: .*free block"),
    ):
        opened(model, device, audit="error")
    with torch.no_grad():
        assert opened(model, device, audit="error").audit().findings == ()


def test_reports_are_saved_and_shown(device: str, tmp_path: Any) -> None:
    with torch.no_grad():
        model = Block(device)
        runner = opened(model, device)
        model.scale = model.scale + 1
        report = runner.audit()
    path = tmp_path / "audit.json"
    path.write_text(report.model_dump_json())
    assert load_report(path) == report
    text = str(report)
    assert "model.scale was at capture" in " ".join(text.split())
    assert runner.report.audit is not None
    assert runner.report.audit.findings == ()


def test_without_the_setting_findings_have_no_lines(device: str) -> None:
    with torch.no_grad():
        model = Block(device, lambda model, y: y + model.table[: len(y)])
        model.table = torch.ones(8, 64, device=device)
        runner = opened(model, device, audit="off")
        assert runner.report.audit is None
        model.table = model.table + 1
        report = runner.audit()
    assert report.findings
    assert all(finding.line is None for finding in report.findings)
    assert "compilation.audit" in " ".join(report.notes)


def test_a_closed_runner_has_no_graphs(device: str) -> None:
    with torch.no_grad():
        runner = opened(Block(device), device)
    runner.close()
    gc.collect()
    with pytest.raises(CgplanError, match="closed"):
        runner.audit()


# --- second captures ------------------------------------------------------------------------------


def kinds_of(runner: GraphRunner) -> Counter[str]:
    """Of the audit at the capture."""
    assert runner.report.audit is not None
    kinds = Counter[str]()
    for owner in runner.report.audit.owners:
        kinds[owner.kind] += owner.words
    return kinds


def is_captured_once(runner: GraphRunner) -> bool:
    return any("no second capture" in warning for warning in runner.report.warnings)


def test_a_second_capture_proves_pointers_into_the_pool(device: str) -> None:
    with torch.no_grad():
        model = Block(device)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        once = kinds_of(opened(model, device, audit="error"))
        runner = opened(model, device, audit="prove")
        twice = kinds_of(runner)
        assert twice["proven"] > 0
        assert twice["proven"] + twice["graph pool"] == once["graph pool"]
        assert twice["disproven"] == 0
        if device == "cpu":
            assert twice["graph pool"] == 0
        assert not is_captured_once(runner)
        assert runner.audit().owners == runner.report.audit.owners
        assert f"proven {twice['proven']} " in " ".join(str(runner.audit()).split())
        x = torch.randn(3, device=device)
        torch.testing.assert_close(runner(x=x), model(x))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        runner.recapture()
        assert kinds_of(runner) == twice


def test_progress_tells_of_the_first_capture_alone(device: str) -> None:
    steps: list[Any] = []
    compilation = {"cudagraph_capture_sizes": (4, 8), "audit": "prove"}
    model = Block(device).eval()
    with torch.no_grad():
        runner = cgplan.capture(
            model, X, compilation=compilation, device=device, progress=steps.append
        )
    assert not is_captured_once(runner)
    assert [(step.index, step.total) for step in steps] == [(0, 2), (1, 2)]


def test_a_second_capture_leaves_no_memory(device: str, backend: GraphBackend) -> None:
    with torch.no_grad():
        kept = {}
        for audit in ("error", "prove"):
            runner = opened(Block(device), device, audit=audit)
            kept[audit] = runner.report.static_bytes, runner.report.pool_bytes
            pools = {block.pool for block in runner.backend.blocks()}
            own = set(runner.graphs.pools.handles)
            assert len(pools & own) == len(own) == 1
            assert not runner.graphs.pools.left_bytes
            runner.close()
    assert kept["prove"] == kept["error"]


@pytest.fixture
def chance(monkeypatch: pytest.MonkeyPatch, backend: GraphBackend) -> list[int]:
    """Each graph gets a kernel argument that is equal to an address of the first graph's pool."""
    if not backend.is_tape:
        pytest.skip("words are put into graphs of the tape")
    found = list[int]()
    read = type(backend).nodes

    def nodes(tape: Any, graph: Any) -> GraphNodes:
        given = read(tape, graph)
        if not found:
            found.append(next(start for start, _, is_free in graph.pool.spans() if is_free))
        return GraphNodes(
            given.names,
            given.opaque,
            numpy.append(given.words, numpy.uint64(found[0])),
            numpy.append(given.nodes, 0),
            numpy.append(given.certain, True),
            given.tensors,
        )

    monkeypatch.setattr(type(backend), "nodes", nodes)
    return found


def test_a_number_that_looks_like_an_address_is_disproven(device: str, chance: list[int]) -> None:
    with torch.no_grad():
        once = kinds_of(opened(Block(device), device))
        chance.clear()
        twice = kinds_of(opened(Block(device), device, audit="prove"))
    assert twice["disproven"] == 2  # one in each graph
    assert twice["proven"] == once["graph pool"] - 2


def test_a_second_capture_without_memory_is_said(
    device: str, monkeypatch: pytest.MonkeyPatch, backend: GraphBackend
) -> None:
    if not backend.is_tape:
        pytest.skip("pools of the tape have a limit")
    made = list[TapePool]()
    by_tape = type(backend).new_pool

    def new_pool(tape: Any) -> TapePool:
        is_second = any(pool.graphs for pool in made)
        made.append(limited(by_tape(tape), 64 if is_second else None))
        return made[-1]

    monkeypatch.setattr(type(backend), "new_pool", new_pool)
    with torch.no_grad():
        model = Block(device)
        runner = opened(model, device, audit="prove")
        assert len(made) >= 2
        assert is_captured_once(runner)
        assert kinds_of(runner)["proven"] == 0
        x = torch.randn(3, device=device)
        torch.testing.assert_close(runner(x=x), model(x))
        model.scale = model.scale + 1
        assert problems(runner.audit()) == {"free block"}


def test_graphs_of_other_nodes_prove_nothing(device: str) -> None:
    captures = list[object]()

    def changes(model: Block, y: Tensor) -> Tensor:
        return y + 1 if len(captures) == 1 else y.relu()

    with torch.no_grad():
        runner = cgplan.capture(
            Block(device, changes).eval(),
            X,
            compilation={"cudagraph_capture_sizes": (4,), "audit": "prove"},
            device=device,
            before_key=lambda *key: captures.append(key),
        )
        assert len(captures) == 2
        assert kinds_of(runner).keys().isdisjoint({"proven", "disproven"})


def test_graphs_on_demand_are_captured_once(device: str) -> None:
    with torch.no_grad():
        runner = opened(Block(device), device, audit="prove", capture_policy="lazy")
        runner(x=torch.ones(4, device=device))
        assert is_captured_once(runner)


def test_graphs_in_wrappers_of_the_model_are_captured_once(device: str) -> None:
    """A wrapper holds one graph of a size: a second capture would take its place."""
    backend = select_backend(device)
    first = cgplan.CUDAGraphWrapper(
        lambda x: x * 2, cgplan.CUDAGraphMode.PIECEWISE, backend=backend
    )
    with torch.no_grad():
        runner = cgplan.capture(
            lambda x: first(x) + 1,
            X,
            compilation={
                "cudagraph_capture_sizes": (4,),
                "cudagraph_mode": "PIECEWISE",
                "piecewise": "wrappers",
                "audit": "prove",
            },
            device=device,
        )
        assert is_captured_once(runner)
        assert kinds_of(runner)["graph pool"] > 0
        x = torch.randn(3, device=device)
        torch.testing.assert_close(runner(x=x), x * 2 + 1)


def test_findings_of_a_proven_audit_are_errors(device: str) -> None:
    held = {torch.ones(64, device=device)}

    def reads(model: Block, y: Tensor) -> Tensor:
        is_capture = cgplan.get_forward_context().runtime_mode is cgplan.CUDAGraphMode.FULL
        return y * (held.pop() if held and is_capture else model.scale)

    with torch.no_grad(), pytest.raises(AuditError, match="free block"):
        opened(Block(device, reads), device, audit="prove")
