"""The files of a caller: one of them, a page of them in either order, and their end."""

from typing import Literal, final

from dist_attn_service.uploads.books import Books
from dist_attn_service.uploads.catalogue import Catalogue, known
from dist_attn_service.uploads.entries import FileRecord, decode, moment, remote_moment

__all__ = ["Filing", "Order"]

Order = Literal["asc", "desc"]
PAGE = 500


@final
class Filing:
    """Reads and removes the records of files."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def get(self, caller: str, name: str) -> FileRecord:
        """A file.

        Raises: NotFound.
        """
        tenant = self._catalogue.tenant(caller)
        return await self._catalogue.change(lambda books: books.file(tenant, known(name)))

    async def delete(self, caller: str, name: str) -> None:
        """Forget a file and its bytes.

        Raises: NotFound.
        """
        tenant = self._catalogue.tenant(caller)

        async def drop(books: Books) -> None:
            await books.drop_file(name, await books.file(tenant, known(name)))

        await self._catalogue.change(drop)

    async def page(
        self, caller: str, *, after: str | None, limit: int, order: Order, purpose: str | None
    ) -> tuple[list[tuple[str, FileRecord]], bool]:
        """At most `limit` files behind the file `after`, and whether there are more.

        Raises: NotFound for an `after` that is not there.
        """
        tenant = self._catalogue.tenant(caller)
        prefix = f"{'oldest' if order == 'asc' else 'newest'}/{tenant}/"
        place = ""
        if after is not None:
            made = (await self.get(caller, after)).made_at
            place = f"{prefix}{moment(made) if order == 'asc' else remote_moment(made)}/{after}"
        found: list[tuple[str, FileRecord]] = []
        while len(found) <= limit:
            keys, some = await self._catalogue.change(lambda books, place=place: _some(books, prefix, place))  # type: ignore[misc]
            found += [(name, record) for name, record in some if purpose in (None, record.details.purpose)]
            if len(keys) < PAGE:
                break
            place = keys[-1]
        return found[:limit], len(found) > limit


async def _some(books: Books, prefix: str, after: str) -> tuple[list[str], list[tuple[str, FileRecord]]]:
    """The next places of a caller's files, and those of the files that have not expired."""
    keys = [key for key, _ in await books.transaction.scan(prefix, PAGE, after)]
    names = [key.rpartition("/")[2] for key in keys]
    values = await books.transaction.get_many(f"file/{name}" for name in names)
    records = [
        (name, decode(value, FileRecord)) for name, value in zip(names, values, strict=True) if value is not None
    ]
    return keys, [(name, record) for name, record in records if not 0 < record.expires_at <= books.now]
