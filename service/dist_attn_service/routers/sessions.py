"""/v1/sessions: what the model knows of a text, kept between requests; made, listed, forked, read, put, ended."""

from fastapi import APIRouter
from starlette.responses import Response

from dist_attn_api.types import CheckpointList, Deleted, Session, SessionList
from dist_attn_service.base.errors import Code, ServiceError, TooLarge
from dist_attn_service.dependencies import media_type
from dist_attn_service.http.exchange import ResponseWriter
from dist_attn_service.routers.incoming import Asked, json_response, no_error_trailer
from dist_attn_service.routers.openapi import ANY_BYTES, BYTES, described, query_parameters
from dist_attn_service.schemas.base import ListOptions
from dist_attn_service.schemas.stored import CreateSession, ForkSession, StateOptions
from dist_attn_service.sessions.answers import content_digest, names_tag

router = APIRouter(tags=["sessions"])
_FILE = {BYTES: ANY_BYTES}


@router.post(
    "/v1/sessions",
    status_code=201,
    response_model=Session,
    summary="Begin a session",
    openapi_extra=described(CreateSession, required=False),
)
async def create_session(asked: Asked) -> Response:
    """A session without a text; it ends when nobody uses it for `ttl_seconds`."""
    wanted = await asked.options(CreateSession)
    asked.services.context_for(wanted.model, "sessions")
    return _created(await asked.services.sessions.catalogue.create(asked.caller, wanted))


@router.get("/v1/sessions", summary="List sessions", openapi_extra=described(parameters=query_parameters(ListOptions)))
async def list_sessions(asked: Asked) -> SessionList:
    """The caller's own sessions, a page at a time: `after` is the last id of the page before."""
    return await asked.services.sessions.catalogue.page(asked.caller, asked.query(ListOptions))


@router.get("/v1/sessions/{session_id}", summary="Look at a session")
async def get_session(asked: Asked, session_id: str) -> Session:
    """Where a session stands."""
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
    """A session that goes on from a checkpoint of this one; nothing is copied, and neither touches the other."""
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

    return asked.streamed(write, no_error_trailer)  # a file has no room for words


@router.put(
    "/v1/sessions/{session_id}/state",
    response_model=Session,
    summary="Put a state",
    openapi_extra=described(content=_FILE),
)
async def put_state(asked: Asked, session_id: str) -> Response:
    """Take a snapshot file as the session's state; one that takes the place of another must name it by `If-Match`."""
    services, kind = asked.services, media_type(asked.request)
    if kind not in (BYTES, ""):
        raise ServiceError(
            f"Content-Type is {kind[:80]!r}; send the snapshot file with -H 'Content-Type: {BYTES}'",
            code=Code.UNSUPPORTED_MEDIA_TYPE,
        )
    limit, length = services.settings.store.snapshot_bytes, asked.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise TooLarge(f"the body has {length} bytes; a state may have {limit}")
    with asked.place():
        watch = services.context_for(None, "sessions").watch
        await watch.until_ready()
        served = watch.manifest().model
        state = await services.sessions.states.put(asked.caller, session_id, asked.body, asked.headers, served)
    shown = await services.sessions.catalogue.get(asked.caller, session_id)
    asked.record.note(state_bytes=state.snapshot.size, position=state.position)
    return json_response(shown, headers={"etag": state.tag})


def _created(session: Session) -> Response:
    return json_response(session, status=201, headers={"location": f"/v1/sessions/{session.id}"})
