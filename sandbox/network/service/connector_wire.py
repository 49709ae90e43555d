"""Messages between a service gate and its connector, over a pair of SOCK_SEQPACKET sockets.

gate -> connector    an id, the number of a provider; or BY_NAME and the name of a host
connector -> gate    the id, 0 and a connected socket; or an errno
"""

from __future__ import annotations

import struct
from typing import Final

REQUEST: Final = struct.Struct("!IH")
# In place of a provider's number.
BY_NAME: Final = 0xFFFF
NAME_BYTES: Final = 253
REPLY: Final = struct.Struct("!II")
