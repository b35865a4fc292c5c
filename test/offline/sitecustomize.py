"""On PYTHONPATH, this keeps a process and its children on their own machine."""

import socket
import sys

LOOPBACK = ("127.", "::1", "localhost")


def refuse_network(event, args):
    """Raise OSError on a connection or a name look-up that would leave the machine."""
    if event == "socket.connect":
        family, address = args[0].family, args[1]
        outside = family != socket.AF_UNIX and not address[0].startswith(LOOPBACK)
    elif event == "socket.getaddrinfo":
        address = args[0]
        outside = address and not str(address).startswith((*LOOPBACK, "0.0.0.0"))
        outside = outside and address != socket.gethostname()
    else:
        return
    if outside:
        raise OSError(f"no network in tests: {event} {address}")


sys.addaudithook(refuse_network)
