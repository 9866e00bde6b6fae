"""/v1/sessions: the model's state of a text, kept between requests; made, listed, forked, read, put, ended.

/append puts text into a session, /generate draws text out of it; both become a part of it.
"""

import asyncio
import hashlib
import json

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from dist_attn_api.types import CheckpointList, Choice, Deleted, Generation, Session, SessionList, TextEvent
from dist_attn_service.base.errors import BadRequest, Code, ServiceError
from dist_attn_service.base.parsing import parse_drawing, utf8
from dist_attn_service.base.tasks import task_group
from dist_attn_service.completions.answer_form import grammar_of
from dist_attn_service.http.exchange import EventWriter, ResponseWriter
from dist_attn_service.routers.incoming import (
    Asked,
    Incoming,
    json_response,
    named_source,
    no_error_trailer,
    wrong_type,
)
from dist_attn_service.routers.openapi import (
    ANY_BYTES,
    ANY_TEXT,
    BYTES,
    JSON,
    TEXT,
    answered,
    described,
    events,
    header,
    query_parameters,
)
from dist_attn_service.schemas.base import ListOptions
from dist_attn_service.schemas.stored import (
    AppendOptions,
    AppendRequest,
    CreateSession,
    ForkSession,
    GenerateRequest,
    StateOptions,
)
from dist_attn_service.sessions.answers import (
    KEY_PATTERN,
    AnswerOutlet,
    content_digest,
    idempotency_key,
    names_tag,
    watch,
)
from dist_attn_service.sessions.append import AppendSource
from dist_attn_service.sessions.generate import GenerateWork, TextPiece
from dist_attn_service.text.choice_text import choice_logprobs
from dist_attn_service.text.text_check import utf8_checked
from dist_attn_service.text.tokenising import cut

router = APIRouter(tags=["sessions"])
_FILE = {BYTES: ANY_BYTES}
IDEMPOTENCY_KEY = header("Idempotency-Key", {"type": "string", "pattern": KEY_PATTERN})
NO_PART_OF_IT = {"stream", "user", "priority", "deadline_seconds"}
"""The options that may differ in a request that is sent again under the same key."""


@router.post(
    "/v1/sessions",
    status_code=201,
    response_model=Session,
    summary="Begin a session",
    openapi_extra=described(CreateSession, required=False),
)
async def create_session(asked: Asked) -> Response:
    """Create a session without a text; it ends when it was not written to for `ttl_seconds`."""
    wanted = await asked.options(CreateSession)
    asked.services.context_for(wanted.model, "sessions")
    return _created(await asked.services.sessions.catalogue.create(asked.caller, wanted))


@router.get("/v1/sessions", summary="List sessions", openapi_extra=described(parameters=query_parameters(ListOptions)))
async def list_sessions(asked: Asked) -> SessionList:
    """The caller's own sessions, a page at a time: `after` is the last id of the page before."""
    return await asked.services.sessions.catalogue.page(asked.caller, asked.query(ListOptions))


@router.get("/v1/sessions/{session_id}", summary="Look at a session")
async def get_session(asked: Asked, session_id: str) -> Session:
    """The session's position, checkpoints and times."""
    return await asked.services.sessions.catalogue.get(asked.caller, session_id)


@router.delete("/v1/sessions/{session_id}", summary="End a session")
async def delete_session(asked: Asked, session_id: str) -> Deleted:
    """End a session; forks of it live on."""
    await asked.services.sessions.catalogue.delete(asked.caller, session_id)
    return Deleted(id=session_id, object="session.deleted")


@router.post(
    "/v1/sessions/{session_id}/fork",
    status_code=201,
    response_model=Session,
    summary="Fork a session",
    openapi_extra=described(ForkSession, required=False),
)
async def fork_session(asked: Asked, session_id: str) -> Response:
    """Create a session that goes on from a checkpoint of this one; nothing is copied, and neither changes the other."""
    wanted = await asked.options(ForkSession)
    return _created(await asked.services.sessions.catalogue.fork(asked.caller, session_id, wanted))


