"""`python -m dist_attn.adapters FOLDER` checks the tensors of a downloaded folder."""

import gc
import sys

from dist_attn.host_limits import load

if __name__ == "__main__":
    load("dist_attn.adapters.check")
    gc.freeze()  # also the end of the process looks for no garbage in them, which takes longer than the check
    from dist_attn.adapters.check import main

    main(*sys.argv[1:])
