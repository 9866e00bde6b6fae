"""`python -m dist_attn` is the command line, so that torchrun and mpiexec can start it."""

from dist_attn.commands.cli import main

if __name__ == "__main__":
    main()
