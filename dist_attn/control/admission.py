"""What a request asks that the loaded model cannot do: found before it can hurt a rank."""

from dist_attn.wire.messages import RowSpec, SamplingSpec
from dist_attn.wire.rank_messages import RankHello
from dist_attn.wire.row_choice import MODEL_POOLING

__all__ = ["misfit"]


def misfit(model: RankHello, rows: RowSpec | None, sampling: SamplingSpec | None, received: int) -> str:
    """Why the model cannot do this work, of which `received` tokens have come; empty when it can."""
    unknown = [] if sampling is None else [token for token in sampling.logit_bias if token >= model.vocab_size]
    if unknown:
        return f"logit_bias names token {unknown[0]}; the vocabulary has {model.vocab_size} tokens"
    longest = model.text_tokens
    if longest is None:
        asks = rows is not None and rows.pooling == MODEL_POOLING
        return "this model has no pooling of its own; pool by mean or last" if asks else ""
    if sampling is not None or rows is None:
        return "this model makes vectors of texts and cannot write any"
    if rows.granularity != "token" and rows.pooling != MODEL_POOLING:
        return f"this model pools in a way of its own; pooling must be {MODEL_POOLING!r}"
    if rows.granularity == "window" and rows.window > longest:
        return f"a window of {rows.window} tokens is over the {longest} that this model reads at once"
    if rows.granularity == "document" and received > longest:
        return f"a text of {received} tokens or more is over the {longest} that this model reads at once"
    return ""
