"""Log probabilities on the wire: in columns beside token ids, and entry by entry beside text.

Between services they travel in columns, which are compact; a text's entries have
the text of each token, and are what a client gets.
"""

from collections.abc import Sequence

from kvmesh.errors import InvalidRequestError
from kvmesh.types import TextLogprob, TokenLogprob, TokenScore
from kvmesh.v1 import generation_pb2, inference_pb2, prefill_pb2, tokenizer_pb2

LogprobColumns = generation_pb2.TokenDelta | prefill_pb2.PrefillResult
"""The messages that have columns of log probabilities beside their tokens."""


def logprobs_fit(rows: Sequence[TokenLogprob] | None, out: LogprobColumns, tokens: int) -> bool:
    """Return whether `rows` may follow what `out` has for its `tokens`, one row for each."""
    if rows is None:
        return not out.logprobs
    return len(out.logprobs) == tokens and all(len(row.top) == out.top_count for row in rows)


def logprobs_to_proto(rows: Sequence[TokenLogprob], out: LogprobColumns) -> None:
    """Append rows to the columns of `out`. Their `top` are of one length, and `out`'s."""
    if rows:
        out.top_count = len(rows[0].top)
    for row in rows:
        out.logprobs.append(row.logprob)
        out.ranks.append(row.rank)
        out.top_token_ids.extend(token_id for token_id, _ in row.top)
        out.top_logprobs.extend(logprob for _, logprob in row.top)


def logprobs_from_proto(message: LogprobColumns) -> tuple[TokenLogprob, ...]:
    """Read columns as rows; () where there are none. They must be of the lengths they say."""
    count, rows = message.top_count, len(message.logprobs)
    ranks = message.ranks or [0] * rows
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=False))
    if not len(top) == len(message.top_token_ids) == len(message.top_logprobs) == count * rows:
        raise InvalidRequestError(
            f"{rows} log probabilities with {count} more for each do not fit "
            f"{len(message.top_token_ids)} ids and {len(message.top_logprobs)} values",
            field="top_logprobs",
        )
    if len(ranks) != rows:
        raise InvalidRequestError(
            f"{rows} log probabilities do not fit {len(ranks)} ranks", field="ranks"
        )
    return tuple(
        TokenLogprob(logprob, top[at * count : (at + 1) * count], rank)
        for at, (logprob, rank) in enumerate(zip(message.logprobs, ranks, strict=True))
    )


TextLogprobs = (
    tokenizer_pb2.TextDelta | inference_pb2.GenerateResponse | inference_pb2.StreamGenerateResponse
)
"""The messages that have `logprobs` beside their text."""


def text_logprobs_to_proto(entries: Sequence[TextLogprob], out: TextLogprobs) -> None:
    """Append the tokens of a text to a message."""
    for entry in entries:
        added = out.logprobs.add(text_offset=entry.offset, rank=entry.rank)
        _score_to_proto(entry.token, added.token)
        for score in entry.top:
            _score_to_proto(score, added.top.add())


def text_logprobs_from_proto(message: TextLogprobs) -> tuple[TextLogprob, ...]:
    """Read the tokens of a text; () where there are none."""
    return tuple(
        TextLogprob(
            _score_from_proto(entry.token),
            entry.text_offset,
            tuple(_score_from_proto(score) for score in entry.top),
            entry.rank,
        )
        for entry in message.logprobs
    )


def _score_to_proto(score: TokenScore, out: generation_pb2.TokenScore) -> None:
    out.token_id, out.text = score.token_id, score.text
    if score.logprob is not None:
        out.logprob = score.logprob


def _score_from_proto(message: generation_pb2.TokenScore) -> TokenScore:
    logprob = message.logprob if message.HasField("logprob") else None
    return TokenScore(message.token_id, message.text, logprob)
