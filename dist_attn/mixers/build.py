"""From a mixer's configuration to the mixer."""

from dist_attn.mixers.base import TokenMixer
from dist_attn.mixers.bidirectional import BidirectionalAttention
from dist_attn.mixers.config import (
    BidirectionalConfig,
    EfficientConfig,
    EluConfig,
    MixerConfig,
    PerformerConfig,
    ScaleformerConfig,
    SoftmaxConfig,
    StaticKernelConfig,
)
from dist_attn.mixers.convolution import CausalConvolution, CentredConvolution
from dist_attn.mixers.efficient import EfficientAttention
from dist_attn.mixers.elu import EluAttention
from dist_attn.mixers.fourier import FourierMixing
from dist_attn.mixers.hippo import LegsMemory
from dist_attn.mixers.input_independent_config import (
    ConvolutionConfig,
    FourierConfig,
    HippoConfig,
    LsslConfig,
    S4Config,
    S4DConfig,
    SgConvConfig,
    TokenMlpConfig,
)
from dist_attn.mixers.lssl import LinearStateSpace
from dist_attn.mixers.performer import PerformerAttention
from dist_attn.mixers.random_feature import RandomFeatureAttention
from dist_attn.mixers.s4 import S4Convolution, S4Scan
from dist_attn.mixers.s4d import S4DConvolution, S4DScan
from dist_attn.mixers.scaleformer import ScaleformerAttention
from dist_attn.mixers.sgconv import StructuredConvolution
from dist_attn.mixers.softmax import SoftmaxAttention
from dist_attn.mixers.static_kernel import CausalStaticKernel, StaticKernel
from dist_attn.mixers.token_mlp import TokenMlp

__all__ = ["build_mixer"]


def build_mixer(config: MixerConfig | BidirectionalConfig) -> TokenMixer:
    """The mixer that `config.kind` names, with fresh parameters."""
    match config:
        case SoftmaxConfig():
            return SoftmaxAttention(config)
        case ScaleformerConfig():
            return ScaleformerAttention(config)
        case EluConfig():
            return EluAttention(config)
        case EfficientConfig():
            return EfficientAttention(config)
        case StaticKernelConfig():
            return StaticKernel(config) if config.bidirectional else CausalStaticKernel(config)
        case PerformerConfig():
            return PerformerAttention(config)
        case BidirectionalConfig():
            return BidirectionalAttention(config)
        case ConvolutionConfig():
            return CentredConvolution(config) if config.centred else CausalConvolution(config)
        case FourierConfig():
            return FourierMixing(config)
        case TokenMlpConfig():
            return TokenMlp(config)
        case SgConvConfig():
            return StructuredConvolution(config)
        case HippoConfig():
            return LegsMemory(config)
        case LsslConfig():
            return LinearStateSpace(config)
        case S4Config():
            return S4Scan(config) if config.form == "scan" else S4Convolution(config)
        case S4DConfig():
            return S4DScan(config) if config.form == "scan" else S4DConvolution(config)
    return RandomFeatureAttention(config)