@router.get("/v1/sessions/{session_id}/checkpoints", summary="List checkpoints")
async def list_checkpoints(asked: Asked, session_id: str) -> CheckpointList:
    """The positions that the session can be forked from and read at."""
    return await asked.services.sessions.catalogue.checkpoints(asked.caller, session_id)


@router.get(
    "/v1/sessions/{session_id}/state",
    summary="Read a state",
    response_class=Response,
    openapi_extra=described(
        parameters=query_parameters(StateOptions),
        answers={"200": {"description": "The snapshot file.", "content": _FILE}},
    ),
)
async def read_state(asked: Asked, session_id: str) -> Response:
    """The snapshot file of the newest state, or of a checkpoint."""
    states = asked.services.sessions.states
    state = await states.find(asked.caller, session_id, asked.query(StateOptions).position)
    tagged = {"etag": state.tag, "x-session-position": str(state.position)}
    if names_tag(asked.headers.get("if-none-match", ""), state.tag):
        return Response(status_code=304, headers=tagged)
    pieces = await states.pieces(asked.caller, state)

    async def write(writer: ResponseWriter) -> None:
        headers = {**tagged, "content-digest": content_digest(state.snapshot.digest)}
        await writer.start(BYTES, state.snapshot.size, headers)
        async for piece in pieces:
            await writer.write(piece)
        await writer.finish()

    return asked.streamed(write, no_error_trailer)  # a file has no room for an error


@router.put(
    "/v1/sessions/{session_id}/state",
    response_model=Session,
    summary="Put a state",
    openapi_extra=described(content=_FILE),
)
async def put_state(asked: Asked, session_id: str) -> Response:
    """Take a snapshot file as the session's state; one that takes the place of another must name it by `If-Match`."""
    services, kind = asked.services, asked.media_type()
    if kind not in (BYTES, ""):
        raise wrong_type(kind, f"send the snapshot file with -H 'Content-Type: {BYTES}'")
    asked.length(services.settings.store.snapshot_bytes, "a state")
    with asked.place():
        engine = services.context_for(None, "sessions").watch
        await engine.until_ready()
        served = engine.manifest().model
        state = await services.sessions.states.put(asked.caller, session_id, asked.body, asked.headers, served)
    shown = await services.sessions.catalogue.get(asked.caller, session_id)
    asked.record.note(state_bytes=state.snapshot.size, position=state.position)
    return json_response(shown, headers={"etag": state.tag})


def _created(session: Session) -> Response:
    return json_response(session, status=201, headers={"location": f"/v1/sessions/{session.id}"})


@router.post(
    "/v1/sessions/{session_id}/append",
    summary="Append a text to a session",
    response_class=Response,
    openapi_extra=described(
        AppendRequest,
        content={TEXT: ANY_TEXT, BYTES: ANY_BYTES},
        parameters=[*query_parameters(AppendOptions), IDEMPOTENCY_KEY],
        answers=answered("One JSON object per line: progress, then a summary or an error.", "application/x-ndjson"),
    ),
)
async def append_text(asked: Asked, session_id: str) -> Response:
    """Read a text of any length into a session while it is still being sent, each part of it once."""
    asked.services.context_for(None, "sessions")
    source = await _appended(asked)
    appends = asked.services.sessions.appends
    return asked.streamed(lambda writer: appends.answer(session_id, source, writer, asked.record), ServiceError.line)


@router.post(
    "/v1/sessions/{session_id}/generate",
    response_model=Generation,
    summary="Go on with the text of a session",
    openapi_extra=described(
        GenerateRequest,
        required=False,
        parameters=[IDEMPOTENCY_KEY],
        answers=events("The whole text; with `stream`, its pieces as server-sent events."),
    ),
)
async def generate(asked: Asked, session_id: str) -> Response:
    """Draw tokens after the text of a session; they become a part of it, whether or not the client stays."""
    services = asked.services
    wanted = await asked.options(GenerateRequest)
    served = services.context_for(wanted.model, "sessions")
    spec, stops = parse_drawing(wanted, services.settings, served.tokeniser.vocab_size, served.model.drawing)
    spec = msgspec.structs.replace(spec, grammar=await grammar_of(served, wanted))
    key, terms = idempotency_key(asked.headers), asked.terms(wanted)
    work = GenerateWork(key, wanted.expected_position, spec, stops, _digest(wanted), terms)
    asked.record.note(completion_id=work.id, stream=bool(wanted.stream))
    if wanted.stream:
        return asked.streamed(lambda writer: _stream(asked, session_id, work, writer), ServiceError.events)
    with asked.place():
        return json_response(await _whole(asked, session_id, work))


