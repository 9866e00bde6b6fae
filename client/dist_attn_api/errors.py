"""The roots of the error tree, which library, service and client share; dist_attn/errors.py draws the whole of it."""


class DistAttnError(Exception):
    """Anything these packages raise on purpose."""


class InputError(DistAttnError, ValueError):
    """The caller gave something unusable."""


class ClientError(DistAttnError):
    """A call to a service came to something else than success; dist_attn_client/errors.py has its kinds."""
