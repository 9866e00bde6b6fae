"""What is to be checked and timed on a GPU, and kernels compiled for one without one."""
