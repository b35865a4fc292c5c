"""On PYTHONPATH, this keeps a process and its children on their own machine."""

import ipaddress
import socket
import sys

OWN_NAMES = ("", "localhost", socket.gethostname())


def is_own(address):
    """Whether an address is this machine's: no other can be bound."""
    if address in OWN_NAMES:
        return True
    try:
        version = ipaddress.ip_address(address).version
        with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except (OSError, ValueError):
        return False
    return True


def refuse_network(event, args):
    """Raise OSError on a connection or a name look-up that would leave the machine."""
    if event == "socket.connect" and args[0].family != socket.AF_UNIX:
        address = args[1][0]
    elif event == "socket.getaddrinfo" and args[0]:
        address = args[0].decode() if isinstance(args[0], bytes) else args[0]
    else:
        return
    if not is_own(address):
        raise OSError(f"no network in tests: {event} {address}")


sys.addaudithook(refuse_network)
