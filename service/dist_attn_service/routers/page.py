"""GET / and its styles and scripts: the web page, which talks to nothing but the public API."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dist_attn_service.base.errors import Code, NotFound
from dist_attn_service.http.pages import PAGE_FILES, PAGE_HEADERS

__all__ = ["router"]

router = APIRouter()


@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    """The page."""
    return _answer(request)


@router.get("/page/{name:path}", include_in_schema=False)
async def part(request: Request, name: str) -> Response:
    """A style or a script of it."""
    return _answer(request)


def _answer(request: Request) -> Response:
    """The file at exactly this address.

    Raises: NotFound.
    """
    file = PAGE_FILES.get(request.scope["path"])
    if file is None:
        raise NotFound("the page has no such file; it begins at /", code=Code.NOT_FOUND)
    headers = {**PAGE_HEADERS, "etag": file.etag}
    tags = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in tags:
        return Response(status_code=304, headers=headers)
    return Response(file.data, media_type=file.media_type, headers=headers)
