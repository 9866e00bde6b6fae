"""GET /docs: the API's description as one page without scripts, so that it works where nothing else can be reached."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dist_attn_service.http.pages import render_reference

__all__ = ["router"]

router = APIRouter()
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
}


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """The page; /openapi.json has the same for programs."""
    page = render_reference(request.app.openapi())
    return Response(page, media_type="text/html; charset=utf-8", headers=HEADERS)
