"""The secret of a place: drawn when it is first opened, and kept there."""

import secrets

from dist_attn.store.records import BufferedTransaction, Records

__all__ = ["secret_of"]

SECRET_BYTES = 32


async def secret_of(records: Records) -> bytes:
    """The secret in these records; all who open them have the same one.

    Raises: StorageError.
    """

    async def settle(transaction: BufferedTransaction) -> bytes:
        known = await transaction.get("secret")
        if known is None:
            known = secrets.token_bytes(SECRET_BYTES)
            transaction.put("secret", known)
        return known

    return await records.transact(settle)
