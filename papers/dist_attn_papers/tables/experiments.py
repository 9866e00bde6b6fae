"""All experiments by name, in the order of the papers."""

from dist_attn_papers.tables.context_length import CONTEXT_LENGTH
from dist_attn_papers.tables.distributed_softmax import DISTRIBUTED_SOFTMAX
from dist_attn_papers.tables.experiment import Experiment
from dist_attn_papers.tables.million_scaling import MILLION_SCALING
from dist_attn_papers.tables.million_tokens import MILLION_TOKENS
from dist_attn_papers.tables.mixers import MIXERS
from dist_attn_papers.tables.needles import NEEDLES
from dist_attn_papers.tables.patch_size import PATCH_SIZE
from dist_attn_papers.tables.quantised_memory import QUANTISED_MEMORY
from dist_attn_papers.tables.quantised_projection import QUANTISED_PROJECTION
from dist_attn_papers.tables.rfa_appendix_c import RFA_APPENDIX_C
from dist_attn_papers.tables.rfa_decoding import RFA_DECODING
from dist_attn_papers.tables.rfa_floors import RFA_FLOORS
from dist_attn_papers.tables.rfa_table1 import RFA_TABLE1
from dist_attn_papers.tables.rfa_table2 import RFA_TABLE2
from dist_attn_papers.tables.rfa_table3 import RFA_TABLE3
from dist_attn_papers.tables.rfa_table3_speed import RFA_TABLE3_SPEED
from dist_attn_papers.tables.scaleformer_figures import SCALEFORMER_FIGURES
from dist_attn_papers.tables.scaleformer_translation import SCALEFORMER_TRANSLATION
from dist_attn_papers.tables.selector_collapse import SELECTOR_COLLAPSE
from dist_attn_papers.tables.trained_on_short import TRAINED_ON_SHORT

__all__ = ["EXPERIMENTS"]

_ALL: tuple[Experiment, ...] = (
    RFA_TABLE1,
    RFA_TABLE2,
    RFA_DECODING,
    RFA_TABLE3,
    RFA_TABLE3_SPEED,
    RFA_APPENDIX_C,
    RFA_FLOORS,
    SCALEFORMER_FIGURES,
    TRAINED_ON_SHORT,
    SCALEFORMER_TRANSLATION,
    PATCH_SIZE,
    CONTEXT_LENGTH,
    DISTRIBUTED_SOFTMAX,
    NEEDLES,
    SELECTOR_COLLAPSE,
    MILLION_SCALING,
    MILLION_TOKENS,
    MIXERS,
    QUANTISED_PROJECTION,
    QUANTISED_MEMORY,
)
EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}
