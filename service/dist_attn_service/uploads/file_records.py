"""The files of a caller: one of them, a page of them in either order, and their end."""

from typing import Literal, final

from dist_attn.store.ledger import moment
from dist_attn_service.uploads.catalogue import Catalogue, known
from dist_attn_service.uploads.entries import FileRecord, remote_moment
from dist_attn_service.uploads.ledger import FileLedger

Order = Literal["asc", "desc"]
PAGE = 500


@final
class FileRecords:
    """Reads and removes the records of files."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def get(self, caller: str, name: str) -> FileRecord:
        """A file.

        Raises: NotFound.
        """
        tenant = self._catalogue.tenant(caller)
        return await self._catalogue.change(lambda ledger: ledger.file(tenant, known(name)))

    async def delete(self, caller: str, name: str) -> None:
        """Forget a file and its bytes.

        Raises: NotFound.
        """
        tenant = self._catalogue.tenant(caller)

        async def drop(ledger: FileLedger) -> None:
            await ledger.drop_file(name, await ledger.file(tenant, known(name)))

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
        files: list[tuple[str, FileRecord]] = []
        while len(files) <= limit:
            keys, some = await self._catalogue.change(lambda ledger, place=place: _some(ledger, prefix, place))  # type: ignore[misc]
            files += [(name, record) for name, record in some if purpose in (None, record.details.purpose)]
            if len(keys) < PAGE:
                break
            place = keys[-1]
        return files[:limit], len(files) > limit


async def _some(ledger: FileLedger, prefix: str, after: str) -> tuple[list[str], list[tuple[str, FileRecord]]]:
    """The next places of a caller's files, and those of the files that have not expired."""
    keys = [key for key, _ in await ledger.transaction.scan(prefix, PAGE, after)]
    names = [key.rpartition("/")[2] for key in keys]
    records = zip(names, await ledger.find_all(FileRecord, names), strict=True)
    return keys, [(name, record) for name, record in records if record and not 0 < record.expires_at <= ledger.now]
