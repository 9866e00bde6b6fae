"""Health check of the engine image: exit code 0 if the controller answers in time and its ranks can take work.

python engine_ready.py [ADDRESS]
"""

import os
import sys

import zmq

from dist_attn.errors import DistAttnError
from dist_attn.settings import read_settings
from dist_attn.wire.curve import ClientKeys
from dist_attn.wire.messages import GetStatus, Status
from dist_attn.wire.sockets import Dealer

DEADLINE_S = 4.0
ADDRESS = "tcp://127.0.0.1:5555"


def main(arguments: list[str]) -> int:
    """Ask once; says on stderr what is wrong."""
    address = arguments[0] if arguments else ADDRESS
    context = zmq.Context[zmq.Socket[bytes]](1)
    try:
        folder = read_settings(environment=os.environ).settings.engine.keys_dir
        keys = ClientKeys.find(folder, "api", address)
        with Dealer(context, address, f"health-{os.getpid()}", keys) as dealer:
            dealer.send(GetStatus(), DEADLINE_S)
            status = dealer.receive(DEADLINE_S)
    except DistAttnError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        # A question that nobody took must not keep this process.
        context.destroy(linger=0)
    if not isinstance(status, Status):
        print(f"{address}: no answer within {DEADLINE_S:g} s", file=sys.stderr)
        return 1
    if not status.ready:
        print(f"{address}: not ready: {status.reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
