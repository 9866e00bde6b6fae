"""Health check of the API image: exit code 0 if GET /livez answers 200 within the deadline.

python api_alive.py [http://HOST:PORT/livez]
"""

import sys
import urllib.request

DEADLINE_S = 4.0
URL = "http://127.0.0.1:8000/livez"


def main(arguments: list[str]) -> int:
    """Ask once; says on stderr what is wrong."""
    url = arguments[0] if arguments else URL
    try:
        # No proxy: whatever the environment says, this address is in this container.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=DEADLINE_S) as answer:
            answer.read()
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
