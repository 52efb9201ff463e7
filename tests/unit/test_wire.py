"""Between protobuf and the mesh's own types: what goes in comes out, or is refused."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import InvalidRequestError
from kvmesh.types import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheSnapshot,
    ChatMessage,
    ChatPrompt,
    Completion,
    Context,
    FinishReason,
    KvTicket,
    Load,
    Plan,
    Prompt,
    Sampling,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
    Usage,
    Worker,
    WorkerEvent,
)
from kvmesh.v1 import (
    generation_pb2,
    kv_pb2,
    prefill_pb2,
    router_pb2,
    tokenizer_pb2,
    worker_pb2,
)
from kvmesh.wire import (
    completion_from_proto,
    completion_to_proto,
    context_from_proto,
    context_to_proto,
    event_from_proto,
    event_to_proto,
    plan_from_proto,
    plan_to_proto,
    prompt_from_proto,
    prompt_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    ticket_from_proto,
    ticket_to_proto,
)
from kvmesh.wire_logprobs import logprobs_fit, logprobs_from_proto, logprobs_to_proto

uint32 = st.integers(0, 2**32 - 1)
samplings = st.builds(
    Sampling,
    max_tokens=st.none() | st.integers(2**31, 2**32 - 1),
    min_tokens=st.integers(0, 2**31),
    temperature=st.none() | st.floats(0, 100),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    top_k=st.none() | st.just(-1) | st.integers(1, 2**31 - 1),
    min_p=st.none() | st.floats(0, 1),
    presence_penalty=st.none() | st.floats(-2, 2),
    frequency_penalty=st.none() | st.floats(-2, 2),
    repetition_penalty=st.none() | st.floats(0, 100, exclude_min=True),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop_token_ids=st.lists(uint32).map(tuple),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(uint32, st.floats(-100, 100)).map(
        lambda d: tuple(sorted(d.items()))
    ),
    logprobs=st.none() | st.integers(0, 20),
    bad_words=st.lists(st.lists(uint32, min_size=1).map(tuple)).map(tuple),
)
# What a float of protobuf holds exactly.
logprobs = st.floats(-9999, 0, width=32)


class FixedClock:
    def __init__(self, at: float) -> None:
        self.at = at

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at


@given(samplings)
def test_sampling_arrives_as_it_was_sent(sampling: Sampling) -> None:
    message = generation_pb2.SamplingParams()
    sampling_to_proto(sampling, message)
    received = generation_pb2.SamplingParams.FromString(message.SerializeToString())
    assert sampling_from_proto(received) == sampling


def test_a11_explicit_zeros_stay_zeros_and_absent_stays_absent() -> None:
    message = generation_pb2.SamplingParams()
    sampling_to_proto(Sampling(temperature=0.0, seed=0, presence_penalty=0.0, min_p=0.0), message)
    assert all(map(message.HasField, ("temperature", "seed", "presence_penalty", "min_p")))
    assert not any(map(message.HasField, ("top_p", "top_k", "frequency_penalty", "max_tokens")))
    got = sampling_from_proto(message)
    assert (got.temperature, got.seed, got.top_p, got.max_tokens) == (0.0, 0, None, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", -2),
        ("min_p", -0.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("logprobs", 21),
    ],
)
def test_sampling_out_of_range_names_its_field(field: str, value: float) -> None:
    message = generation_pb2.SamplingParams()
    setattr(message, field, value)
    with pytest.raises(InvalidRequestError) as caught:
        sampling_from_proto(message)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "pairs",
    [
        ((5, 100.1),),
        ((5, -101.0),),
        ((5, math.nan),),
        ((5, math.inf),),
        ((-1, 1.0),),
        ((2**32, 1.0),),
        ((5, 1.0), (5, 2.0)),
        tuple((n, 1.0) for n in range(1025)),
    ],
    ids=["over", "under", "nan", "inf", "negative", "wide", "twice", "many"],
)
def test_a44_biases_that_no_engine_could_honour_name_their_field(
    pairs: tuple[tuple[int, float], ...],
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Sampling(logit_bias=pairs)
    assert caught.value.field == "logit_bias"


def test_as_many_biases_as_there_may_be_are_taken() -> None:
    Sampling(logit_bias=tuple((n, -100.0) for n in range(1024)))


def test_no_logprobs_and_only_the_sampled_tokens_are_different() -> None:
    message = generation_pb2.SamplingParams()
    assert sampling_from_proto(message).logprobs is None
    sampling_to_proto(Sampling(logprobs=0), message)
    assert sampling_from_proto(message).logprobs == 0


def rows_of(count: int) -> st.SearchStrategy[tuple[TokenLogprob, ...]]:
    top = st.lists(st.tuples(uint32, logprobs), min_size=count, max_size=count).map(tuple)
    return st.lists(st.builds(TokenLogprob, logprobs, top, uint32)).map(tuple)


two_parts = st.integers(0, 3).flatmap(lambda count: st.tuples(rows_of(count), rows_of(count)))


@pytest.mark.parametrize("columns", [generation_pb2.TokenDelta, prefill_pb2.PrefillResult])
@given(parts=two_parts)
def test_logprobs_arrive_as_they_were_sent_in_one_part_or_two(
    columns: type[generation_pb2.TokenDelta | prefill_pb2.PrefillResult],
    parts: tuple[tuple[TokenLogprob, ...], tuple[TokenLogprob, ...]],
) -> None:
    message = columns()
    for part in parts:
        logprobs_to_proto(part, message)
    received = columns.FromString(message.SerializeToString())
    assert logprobs_from_proto(received) == parts[0] + parts[1]


@pytest.mark.parametrize(
    ("rows", "fits"),
    [
        ((TokenLogprob(-2.0, ((3, -1.0),)),), True),
        ((TokenLogprob(-2.0),), False),
        ((TokenLogprob(-2.0, ((3, -1.0), (4, -2.0))),), False),
        (None, False),
    ],
)
def test_only_rows_of_the_same_length_follow(
    rows: tuple[TokenLogprob, ...] | None, fits: bool
) -> None:
    delta = generation_pb2.TokenDelta(token_ids=[7])
    logprobs_to_proto((TokenLogprob(-1.0, ((7, -1.0),)),), delta)
    assert logprobs_fit(rows, delta, 1) is fits


def test_rows_do_not_follow_tokens_without_any() -> None:
    delta = generation_pb2.TokenDelta(token_ids=[7])
    assert logprobs_fit(None, delta, 1)
    assert not logprobs_fit((TokenLogprob(-1.0),), delta, 1)


@pytest.mark.parametrize(
    "columns",
    [
        {"logprobs": [-1.0], "top_count": 2, "top_token_ids": [1], "top_logprobs": [-1.0]},
        {"logprobs": [-1.0], "top_count": 1, "top_token_ids": [1]},
        {"logprobs": [-1.0], "top_token_ids": [1], "top_logprobs": [-1.0]},
        {"top_count": 1, "top_token_ids": [1], "top_logprobs": [-1.0]},
    ],
)
def test_columns_of_other_lengths_than_they_say_are_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        logprobs_from_proto(generation_pb2.TokenDelta(**columns))
    assert caught.value.field == "top_logprobs"


def test_ranks_may_be_missing_and_are_for_each_row() -> None:
    delta = generation_pb2.TokenDelta(logprobs=[-1.0, -2.0])
    assert logprobs_from_proto(delta) == (TokenLogprob(-1.0), TokenLogprob(-2.0))
    delta.ranks.append(3)
    with pytest.raises(InvalidRequestError) as caught:
        logprobs_from_proto(delta)
    assert caught.value.field == "ranks"


@pytest.mark.parametrize(
    "words",
    [((),), ((1,), ()), ((1,),) * 129, (tuple(range(1025)),), (tuple(range(9)),) * 114],
    ids=["none", "one-of-none", "many", "long", "in-all"],
)
def test_bad_words_beyond_what_there_may_be_name_their_field(
    words: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Sampling(bad_words=words)
    assert caught.value.field == "bad_words"


def test_as_many_bad_words_as_there_may_be_are_taken() -> None:
    assert len(Sampling(bad_words=(tuple(range(8)),) * 128).bad_words) == 128


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63, 2**64])
def test_a49_seeds_that_int64_cannot_hold_are_refused(seed: int) -> None:
    with pytest.raises(InvalidRequestError, match="seed"):
        Sampling(seed=seed)


def test_more_least_tokens_than_most_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        Sampling(max_tokens=3, min_tokens=4)


@given(
    st.builds(
        Completion,
        st.none() | st.sampled_from(FinishReason),
        st.none() | st.builds(Usage, uint32, uint32, uint32),
        st.none() | st.text() | uint32,
    )
)
def test_a_completion_arrives_as_it_was_sent(completion: Completion) -> None:
    message = generation_pb2.Completion()
    completion_to_proto(completion, message)
    assert completion_from_proto(message) == completion


def test_a_finish_reason_from_the_future_reads_as_stop() -> None:
    assert completion_from_proto(generation_pb2.Completion(finish_reason=99)) == Completion(
        FinishReason.STOP
    )


def test_an_empty_completion_is_still_present_on_the_wire() -> None:
    end = generation_pb2.StreamEnd()
    completion_to_proto(Completion(), end.completion)
    assert end.WhichOneof("outcome") == "completion"


@given(st.binary(), st.floats(0, 1e10), st.lists(uint32, max_size=3))
def test_a_ticket_arrives_as_it_was_sent(params: bytes, expires: float, first: list[int]) -> None:
    ticket = KvTicket(
        "t", "w", "e", "nixl", "sim", "fp", 9, 2, 2**40, expires, tuple(first), params
    )
    message = kv_pb2.KvTicket()
    ticket_to_proto(ticket, message)
    got = ticket_from_proto(message)
    assert abs(got.lease_expire_time - expires) < 1e-5
    assert dataclasses.replace(got, lease_expire_time=expires) == ticket


@pytest.mark.parametrize("prefill", [None, Worker("p", "e2", "b:2")])
def test_a_plan_arrives_as_it_was_sent(prefill: Worker | None) -> None:
    plan = Plan(Worker("d", "e1", "a:1"), prefill, 64, "least loaded", "kv", "short", 0.25)
    message = router_pb2.RoutePlan()
    plan_to_proto(plan, message)
    assert plan_from_proto(message) == plan


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt(""),
        TextPrompt("hé"),
        TokenPrompt((1, 2, 2**32 - 1)),
        ChatPrompt((ChatMessage("user", "hi"), ChatMessage("assistant", "", "bob"))),
        ChatPrompt((ChatMessage("user", "hi"),), add_generation_prompt=False),
    ],
)
def test_a_prompt_arrives_as_it_was_sent(prompt: Prompt) -> None:
    message = tokenizer_pb2.TokenizeStart()
    prompt_to_proto(prompt, message)
    assert prompt_from_proto(message) == prompt


def test_no_prompt_and_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        prompt_from_proto(tokenizer_pb2.TokenizeStart())
    with pytest.raises(InvalidRequestError, match="message"):
        prompt_from_proto(tokenizer_pb2.TokenizeStart(chat=tokenizer_pb2.Chat()))


def test_a_deadline_crosses_as_the_time_left() -> None:
    message = generation_pb2.RequestContext()
    context_to_proto(Context("r", 107.5, "tp", -3), message, FixedClock(100.0))
    got = context_from_proto(message, FixedClock(2000.0))
    assert got == Context("r", 2007.5, "tp", -3)


def test_a_deadline_that_has_passed_is_no_time_left_and_none_is_none() -> None:
    message = generation_pb2.RequestContext()
    context_to_proto(Context("r", 90.0), message, FixedClock(100.0))
    assert context_from_proto(message, FixedClock(5.0)).deadline == 5.0
    context_to_proto(Context("r"), message := generation_pb2.RequestContext(), FixedClock(1.0))
    assert context_from_proto(message, FixedClock(5.0)).deadline is None


@pytest.mark.parametrize(
    "event",
    [
        CacheSnapshot([]),
        CacheSnapshot([1, 2**64 - 1]),
        BlocksStored([3]),
        BlocksRemoved([4, 5]),
        BlocksCleared(),
        Load(),
        Load(1, 2, 3, 4, 5, 2**40, 2**41),
    ],
)
def test_a_workers_event_arrives_as_it_was_sent(event: WorkerEvent) -> None:
    message = worker_pb2.WorkerEvent()
    event_to_proto(event, message)
    got = event_from_proto(worker_pb2.WorkerEvent.FromString(message.SerializeToString()))
    if isinstance(event, CacheSnapshot | BlocksStored | BlocksRemoved):
        assert type(got) is type(event)
        assert list(got.block_hashes) == event.block_hashes
    else:
        assert got == event


def test_an_event_from_the_future_is_passed_over() -> None:
    assert event_from_proto(worker_pb2.WorkerEvent()) is None