def _digest(wanted: GenerateRequest) -> str:
    """The digest that tells requests under one key apart; the order of options, and options left out, do not count."""
    options = wanted.model_dump(exclude=NO_PART_OF_IT, exclude_none=True)
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()


async def _stream(asked: Incoming, session_id: str, work: GenerateWork, writer: ResponseWriter) -> None:
    services, outlet = asked.services, AnswerOutlet(writer)
    # Bounded by max_tokens: a client that does not read does not hold the drawing up.
    pieces: asyncio.Queue[TextPiece | None] = asyncio.Queue()
    sse = EventWriter(outlet, ping_seconds=services.settings.ping_seconds)
    head: TextEvent = {
        "id": work.id,
        "object": "session.completion.chunk",
        "created": work.created,
        "model": services.writer.model.id,
    }
    async with task_group() as group:
        watching = group.create_task(watch(asked.body, outlet.gone))
        generation = services.sessions.generations
        task = group.create_task(generation.answer(session_id, work, asked.record, outlet.gone, pieces.put_nowait))
        task.add_done_callback(lambda _: pieces.put_nowait(None))
        if await pieces.get() is not None:
            await sse.start()
            while (piece := await sse.alive(pieces.get())) is not None:
                if piece.text or piece.reason:
                    logprobs = choice_logprobs(piece.scored, work.sampling.logprobs) if piece.scored else None
                    choice = Choice(text=piece.text, logprobs=logprobs, finish_reason=piece.reason)
                    await sse.send({**head, "choices": [choice]})
        answer = await task
        watching.cancel()
    end: TextEvent = {"choices": [], "usage": answer.usage, "session": answer.session}
    await sse.send({**head, "id": answer.id, "created": answer.created, "model": answer.model, **end})
    await sse.done()


async def _whole(asked: Incoming, session_id: str, work: GenerateWork) -> Generation:
    """The whole answer; a client that leaves does not end the work at once."""
    gone, generations = asyncio.Event(), asked.services.sessions.generations
    async with task_group() as group:
        watching = group.create_task(watch(asked.body, gone))
        answer = await generations.answer(session_id, work, asked.record, gone, lambda _: None)
        watching.cancel()
    if gone.is_set():
        asked.record.reason = "client_gone"
    return answer


async def _appended(asked: Incoming) -> AppendSource:
    """The text to append and its options, from query and JSON together."""
    at, body = asked.query(AppendOptions).expected_position, asked.body
    key, kind = idempotency_key(asked.headers), asked.media_type()
    if kind == JSON:
        wanted = await asked.json(AppendRequest)
        expected = wanted.expected_position
        if expected is not None and at not in (None, expected):
            raise BadRequest(
                f"expected_position is {at} in the query and {expected} in the body", param="expected_position"
            )
        at, terms = at if expected is None else expected, asked.terms(wanted)
        if wanted.input is None or wanted.file_id is not None:
            source = await named_source(asked, wanted.input, wanted.file_id)
            return AppendSource(body, key, at, source.pieces, terms=terms)
        text = utf8(wanted.input, "input", "input")
        if not text:
            raise BadRequest("input is empty; send a text", code=Code.EMPTY_INPUT, param="input")
        pieces = cut(text, asked.services.settings.piece_bytes)
        return AppendSource(body, key, at, pieces, hashlib.sha256(text).hexdigest(), terms)
    if kind not in (TEXT, BYTES, ""):
        raise wrong_type(kind, f"send -H 'Content-Type: {TEXT}' (UTF-8), {BYTES} (any bytes) or {JSON}")
    asked.length(asked.services.settings.body_bytes, "a text")
    pieces = utf8_checked(body.chunks()) if kind == TEXT else body.chunks()
    return AppendSource(body, key, at, pieces, terms=asked.terms())
