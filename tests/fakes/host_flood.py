"""An engine that prints without measure: LINES short lines spread over SECONDS, with the odd things logs hold.

    host_flood.py LINES SECONDS

Its last line says how long it took, which is more than SECONDS when somebody let it wait for its pipe.
"""

import os
import sys
import time

ODD = b"\x1b[31mred\x1b[0m \xff\xfe bad \x00 nul\n" + b"x" * (1 << 20) + b"\n"
BATCH = 1000


def main() -> None:
    lines, seconds = int(sys.argv[1]), float(sys.argv[2])
    began_at = time.monotonic()
    for start in range(0, lines, BATCH):
        write(b"".join(b"%07d %s\n" % (number, b"a" * 91) for number in range(start, start + BATCH)))
        if start % 100_000 == 0:
            write(ODD)
        ahead_s = began_at + seconds * (start + BATCH) / lines - time.monotonic()
        if ahead_s > 0:
            time.sleep(ahead_s)
    write(b"took %.2f\n" % (time.monotonic() - began_at))


def write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


main()
