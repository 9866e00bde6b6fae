"""Linear state spaces x' = A x + B u, y = C x: their matrices, their steps in discrete time, and their kernels."""

from dist_attn.ops.state_space.bilinear import discretise_dense
from dist_attn.ops.state_space.discretise import Rule, discretise
from dist_attn.ops.state_space.dplr import dplr_kernel, real_form
from dist_attn.ops.state_space.hippo import legs, legs_eigenvalues
from dist_attn.ops.state_space.initial import Spectrum, initial_eigenvalues, initial_inputs
from dist_attn.ops.state_space.naive import diagonal_kernel_naive
from dist_attn.ops.state_space.vandermonde import diagonal_kernel

__all__ = [
    "Rule",
    "Spectrum",
    "diagonal_kernel",
    "diagonal_kernel_naive",
    "discretise",
    "discretise_dense",
    "dplr_kernel",
    "initial_eigenvalues",
    "initial_inputs",
    "legs",
    "legs_eigenvalues",
    "real_form",
]
