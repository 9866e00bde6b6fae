"""Which implementation computes a call of an affine recurrence, and why."""

from dist_attn.ops.affine.call import AffineCall
from dist_attn.ops.linear_attention.implementation import Choice, resolve

__all__ = ["choose"]


def choose(call: AffineCall) -> Choice:
    """What computes a call: the implementation asked for by name; "auto" takes the streaming form.

    Raises: ConfigError for an implementation that does not exist, and for kernels that were asked for by name and
        cannot take this call; the message says why.
    """
    return resolve(call.implementation, "affine", call.v_BHLV.device, lambda: "there are no Triton kernels of it")
