"""The session against TensorRT's API contract: what is bound, in which order, on which stream, and what is refused."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.ranks.job import make_engine
from tests.support.fake_tensorrt import SCRATCH, FakeCuda, Journal, fake_module
from tests.support.fake_tensorrt import Engine as FakeEngine
from tests.support.plan_engine import load_for_plans, write_plan_network
from tests.support.plans import specs
from trt_redknot import Request, Tokens
from trt_redknot.engine.tensorrt import session as session_module
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import Phase, PlanLimits
from trt_redknot.engine.tensorrt.running import LoadedPlan, aligned, empty_aligned
from trt_redknot.engine.tensorrt.samples import PlanSample
from trt_redknot.engine.tensorrt.session import PlanSession
from trt_redknot.engine.tensorrt.specification import PlanSpec, needs_other_ranks
from trt_redknot.engine.tensorrt.streams import DEFAULT_STREAM, PlanStream, find_cuda_runtime
from trt_redknot.errors import EngineError, RequestError

CPU = torch.device("cpu")
LIMITS = PlanLimits(chunk_rows=16, max_length=512, decode_rows=4)


def nothing(plan: str, inputs: Any) -> dict[str, torch.Tensor]:
    return {}


@dataclass(kw_only=True)
class Bench:
    """A session over fake plans, and what it did.

    Attributes:
        current: handle of the caller's stream.
    """

    session: PlanSession
    journal: Journal
    cuda: FakeCuda
    stream: PlanStream
    current: int = DEFAULT_STREAM


def bench(plans: tuple[PlanSpec, ...], *, limits: PlanLimits = LIMITS, compute: Any = nothing) -> Bench:
    journal = Journal()
    cuda = FakeCuda(journal)
    module = fake_module(plans, limits, compute, journal)
    runtime = module.Runtime(None)
    loaded = {
        spec.kind.name: LoadedPlan(spec, runtime.deserialize_cuda_engine(spec.kind.name.encode())) for spec in plans
    }
    stream = PlanStream(cuda)
    made: Bench
    session = PlanSession(module, loaded, limits, CPU, stream, current_stream=lambda: made.current)
    made = Bench(session=session, journal=journal, cuda=cuda, stream=stream)
    return made


def inputs(spec: PlanSpec, seed: int = 1) -> dict[str, torch.Tensor]:
    return {name: aligned(tensor) for name, tensor in PlanSample(spec, seed).tensors.items()}


@pytest.mark.parametrize("spec", specs("nano", world=1), ids=lambda spec: spec.kind.name)
def test_every_plan_is_bound_as_the_api_demands(spec: PlanSpec) -> None:
    made = bench((spec,))
    outputs = made.session.run(spec.kind.name, inputs(spec))
    assert outputs.keys() == {tensor.name for tensor in spec.outputs}
    (_, _, (name, phase, stream), _, _) = made.journal.entries
    wanted = Phase.DECODE if spec.kind.name == "head" else Phase.PREFILL
    assert (name, phase, stream) == (spec.kind.name, wanted, made.stream.handle)


def test_few_rows_take_the_profile_for_decoding() -> None:
    spec = next(spec for spec in specs("nano", world=1) if spec.kind.name == "embed")
    made = bench((spec,))
    table = aligned(torch.zeros((spec.geometry.vocab, spec.geometry.hidden), dtype=torch.bfloat16))
    for rows in (1, 6, 7, 18):
        made.session.run("embed", {"tokens": torch.zeros(rows, dtype=torch.int64), "embed": table})
    phases = [entry[1] for entry in made.journal.entries if entry[0] == "embed"]
    assert phases == [Phase.DECODE, Phase.DECODE, Phase.PREFILL, Phase.PREFILL]
    with pytest.raises(EngineError, match=r"not built for these sizes, found 19 own_rows \(at most 18\).*--chunk-rows"):
        made.session.run("embed", {"tokens": torch.zeros(19, dtype=torch.int64), "embed": table})


def test_events_order_a_plan_with_the_default_stream_and_nothing_waits() -> None:
    spec = specs("nano", world=1)[0]
    made = bench((spec,))
    made.session.run("embed", inputs(spec))
    handle = made.stream.handle
    (before, record), (after, wait) = (made.journal.entries[0][1:], made.journal.entries[3][1:])
    assert made.journal.entries == [
        ("record", before, DEFAULT_STREAM), ("wait", before, handle), ("embed", Phase.PREFILL, handle),
        ("record", after, handle), ("wait", after, DEFAULT_STREAM),
    ]  # fmt: skip
    assert (record, wait) == (DEFAULT_STREAM, handle)
    assert before != after


def test_a_caller_s_own_stream_is_used_as_it_is() -> None:
    """A stream that a CUDA graph is captured on."""
    spec = specs("nano", world=1)[0]
    made = bench((spec,))
    made.current = 77
    made.session.run("embed", inputs(spec))
    made.session.run("embed", inputs(spec))
    plan, (record, after, stream) = made.journal.entries[0], made.journal.entries[1]
    assert (record, stream) == ("record", 77)
    assert made.journal.entries == [plan, ("record", after, 77)] * 2
    assert plan == ("embed", Phase.PREFILL, 77)


def test_plans_of_two_streams_never_run_at_the_same_time() -> None:
    """They share contexts and scratch memory: each waits for what the other stream was given last."""
    spec = specs("nano", world=1)[0]
    made = bench((spec,))
    for current in (77, 78, DEFAULT_STREAM, 77):
        made.current = current
        made.session.run("embed", inputs(spec))
    handle = made.stream.handle
    ran = [at for at, entry in enumerate(made.journal.entries) if entry[0] == "embed"]
    after = made.journal.entries[ran[0] + 1][1]
    for place, (stream, before) in zip(ran[1:], ((78, 77), (handle, 78), (77, handle)), strict=True):
        assert made.journal.entries[place] == ("embed", Phase.PREFILL, stream)
        assert made.journal.entries[place - 1] == ("wait", after, stream)
        records = [entry for entry in made.journal.entries[:place] if entry[0] == "record" and entry[1] == after]
        assert records[-1] == ("record", after, before)


def test_a_stream_that_cannot_be_ordered_behind_the_other_is_refused() -> None:
    """CUDA refuses to order what is being captured behind what is not."""
    spec = specs("nano", world=1)[0]
    made = bench((spec,))
    made.current = 77
    made.session.run("embed", inputs(spec))
    made.current, made.cuda.status = 78, 905
    with pytest.raises(EngineError, match="CUDA refused a stream or an event"):
        made.session.run("embed", inputs(spec))
    assert [entry for entry in made.journal.entries if entry[0] == "embed"] == [("embed", Phase.PREFILL, 77)]


def test_rows_that_lie_anywhere_are_copied_and_weights_are_not() -> None:
    spec = specs("nano", world=1)[0]
    seen: list[torch.Tensor] = []
    made = bench((spec,), compute=lambda plan, given: seen.append(given["tokens"].clone()) or {})
    given = inputs(spec)
    long = aligned(torch.arange(40))
    made.session.run("embed", {**given, "tokens": long[3:12]})
    assert seen[0].tolist() == list(range(3, 12))
    shifted = empty_aligned((given["embed"].numel() + 1,), torch.bfloat16, CPU)[1:].view(given["embed"].shape)
    with pytest.raises(EngineError, match="'embed' of plan 'embed' lies at an address that TensorRT does not take"):
        made.session.run("embed", {**given, "embed": shifted})


def test_contexts_share_one_scratch_memory() -> None:
    plans = specs("nano", world=1)
    journal = Journal()
    module = fake_module(plans, LIMITS, nothing, journal)
    loaded = {
        s.kind.name: LoadedPlan(s, module.Runtime(None).deserialize_cuda_engine(s.kind.name.encode())) for s in plans
    }
    PlanSession(module, loaded, LIMITS, CPU, PlanStream(FakeCuda(journal)), current_stream=lambda: 5)
    scratch = {context.scratch for plan in loaded.values() for context in plan.contexts}  # type: ignore[attr-defined]
    assert len(scratch) == 1
    assert scratch.pop()[1] == SCRATCH + len(Phase) - 1
    assert all(len(plan.contexts) == len(Phase) for plan in loaded.values())


def test_communicators_go_to_plans_with_collectives_and_a_refusal_is_an_error() -> None:
    plans = specs("nano", world=2)
    made = bench(plans)
    communicator = object()
    made.session.connect(communicator)
    wanted = [spec.kind.name for spec in plans if needs_other_ranks(spec) for _ in Phase]
    assert made.journal.communicators == [(name, communicator) for name in wanted]
    made.journal.refuse = "mix-learned"
    with pytest.raises(
        EngineError, match=r"set_communicator of plan 'mix-learned' returned False.*--collectives plugin"
    ):
        made.session.connect(communicator)


def test_without_set_communicator_native_plans_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("tests.support.fake_tensorrt.Context.set_communicator")
    with pytest.raises(EngineError, match="this TensorRT has no set_communicator"):
        bench(specs("nano", world=2)).session.connect(object())


def test_no_memory_for_a_context_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "create_execution_context", lambda self, strategy: None)
    with pytest.raises(EngineError, match="made no execution context for plan 'embed'"):
        bench(specs("nano", world=1))


def test_what_tensorrt_does_not_enqueue_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = specs("nano", world=1)[0]
    made = bench((spec,))
    monkeypatch.setattr("tests.support.fake_tensorrt.Context.execute_async_v3", lambda self, stream: False)
    with pytest.raises(EngineError, match="did not enqueue plan 'embed'"):
        made.session.run("embed", inputs(spec))


def test_streams_and_events_are_given_back_and_their_errors_are_typed() -> None:
    made = bench(specs("nano", world=1)[:1])
    assert len(made.cuda.alive) == 3
    made.session.close()
    assert made.cuda.alive == set()
    made = bench(specs("nano", world=1)[:1])
    made.cuda.status = 700
    with pytest.raises(EngineError, match="CUDA refused a stream or an event, found 700"):
        made.session.run("embed", inputs(specs("nano", world=1)[0]))
    with pytest.raises(EngineError, match=r"cuda-python is not installed.*pip install cuda-python"):
        find_cuda_runtime("no_such_cuda.runtime")


def test_the_real_bindings_take_the_calls() -> None:
    pytest.importorskip("cuda.bindings.runtime", reason="cuda-python is not installed (cuda-bindings)")
    cuda = find_cuda_runtime()
    if torch.cuda.is_available():
        torch.cuda.init()
        stream = PlanStream(cuda)
        with stream.running(DEFAULT_STREAM) as handle:
            assert handle == stream.handle != DEFAULT_STREAM
        stream.close()
    else:
        with pytest.raises(EngineError, match="CUDA refused a stream or an event, found cudaError"):
            PlanStream(cuda)


def test_a_request_through_the_session_is_bit_for_bit_what_its_plans_compute(
    platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 by address through contexts, against the same plans called directly."""
    # A CPU's allocator knows no alignment of 256: what plans only read is copied here.
    monkeypatch.setattr(session_module, "POOLS", frozenset())
    checkpoint = write_plan_network(tmp_path / "checkpoint", random.randrange(2**31))
    make_engine(checkpoint, tmp_path / "engine", None, chunk_rows=20, dtype="bfloat16")
    files = load_for_plans(tmp_path / "engine", None)
    interpreter, other = files.interpreter(platform), files.interpreter(platform)
    made = bench(files.specs, limits=files.limits, compute=other.run)
    tokens = [random.randrange(files.loaded.geometry.vocab) for _ in range(53)]
    request = Request(segments=[Tokens(tokens)], max_new_tokens=3, stop_tokens=[])
    wanted = files.engine(interpreter).generate(request)
    found = files.engine(made.session).generate(request)
    assert found.tokens == wanted.tokens
    assert torch.equal(found.first_logits, wanted.first_logits)
    assert bool(found.first_logits.isfinite().all())
    assert [entry[:2] for entry in made.journal.entries if isinstance(entry[1], Phase)] == interpreter.runs
    # Ten of them have more tokens than the plans' pools.
    with pytest.raises(RequestError, match=r"expected at most 512 tokens.*found 560.*--pool-tokens"):
        files.engine(made.session).generate([request] * 10)
