"""The longest attention that four ranks on one GPU hold, and kernels compiled for a GPU without one."""
