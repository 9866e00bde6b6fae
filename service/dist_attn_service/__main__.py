"""`python -m dist_attn_service` is the API process."""

import sys

from dist_attn.host_limits import load

if __name__ == "__main__":
    load("dist_attn_service.api_process")
    from dist_attn_service.api_process import main

    sys.exit(main())
