"""`python -m dist_attn.adapters FOLDER` checks the tensors of a downloaded folder."""

import gc
import sys

from dist_attn.host_limits import load

if __name__ == "__main__":
    load("dist_attn.adapters.check")
    # At its exit Python looks for garbage once more: among these libraries that takes longer than the check.
    gc.freeze()
    from dist_attn.adapters.check import main

    main(*sys.argv[1:])
