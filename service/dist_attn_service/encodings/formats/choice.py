"""Which format an answer has: the one that is named, else the one that the client likes best, else NDJSON."""

from collections.abc import Mapping

from dist_attn.errors import MissingExtraError
from dist_attn_service.base.errors import BadRequest, Code
from dist_attn_service.encodings.formats.arrow import ArrowFormat
from dist_attn_service.encodings.formats.base import RowFormat, RowsAhead
from dist_attn_service.encodings.formats.ndjson import NdjsonFormat
from dist_attn_service.encodings.formats.npy import NpyFormat

__all__ = ["FORMATS", "choose_format", "make_format"]

FORMATS: Mapping[str, type[RowFormat]] = {"ndjson": NdjsonFormat, "arrow": ArrowFormat, "npy": NpyFormat}
_NAMES = {kind.media_type: name for name, kind in FORMATS.items()}


def choose_format(named: str | None, accept: str) -> str:
    """The name of the format; an `Accept` that names none of ours changes nothing."""
    if named is not None:
        return named
    wanted: list[tuple[float, int, str]] = []
    for place, item in enumerate(accept.split(",")):
        kind, *parameters = (part.strip().lower() for part in item.split(";"))
        if kind in _NAMES and (weight := _weight(parameters)) > 0:
            wanted.append((-weight, place, _NAMES[kind]))
    return min(wanted)[2] if wanted else "ndjson"


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(max(float(value), 0.0), 1.0)
            except ValueError:
                return 0.0
    return 1.0


def make_format(name: str, ahead: RowsAhead) -> RowFormat:
    """A format for one answer.

    Raises: BadRequest for one that this installation lacks.
    """
    try:
        return FORMATS[name](ahead)
    except MissingExtraError as error:
        raise BadRequest(str(error), code=Code.UNSUPPORTED_PARAMETER, param="format") from None
