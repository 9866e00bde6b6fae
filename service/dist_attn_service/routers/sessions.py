"""/v1/sessions: what the model knows of a text, kept between requests; made, listed, forked, read, put, ended."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dist_attn_service.base.errors import Code, ServiceError, TooLarge
from dist_attn_service.base.parsing import parse_json, parse_query
from dist_attn_service.dependencies import media_type, read_options, record_of, services_of
from dist_attn_service.http.exchange import ResponseWriter, StreamedResponse
from dist_attn_service.schemas.sessions import (
    CheckpointList,
    CreateSession,
    DeletedSession,
    ForkSession,
    ListOptions,
    SessionList,
    SessionObject,
    StateOptions,
)
from dist_attn_service.sessions.answers import content_digest, names_tag

__all__ = ["router"]

router = APIRouter(tags=["sessions"])
STATE = "application/octet-stream"
_POSITION = {"type": "integer", "minimum": 0, "maximum": 1 << 53}
_FILE = {STATE: {"schema": {"type": "string", "format": "binary"}}}


def _body(schema: str) -> dict[str, object]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"requestBody": {"required": False, "content": content}}


@router.post(
    "/v1/sessions",
    status_code=201,
    response_model=SessionObject,
    summary="Begin a session",
    openapi_extra=_body("CreateSession"),
)
async def create_session(request: Request) -> Response:
    """A session without a text; it ends when nobody uses it for `ttl_seconds`."""
    services = services_of(request)
    wanted = parse_json(await read_options(request, services.body(request)), CreateSession)
    services.check_model(wanted.model)
    services.check_writes()
    return _created(await services.sessions.catalogue.create(record_of(request).caller, wanted))


@router.get("/v1/sessions", summary="List sessions")
async def list_sessions(request: Request) -> SessionList:
    """The caller's own sessions, a page at a time: `after` is the last id of the page before."""
    options = parse_query(request.query_params.multi_items(), ListOptions)
    return await services_of(request).sessions.catalogue.page(record_of(request).caller, options)


@router.get("/v1/sessions/{session_id}", summary="Look at a session")
async def get_session(request: Request, session_id: str) -> SessionObject:
    """Where a session stands."""
    return await services_of(request).sessions.catalogue.get(record_of(request).caller, session_id)


@router.delete("/v1/sessions/{session_id}", summary="End a session")
async def delete_session(request: Request, session_id: str) -> DeletedSession:
    """End a session; forks of it live on."""
    await services_of(request).sessions.catalogue.delete(record_of(request).caller, session_id)
    return DeletedSession(id=session_id)


@router.post(
    "/v1/sessions/{session_id}/fork",
    status_code=201,
    response_model=SessionObject,
    summary="Fork a session",
    openapi_extra=_body("ForkSession"),
)
async def fork_session(request: Request, session_id: str) -> Response:
    """A session that goes on from a checkpoint of this one; nothing is copied, and neither touches the other."""
    services = services_of(request)
    wanted = parse_json(await read_options(request, services.body(request)), ForkSession)
    return _created(await services.sessions.catalogue.fork(record_of(request).caller, session_id, wanted))


@router.get("/v1/sessions/{session_id}/checkpoints", summary="List checkpoints")
async def list_checkpoints(request: Request, session_id: str) -> CheckpointList:
    """The positions that the session can be forked from and read at."""
    return await services_of(request).sessions.catalogue.checkpoints(record_of(request).caller, session_id)


@router.get(
    "/v1/sessions/{session_id}/state",
    summary="Read a state",
    response_class=Response,
    openapi_extra={
        "parameters": [{"name": "position", "in": "query", "required": False, "schema": _POSITION}],
        "responses": {"200": {"description": "The snapshot file.", "content": _FILE}},
    },
)
async def read_state(request: Request, session_id: str) -> Response:
    """The snapshot file of the newest state, or of a checkpoint."""
    services, record = services_of(request), record_of(request)
    options = parse_query(request.query_params.multi_items(), StateOptions)
    states = services.sessions.states
    state = await states.find(record.caller, session_id, options.position)
    tagged = {"etag": state.tag, "x-session-position": str(state.position)}
    if names_tag(request.headers.get("if-none-match", ""), state.tag):
        return Response(status_code=304, headers=tagged)
    pieces = await states.pieces(record.caller, state)
    headers = {
        **tagged,
        "content-digest": content_digest(state.snapshot.digest),
    }
    body = services.body(request)

    async def exchange(writer: ResponseWriter) -> None:
        with services.open_requests.one(record.holder):
            await writer.start(STATE, state.snapshot.size, headers)
            async for piece in pieces:
                await writer.write(piece)
            await writer.finish()

    return StreamedResponse(
        exchange,
        body,
        record,
        last_words=lambda _: None,  # a file has no room for words
        stall_seconds=services.settings.client_stall_seconds,
    )


@router.put(
    "/v1/sessions/{session_id}/state",
    response_model=SessionObject,
    summary="Put a state",
    openapi_extra={"requestBody": {"required": True, "content": _FILE}},
)
async def put_state(request: Request, session_id: str) -> Response:
    """Take a snapshot file as the session's state; one that takes the place of another must name it by `If-Match`."""
    services, record = services_of(request), record_of(request)
    kind = media_type(request)
    if kind not in (STATE, ""):
        raise ServiceError(
            f"Content-Type is {kind[:80]!r}; send the snapshot file with -H 'Content-Type: {STATE}'",
            code=Code.UNSUPPORTED_MEDIA_TYPE,
        )
    limit, length = services.settings.store.snapshot_bytes, request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise TooLarge(f"the body has {length} bytes; a state may have {limit}")
    with services.open_requests.one(record.holder):
        await services.watch.until_ready()
        served = services.watch.manifest().model
        body = services.body(request)
        state = await services.sessions.states.put(record.caller, session_id, body, request.headers, served)
    shown = await services.sessions.catalogue.get(record.caller, session_id)
    record.note(state_bytes=state.snapshot.size, position=state.position)
    return Response(shown.model_dump_json(), media_type="application/json", headers={"etag": state.tag})


def _created(session: SessionObject) -> Response:
    location = {"location": f"/v1/sessions/{session.id}"}
    return Response(session.model_dump_json(), status_code=201, media_type="application/json", headers=location)
